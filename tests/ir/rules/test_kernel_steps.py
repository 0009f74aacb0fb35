"""Kernels without blocks, whose steps find their rows by their own number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_function, eqn_of

ROWS, STEPS = 32, 8
SCRATCH = [pltpu.VMEM((4, 8), jnp.float32)]


def kernel_of(body, more=(), scratch=()):
    """A function of `x` and `y`, both whole at each of 8 steps; `more` are blocks that a step has of other results."""

    def fun(x, y):
        whole = pl.BlockSpec((ROWS, 8), lambda i: (0, 0))
        block = pl.BlockSpec((1, 8), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(STEPS,),
            in_specs=[whole, whole],
            out_specs=[whole, *(block for _ in more)],
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, 8), *more)],
            scratch_shapes=scratch,
            interpret=True,
        )(x, y)

    return fun


def here(size=4):
    return pl.ds(pl.program_id(0) * 4, size)


def rows(x, y, out):
    out[here()] = jax.nn.softmax(x[here()]) * y[0]


def by_places(x, y, out):
    """As Triton has it: places, and a mask of those that exist."""
    places = pl.program_id(0) * 4 + jnp.arange(4)
    at, mask = (places[:, None], jnp.arange(8)[None]), (places < ROWS)[:, None]
    triton.store(out.at[at], triton.load(x.at[at], mask=mask, other=0.0) + y[1], mask=mask)


def row_by_row(x, y, out, sums):
    """A loop over the rows of a step, which adds up something of its own."""

    first = pl.program_id(0) * 4

    def trip(k, total):
        row = pl.ds(first + k, 1)
        out[row] = x[row] * y[row]

        @pl.when(k > 1)
        def _():
            out[row] = x[row] - 1

        return total + x[row]

    sums[...] = lax.fori_loop(0, 4, trip, jnp.zeros((1, 8)))


@pytest.mark.parametrize(
    "body, more", [(rows, ()), (by_places, ()), (row_by_row, [(STEPS, 8)])], ids=["rows", "places", "row by row"]
)
def test_steps_split(body, more):
    check_split(kernel_of(body, more))


def test_steps_that_use_scratch_split():
    check_split(kernel_of(in_scratch, scratch=SCRATCH))


def check_split(fun):
    rule = rule_for(eqn_of("pallas_call", fun, (ROWS, 8), (ROWS, 8)))
    assert [rule.sizes[f] for f in rule.splittable()] == [STEPS]
    assert check_function(fun, (ROWS, 8), (ROWS, 8), only=["pallas_call"]) > 1


def strided(x, y, out):
    first = pl.program_id(0)
    lax.fori_loop(0, 4, lambda k, _: out.__setitem__(pl.ds(first + k * STEPS, 1), y[pl.ds(k, 1)]), None)


def backwards(x, y, out):
    out[pl.ds((STEPS - 1 - pl.program_id(0)) * 4, 4)] = x[here()]


def neighbours(x, y, out):
    out[here()] = x[here(5)][1:]


def numbered(x, y, out):
    out[here()] = x[here()] * pl.program_id(0)


def twice(x, y, out):
    out[here()] = x[here()]
    out[...] = out[...] + 1


def read_back(x, y, out):
    out[here()] += x[here()]


def first_only(x, y, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[here()] = x[here()]


def in_scratch(x, y, out, total):
    total[...] = x[here()]
    out[here()] = total[...]


def carried(x, y, out, total):
    total[...] += x[here()]
    out[here()] = total[...]


def in_a_while(x, y, out):
    out[here()] = x[here()] + lax.while_loop(lambda k: k < 3, lambda k: k + 1, pl.program_id(0))


REFUSED = [strided, backwards, neighbours, numbered, twice, read_back, first_only, carried, in_a_while]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
@pytest.mark.filterwarnings("ignore:the Pallas kernel")
def test_other_steps_stay_whole(body):
    fun = kernel_of(body, scratch=SCRATCH if body is carried else ())
    rule = rule_for(eqn_of("pallas_call", fun, (ROWS, 8), (ROWS, 8)))
    assert not rule.splittable()

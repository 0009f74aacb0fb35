"""Kernels that keep something for the next step: split where each step of a dim begins it anew."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_function, eqn_of

SHAPE = (4, 8, 8)


def kernel_of(body, in_scratch):
    """A function of an array, row by row of each of its 4 parts; what is kept is scratch, or a result that nothing reads."""
    row = pl.BlockSpec((1, 1, 8), lambda outer, part, k: (part, 2 * outer + k, 0))
    kept = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    out = jax.ShapeDtypeStruct(SHAPE, jnp.float32)

    def fun(x):
        made = pl.pallas_call(
            body,
            grid=(4, 4, 2),
            in_specs=[row],
            out_specs=[row] if in_scratch else [row, pl.BlockSpec((8, 8), lambda outer, part, k: (0, 0))],
            out_shape=[out] if in_scratch else [out, kept],
            scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)] if in_scratch else [],
            interpret=True,
        )(x)
        return made[0]

    return fun


def adds(begin):
    """A running sum over the last dim of the grid, whose body knows of the first (as that of attention: of its keys)."""

    def body(x, out, kept):
        begin(x, kept)
        kept[...] += x[0]
        out[...] = kept[:1][None] * pl.program_id(0)

    return body


def begun_by_row(x, kept):
    @pl.when(pl.program_id(2) == 0)
    def _():
        kept[...] = jnp.zeros_like(kept)


def begun_by_number(x, kept):
    @pl.when(pl.program_id(2) * 3 < 1)
    def _():
        kept[...] = jnp.zeros_like(kept)


def begun_always(x, kept):
    kept[...] = jnp.zeros_like(kept)


def begun_once(x, kept):
    @pl.when((pl.program_id(2) == 0) & (pl.program_id(1) == 0))
    def _():
        kept[...] = jnp.zeros_like(kept)


def begun_outside(x, kept):
    @pl.when(pl.program_id(0) == 0)
    def _():
        kept[...] = jnp.zeros_like(kept)


def begun_in_part(x, kept):
    @pl.when(pl.program_id(2) == 0)
    def _():
        kept[:4] = jnp.zeros((4, 8))


def begun_by_data(x, kept):
    @pl.when(x[0, 0, 0] > 0)
    def _():
        kept[...] = jnp.zeros_like(kept)


def begun_with_what_was_there(x, kept):
    @pl.when(pl.program_id(2) == 0)
    def _():
        kept[...] = kept[...] * 0.5


def begun_last(x, kept):
    @pl.when(pl.program_id(2) == 1)
    def _():
        kept[...] = jnp.zeros_like(kept)


def parts_of(begin, in_scratch):
    rule = rule_for(eqn_of("pallas_call", kernel_of(adds(begin), in_scratch), SHAPE))
    return [rule.sizes[factor] for factor in rule.splittable()]


@pytest.mark.parametrize("in_scratch", [True, False], ids=["scratch", "result"])
@pytest.mark.parametrize("begin", [begun_by_row, begun_by_number, begun_always], ids=lambda begin: begin.__name__)
def test_begun_anew(begin, in_scratch):
    assert parts_of(begin, in_scratch) == [4]
    assert check_function(kernel_of(adds(begin), in_scratch), SHAPE, only=["pallas_call"], limit=2) == 2


CARRIED = [begun_once, begun_outside, begun_in_part, begun_by_data, begun_with_what_was_there, begun_last]


@pytest.mark.parametrize("in_scratch", [True, False], ids=["scratch", "result"])
@pytest.mark.parametrize("begin", CARRIED, ids=lambda begin: begin.__name__)
@pytest.mark.filterwarnings("ignore:the Pallas kernel")
def test_carried_over(begin, in_scratch):
    assert parts_of(begin, in_scratch) == []


@pytest.mark.filterwarnings("ignore:the Pallas kernel")
def test_a_result_that_is_read_is_no_scratch():
    def both(x):
        row = pl.BlockSpec((1, 2, 8), lambda part: (part, 0, 0))
        out = [jax.ShapeDtypeStruct((4, 2, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)]

        def body(x, out, last):
            out[...] = x[...] * 2
            last[...] = x[0, 0] + 1

        specs = [row, pl.BlockSpec((8,), lambda part: (0,))]
        return pl.pallas_call(body, grid=(4,), in_specs=[row], out_specs=specs, out_shape=out, interpret=True)(x)

    def splittable(fun):
        return rule_for(eqn_of("pallas_call", fun, (4, 2, 8))).splittable()

    assert len(splittable(lambda x: both(x)[0])) == 1 and splittable(both) == ()


def scaled(weigh):
    """Of 8 heads 4 share the row of `y` that they meet; which of these it is, is asked for."""

    def body(x, y, out):
        out[...] = x[...] * y[...] * weigh(pl.program_id(0))

    def fun(x, y):
        return pl.pallas_call(
            body,
            grid=(8,),
            in_specs=[pl.BlockSpec((1, 8), lambda h: (h, 0)), pl.BlockSpec((1, 8), lambda h: (h // 4, 0))],
            out_specs=pl.BlockSpec((1, 8), lambda h: (h, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
            interpret=True,
        )(x, y)

    return fun


def test_which_of_the_heads_that_share_keys():
    fun = scaled(lambda h: jnp.where(jax.lax.rem(h, 4) == 0, 2.0, 3.0))
    rule = rule_for(eqn_of("pallas_call", fun, (8, 8), (2, 8)))
    assert [rule.sizes[factor] for factor in rule.splittable()] == [2]
    assert check_function(fun, (8, 8), (2, 8), only=["pallas_call"], limit=2) == 2


@pytest.mark.parametrize("weigh", [lambda h: h // 4, lambda h: jax.lax.rem(h, 8), lambda h: jax.lax.rem(h, 3)])
@pytest.mark.filterwarnings("ignore:the Pallas kernel")
def test_which_head_of_all(weigh):
    fun = functools.partial(scaled(lambda h: weigh(h).astype(jnp.float32)))
    assert rule_for(eqn_of("pallas_call", fun, (8, 8), (2, 8))).splittable() == ()

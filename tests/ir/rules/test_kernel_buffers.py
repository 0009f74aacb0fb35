"""Sums that a kernel makes over the trips of a loop in its body, or over grid steps in a scratch buffer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_function, eqn_of

ROWS = 32


def in_a_loop(trip, out=(8,), start=jnp.zeros, trips=8, end=lambda total: total):
    """A kernel that goes over the rows of `x`: `trip(x, y, out, k)` is what the k-th trip adds to the sum."""

    def kernel(x, y, result):
        total = lax.fori_loop(0, trips, lambda k, total: total + trip(x, y, result, k), start(out))
        result[...] = end(total)

    def fun(x, y):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(out, jnp.float32), interpret=True)(x, y)

    return fun


def rows(x, y, result, k):
    return (x[pl.ds(k * 4, 4)] * jnp.tanh(y[pl.ds(k * 4, 4)])).sum(0)


def by_places(x, y, result, k):
    """As Triton has it: places, and a mask of those that exist."""
    places = k * 4 + jnp.arange(4)
    at, mask = (places[:, None], jnp.arange(8)[None]), (places < ROWS)[:, None]
    return (triton.load(x.at[at], mask=mask, other=0.0) * triton.load(y.at[at], mask=mask, other=0.0)).sum(0)


def stores_rows(x, y, result):
    """A loop that stores what it makes of each block."""

    def trip(k, _):
        result[pl.ds(k * 4, 4)] = x[pl.ds(k * 4, 4)] + y[pl.ds(k * 4, 4)]
        return _

    lax.fori_loop(0, 8, trip, None)


def storing(x, y):
    return pl.pallas_call(stores_rows, out_shape=jax.ShapeDtypeStruct((ROWS, 8), jnp.float32), interpret=True)(x, y)


def in_scratch(add, start=jnp.zeros_like, end=lambda total: total):
    """The same with `pl.loop`, and the sum in a scratch buffer."""

    def kernel(x, y, result, total):
        total[...] = start(total)

        @pl.loop(0, 8)
        def _(k):
            add(total, rows(x, y, None, k))

        result[...] = end(total[...])

    def fun(x, y):
        out, scratch = jax.ShapeDtypeStruct((8,), jnp.float32), [pltpu.VMEM((8,), jnp.float32)]
        return pl.pallas_call(kernel, out_shape=out, scratch_shapes=scratch, interpret=True)(x, y)

    return fun


def in_the_result(x, y, result):
    """The same, where the sum is to be."""
    result[...] = jnp.zeros_like(result)
    lax.fori_loop(0, 8, lambda k, _: result.__setitem__(..., result[...] + rows(x, y, result, k)), None)


def added_there(x, y):
    return pl.pallas_call(in_the_result, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True)(x, y)


def add(total, more):
    total[...] += more


def add_twice(total, more):
    total[...] += more
    total[...] += more


def forget(total, more):
    total[...] = more


def add_in_part(total, more):
    total[:4] += more[:4]


def product(last, end=lambda total, _: total):
    """A product of matrices as for TPUs: added up in scratch over the last dim of the grid."""

    def kernel(x, y, result, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] @ y[...]

        @last(pl.program_id(2))
        def _():
            result[...] = end(total[...], pl.program_id(2)).astype(result.dtype)

    def fun(x, y):
        return pl.pallas_call(
            kernel,
            grid=(2, 1, 8),
            in_specs=[pl.BlockSpec((4, 4), lambda i, j, k: (i, k)), pl.BlockSpec((4, 8), lambda i, j, k: (k, j))],
            out_specs=pl.BlockSpec((4, 8), lambda i, j, k: (i, j)),
            out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
            scratch_shapes=[pltpu.VMEM((4, 8), jnp.float32)],
            interpret=True,
        )(x, y)

    return fun


def is_seventh(step):
    return pl.when(step == 7)


def is_last(step):
    return pl.when(step == pl.num_programs(2) - 1)


def is_any(step):
    return lambda store: store()


def loss_of_rows(begins=lambda i, j: j == 0, adds=lambda i, j: j == 1, added=lambda total, i: total):
    """A loss as of a softmax: over blocks of columns in scratch, begun anew for each block of rows, then added up."""

    def kernel(x, w, loss, each, total):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when((i == 0) & (j == 0))
        def _():
            loss[...] = jnp.zeros_like(loss)

        @pl.when(begins(i, j))
        def _():
            total[...] = jnp.full_like(total, -jnp.inf)

        total[...] = jnp.logaddexp(total[...], jax.nn.logsumexp(x[...] @ w[...], axis=1))
        each[...] = total[...]

        @pl.when(adds(i, j))
        def _():
            loss[...] += added(total[...].sum(keepdims=True), i)

    def fun(x, w):
        return pl.pallas_call(
            kernel,
            grid=(8, 2),
            in_specs=[pl.BlockSpec((4, 8), lambda i, j: (i, 0)), pl.BlockSpec((8, 4), lambda i, j: (0, j))],
            out_specs=[pl.BlockSpec((1,), lambda i, j: (0,)), pl.BlockSpec((4,), lambda i, j: (i,))],
            out_shape=[jax.ShapeDtypeStruct((n,), jnp.float32) for n in (1, ROWS)],
            scratch_shapes=[pltpu.VMEM((4,), jnp.float32)],
            interpret=True,
        )(x, w)

    return fun


TWICE = [(ROWS, 8), (ROWS, 8)]
MATRICES = [(8, ROWS), (ROWS, 8)]
SUMS = {
    "loop": (in_a_loop(rows), TWICE, "(ab)c,(ad)e->f {sum a, whole b c d e f}"),
    "scaled": (in_a_loop(rows, end=lambda total: total * 0.5), TWICE, "(ab)c,(ad)e->f {sum a, whole b c d e f}"),
    "places": (in_a_loop(by_places), TWICE, "(ab)c,(ad)e->f {sum a, whole b c d e f}"),
    "loop in scratch": (in_scratch(add), TWICE, "(ab)c,(ad)e->f {sum a, whole b c d e f}"),
    "loop in the result": (added_there, TWICE, "(ab)c,(ad)e->f {sum a, whole b c d e f}"),
    "stored": (storing, TWICE, "(ab)c,(ad)e->(af)g {whole b c d e f g}"),
    "scratch": (product(is_seventh), MATRICES, "(ad)(ce),(cf)g->(ah)i {sum c, whole d e f g h i}"),
    "counted scratch": (product(is_last), MATRICES, "(ad)(ce),(cf)g->(ah)i {sum c, whole d e f g h i}"),
    "losses": (loss_of_rows(), [(ROWS, 8), (8, 8)], "(ac)d,e(bf)->1,(ag) {sum a, whole b c d e f g}"),
    "at each step": (product(is_any), MATRICES, "(ad)(ce),(cf)g->(ah)i {sum c, whole d e f g h i}"),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    fun, shapes, rule = SUMS[name]
    assert str(rule_for(eqn_of("pallas_call", fun, *shapes))) == rule
    assert check_function(fun, *shapes, limit=4) > 1


NO_SUMS = {
    "numbered": in_a_loop(lambda x, y, result, k: rows(x, y, result, k) * k),
    "decayed": in_a_loop(lambda x, y, result, k: rows(x, y, result, k), end=jnp.tanh),
    "shifted": in_a_loop(rows, end=lambda total: total + 1.0),
    "from one": in_a_loop(rows, start=jnp.ones),
    "half of the rows": in_a_loop(rows, trips=4),
    "masked by trip": in_a_loop(lambda x, y, result, k: jnp.where(jnp.arange(8) < k, x[pl.ds(k * 4, 4)].sum(0), 0)),
    "overlapping": in_a_loop(lambda x, y, result, k: x[pl.ds(k * 4, 4)].sum(0) + y[pl.ds(k * 3, 4)].sum(0)),
    "reversed": in_a_loop(lambda x, y, result, k: x[pl.ds((7 - k) * 4, 4)].sum(0)),
    "read outside too": in_a_loop(lambda x, y, result, k: x[pl.ds(k * 4, 4)].sum(0) + x[...].max(0)),
    "scratch from one": in_scratch(add, start=jnp.ones_like),
    "scratch decayed": in_scratch(add, end=jnp.tanh),
    "added twice": in_scratch(add_twice),
    "forgotten": in_scratch(forget),
    "in part": in_scratch(add_in_part),
    "nothing walked": in_a_loop(lambda x, y, result, k: x[...].sum(0)),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_over_trips(name):
    with pytest.warns(UserWarning, match="computed whole on every device"):
        assert rule_for(eqn_of("pallas_call", NO_SUMS[name], *TWICE)).splittable() == ()


@pytest.mark.parametrize(
    "fun",
    [
        product(is_last, lambda total, _: jnp.tanh(total)),
        product(lambda step: pl.when(step == 5)),
        product(lambda step: pl.when(step + 1 == 8)),  # as many as there are stands where it is not found
        product(is_any, lambda total, step: total * step),
    ],
)
def test_what_is_no_sum_in_scratch(fun):
    rule = rule_for(eqn_of("pallas_call", fun, *MATRICES))
    assert [rule.sizes[factor] for factor in rule.splittable()] == [2]


@pytest.mark.parametrize(
    "fun",
    [
        loss_of_rows(begins=lambda i, j: (i == 0) & (j == 0)),
        loss_of_rows(begins=lambda i, j: j == 1),
        loss_of_rows(adds=lambda i, j: (j == 1) & (i == 7)),
        loss_of_rows(adds=lambda i, j: (j == 1) & (i < 4)),
        loss_of_rows(added=lambda total, i: total / (i + 1)),
    ],
    ids=["never anew", "too late", "only the last", "some", "weighed"],
)
def test_what_is_no_sum_over_rows(fun):
    with pytest.warns(UserWarning, match="computed whole on every device"):
        assert rule_for(eqn_of("pallas_call", fun, (ROWS, 8), (8, 8))).splittable() == ()


def test_as_few_bits_as_the_result_has():
    """A sum in 32 bits whose result has 16, as products of 16 bits are."""
    x = np.ones((ROWS, 8), np.float32)

    def kernel(x, result):
        total = lax.fori_loop(0, 8, lambda k, total: total + x[pl.ds(k * 4, 4)].sum(0), jnp.zeros(8))
        result[...] = total.astype(result.dtype)

    def fun(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8,), jnp.bfloat16), interpret=True)(x)

    assert rule_for(eqn_of("pallas_call", fun, x)).summed == ("a",)

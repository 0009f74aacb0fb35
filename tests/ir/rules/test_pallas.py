"""Pallas kernels: the rule that their grid and index maps give, and the kernel over a part of its grid."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention, decode_attention, layer_norm, rms_norm, softmax
from jax.experimental.pallas.ops.tpu import megablox

import autopar
from autopar.ir.rules import rule_for
from autopar.ir.rules.index_map import block_numbers, digits_in, split_steps
from autopar.ir.signature import equation_signature
from tests.ir.rules.harness import check_equations, check_function, eqn_of, flat_eqns, gradient_of

BLOCKS = attention.BlockSizes(
    **dict.fromkeys("block_q block_k block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split(), 16)
)


def copied(grid, specs, out_spec, out_shape, body=None, **kwargs):
    """A function of arrays: a kernel that adds its operands' first elements to its result."""

    def kernel(*refs):
        refs[-1][...] = jnp.zeros(refs[-1].shape, refs[-1].dtype) + sum(ref[...].sum() for ref in refs[:-1])

    def fun(*arrays):
        out = jax.ShapeDtypeStruct(out_shape, jnp.float32)
        call = pl.pallas_call(
            body or kernel, grid=grid, in_specs=specs, out_specs=out_spec, out_shape=out, interpret=True, **kwargs
        )
        return call(*arrays)

    return fun


def spec(block, index_map):
    return pl.BlockSpec(block, index_map)


def position(x, out):
    """Reads at which step it is."""
    out[...] = x[...] + pl.program_id(0).astype(jnp.float32)


def matmul(x, y, out):
    @pl.when(pl.program_id(2) == 0)
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)

    out[...] += x[...] @ y[...]


def rows_and_sum(x, y, out, total):
    """A norm's backward pass: gradients of rows, and of what all rows share."""

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    out[...] = x[...] * y[...]
    total[...] += jnp.sum(x[...] * y[...], axis=0, keepdims=True)


TABLE = {
    "elementwise": (
        copied((4,), [spec((2, 8), lambda i: (i, 0))], spec((2, 8), lambda i: (i, 0)), (8, 8)),
        [(8, 8)],
        "(ab)c->(ad)e {whole b c d e}",
    ),
    "squeezed and shared": (
        copied(
            (4, 2),
            [spec((None, 4, 8), lambda i, j: (i, j, 0)), spec((8,), lambda i, j: (0,))],
            spec((None, 4, 1), lambda i, j: (i, j, 0)),
            (4, 8, 1),
        ),
        [(4, 8, 8), (8,)],
        "a(bc)d,e->a(bf)1 {whole c d e f}",
    ),
    "four queries for a key": (
        copied(
            (8, 8),
            [spec((1, 1, 8), lambda i, h: (i, h, 0)), spec((1, 1, 8), lambda i, h: (i, h // 4, 0))],
            spec((1, 1, 8), lambda i, h: (i, h, 0)),
            (8, 8, 8),
        ),
        [(8, 8, 8), (8, 2, 8)],
        "a(cb)d,ace->a(cb)f {whole b d e f}",
    ),
    "two grid dims in one dim": (
        copied(
            (4, 2),
            [spec((1, 8), lambda i, j: (2 * i + j, 0)), spec((1, 1, 8), lambda i, j: (i, j, 0))],
            spec((1, 8), lambda i, j: (2 * i + j, 0)),
            (8, 8),
        ),
        [(8, 8), (4, 2, 8)],
        "(ab)c,abd->(ab)e {whole c d e}",
    ),
    "one grid dim in two dims": (
        copied(
            (8,),
            [spec((1, 1, 8), lambda i: (i // 2, jax.lax.rem(i, 2), 0))],
            spec((1, 8), lambda i: (i, 0)),
            (8, 8),
        ),
        [(4, 2, 8)],
        "bac->(ba)d {whole a c d}",
    ),
    "sum over steps": (
        copied(
            (4, 2, 2),
            [spec((2, 4), lambda i, j, k: (i, k)), spec((4, 4), lambda i, j, k: (k, j))],
            spec((2, 4), lambda i, j, k: (i, j)),
            (8, 8),
            matmul,
        ),
        [(8, 8), (8, 8)],
        "(ad)(ce),(cf)(bg)->(ah)(bi) {sum c, whole d e f g h i}",
    ),
    "rows, and a sum over them": (
        lambda x, y: pl.pallas_call(
            rows_and_sum,
            grid=(2, 4),
            in_specs=[spec((None, 2, 8), lambda i, j: (i, j, 0))] * 2,
            out_specs=[spec((None, 2, 8), lambda i, j: (i, j, 0)), spec((1, 8), lambda i, j: (0, 0))],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, 8), x.dtype)],
            interpret=True,
        )(x, y),
        [(2, 8, 8), (2, 8, 8)],
        "a(bc)d,a(be)f->a(bg)h,1i {sum a b, whole c d e f g h i}",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_rule(name):
    fun, shapes, rule = TABLE[name]
    assert str(rule_for(eqn_of("pallas_call", fun, *shapes))) == rule
    assert check_function(fun, *shapes) > 1


def sequential(*refs):
    """Carries a sum through scratch, begun anew whenever grid dim 0 begins."""
    x, out, total = refs

    @pl.when(pl.program_id(0) == 0)
    def _():
        total[...] = jnp.zeros(total.shape, total.dtype)

    total[...] += x[...]
    out[...] = total[...]


def shared_block(step):
    """A kernel whose steps all write one block, in some way that is no sum of their parts."""

    def kernel(x, out):
        first = pl.program_id(0) == 0
        step(x, out, first)

    return copied((4,), [spec((2, 8), lambda i: (i, 0))], spec((2, 8), lambda i: (0, 0)), (2, 8), kernel)


def weighed(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] += x[...] * (pl.program_id(0) + 1.0)


def decayed(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] = out[...] * 0.5 + x[...]


def squared(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] += out[...] * x[...]


def largest(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] = jnp.maximum(out[...], x[...])


def from_one(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.ones_like(out)))
    out[...] += x[...]


def twice(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] += x[...]
    out[...] += x[...]


def running(x, out, first):
    """What was there before, or is there now, is read for something else."""
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    before = out[...]
    out[...] = before + x[...]
    x[...] = before


def running_after(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    after = out[...] + x[...]
    out[...] = after
    x[...] = after


def read_before_it_begins(x, out, first):
    before = out[...]
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] = before + x[...]


def inside_a_condition(x, out, first):
    pl.when(first)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
    out[...] += x[...]
    pl.when(x[0, 0] > 0)(lambda: out.__setitem__(..., x[...] * pl.program_id(0)))


def begun_anew():
    """Of two dims whose steps share a block, one begins it anew each time."""

    def kernel(x, out):
        pl.when(pl.program_id(1) == 0)(lambda: out.__setitem__(..., jnp.zeros_like(out)))
        out[...] += x[...]

    return copied(
        (4, 2), [spec((1, 8), lambda i, j: (2 * i + j, 0))], spec((1, 8), lambda i, j: (0, 0)), (1, 8), kernel
    )


NO_SUMS = [
    weighed,
    decayed,
    squared,
    largest,
    from_one,
    twice,
    running,
    running_after,
    inside_a_condition,
    read_before_it_begins,
]


@pytest.mark.parametrize("step", NO_SUMS)
def test_what_is_no_sum_over_steps(step):
    with pytest.warns(UserWarning, match="computed whole on every device"):
        assert rule_for(eqn_of("pallas_call", shared_block(step), (8, 8))).splittable() == ()
    with pytest.warns(UserWarning, match="computed whole on every device"):
        assert rule_for(eqn_of("pallas_call", begun_anew(), (8, 8))).splittable() == ()


WHOLE = {
    "position": (
        copied((4,), [spec((2, 8), lambda i: (i, 0))], spec((2, 8), lambda i: (i, 0)), (8, 8), position),
        [(8, 8)],
        "grid dim 0: the kernel asks for its index",
    ),
    "reversed": (
        copied((4,), [spec((2, 8), lambda i: (3 - i, 0))], spec((2, 8), lambda i: (i, 0)), (8, 8)),
        [(8, 8)],
        "no plain function",
    ),
    "diagonal": (
        copied((4,), [spec((1, 1), lambda i: (i, i))], spec((1, 1), lambda i: (i, 0)), (4, 1)),
        [(4, 4)],
        "no plain function",
    ),
    "does not divide": (
        copied((3,), [spec((2, 8), lambda i: (i, 0))], spec((2, 8), lambda i: (i, 0)), (5, 8)),
        [(5, 8)],
        "no plain function",
    ),
    "written again and again": (
        copied((4,), [spec((2, 8), lambda i: (i, 0))], spec((2, 8), lambda i: (0, 0)), (2, 8)),
        [(8, 8)],
        "results do not move with it",
    ),
    "no grid": (copied((), [spec((8, 8), lambda: (0, 0))], spec((8, 8), lambda: (0, 0)), (8, 8)), [(8, 8)], "no grid"),
    "overwrites what another step reads": (
        copied(
            (4,),
            [spec((8, 8), lambda i: (0, 0))],
            spec((2, 8), lambda i: (i, 0)),
            (8, 8),
            input_output_aliases={0: 0},
        ),
        [(8, 8)],
        "a result overwrites an operand",
    ),
    "scratch that outlives a step": (
        copied(
            (4, 2),
            [spec((1, 1, 8), lambda k, i: (k, i, 0))],
            spec((1, 1, 8), lambda k, i: (k, i, 0)),
            (4, 2, 8),
            sequential,
            scratch_shapes=[pltpu.VMEM((1, 1, 8), jnp.float32)],
        ),
        [(4, 2, 8)],
        "grid dim 1: a scratch buffer may carry values",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_says_why(name):
    fun, shapes, reason = WHOLE[name]
    eqn = eqn_of("pallas_call", fun, *shapes)
    with pytest.warns(UserWarning, match="computed whole on every device") as caught:
        assert rule_for(eqn).splittable() == ()
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert "@autopar.sharding_rule(" in str(caught[0].message) and "test_pallas.py" in str(caught[0].message)


def test_the_line_to_write_can_be_written():
    fun, shapes, _ = WHOLE["position"]
    with pytest.warns(UserWarning) as caught:
        rule_for(eqn_of("pallas_call", fun, *shapes))
    line = str(caught[0].message).rsplit('"', 2)[1]
    assert line == "b a -> b c"
    assert rule_for(eqn_of("sharding_rule", autopar.sharding_rule(line)(fun), *shapes)).splittable() == ("b",)


def test_scalar_prefetch():
    """Where rows come from is known when it runs; which sample they belong to is known before."""

    def kernel(rows, x, out):
        del rows
        out[...] = x[...] * 2

    def fun(rows, x):
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(4, 2),
            in_specs=[pl.BlockSpec((1, 2, 8), lambda i, j, rows: (i, rows[j], 0))],
            out_specs=pl.BlockSpec((1, 2, 8), lambda i, j, rows: (i, j, 0)),
        )
        out = jax.ShapeDtypeStruct((4, 4, 8), x.dtype)
        return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=out, interpret=True)(rows, x)

    rows, x = np.array([1, 0], np.int32), (4, 4, 8)
    rule = rule_for(eqn_of("pallas_call", fun, rows, x))
    assert rule.splittable() == ("a",) and str(rule).startswith("c,ade->a(bf)g")
    assert check_function(fun, rows, x) > 1


@pytest.mark.parametrize("index_map", [lambda i, j: 8 * i + j, lambda i, j: i * 8 + jnp.minimum(j, 7)])
def test_block_numbers(index_map):
    avals = (jax.ShapeDtypeStruct((), jnp.int32),) * 2
    (number,) = block_numbers(jax.make_jaxpr(index_map)(*avals), (4, 8))
    np.testing.assert_array_equal(number.numbers, np.arange(32).reshape(4, 8))
    lengths = split_steps((4, 8), [number])
    assert lengths == [(4,), (8,)] and digits_in(number, 32, lengths) == ((0, 0), (1, 0))
    assert digits_in(number, 33, lengths) is None


LIBRARY = {
    "attention": (
        functools.partial(attention.mha, segment_ids=None, causal=True, block_sizes=BLOCKS, interpret=True),
        [(8, 32, 2, 16)] * 3,
    ),
    "layer norm": (functools.partial(layer_norm.layer_norm, interpret=True), [(4, 8, 16), (16,), (16,)]),
    "rms norm": (functools.partial(rms_norm.rms_norm, interpret=True), [(4, 8, 16), (16,), (16,)]),
    "decoding": (
        functools.partial(decode_attention.gqa, interpret=True),
        [(8, 4, 16), (8, 256, 2, 16), (8, 256, 2, 16)],
    ),
    "softmax": (functools.partial(softmax.softmax, interpret=True), [(4, 8, 16)]),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_library_kernels(name):
    """Forward and backward, sums over all rows in the gradient of a norm's weights too."""
    fun, shapes = LIBRARY[name]
    fun = fun if name in ("softmax", "decoding") else gradient_of(fun)
    kernels = [eqn for eqn in flat_eqns(fun, *shapes) if eqn.primitive.name == "pallas_call"]
    assert kernels
    if "norm" in name:
        assert rule_for(kernels[-1]).summed and check_equations(kernels, limit=2) == 2 * len(kernels)
    else:
        assert check_function(fun, *shapes, only=["pallas_call"], limit=3) > 1
    assert all(rule_for(eqn).flops > math.prod(eqn.outvars[0].aval.shape) for eqn in kernels)


def test_grouped_product_splits_by_columns():
    """Which group a tile of rows is of is known only when it runs, and so is how many tiles there are."""
    kernel = functools.partial(megablox.gmm, preferred_element_type=jnp.float32, interpret=True)
    fun = functools.partial(kernel, group_offset=jnp.int32(0))  # without it: one operation (`grouped_product.py`)
    sizes = np.array([64, 64, 100, 28], np.int32)
    args = (256, 128), (4, 128, 1024), sizes
    rule = rule_for(eqn_of("pallas_call", fun, *args))
    assert [rule.sizes[factor] for factor in rule.splittable()] == [8]
    assert rule.flops == 2 * 256 * 128 * 1024
    assert check_function(fun, *args, only=["pallas_call"], limit=2) == 2


def test_equal_kernels_are_one_operation():
    """Two calls, traced apart; another constant in the kernel or another index map is another operation."""

    def make(factor, index_map):
        def kernel(x, out):
            out[...] = x[...] * factor

        return copied((4,), [spec((2, 8), index_map)], spec((2, 8), lambda i: (i, 0)), (8, 8), kernel)

    calls = [
        make(2.0, lambda i: (i, 0)),
        make(2.0, lambda i: (i, 0)),
        make(3.0, lambda i: (i, 0)),
        make(2.0, lambda i: (0, 0)),
    ]
    signatures = [equation_signature(eqn_of("pallas_call", call, (8, 8))) for call in calls]
    assert signatures[0] == signatures[1] and len(set(signatures)) == 3

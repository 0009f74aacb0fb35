"""Reading by index: golden lines, and every strategy against the operation itself, out of range too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import (
    FEW,
    MESH_SHAPES,
    check_equation,
    check_equations,
    check_function,
    eqn_of,
    gradient_of,
    only_eqn,
)
from tests.ir.rules.indices import MODES, indexed

IDS = jnp.array([[0, 15, 3, 2], [7, 7, 8, 1]])
ROWS = jnp.array([3, 1, 0, 7, 7, 2, 5, 6])
WILD = jnp.array([3, -1, 99, 7, -9, 2, 5, 8])
"""Negative, and beyond 8."""
LINEAR = ((0,),)
INTEGERS = jnp.arange(32).reshape(8, 4)
FLAGS = INTEGERS % 3 > 0


def _label_logits(logits, labels):
    """The cross entropy's numerator."""
    return jnp.take_along_axis(logits, labels[..., None], -1)


def _of_each(table, row):
    return jax.vmap(lambda one, k: one[k])(table, row)


@pytest.mark.parametrize(
    "fun, args, rule, linear",
    [
        (lambda t: t[IDS], [(16, 8)], "cd,ab1->abd {sum c}", LINEAR),
        (lambda t: jnp.take(t, IDS, axis=0), [(16, 8)], "cd,ab1->abd {sum c}", LINEAR),
        (lambda t: jnp.take(t, IDS, axis=1), [(4, 16)], "cd,ab1->cab {sum d}", LINEAR),
        (_label_logits, [(2, 4, 16), IDS % 8], "abc,ab11->ab1 {sum c}", LINEAR),
        (_of_each, [(8, 16), ROWS], "ab,a1->a1 {sum b}", LINEAR),
        (_of_each, [(8, 16, 4), ROWS], "abc,ad->a1c {sum b, whole d}", LINEAR),
        (lambda t: t[ROWS, ROWS], [(8, 8)], "bc,ad->a {sum b c, whole d}", LINEAR),
        (lambda t: t[ROWS, :, ROWS], [(8, 4, 8)], "bcd,ae->ac {sum b d, whole e}", LINEAR),
        (lambda t: t.at[ROWS].get(mode="fill", fill_value=0), [(8, 4)], "bc,a1->ac {sum b}", LINEAR),
        (lambda t: t.at[ROWS].get(mode="fill", fill_value=1), [(8, 4)], "bc,a1->ac {sum b}", ()),
        (lambda t: t.at[ROWS].get(mode="clip"), [INTEGERS], "bc,a1->ac {sum b}", LINEAR),
        (lambda t: t.at[ROWS].get(mode="fill"), [INTEGERS], "bc,a1->ac {sum b}", ()),
        (lambda t: t[ROWS], [FLAGS], "bc,a1->ac {whole b}", ()),
        (lambda t: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (3, 8)))(ROWS), [(8, 8)],
         "bd,ae->acd {whole b c e}", LINEAR),
    ],
)  # fmt: skip
def test_gather(fun, args, rule, linear):
    found = rule_for(eqn_of("gather", fun, *args))
    assert (str(found), found.linear, found.flops) == (rule, linear, 0)


@pytest.mark.parametrize(
    "fun, args, rule",
    [
        (lambda t, k: t[k], [(8, 4), jnp.int32(3)], "ab,,->1b {sum a}"),
        (lambda t, k: lax.dynamic_index_in_dim(t, k, 1), [(2, 8, 4), jnp.int32(3)], "abc,,,->a1c {sum b}"),
        (lambda t, k: lax.dynamic_slice(t, (k, k), (1, 1)), [(8, 4), jnp.int32(3)], "ab,,->11 {sum a b}"),
        (lambda t, k: lax.dynamic_slice(t, (0, k), (8, 3)), [(8, 4), jnp.int32(1)], "ab,,->ac {whole b c}"),
        (lambda t, k: lax.dynamic_slice(t, (k, 0), (1, 4)), [FLAGS, jnp.int32(1)], "ab,,->1b {whole a}"),
    ],
)
def test_dynamic_slice(fun, args, rule):
    assert str(rule_for(eqn_of("dynamic_slice", fun, *args))) == rule


@pytest.mark.parametrize("mode", MODES)
def test_lookup_out_of_range(mode):
    """The vocabulary split, and the gradient, in every mode; none given is the last one."""
    fun = gradient_of(lambda t: t.at[WILD].get(mode=mode))
    assert check_function(fun, (8, 8), mesh_shape=(2, 4), only={"gather", "scatter-add"}, limit=16) == 32


FUNCTIONS = {
    "embedding": (lambda t: t[IDS], [(16, 8)]),
    "cross entropy": (lambda t: _label_logits(t, IDS), [(2, 4, 16)]),
    "one row each": (lambda t: _of_each(t, WILD), [(8, 4, 8)]),
    "two columns": (lambda t: t[ROWS, ROWS[::-1]], [(8, 8)]),
    "combine experts": (lambda t: t[ROWS // 2, ROWS % 4], [(4, 4, 8)]),
    "windows": (lambda t: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (3, 8)))(WILD), [(8, 8)]),
    "index": (lambda t, k: lax.dynamic_index_in_dim(t, k, 0), [(8, 4), jnp.int32(11)]),
    "index of columns": (lambda t, k: lax.dynamic_index_in_dim(t, k, 1), [(4, 8), jnp.int32(5)]),
    "index from the end": (lambda t, k: t[k], [(8, 4), jnp.int32(-2)]),
    "element": (lambda t, k: lax.dynamic_slice(t, (k, k), (1, 1)), [(8, 4), jnp.uint8(200)]),
    "slice": (lambda t, k: lax.dynamic_slice(t, (k, 0), (4, 8)), [(8, 8), jnp.int32(6)]),
    "slice of columns": (lambda t, k: lax.dynamic_slice(t, (0, k), (8, 3)), [(8, 8), jnp.int32(1)]),
}
ONLY = {"gather", "scatter-add", "dynamic_slice", "dynamic_update_slice"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_with_gradient(name):
    fun, (table, *starts) = FUNCTIONS[name]
    mesh_shape = MESH_SHAPES[sorted(FUNCTIONS).index(name) % 3]
    checked = gradient_of(lambda table: fun(table, *starts))
    assert check_function(checked, table, seed=len(name), mesh_shape=mesh_shape, only=ONLY, limit=12) > 4


@pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
def test_embedding(mesh_shape):
    """Tokens, hidden and vocabulary, in all combinations."""
    eqn = only_eqn(lambda t, k: lax.gather(t, k, _ROW, (1, 8), mode="clip"), (16, 8), _TOKENS)
    tokens = np.arange(64).reshape(8, 8, 1) % 19 - 1
    operands = [np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), tokens.astype(np.int32)]
    assert check_equation(eqn, mesh_shape=mesh_shape, operands=operands, limit=24) >= 6


_ROW = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
_TOKENS = jnp.zeros((8, 8, 1), jnp.int32)


ANY_GATHER = st.tuples(
    indexed(),
    st.sampled_from(MODES),
    st.sampled_from(["float32", "bfloat16", "int32", "bool", "complex64"]),
    st.sampled_from([None, 0, 7]),
)


@settings(FEW, max_examples=7)
@given(st.lists(ANY_GATHER, min_size=4, max_size=4), st.sampled_from(MESH_SHAPES))
def test_any_gather(drawn, mesh_shape):
    """Four drawn together."""
    eqns, operands = zip(*(gather_of(*each) for each in drawn), strict=True)
    assert check_equations(eqns, mesh_shape=mesh_shape, operands=operands, limit=6) >= len(drawn)


def gather_of(case, mode, dtype, fill):
    """The equation, and random operands."""
    table = np.random.default_rng(case.indices.size).integers(-5, 5, case.table).astype(jnp.dtype(dtype))
    fill = bool(fill) if dtype == "bool" and fill is not None else fill

    def read(table, indices):
        return lax.gather(table, indices, case.numbers, case.taken, mode=mode, fill_value=fill)

    eqn = only_eqn(read, jnp.asarray(table), jnp.asarray(case.indices))
    assert eqn.outvars[0].aval.shape == case.slices
    return eqn, [table, case.indices]


@pytest.mark.parametrize("mesh_shape, mode, k", list(zip(MESH_SHAPES, MODES, (8, -1, 7), strict=True)))
def test_a_single_lookup(mesh_shape, mode, k):
    """XLA makes a slice of it: of a table that is sliced before, and of a result that is sliced behind."""

    def fun(t, k):
        row, column = lax.GatherDimensionNumbers((0,), (0,), (0,)), lax.GatherDimensionNumbers((0,), (1,), (0, 1))
        window = lax.GatherDimensionNumbers((0, 1), (), (0,))
        return [
            lax.gather(t, k[None], row, (1, 8), mode=mode),
            lax.gather(t, jnp.stack([k, k - 7]), column, (8, 1), mode=mode),
            lax.gather(t, k[None], window, (8, 8), mode=mode),
            lax.gather(t, k[None], window, (4, 8), mode=mode),
            lax.dynamic_slice(t, (k, k - 7), (1, 8)),
            lax.dynamic_slice(t, (k, k - 7), (4, 8)),
        ]

    args = [(8, 8), np.int32(k)]
    assert check_function(fun, *args, mesh_shape=mesh_shape, only=ONLY, limit=8, seed=k + 1) > 20

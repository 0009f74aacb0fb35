"""Writing by index: golden lines, and every strategy against the operation itself, out of range too."""

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
    check_equations,
    check_function,
    eqn_of,
    flat_eqns,
    gradient_of,
    only_eqn,
)
from tests.ir.rules.indices import MODES, indexed

IDS = jnp.array([[0, 15, 3, 2], [7, 7, 8, 1]])
ROWS = jnp.array([3, 1, 0, 7, 7, 2, 5, 6])
WILD = jnp.array([3, -1, 99, 7, -9, 2, 5, 8])
"""Negative, and beyond 8."""
BOTH = ((0, 2),)


def _gradient(fun):
    return lambda *args: gradient_of(fun)(*args)[1]


def _dispatch(tokens):
    """Tokens into the slots of their experts, [expert, slot, hidden]; those beyond the capacity are dropped."""
    expert, slot = ROWS // 2, jnp.array([0, 0, 0, 0, 1, 1, 2, 1])
    return jnp.zeros((4, 2, tokens.shape[1])).at[expert, slot].add(tokens, mode="drop")


@pytest.mark.parametrize(
    "primitive, fun, args, rule, linear",
    [
        ("scatter-add", _gradient(lambda t: t[IDS]), [(16, 8)], "cd,ab1,abd->cd {sum a b}", BOTH),
        ("scatter-add", _gradient(lambda t: jnp.take_along_axis(t, IDS[..., None], -1)), [(2, 4, 16)],
         "abc,ab11,ab1->abc", BOTH),
        ("scatter-add", lambda t: t.at[IDS].add(1.0), [(16, 8)], "cd,ab1,abd->cd {sum a b}", BOTH),
        ("scatter-add", lambda t: t.at[:, ROWS].add(1.0), [(4, 8)], "bc,a1,ba->bc {sum a}", BOTH),
        ("scatter-add", lambda t: jax.ops.segment_sum(t, ROWS, 4), [(8, 16)], "bc,a1,ac->bc {sum a}", BOTH),
        ("scatter-add", _dispatch, [(8, 16)], "bcd,ae,ad->bcd {sum a, whole e}", BOTH),
        ("scatter-sub", lambda t: t.at[ROWS].subtract(1.0), [(8, 4)], "bc,a1,ac->bc {sum a}", BOTH),
        ("scatter-mul", lambda t: t.at[ROWS].mul(2.0), [(8, 4)], "bc,a1,ac->bc {whole a}", ((0,),)),
        ("scatter-max", lambda t: t.at[ROWS].max(2.0), [(8, 4)], "bc,a1,ac->bc {whole a}", ()),
        ("scatter-min", lambda t: t.at[ROWS].min(2.0), [(8, 4)], "bc,a1,ac->bc {whole a}", ()),
        ("scatter", lambda t: t.at[ROWS].set(2.0), [(8, 4)], "bc,a1,ac->bc {whole a}", ()),
        ("scatter", lambda t: t.at[ROWS].set(2.0, unique_indices=True), [(8, 4)], "bc,a1,ac->bc {whole a}", BOTH),
        ("scatter", lambda t: t.at[3].set(2.0), [(8, 4)], "ab,1,b->ab", BOTH),
        ("scatter", lambda t, k: jax.vmap(lambda row, k: row.at[k].set(2.0))(t, k), [(8, 4), ROWS % 4], "ab,a1,a->ab",
         BOTH),
        ("scatter-add", lambda t: t.at[ROWS].add(1), [jnp.ones((8, 4), jnp.int32)], "bc,a1,ac->bc {sum a}", BOTH),
        ("dynamic_update_slice", lambda t, u, k: lax.dynamic_update_slice(t, u, (k, 0)), [(8, 4), (1, 4), jnp.int32(1)],
         "ab,1b,,->ab", ((0, 1),)),
        ("dynamic_update_slice", lambda t, u, k: lax.dynamic_update_slice(t, u, (0, k, 0, 0)),
         [(2, 8, 4, 16), (2, 1, 4, 16), jnp.int32(1)], "abcd,a1cd,,,,->abcd", ((0, 1),)),
        ("dynamic_update_slice", lambda t, u, k: lax.dynamic_update_slice(t, u, (k, 0)), [(8, 4), (3, 4), jnp.int32(1)],
         "ab,cb,,->ab {whole a c}", ((0, 1),)),
    ],
)  # fmt: skip
def test_rule(primitive, fun, args, rule, linear):
    found = rule_for(eqn_of(primitive, fun, *args))
    assert (str(found), found.linear) == (rule, linear)
    assert (
        all(operands == (0,) for operands in found.accumulators.values()) and tuple(found.accumulators) == found.summed
    )


WRITES = {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}


def _every_write(mode):
    def fun(t, u):
        at = t.at[WILD]
        return [getattr(at, name)(u, mode=mode) for name in ("set", "add", "subtract", "mul", "min", "max")]

    return fun


@pytest.mark.parametrize("mesh_shape, mode", list(zip(MESH_SHAPES, MODES, strict=True)))
def test_updates_out_of_range(mesh_shape, mode):
    assert check_function(_every_write(mode), (8, 4), (8, 4), mesh_shape=mesh_shape, only=WRITES, limit=8) >= 17


def test_no_mode_is_one_of_these():
    filled, none = (flat_eqns(_every_write(mode), (8, 4), (8, 4)) for mode in ("fill", None))
    assert [(e.primitive, e.params.get("mode")) for e in filled] == [(e.primitive, e.params.get("mode")) for e in none]


FUNCTIONS = {
    "dispatch to experts": (_dispatch, [(8, 16)]),
    "segment sum": (lambda t: jax.ops.segment_sum(t, ROWS, 8), [(8, 4)]),
    "segment max": (lambda t: jax.ops.segment_max(t, ROWS % 4, 4), [(8, 4)]),
    "add columns": (lambda t, u: t.at[:, WILD].add(u), [(4, 8), (4, 8)]),
    "one column each": (lambda t: jax.vmap(lambda row, k: row.at[k].set(0.0))(t, WILD), [(8, 8)]),
    "a cache of its own each": (
        lambda t, u: jax.vmap(lambda a, b, k: lax.dynamic_update_slice(a, b, (k, 0)))(t, u, WILD),
        [(8, 8, 2), (8, 1, 2)],
    ),
    "set once": (lambda t, u: t.at[jnp.array([1, 6, 3, 0])].set(u, unique_indices=True), [(8, 4), (4, 4)]),
    "a row": (lambda t, u: lax.dynamic_update_slice(t, u, (jnp.int32(6), 0)), [(8, 4), (1, 4)]),
    "rows": (lambda t, u: lax.dynamic_update_slice(t, u, (jnp.int32(9), 0)), [(8, 4), (3, 4)]),
    "a cache": (
        lambda t, u: lax.dynamic_update_slice(t, u, (jnp.uint8(0), jnp.uint8(255), jnp.uint8(0))),
        [(2, 8, 4), (2, 1, 4)],
    ),
    "an element": (lambda t, u: lax.dynamic_update_slice(t, u, (jnp.int32(-3), jnp.int32(2))), [(8, 4), (1, 1)]),
}
ONLY = {*WRITES, "gather", "dynamic_slice", "dynamic_update_slice"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_with_gradient(name):
    fun, args = FUNCTIONS[name]
    mesh_shape = MESH_SHAPES[sorted(FUNCTIONS).index(name) % 3]
    assert check_function(gradient_of(fun), *args, seed=len(name), mesh_shape=mesh_shape, only=ONLY, limit=10) > 4


SCATTERS = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


ANY_SCATTER = st.tuples(
    indexed(),
    st.sampled_from(MODES),
    st.sampled_from(["float32", "int32", "uint8", "complex64"]),
    st.sampled_from(sorted(SCATTERS)),
)


@settings(FEW, max_examples=7)
@given(st.lists(ANY_SCATTER, min_size=4, max_size=4), st.sampled_from(MESH_SHAPES))
def test_any_scatter(drawn, mesh_shape):
    """Four drawn together."""
    eqns, operands = zip(*(scatter_of(*each) for each in drawn), strict=True)
    assert check_equations(eqns, mesh_shape=mesh_shape, operands=operands, limit=6) >= len(drawn)


def scatter_of(case, mode, dtype, kind):
    """The equation, and random operands."""
    if dtype == "complex64" and kind in ("min", "max"):
        dtype = "float32"
    rng = np.random.default_rng(case.indices.size)
    table, updates = (rng.integers(-3, 3, shape).astype(jnp.dtype(dtype)) for shape in (case.table, case.slices))

    def write(table, indices, updates):
        return SCATTERS[kind](table, indices, updates, case.scatter_numbers(), mode=mode)

    operands = [table, case.indices, updates]
    return only_eqn(write, *map(jnp.asarray, operands)), operands


@pytest.mark.parametrize("mesh_shape, mode, k", list(zip(MESH_SHAPES, MODES, (8, -1, 7), strict=True)))
def test_a_single_update(mesh_shape, mode, k):
    """XLA makes slices of it: of a table that is whole and then sliced, every other element stays what it was."""

    def fun(t, row, window, k):
        writes = [getattr(t.at[k], name)(row, mode=mode) for name in ("set", "add", "multiply", "min", "max")]
        writes += [t.at[5, 3].set(row[0]), t.at[:, -1].multiply(2.0), t.at[3].apply(jnp.exp)]
        writes += [t.at[k, 2].add(row[1], mode=mode), t[:1].at[0, k].min(row[2], mode=mode)]
        numbers = lax.ScatterDimensionNumbers((0, 1), (), (0, 1))  # a whole window of columns, at a place in them
        writes += [lax.scatter(t, jnp.stack([k, k - 7]), row[None], numbers, mode=mode)]
        writes += [lax.scatter_add(t, jnp.stack([k]), window, lax.ScatterDimensionNumbers((0, 1), (), (0,)), mode=mode)]
        return writes

    args = [(8, 8), (8,), (3, 8), np.int32(k)]
    assert check_function(fun, *args, mesh_shape=mesh_shape, only=WRITES, limit=5, seed=k + 1) > 30


@pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
def test_one_place_of_what_is_ordered(mesh_shape):
    """An amax history, running sums: one place written behind a roll, a sort, a sum."""

    def fun(h, x):
        return [jnp.roll(h, 1).at[0].set(jnp.abs(x).max()), jnp.sort(h).at[5].add(1.0), jnp.cumsum(h).at[9].add(x[0])]

    assert check_function(fun, (16,), (8,), mesh_shape=mesh_shape, only=WRITES, seed=3) >= 9


def test_a_function_of_what_stands_there_is_not_linear():
    assert rule_for(eqn_of("scatter", lambda t: t.at[3].apply(jnp.exp), (8, 4))).linear == ()

"""Reading and writing by index: golden lines, and every strategy against the operation itself, out of range too."""

import jax
import jax.numpy as jnp
import pytest
from harness import FEW, MESH_SHAPES, check_function, eqn_of, gradient_of
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for

IDS = jnp.array([[0, 15, 3], [7, 7, 8]])
ROWS = jnp.array([3, 1, 0, 7, 7, 2, 5, 6])
WILD = jnp.array([3, -1, 99, 7, -9, 2, 5, 8])
"""Negative, and beyond 8."""


@pytest.mark.parametrize("primitive, fun, args, rule", [
    ("gather", lambda t: t[IDS], [(16, 8)], "cd,ab1->abd {sum c}"),
    ("gather", lambda t: jnp.take_along_axis(t, ROWS[:, None], 1), [(8, 16)], "ab,a11->a1 {sum b}"),
    ("gather", lambda t: jax.vmap(lambda row, k: row[k])(t, ROWS), [(8, 16)], "ab,a1->a1 {sum b}"),
    ("gather", lambda t: t[:, ROWS], [(4, 8)], "bc,a1->ba {sum c}"),
    ("gather", lambda t: t[ROWS, ROWS], [(8, 8)], "bc,ad->a {sum b c, whole d}"),
    ("gather", lambda t: t[ROWS], [jnp.zeros((8, 4), bool)], "bc,a1->ac {whole b}"),
    ("scatter-add", lambda t: t.at[IDS].add(1.0), [(16, 8)], "cd,ab1,abd->cd {sum a b}"),
    ("scatter-mul", lambda t: t.at[ROWS].mul(2.0), [(8, 4)], "bc,a1,ac->bc {whole a}"),
    ("scatter", lambda t: t.at[ROWS].set(2.0), [(8, 4)], "bc,a1,ac->bc {whole a}"),
    ("dynamic_slice", lambda t, k: lax.dynamic_index_in_dim(t, k, 0, False), [(8, 4), jnp.int32(3)], "ab,,->1b {sum a}"),
    ("dynamic_slice", lambda t, k: lax.dynamic_slice(t, (0, k), (8, 2)), [(8, 4), jnp.int32(1)], "ab,,->ac {whole b c}"),
    ("dynamic_update_slice", lambda t, u, k: lax.dynamic_update_slice(t, u, (k, 0)), [(8, 4), (1, 4), jnp.int32(1)],
     "ab,1b,,->ab"),
    ("dynamic_update_slice", lambda t, u, k: lax.dynamic_update_slice(t, u, (k, 0)), [(8, 4), (3, 4), jnp.int32(1)],
     "ab,cb,,->ab {whole a c}"),
])
def test_golden(primitive, fun, args, rule):
    found = str(rule_for(eqn_of(primitive, fun, *args)))
    assert found == rule


MODES = [None, "clip", "fill", "promise_in_bounds"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
def test_lookup(mesh_shape, mode):
    fun = gradient_of(lambda t: t.at[WILD].get(mode=mode))
    assert check_function(fun, (8, 8), mesh_shape=mesh_shape, only={"gather", "scatter-add"}, limit=16) > 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", ["set", "add", "mul", "min", "max", "subtract"])
def test_update(mode, write):
    fun = lambda t, u: getattr(t.at[WILD], write)(u, mode=mode)  # noqa: E731
    only = {"scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"}
    assert check_function(fun, (8, 4), (8, 4), mesh_shape=(2, 4), only=only, limit=12) > 2


FUNCTIONS = {
    "two columns": (lambda t: t[ROWS, ROWS[::-1]], [(8, 8)]),
    "rows of columns": (lambda t: t[:, WILD], [(4, 8)]),
    "of integers": (lambda t: t[WILD], [jnp.arange(16).reshape(8, 2)]),
    "of booleans": (lambda t: t[WILD], [jnp.arange(16).reshape(8, 2) % 3 > 0]),
    "small unsigned indices": (lambda t: t[jnp.array([0, 200, 255, 3], jnp.uint8)], [(8, 4)]),
    "windows": (lambda t: jax.vmap(lambda k: lax.dynamic_slice(t, (k, 0), (3, 8)))(WILD), [(8, 8)]),
    "one row each": (lambda t: jax.vmap(lambda m, k: m[k])(t, WILD), [(8, 4, 8)]),
    "one column each, written": (lambda t: jax.vmap(lambda m, k: m.at[k].set(0.0))(t, WILD), [(8, 8)]),
    "a number per row": (lambda t: jnp.take_along_axis(t, WILD[:, None], 1), [(8, 8)]),
    "index": (lambda t, k: lax.dynamic_index_in_dim(t, k, 0), [(8, 4), jnp.int32(11)]),
    "index of columns": (lambda t, k: lax.dynamic_index_in_dim(t, k, 1), [(4, 8), jnp.int32(5)]),
    "slice": (lambda t, k: lax.dynamic_slice(t, (k, 0), (4, 8)), [(8, 8), jnp.int32(6)]),
    "write a row": (lambda t, u, k: lax.dynamic_update_slice(t, u, (k, 0)), [(8, 4), (1, 4), jnp.int32(6)]),
    "write rows": (lambda t, u, k: lax.dynamic_update_slice(t, u, (k, 0)), [(8, 4), (3, 4), jnp.int32(9)]),
    "write a cache": (lambda t, u, k: lax.dynamic_update_slice(t, u, (0, k, 0)), [(2, 8, 4), (2, 1, 4), jnp.int32(3)]),
    "segment sum": (lambda t: jax.ops.segment_sum(t, ROWS, 8), [(8, 4)]),
}
ONLY = {"gather", "scatter", "scatter-add", "dynamic_slice", "dynamic_update_slice"}


@pytest.mark.parametrize("name", FUNCTIONS)
@FEW
@given(mesh_shape=st.sampled_from(MESH_SHAPES), seed=st.integers(0, 2**16))
def test_against_the_operation(name, mesh_shape, seed):
    fun, args = FUNCTIONS[name]
    exact = any(hasattr(a, "dtype") and a.dtype != jnp.float32 and a.ndim for a in args)
    checked = fun if exact else (lambda *args: gradient_of(lambda *floats: fun(*floats, *args[len(floats):]))(
        *[a for a in args if jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)]))
    assert check_function(checked, *args, seed=seed, mesh_shape=mesh_shape, only=ONLY, limit=6) > 0

"""Training steps in microbatches: the data, small models, and what is checked of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar._jax import JaxprEqn, eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.program import Program
from autopar.ir.region import bodies_of, is_region
from autopar.ir.split.microbatches.accumulate import accumulate
from autopar.ir.split.microbatches.microbatch import Microbatches
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import split_microbatches

BATCH, LENGTH, WIDTH, CLASSES, WORDS, LAYERS = 8, 4, 16, 4, 12, 3

COUNTS = (2, 4)

TOLERANCE = 1e-5

HERE = r"(losses|models|test_refusal)\.py"

Tree = Any

Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _integers(seed: int, below: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


@functools.cache
def batch_of(size: int = BATCH) -> dict[str, jax.Array]:
    """Vectors and sentences with labels, weights and masks; a microbatch of two has at least one sample that counts."""
    mask = jnp.asarray(np.arange(size) % 3 != 1, jnp.float32)
    words = jnp.asarray(np.random.default_rng(4).random((size, LENGTH)) < 0.6, jnp.float32)
    return {
        "x": _normal(0, size, WIDTH),
        "y": _normal(1, size, CLASSES),
        "label": _integers(2, CLASSES, size),
        "mask": mask,
        "weight": 0.5 + jnp.abs(_normal(3, size)),
        "tokens": _integers(5, WORDS, size, LENGTH),
        "targets": _integers(6, WORDS, size, LENGTH),
        "words": words,
    }


@functools.cache
def mlp_params() -> dict[str, jax.Array]:
    return {
        "bias": jnp.full(WIDTH, 0.1, jnp.float32),
        "w1": 0.3 * _normal(10, WIDTH, WIDTH),
        "w2": 0.3 * _normal(11, WIDTH, CLASSES),
    }


def mlp(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w1"] + params["bias"]) @ params["w2"]


def squares(params: Tree, batch: Tree) -> jax.Array:
    """Loss of each sample."""
    return ((mlp(params, batch["x"]) - batch["y"]) ** 2).sum(-1)


def cross_entropies(params: Tree, batch: Tree) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(mlp(params, batch["x"]), batch["label"])


@functools.cache
def language_params() -> dict[str, jax.Array]:
    return {"embed": _normal(12, WORDS, WIDTH), "w": 0.3 * _normal(13, WIDTH, WIDTH), "out": _normal(14, WIDTH, WORDS)}


def token_losses(params: Tree, batch: Tree) -> jax.Array:
    """Loss of each token, [batch, length]."""
    h = jnp.tanh(params["embed"][batch["tokens"]] @ params["w"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], batch["targets"])


def descend(params: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads)


def sgd(loss: Callable[[Tree, Tree], jax.Array]) -> Step:
    """A training step of plain gradient descent on `loss(params, batch)`."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return {**state, "params": descend(state["params"], grads)}, {"loss": value}

    return step


def sgd_of_state(loss: Callable[[Tree, Tree, Tree], jax.Array]) -> Step:
    """The same on `loss(params, state, batch)`; counts steps."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        value, grads = jax.value_and_grad(loss)(state["params"], state, batch)
        return {**state, "step": state["step"] + 1, "params": descend(state["params"], grads)}, {"loss": value}

    return step


def trace_case(case: Case) -> tuple[Program, tuple[int, ...]]:
    """The program of a step, and which of its inputs are the batch."""
    program = trace_step(case.step, (case.state(), case.batch()))
    return program, find_roles(program, (1,)).batch


traced = functools.cache(trace_case)


def split_case(case: Case, count: int = 2, per_microbatch: bool = False) -> tuple[Program, Microbatches]:
    program, batch = traced(case)
    return program, split_microbatches(program.jaxpr, count, batch, per_microbatch)


def run_split(case: Case, program: Program, split: Microbatches) -> tuple[Tree, Tree]:
    """New state and metrics, worked out in microbatches on one device."""
    flat = accumulate(program.jaxpr, split)
    check_program(flat)
    run = jax.jit(lambda *args: eval_jaxpr(flat, (), *args))
    return program.unflatten_outputs(run(*program.flatten_inputs(jax.tree.leaves((case.state(), case.batch())))))


@functools.cache
def full_batch(case: Case) -> tuple[Tree, Tree]:
    return jax.jit(case.step)(case.state(), case.batch())


def assert_same(actual: Tree, expected: Tree, tolerance: float = TOLERANCE) -> None:
    """Equal leaf by leaf, relative to each leaf's scale; integers and booleans exactly."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        got, want, name = _host(got), _host(want), jax.tree_util.keystr(path)
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        if not jnp.issubdtype(want.dtype, jnp.inexact):
            np.testing.assert_array_equal(got, want, err_msg=name)
            continue
        got, want = got.astype(np.float64), want.astype(np.float64)
        assert np.isfinite(want).all(), f"{name}: the case itself is not finite"
        scale = max(float(np.abs(want).max(initial=0.0)), 1e-6)
        error = float(np.abs(got - want).max(initial=0.0)) / scale
        assert error <= tolerance, f"{name} is off by {error:.1e} of its scale"


def _host(leaf: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def equations(eqns: Any) -> Iterator[JaxprEqn]:
    """Equations with those in bodies of loops and branches."""
    for eqn in eqns:
        yield eqn
        if is_region(eqn):
            for body in bodies_of(eqn):
                yield from equations(body.eqns)


def primitives_in(eqns: Any) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in equations(eqns))


def assert_is_worked_through(split: Microbatches) -> None:
    """The model is in the loop: no matrix product is made of the whole batch."""
    assert primitives_in(split.loop.eqns)["dot_general"] > 0
    outside = primitives_in([*split.before, *split.after])
    assert not outside["dot_general"], f"outside of the loop: {outside}"


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A step, its state and its batch."""

    step: Step
    params: Callable[[], Tree] = mlp_params
    extra: Callable[[], Tree] = dict
    batch: Callable[[], Tree] = batch_of
    tolerance: float = TOLERANCE

    def state(self) -> Tree:
        return {"params": self.params(), **self.extra()}


def cases(table: dict[str, Case]) -> Any:
    """Parametrize over a table."""
    return pytest.mark.parametrize("case", list(table.values()), ids=list(table))


def cases_in_parts(table: dict[str, Case]) -> Any:
    """Parametrize over a table: a case, and in how many microbatches, each number in turn."""
    counted = zip(table.values(), itertools.cycle(COUNTS), strict=False)
    return pytest.mark.parametrize("case, count", list(counted), ids=list(table))


def assert_equals_full_batch(case: Case, count: int) -> None:
    program, split = split_case(case, count)
    assert_is_worked_through(split)
    assert_same(run_split(case, program, split), full_batch(case), case.tolerance)


def typed_key() -> Tree:
    return {"key": jax.random.key(3), "step": jnp.int32(5)}


def scale(value: float) -> Callable[[], Tree]:
    return lambda: {"scale": jnp.float32(value)}


def step_number(number: int) -> Callable[[], Tree]:
    return lambda: {"step": jnp.int32(number)}


def old_key() -> Tree:
    return {"key": jax.random.PRNGKey(3), "step": jnp.int32(5)}


def hardware_key() -> Tree:
    return {"key": jax.random.key(3, impl="rbg"), "step": jnp.int32(5)}

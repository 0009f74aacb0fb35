"""Microbatches: a step worked through in parts equals the step, or is refused with the user's line.

Table tests: each form of loss, model and metric at batch 8, in 2 and in 4 microbatches, against plain `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar import DataParallel, Plan, ShardParallel
from autopar._jax import JaxprEqn, eval_jaxpr
from autopar.errors import AutoparError, BatchError, MicrobatchError
from autopar.ir.check import check_program
from autopar.ir.printer import print_jaxpr
from autopar.ir.program import Program
from autopar.ir.region import bodies_of, is_region
from autopar.ir.rewrite.fission import behind_gradients
from autopar.ir.split.accumulate import accumulate
from autopar.ir.split.microbatch import Microbatches, split_microbatches
from autopar.ir.split.placement import SUM, Split
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step

BATCH, LENGTH, WIDTH, CLASSES, WORDS, LAYERS = 8, 4, 16, 4, 12, 3
COUNTS = (2, 4)
TOLERANCE = 1e-5
HERE = "test_microbatch.py"

Tree = Any
Step = Callable[[Tree, Tree], tuple[Tree, Tree]]


# Data and models.


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


# What is checked.


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


def assert_equals_full_batch(case: Case, count: int) -> None:
    program, split = split_case(case, count)
    assert_is_worked_through(split)
    assert_same(run_split(case, program, split), full_batch(case), case.tolerance)


# 1. Losses.


def take_along_axis_loss(params: Tree, batch: Tree) -> jax.Array:
    log_p = jax.nn.log_softmax(mlp(params, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["label"][:, None], axis=-1).mean()


def one_hot_loss(params: Tree, batch: Tree) -> jax.Array:
    log_p = jax.nn.log_softmax(mlp(params, batch["x"]))
    return -(jax.nn.one_hot(batch["label"], CLASSES) * log_p).sum(-1).mean()


def indexed_loss(params: Tree, batch: Tree) -> jax.Array:
    log_p = jax.nn.log_softmax(mlp(params, batch["x"]))
    return -log_p[jnp.arange(log_p.shape[0]), batch["label"]].mean()


def picked_probability_loss(params: Tree, batch: Tree) -> jax.Array:
    p = jax.nn.softmax(mlp(params, batch["x"]))
    return -jnp.log(p[jnp.arange(p.shape[0]), batch["label"]]).mean()


def picked_rows_loss(params: Tree, batch: Tree) -> jax.Array:
    """The state at some time of each sample, as of a sentence at its last word."""
    x = batch["x"][:, None] * jnp.arange(1.0, 1 + LENGTH)[:, None]
    h = jnp.tanh(x @ params["w1"])[jnp.arange(x.shape[0]), batch["label"]]
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def decayed_loss(params: Tree, batch: Tree) -> jax.Array:
    return squares(params, batch).mean() + 0.01 * sum((p**2).sum() for p in jax.tree.leaves(params))


def ignored_label_loss(params: Tree, batch: Tree) -> jax.Array:
    """Label 0 stands for none, as padding does."""
    counts = batch["label"] != 0
    return jnp.where(counts, cross_entropies(params, batch), 0.0).sum() / counts.sum()


LOSSES: dict[str, Callable[[Tree, Tree], jax.Array]] = {
    "sum": lambda p, b: squares(p, b).sum(),
    "mean": lambda p, b: squares(p, b).mean(),
    "mean of all elements": lambda p, b: jnp.mean((mlp(p, b["x"]) - b["y"]) ** 2),
    "masked mean": lambda p, b: (squares(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked mean of one at least": lambda p, b: (squares(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1),
    "mean where": lambda p, b: jnp.mean(squares(p, b), where=b["mask"] > 0),
    "mean of ignored labels": ignored_label_loss,
    "weighted mean": lambda p, b: jnp.average(squares(p, b), weights=b["weight"]),
    "normalized weights": lambda p, b: (squares(p, b) * (b["weight"] / b["weight"].sum())).sum(),
    "integer labels": lambda p, b: cross_entropies(p, b).mean(),
    "take_along_axis": take_along_axis_loss,
    "one_hot": one_hot_loss,
    "indexed": indexed_loss,
    "indexed probabilities": picked_probability_loss,
    "indexed states": picked_rows_loss,
    "weight decay": decayed_loss,
    "two losses": lambda p, b: cross_entropies(p, b).mean() + 0.3 * (squares(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "minus mean": lambda p, b: 3.0 - squares(p, b).mean() * 2.0,
}

TOKEN_LOSSES: dict[str, Callable[[Tree, Tree], jax.Array]] = {
    "token mean": lambda p, b: token_losses(p, b).mean(),
    "mean of sequence means": lambda p, b: token_losses(p, b).mean(-1).mean(),
    "masked token mean": lambda p, b: (token_losses(p, b) * b["words"]).sum() / b["words"].sum(),
    "mean of masked sequence means": lambda p, b: (
        (token_losses(p, b) * b["words"]).sum(-1) / jnp.maximum(b["words"].sum(-1), 1)
    ).mean(),
}

LOSS_CASES = {name: Case(sgd(loss)) for name, loss in LOSSES.items()} | {
    name: Case(sgd(loss), language_params) for name, loss in TOKEN_LOSSES.items()
}


@pytest.mark.parametrize("count", COUNTS)
@cases(LOSS_CASES)
def test_losses(case, count):
    assert_equals_full_batch(case, count)


# Samples in another order than they came.


def typed_key() -> Tree:
    return {"key": jax.random.key(3), "step": jnp.int32(5)}


def reversed_inputs_loss(params: Tree, batch: Tree) -> jax.Array:
    return squares(params, {**batch, "x": batch["x"][::-1], "y": batch["y"][::-1]}).mean()


def shuffled_inputs_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    return squares(params, {**batch, "x": batch["x"][order], "y": batch["y"][order]}).mean()


def halves_loss(params: Tree, batch: Tree) -> jax.Array:
    """The first half is trained in another way than the second."""
    half = batch["x"].shape[0] // 2
    supervised = ((mlp(params, batch["x"][:half]) - batch["y"][:half]) ** 2).mean()
    return supervised + 0.1 * (mlp(params, batch["x"][half:]) ** 2).mean()


def mixup_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample is mixed with its neighbour, as labels are."""
    x, y = (0.7 * a + 0.3 * jnp.roll(a, 1, axis=0) for a in (batch["x"], batch["y"]))
    return squares(params, {**batch, "x": x, "y": y}).mean()


def cutmix_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Some features of each sample, drawn with the order, are those of another one; the loss is of both labels."""
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    kept = jax.random.bernoulli(state["key"], 0.6, batch["x"].shape[1:])
    mixed = {**batch, "x": jnp.where(kept, batch["x"], batch["x"][order])}
    other = {**mixed, "label": batch["label"][order], "y": batch["y"][order]}
    share = kept.mean()
    return (share * cross_entropies(params, mixed) + (1 - share) * cross_entropies(params, other)).mean()


def sorted_loss(params: Tree, batch: Tree) -> jax.Array:
    """Samples in the order of their labels, every second one weighed more."""
    order = jnp.argsort(batch["label"])
    weights = jnp.where(jnp.arange(batch["x"].shape[0]) % 2 == 0, 2.0, 1.0)
    return (weights * squares(params, {**batch, "x": batch["x"][order], "y": batch["y"][order]})).mean()


def two_views_loss(params: Tree, batch: Tree) -> jax.Array:
    """Twice the samples: as they are, and backwards."""
    twice = {name: jnp.concatenate([batch[name], batch[name][::-1]]) for name in ("x", "y")}
    return squares(params, {**batch, **twice}).mean()


REARRANGED = {
    "reversed": Case(sgd(reversed_inputs_loss)),
    "shuffled": Case(sgd_of_state(shuffled_inputs_loss), extra=typed_key),
    "sorted": Case(sgd(sorted_loss)),
    "halves": Case(sgd(halves_loss)),
    "two views": Case(sgd(two_views_loss)),
    "mixup": Case(sgd(mixup_loss)),
    "cutmix": Case(sgd_of_state(cutmix_loss), extra=typed_key),
}


@pytest.mark.parametrize("count", COUNTS)
@cases(REARRANGED)
def test_samples_in_another_order(case, count):
    """They are put in that order before the loop, as a whole; each microbatch has its part of it."""
    assert_equals_full_batch(case, count)


def critic_in_turns(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Every second step trains: the gradient, its clipping and the update are in one branch."""

    def train(params: Tree) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(lambda p: squares(p, batch).mean())(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return descend(params, jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)), value

    params, value = lax.cond(state["step"] % 2 == 0, train, lambda p: (p, jnp.zeros(())), state["params"])
    return {**state, "step": state["step"] + 1, "params": params}, {"loss": value}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("step", (0, 1))
def test_update_in_a_branch(step, count):
    """The branch is split behind its backward pass: gradients are added up in the loop, and used once."""
    case = Case(critic_in_turns, extra=lambda: {"step": jnp.int32(step)})
    program, batch = traced(case)
    with pytest.raises(MicrobatchError, match="cond"):
        split_microbatches(program.jaxpr, count, batch)
    program = dataclasses.replace(program, jaxpr=behind_gradients(program.jaxpr))
    check_program(program.jaxpr)
    split = split_microbatches(program.jaxpr, count, batch)
    assert_is_worked_through(split)
    assert primitives_in(split.loop.eqns)["cond"] == 1 == primitives_in(split.after)["cond"]
    assert_same(run_split(case, program, split), full_batch(case))


# Steps and models.


def scaled_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """A dynamic loss scale: gradients that are not finite are skipped, and the scale is halved."""
    scale = state["scale"]
    grads = jax.grad(lambda p: squares(p, batch).sum() * scale)(state["params"])
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    new = descend(state["params"], grads)
    params = jax.tree.map(lambda n, p: jnp.where(finite, n, p), new, state["params"])
    return {**state, "params": params, "scale": jnp.where(finite, scale, scale / 2)}, {"finite": finite}


def skipping_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The same by `lax.cond`."""
    scale = state["scale"]
    grads = jax.grad(lambda p: squares(p, batch).mean() * scale)(state["params"])
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.isfinite(optax.tree.norm(grads))
    params = lax.cond(finite, lambda: descend(state["params"], grads), lambda: state["params"])
    return {**state, "params": params, "scale": jnp.where(finite, scale, scale / 2)}, {"finite": finite}


def clipped_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Gradients scaled to a global norm of at most 1/2."""
    grads = jax.grad(lambda p: squares(p, batch).mean())(state["params"])
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / norm), grads)
    return {**state, "params": descend(state["params"], grads)}, {"norm": norm}


def private_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """DP-SGD: the gradient of each sample is clipped, then they are averaged, and noise is added."""

    def sample_gradient(x: jax.Array, y: jax.Array) -> Tree:
        grads = jax.grad(lambda p: ((mlp(p, x) - y) ** 2).sum())(state["params"])
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)

    each = jax.vmap(sample_gradient)(batch["x"], batch["y"])
    key, noise = jax.random.split(state["key"])
    grads = jax.tree.map(lambda g: g.mean(0) + 0.01 * jax.random.normal(noise, g.shape[1:]), each)
    return {**state, "key": key, "params": descend(state["params"], grads)}, {}


def tied_params() -> Tree:
    return {"embed": _normal(12, WORDS, WIDTH), "w": 0.3 * _normal(13, WIDTH, WIDTH)}


def tied_loss(params: Tree, batch: Tree) -> jax.Array:
    h = jnp.tanh(params["embed"][batch["tokens"]] @ params["w"])
    logits = h @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@functools.cache
def layered_params() -> Tree:
    return {
        "layers": {"w": 0.3 * _normal(15, LAYERS, WIDTH, WIDTH), "b": 0.1 * _normal(16, LAYERS, WIDTH)},
        "out": _normal(17, WIDTH, CLASSES),
    }


def _layer(x: jax.Array, layer: Tree) -> jax.Array:
    return x + jnp.tanh(x @ layer["w"] + layer["b"])


def scanned_loss(params: Tree, batch: Tree) -> jax.Array:
    x, _ = lax.scan(lambda x, layer: (_layer(x, layer), None), batch["x"], params["layers"])
    return ((x @ params["out"] - batch["y"]) ** 2).mean()


def scanned_with_outputs_loss(params: Tree, batch: Tree) -> jax.Array:
    """Every layer also gives an auxiliary loss, which sums over the batch inside of the scan."""

    def body(x: jax.Array, layer: Tree) -> tuple[jax.Array, jax.Array]:
        x = _layer(x, layer)
        return x, (x**2).mean()

    x, auxiliary = lax.scan(body, batch["x"], params["layers"])
    return ((x @ params["out"] - batch["y"]) ** 2).mean() + 0.1 * auxiliary.sum()


def scanned_with_sum_loss(params: Tree, batch: Tree) -> jax.Array:
    """The same with the auxiliary loss as a carry."""

    def body(carry: tuple[jax.Array, jax.Array], layer: Tree) -> tuple[Any, None]:
        x, total = carry
        x = _layer(x, layer)
        return (x, total + (x**2).mean()), None

    (x, total), _ = lax.scan(body, (batch["x"], jnp.float32(0)), params["layers"])
    return ((x @ params["out"] - batch["y"]) ** 2).mean() + 0.1 * total


def checkpointed_loss(params: Tree, batch: Tree) -> jax.Array:
    x = batch["x"]
    for k in range(LAYERS):
        x = jax.checkpoint(_layer)(x, jax.tree.map(lambda p, k=k: p[k], params["layers"]))
    return ((x @ params["out"] - batch["y"]) ** 2).mean()


def checkpointed_scan_loss(params: Tree, batch: Tree) -> jax.Array:
    body = jax.checkpoint(lambda x, layer: (_layer(x, layer), None), prevent_cse=False)
    x, _ = lax.scan(body, batch["x"], params["layers"])
    return ((x @ params["out"] - batch["y"]) ** 2).mean()


def checkpointed_by_name_loss(params: Tree, batch: Tree) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def model(params: Tree, x: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.tanh(x @ params["w1"]), "hidden") @ params["w2"]

    return ((jax.checkpoint(model, policy=policy)(params, batch["x"]) - batch["y"]) ** 2).mean()


@jax.custom_vjp
def clipped_backward(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


clipped_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(jnp.cos(x) * g, -0.01, 0.01),))


def custom_vjp_loss(params: Tree, batch: Tree) -> jax.Array:
    return ((clipped_backward(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]) ** 2).mean()


def absolutes(params: Tree, batch: Tree) -> jax.Array:
    return jnp.abs(mlp(params, batch["x"]) - batch["y"]).sum(-1)


def cond_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """The first steps train on another loss."""
    return lax.cond(state["step"] < 2, squares, absolutes, params, batch).mean()


def cond_mean_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """The sum over the batch is in the branches."""
    return lax.cond(state["step"] < 2, lambda p: squares(p, batch).mean(), lambda p: absolutes(p, batch).mean(), params)


def cond_labels_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    return lax.cond(state["step"] < 2, squares, cross_entropies, params, batch).mean()


def switch_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    x = lax.switch(state["step"] % 3, [jnp.tanh, jnp.sin, lambda x: x], batch["x"] @ params["w1"])
    return ((x @ params["w2"] - batch["y"]) ** 2).mean()


def warm_up_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """A weight that depends on the step, in the loss."""
    return squares(params, batch).mean() * jnp.minimum(1.0, state["step"] / 10)


def dropout_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    h = jnp.tanh(batch["x"] @ params["w1"])
    keep = jax.random.bernoulli(jax.random.fold_in(state["key"], state["step"]), 0.8, h.shape)
    return ((jnp.where(keep, h / 0.8, 0.0) @ params["w2"] - batch["y"]) ** 2).mean()


def noisy_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Diffusion: a random time for each sample, noise of the sample's shape."""
    times, noise = jax.random.split(jax.random.fold_in(state["key"], state["step"]))
    t = jax.random.uniform(times, (batch["x"].shape[0], 1))
    eps = jax.random.normal(noise, batch["x"].shape)
    x = jnp.sqrt(1 - t) * batch["x"] + jnp.sqrt(t) * eps
    return ((mlp(params, x) - eps[:, :CLASSES]) ** 2).mean()


def scanned_dropout_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    def body(x: jax.Array, layer_and_key: tuple[Tree, jax.Array]) -> tuple[jax.Array, None]:
        layer, key = layer_and_key
        return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), _layer(x, layer), x), None

    keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), LAYERS)
    x, _ = lax.scan(body, batch["x"], (params["layers"], keys))
    return ((x @ params["out"] - batch["y"]) ** 2).mean()


def carried_dropout_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """The key is a carry of the scan over layers."""

    def body(carry: tuple[jax.Array, jax.Array], layer: Tree) -> tuple[Any, None]:
        x, key = carry
        key, here = jax.random.split(key)
        return (jnp.where(jax.random.bernoulli(here, 0.8, x.shape), _layer(x, layer), x), key), None

    (x, _), _ = lax.scan(body, (batch["x"], state["key"]), params["layers"])
    return ((x @ params["out"] - batch["y"]) ** 2).mean()


def fori_loss(params: Tree, batch: Tree) -> jax.Array:
    x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["w1"] + batch["x"]), batch["x"])
    return ((x @ params["w2"] - batch["y"]) ** 2).mean()


def while_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """The number of rounds is in the state; no gradient passes a loop like that."""
    x = lax.fori_loop(0, state["step"], lambda _, x: jnp.tanh(x @ params["w1"]), batch["x"])
    return squares(params, {**batch, "x": lax.stop_gradient(x)}).mean()


def while_each_loss(params: Tree, batch: Tree) -> jax.Array:
    """Newton's method, which for each sample ends when that is exact enough."""

    def root(a: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: jnp.abs(x * x - a) > 1e-5, lambda x: 0.5 * (x + a / x), a)

    roots = jax.vmap(jax.vmap(root))(1.0 + 9 * jnp.abs(batch["y"]))
    return ((mlp(params, batch["x"]) - roots) ** 2).mean()


def gamma_noise_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Random numbers that are drawn until one is accepted."""
    noise = jax.random.gamma(state["key"], 0.4, batch["x"].shape)
    return squares(params, {**batch, "x": batch["x"] * noise}).mean()


def attention_loss(params: Tree, batch: Tree) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    scores = jnp.einsum("bqd,bkd->bqk", x @ params["w"], x) / WIDTH**0.5
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    p = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    logits = jnp.einsum("bqk,bkd->bqd", p, x) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def flattened_tokens_loss(params: Tree, batch: Tree) -> jax.Array:
    """Batch and sequence in one dim, as many language models have it."""
    tokens, targets = batch["tokens"].reshape(-1), batch["targets"].reshape(-1)
    logits = jnp.tanh(params["embed"][tokens] @ params["w"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def layer_norm_loss(params: Tree, batch: Tree) -> jax.Array:
    x = batch["x"] @ params["w1"]
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * params["bias"]
    return ((x @ params["w2"] - batch["y"]) ** 2).mean()


def standardized_params() -> Tree:
    return {**mlp_params(), "w0": _normal(20, CLASSES, WIDTH)}


def standardized_loss(params: Tree, batch: Tree) -> jax.Array:
    """Statistics of the whole batch, but cheap ones of its inputs: they are there before the first microbatch."""
    x = (batch["y"] - batch["y"].mean(0)) / (batch["y"].std(0) + 1e-3)
    return squares(params, {**batch, "x": x @ params["w0"]}).mean()


def balanced_classes_loss(params: Tree, batch: Tree) -> jax.Array:
    """The mean over classes of the mean over the samples of a class."""
    sums = jax.ops.segment_sum(squares(params, batch), batch["label"], CLASSES)
    counts = jax.ops.segment_sum(jnp.ones(batch["label"].shape[0]), batch["label"], CLASSES)
    return (sums / jnp.maximum(counts, 1)).mean()


def recurrent_loss(params: Tree, batch: Tree) -> jax.Array:
    """A scan over time; padding keeps the hidden state."""

    def cell(h: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, is_word = now
        h = jnp.where(is_word[:, None] > 0, jnp.tanh(x @ params["w"] + h), h)
        return h, h

    x = jnp.moveaxis(params["embed"][batch["tokens"]], 1, 0)
    _, hidden = lax.scan(cell, jnp.zeros((batch["tokens"].shape[0], WIDTH)), (x, batch["words"].T))
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], batch["targets"].T).mean()


def chunked_loss(params: Tree, batch: Tree) -> jax.Array:
    """Cross entropy position by position, so that the logits of all are never there at once."""
    h = jnp.tanh(params["embed"][batch["tokens"]] @ params["w"])

    @jax.checkpoint
    def body(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        h, targets = chunk
        return total + optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], targets).sum(), None

    total, _ = lax.scan(body, jnp.float32(0), (jnp.moveaxis(h, 1, 0), batch["targets"].T))
    return total / batch["targets"].size


def convolution_loss(params: Tree, batch: Tree) -> jax.Array:
    images = batch["x"].reshape(-1, 4, 4, 1)
    kernel = params["w1"].reshape(4, 4, 1, WIDTH)[:3, :3]
    dims = ("NHWC", "HWIO", "NHWC")
    h = jax.nn.relu(lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dims))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").mean((1, 2))
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def pairs_loss(params: Tree, batch: Tree) -> jax.Array:
    """Preferences: neighbours in the batch are a pair."""
    scores = mlp(params, batch["x"].reshape(-1, 2, WIDTH))[..., 0]
    return -jax.nn.log_sigmoid(scores[:, 0] - scores[:, 1]).mean()


def mapped_loss(params: Tree, batch: Tree) -> jax.Array:
    """One sample after the other."""
    return lax.map(lambda sample: ((mlp(params, sample[0]) - sample[1]) ** 2).sum(), (batch["x"], batch["y"])).mean()


def mapped_in_groups_loss(params: Tree, batch: Tree) -> jax.Array:
    """Groups of two samples, one after the other; the noise of each has its key."""
    keys = jax.random.split(jax.random.key(2), BATCH)

    def loss_of(sample: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, y, key = sample
        return ((mlp(params, x + jax.random.normal(key, x.shape)) - y) ** 2).sum()

    return lax.map(loss_of, (batch["x"], batch["y"], keys), batch_size=2).mean()


def scanned_samples_loss(params: Tree, batch: Tree) -> jax.Array:
    """A sum of losses over samples, which is not zero before the first."""

    def body(total: jax.Array, sample: Tree) -> tuple[jax.Array, jax.Array]:
        error = ((mlp(params, sample["x"]) - sample["y"]) ** 2).sum()
        return total + error, error

    total, errors = lax.scan(body, (params["bias"] ** 2).sum(), batch)
    return total / BATCH + 0.1 * jnp.tanh(errors).mean()


def sample_chunks_loss(params: Tree, batch: Tree) -> jax.Array:
    """A loss over chunks of samples, each worked out again in the backward pass; the sum begins as a Python number."""
    chunks = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), {"x": batch["x"], "y": batch["y"]})

    @jax.checkpoint
    def body(total: jax.Array, chunk: Tree) -> tuple[jax.Array, None]:
        return total + squares(params, chunk).sum(), None

    return lax.scan(body, 0.0, chunks)[0] / BATCH


def accumulating_step(
    state: Tree, batch: Tree, groups: int = 4, reverse: bool = False, start: Any = 0.0
) -> tuple[Tree, Tree]:
    """The user accumulates gradients himself, over groups of samples with statistics of their own."""

    def body(sums: Tree, group: Tree) -> tuple[Tree, jax.Array]:
        value, grads = jax.value_and_grad(batch_norm_loss)(state["params"], group)
        return jax.tree.map(jnp.add, sums, (value, grads)), value

    grouped = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), batch)
    zeros = (start, jax.tree.map(jnp.zeros_like, state["params"]))
    (value, grads), values = lax.scan(body, zeros, grouped, reverse=reverse)
    grads = jax.tree.map(lambda g: g / groups, grads)
    return {**state, "params": descend(state["params"], grads)}, {"loss": value / groups, "losses": values}


def gated_loss(params: Tree, batch: Tree) -> jax.Array:
    """Mixture of experts: the gates of the two best of four are written by index into zeros."""
    x = batch["x"]
    gates, experts = lax.top_k(jax.nn.softmax(x @ params["w2"]), 2)
    gates = jnp.zeros((x.shape[0], CLASSES)).at[jnp.arange(x.shape[0])[:, None], experts].set(gates)
    outputs = jnp.stack([jnp.tanh(x @ params["w1"] * k) for k in range(CLASSES)], 1)
    return ((jnp.einsum("be,bed->bd", gates, outputs) @ params["w2"] - batch["y"]) ** 2).mean()


def mixup_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Each sample is mixed with another of the whole batch."""
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    x, y = (0.7 * batch[name] + 0.3 * batch[name][order] for name in ("x", "y"))
    return squares(params, {**batch, "x": x, "y": y}).mean()


def low_rank_params() -> Tree:
    return {**mlp_params(), "a": 0.3 * _normal(18, WIDTH, 2), "b": 0.3 * _normal(19, 2, WIDTH)}


def adam_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    value, grads = jax.value_and_grad(lambda p: (squares(p, batch) * batch["mask"]).sum() / batch["mask"].sum())(
        state["params"]
    )
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, {"loss": value}


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def half_params() -> Tree:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), mlp_params())


def half_loss(params: Tree, batch: Tree) -> jax.Array:
    return squares(params, jax.tree.map(lambda x: x.astype(params["w1"].dtype), batch)).astype(jnp.float32).mean()


def mixed_loss(params: Tree, batch: Tree) -> jax.Array:
    """Parameters in float32, products in bfloat16."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch["x"]))
    return ((mlp(*half).astype(jnp.float32) - batch["y"]) ** 2).mean()


def scale(value: float) -> Callable[[], Tree]:
    return lambda: {"scale": jnp.float32(value)}


def step_number(number: int) -> Callable[[], Tree]:
    return lambda: {"step": jnp.int32(number)}


def old_key() -> Tree:
    return {"key": jax.random.PRNGKey(3), "step": jnp.int32(5)}


def hardware_key() -> Tree:
    return {"key": jax.random.key(3, impl="rbg"), "step": jnp.int32(5)}


MODELS = {
    "loss scale": Case(scaled_step, extra=scale(1024.0)),
    "loss scale that overflows": Case(scaled_step, extra=scale(3e38)),
    "loss scale by cond": Case(skipping_step, extra=scale(1024.0)),
    "clipped to a global norm": Case(clipped_step),
    "adam": Case(adam_step, extra=lambda: {"optimizer": OPTIMIZER.init(mlp_params())}, tolerance=1e-4),
    "DP-SGD": Case(private_step, extra=lambda: {"key": jax.random.key(1)}),
    "tied embedding": Case(sgd(tied_loss), tied_params),
    "attention": Case(sgd(attention_loss), language_params),
    "scan over layers": Case(sgd(scanned_loss), layered_params),
    "scan with auxiliary outputs": Case(sgd(scanned_with_outputs_loss), layered_params),
    "scan with an auxiliary carry": Case(sgd(scanned_with_sum_loss), layered_params),
    "checkpoint": Case(sgd(checkpointed_loss), layered_params),
    "checkpoint in scan": Case(sgd(checkpointed_scan_loss), layered_params),
    "custom_vjp": Case(sgd(custom_vjp_loss)),
    "cond": Case(sgd_of_state(cond_loss), extra=step_number(1)),
    "cond with sums": Case(sgd_of_state(cond_mean_loss), extra=step_number(1)),
    "cond with integer labels": Case(sgd_of_state(cond_labels_loss), extra=step_number(2)),
    "dropout": Case(sgd_of_state(dropout_loss), extra=typed_key),
    "dropout, old key": Case(sgd_of_state(dropout_loss), extra=old_key),
    "dropout in scan": Case(sgd_of_state(scanned_dropout_loss), layered_params, typed_key),
    "dropout in scan, old key": Case(sgd_of_state(scanned_dropout_loss), layered_params, old_key),
    "dropout in scan, carried key": Case(sgd_of_state(carried_dropout_loss), layered_params, typed_key),
    "fori_loop": Case(sgd(fori_loss)),
    "bfloat16": Case(sgd(half_loss), half_params, tolerance=2e-2),
}
MORE_MODELS = {
    "flattened tokens": Case(sgd(flattened_tokens_loss), language_params),
    "layer norm": Case(sgd(layer_norm_loss)),
    "checkpoint by name": Case(sgd(checkpointed_by_name_loss)),
    "cond, other branch": Case(sgd_of_state(cond_loss), extra=step_number(2)),
    "switch": Case(sgd_of_state(switch_loss), extra=step_number(4)),
    "weight of the step": Case(sgd_of_state(warm_up_loss), extra=step_number(3)),
    "dropout, rbg key": Case(sgd_of_state(dropout_loss), extra=hardware_key),
    "diffusion": Case(sgd_of_state(noisy_loss), extra=typed_key),
    "mixup": Case(sgd_of_state(mixup_loss), extra=typed_key),
    "standardized inputs": Case(sgd(standardized_loss), standardized_params),
    "balanced classes": Case(sgd(balanced_classes_loss)),
    "scan over time": Case(sgd(recurrent_loss), language_params),
    "cross entropy in chunks": Case(sgd(chunked_loss), language_params),
    "convolution": Case(sgd(convolution_loss)),
    "pairs": Case(sgd(pairs_loss)),
    "lax.map over samples": Case(sgd(mapped_loss)),
    "lax.map over groups of samples": Case(sgd(mapped_in_groups_loss)),
    "scan over samples": Case(sgd(scanned_samples_loss)),
    "checkpointed lax.map": Case(sgd(jax.checkpoint(mapped_loss))),
    "gradients accumulated by the user": Case(accumulating_step),
    "gradients accumulated from an array": Case(functools.partial(accumulating_step, start=jnp.zeros(()))),
    "a loss over chunks of samples": Case(sgd(sample_chunks_loss)),
    "gradients accumulated backwards": Case(functools.partial(accumulating_step, reverse=True)),
    "gates by index": Case(sgd(gated_loss)),
    "while": Case(sgd_of_state(while_loss), extra=step_number(2)),
    "while of each sample": Case(sgd(while_each_loss)),
    "random numbers until one is accepted": Case(sgd_of_state(gamma_noise_loss), extra=typed_key),
    "mixed precision": Case(sgd(mixed_loss), tolerance=2e-2),
}


@pytest.mark.parametrize("count", COUNTS)
@cases(MODELS)
def test_models(case, count):
    assert_equals_full_batch(case, count)


@cases(MORE_MODELS)
def test_more_models(case):
    assert_equals_full_batch(case, 4)


def test_products_of_weights_are_done_once():
    """LoRA: the gradient of `a @ b` is a sum over the batch; those of a and b are made of it after the loop."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return squares({**params, "w1": params["w1"] + params["a"] @ params["b"]}, batch).mean()

    case = Case(sgd(loss), low_rank_params)
    program, split = split_case(case, 4)
    assert_same(run_split(case, program, split), full_batch(case))
    assert primitives_in(split.before)["dot_general"] == 1
    assert all(r.var.aval.shape != (BATCH, WIDTH) for r in split.results)


# 2. Samples behind samples.


def two_views_loss(params: Tree, batch: Tree) -> jax.Array:
    first, second = jnp.split(mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]])), 2)
    return ((first - second) ** 2).mean()


def three_blocks_loss(params: Tree, batch: Tree) -> jax.Array:
    """Some blocks are sliced off, one is found by its number, and all are reduced together."""
    z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"], -batch["x"]]))
    middle = z.reshape(3, -1, CLASSES)[1]
    return (z[:BATCH] ** 2).mean() + (z[BATCH:] ** 3).sum() / BATCH + (middle * batch["y"]).mean() + z.max(-1).mean()


def preference_loss(params: Tree, batch: Tree) -> jax.Array:
    """DPO: chosen and rejected sentences in one call, with one mask for both."""
    tokens = jnp.concatenate([batch["tokens"], batch["targets"]])
    logits = jnp.tanh(params["embed"][tokens] @ params["w"]) @ params["out"]
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
    chosen, rejected = jnp.split((scores * jnp.tile(batch["words"], (2, 1))).sum(-1), 2)
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


def teacher_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Two views; each is compared with what the moving average of the student makes of the other."""
    first, second = batch["x"], batch["x"][:, ::-1]

    def loss(params: Tree) -> jax.Array:
        targets = jax.nn.softmax(mlp(state["teacher"], jnp.concatenate([first, second])))
        return -(targets * jax.nn.log_softmax(mlp(params, jnp.concatenate([second, first])))).sum(-1).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = descend(state["params"], grads)
    return {"params": params, "teacher": optax.incremental_update(params, state["teacher"], 0.1)}, {"loss": value}


def two_dropouts_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    x = jnp.concatenate([batch["x"], batch["x"]])
    kept = jnp.where(jax.random.bernoulli(state["key"], 0.7, x.shape), x, 0)
    first, second = jnp.split(mlp(params, kept), 2)
    return ((first - second) ** 2).mean()


def two_dropouts_each_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """A key for each row."""
    x = jnp.concatenate([batch["x"], batch["x"]])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(jax.random.split(state["key"], len(x)))
    return (mlp(params, jnp.where(keep, x, 0)) ** 2).mean()


def blocks_by_layers_loss(params: Tree, batch: Tree) -> jax.Array:
    z = scanned_loss(
        params, {**batch, "x": jnp.concatenate([batch["x"], 2 * batch["x"]]), "y": jnp.tile(batch["y"], (2, 1))}
    )
    return z.mean()


def blocks_by_rows_loss(params: Tree, batch: Tree) -> jax.Array:
    """Trip by trip, over all blocks."""
    x = jnp.concatenate([batch["x"], 2 * batch["x"]])
    return lax.map(lambda row: (mlp(params, row) ** 2).sum(), x).mean()


def time_first_loss(params: Tree, batch: Tree) -> jax.Array:
    """A sequence of batches in one dim: as many blocks as there are places."""
    h = params["embed"][batch["tokens"].T.reshape(-1)]
    logits = jnp.tanh(h @ params["w"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"].T.reshape(-1)).mean()


def blocks_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """What is made of all rows is returned in their order."""

    def loss(params: Tree) -> tuple[jax.Array, jax.Array]:
        z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]]))
        return (z**2).mean(), z

    (value, z), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    metrics = {"loss": value, "rows": z, "classes": z.argmax(-1), "turned": z.T}
    return {"params": descend(state["params"], grads)}, metrics


BLOCKS = {
    "two views": Case(sgd(two_views_loss)),
    "three blocks": Case(sgd(three_blocks_loss)),
    "preferences": Case(sgd(preference_loss), language_params),
    "teacher": Case(teacher_step, extra=lambda: {"teacher": jax.tree.map(lambda p: 0.9 * p, mlp_params())}),
    "dropout": Case(sgd_of_state(two_dropouts_loss), extra=typed_key),
    "dropout, old key": Case(sgd_of_state(two_dropouts_loss), extra=old_key),
    "dropout, a key for each row": Case(sgd_of_state(two_dropouts_each_loss), extra=typed_key),
    "scan over layers": Case(sgd(blocks_by_layers_loss), layered_params),
    "lax.map over rows": Case(sgd(blocks_by_rows_loss)),
    "time first": Case(sgd(time_first_loss), language_params),
    "rows returned": Case(blocks_step),
}


@pytest.mark.parametrize("count", COUNTS)
@cases(BLOCKS)
def test_samples_behind_samples(case, count):
    assert_equals_full_batch(case, count)


def test_rows_are_cut_in_blocks():
    """A microbatch has its rows of each block, and the rest of the program knows which they are."""
    _, split = split_case(Case(blocks_step), 4)
    shares = {
        str(result.var.aval.shape): result.placement for result in split.results if isinstance(result.placement, Split)
    }
    assert shares[str((2 * BATCH, CLASSES))] == Split(0, blocks=2)


# 3. Metrics.


def metrics_step(metrics: dict[str, Callable[..., Any]]) -> Step:
    """Trains on the mean cross entropy; each `metric(losses, logits, batch, grads, state)` is reported."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        def loss(params: Tree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            logits = mlp(params, batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (losses, logits)

        grads, (losses, logits) = jax.grad(loss, has_aux=True)(state["params"])
        values = dict(losses=losses, logits=logits, batch=batch, grads=grads, state=state)
        reported = {name: metric(**values) for name, metric in metrics.items()}
        return {**state, "step": state["step"] + 1, "params": descend(state["params"], grads)}, reported

    return step


def _correct(logits: jax.Array, batch: Tree) -> jax.Array:
    return logits.argmax(-1) == batch["label"]


METRICS: dict[str, dict[str, Callable[..., Any]]] = {
    "sums": {
        "sum": lambda losses, **_: losses.sum(),
        "mean": lambda losses, **_: losses.mean(),
        "masked mean": lambda losses, batch, **_: (losses * batch["mask"]).sum() / batch["mask"].sum(),
        "correct": lambda logits, batch, **_: _correct(logits, batch).sum(dtype=jnp.int32),
        "accuracy": lambda logits, batch, **_: _correct(logits, batch).mean(),
        "correct of each class": lambda logits, batch, **_: (
            jnp.zeros(CLASSES, jnp.int32).at[batch["label"]].add(_correct(logits, batch).astype(jnp.int32))
        ),
        "confusion": lambda logits, batch, **_: jnp.einsum(
            "bi,bj->ij", jax.nn.one_hot(batch["label"], CLASSES), jax.nn.one_hot(logits.argmax(-1), CLASSES)
        ),
    },
    "extremes": {
        "max": lambda losses, **_: losses.max(),
        "min": lambda losses, **_: losses.min(),
        "max over samples and classes": lambda logits, **_: jnp.abs(logits).max(),
        "min of integers": lambda logits, **_: logits.argmax(-1).min(),
        "range": lambda losses, **_: losses.max() - losses.min(),
        "any": lambda logits, batch, **_: _correct(logits, batch).any(),
        "none": lambda losses, **_: (losses < 0).any(),
        "all": lambda logits, **_: jnp.isfinite(logits).all(),
        "not all": lambda losses, **_: (losses > 1.0).all(),
    },
    "samples": {
        "losses in order": lambda losses, **_: losses,
        "logits in order": lambda logits, **_: logits,
        "transposed logits": lambda logits, **_: logits.T,
        "predictions": lambda logits, **_: logits.argmax(-1),
        "losses from last to first": lambda losses, **_: losses[::-1],
        "first sample": lambda logits, **_: logits[0],
        "top losses": lambda losses, **_: lax.top_k(losses, 3),
        "median": lambda losses, **_: jnp.median(losses),
        "worst sample": lambda losses, **_: losses.argmax(),
        "running sum": lambda losses, **_: jnp.cumsum(losses),
    },
    "functions of sums": {
        "gradient norm": lambda grads, **_: jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))),
        "norms of gradients": lambda grads, **_: jax.tree.map(jnp.linalg.norm, grads),
        "norm of logits": lambda logits, **_: jnp.sqrt((logits**2).sum()),
        "deviation": lambda losses, **_: losses.std(),
        "perplexity": lambda losses, **_: jnp.exp(losses.mean()),
        "log of sum of exp": lambda losses, **_: jax.nn.logsumexp(losses),
    },
    "others": {
        "value of the state": lambda state, **_: (state["step"], state["params"]["bias"]),
        "value of the batch": lambda batch, **_: (batch["label"], batch["mask"].sum()),
        "constants": lambda **_: (1.0, jnp.arange(3), jnp.ones((BATCH, 2))),
        "learning rate": lambda state, **_: 0.1 * jnp.minimum(1.0, state["step"] / 10),
        "moving average": lambda losses, state, **_: 0.9 * state["step"] + 0.1 * losses.mean(),
    },
}

METRIC_CASES = {kind: Case(metrics_step(metrics), extra=step_number(3)) for kind, metrics in METRICS.items()}


@pytest.mark.parametrize("count", COUNTS)
@cases(METRIC_CASES)
def test_metrics(case, count):
    assert_equals_full_batch(case, count)


# 4. What is refused.


def batch_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3)


def batch_norm_loss(params: Tree, batch: Tree) -> jax.Array:
    h = jnp.tanh(batch_norm(batch["x"] @ params["w1"]) + params["bias"])
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def root_loss(params: Tree, batch: Tree) -> jax.Array:
    return jnp.sqrt(jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2))


def contrastive_loss(params: Tree, batch: Tree) -> jax.Array:
    z = mlp(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(z.shape[0])).mean()


def softmax_over_batch_loss(params: Tree, batch: Tree) -> jax.Array:
    return (jax.nn.softmax(mlp(params, batch["x"]), axis=0) * batch["y"]).sum()


def reversed_loss(params: Tree, batch: Tree) -> jax.Array:
    return ((mlp(params, batch["x"])[::-1] - batch["y"]) ** 2).mean()


def shuffled_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    h = jnp.tanh(batch["x"] @ params["w1"])[order]
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def while_any_loss(params: Tree, batch: Tree) -> jax.Array:
    """All samples are halved until the largest is small."""
    x = lax.while_loop(lambda x: (jnp.abs(x) > 1.0).any(), lambda x: 0.5 * x, mlp(params, batch["x"]))
    return squares(params, {**batch, "y": lax.stop_gradient(x)}).mean()


def running_loss(params: Tree, batch: Tree) -> jax.Array:
    """Each sample meets what the samples before have left."""
    body = lambda h, x: (jnp.tanh(x @ params["w1"] + h),) * 2  # noqa: E731
    _, h = lax.scan(body, params["bias"], batch["x"])
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def uneven_loss(params: Tree, batch: Tree) -> jax.Array:
    """One row more than there are samples."""
    return (mlp(params, jnp.concatenate([batch["x"], params["w1"][:1]])) ** 2).mean()


def across_blocks_loss(params: Tree, batch: Tree) -> jax.Array:
    """What is taken from the middle of two blocks is of no microbatch."""
    z = mlp(params, jnp.concatenate([batch["x"], 2 * batch["x"]]))
    return (z[BATCH // 2 : -BATCH // 2] ** 2).mean()


def hardest_loss(params: Tree, batch: Tree) -> jax.Array:
    return lax.top_k(squares(params, batch), BATCH // 2)[0].mean()


REFUSED = {
    "BatchNorm": (sgd(batch_norm_loss), "sub", "batch_norm"),
    "root of the mean": (sgd(root_loss), "sqrt", "root_loss"),
    "contrastive": (sgd(contrastive_loss), "dot_general", "contrastive_loss"),
    "softmax over the batch": (sgd(softmax_over_batch_loss), "max", "softmax_over_batch_loss"),
    "reversed": (sgd(reversed_loss), "rev", "reversed_loss"),
    "shuffled": (sgd_of_state(shuffled_loss), "sub", "shuffled_loss"),
    "scan that remembers samples": (sgd(running_loss), "scan", "running_loss"),
    "uneven blocks": (sgd(uneven_loss), "concatenate", "uneven_loss"),
    "slice across blocks": (sgd(across_blocks_loss), "slice", "across_blocks_loss"),
    "while any": (sgd(while_any_loss), "while", "while_any_loss"),
    "hardest samples": (sgd(hardest_loss), "top_k", "hardest_loss"),
}


@pytest.mark.parametrize("count", COUNTS)
@cases({name: Case(step, extra=typed_key) for name, (step, _, _) in REFUSED.items()})
def test_refused(case, count, request):
    operation, function = next((o, f) for step, o, f in REFUSED.values() if step is case.step)
    with pytest.raises(MicrobatchError) as info:
        split_case(case, count)
    error = info.value
    assert error.operation == operation
    assert re.fullmatch(rf"{HERE}:\d+ \({function}\)", error.source)
    message = str(error)
    assert f"{count} microbatches" in message and f"`{operation}` at {error.source}" in message
    assert "num_microbatches=1" in message
    # These alone could take their own microbatch's value; of samples taken by index a microbatch has only some.
    of_sums = operation in ("sub", "sqrt", "max", "while") and function != "shuffled_loss"
    assert ('microbatch_semantics="per_microbatch"' in message) == of_sums


def test_why_not():
    """A scan over samples and a row behind samples are no batch statistics."""
    cases = {running_loss: "more than sums", uneven_loss: "no whole number of batches"}
    for loss, words in cases.items():
        with pytest.raises(MicrobatchError, match=words) as info:
            split_case(Case(sgd(loss)), 2)
        assert "statistics" not in str(info.value)


def test_a_single_trip_is_no_loop():
    """Then forward and backward of the user's own accumulation are there to be cut between stages."""
    case = Case(accumulating_step)
    assert not primitives_in(split_case(case, 4)[1].loop.eqns)["scan"]
    (scan,) = (eqn for eqn in split_case(case, 2)[1].loop.eqns if eqn.primitive.name == "scan")
    assert scan.params["length"] == 2


def test_batch_that_does_not_divide():
    case = LOSS_CASES["mean"]
    with pytest.raises(BatchError, match="does not divide") as info:
        split_case(case, 3)
    assert info.value.size == BATCH
    assert re.search("(?s)8 samples, num_microbatches=3.*no multiple of 3.*divides the batch size", str(info.value))


def test_no_batch():
    case = LOSS_CASES["mean"]
    program, _ = traced(case)
    with pytest.raises(BatchError, match="(?s)there is no batch.*num_microbatches=2.*batch_argnums"):
        split_microbatches(program.jaxpr, 2, ())


# 5. Each microbatch with its own statistics.


def batch_norm_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """BatchNorm with running statistics."""

    def loss(params: Tree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x = batch["x"] @ params["w1"]
        mean, variance = x.mean(0), x.var(0)
        h = jnp.tanh((x - mean) * lax.rsqrt(variance + 1e-3) + params["bias"])
        return ((h @ params["w2"] - batch["y"]) ** 2).mean(), (mean, variance)

    (value, (mean, variance)), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    running = {"mean": 0.9 * state["mean"] + 0.1 * mean, "variance": 0.9 * state["variance"] + 0.1 * variance}
    return {**running, "params": descend(state["params"], grads)}, {"loss": value}


def running_statistics() -> Tree:
    return {"mean": jnp.zeros(WIDTH), "variance": jnp.ones(WIDTH)}


def balanced_experts_loss(params: Tree, batch: Tree) -> jax.Array:
    """Mixture of experts: the share of the samples that each expert gets, times its mean gate."""
    gates = jax.nn.softmax(mlp(params, batch["x"]))
    given = jax.nn.one_hot(gates.argmax(-1), CLASSES).mean(0)
    return squares(params, batch).mean() + CLASSES * (given * gates.mean(0)).sum()


def dice_loss(params: Tree, batch: Tree) -> jax.Array:
    p, y = jax.nn.sigmoid(mlp(params, batch["x"])), batch["y"] > 0
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def largest_loss(params: Tree, batch: Tree) -> jax.Array:
    return squares(params, batch).max()


def guarded_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The step counts only if the loss is finite."""
    value, grads = jax.value_and_grad(dice_loss)(state["params"], batch)
    good = jnp.isfinite(value)
    params = jax.tree.map(lambda new, old: jnp.where(good, new, old), descend(state["params"], grads), state["params"])
    return {**state, "params": params}, {"loss": value, "good": good.astype(jnp.float32)}


PER_MICROBATCH = {
    "BatchNorm": Case(sgd(batch_norm_loss)),
    "balanced experts": Case(sgd(balanced_experts_loss)),
    "dice": Case(sgd(dice_loss)),
    "dice, recomputed": Case(sgd(jax.checkpoint(dice_loss))),
    "dice, guarded": Case(guarded_step),
    "largest": Case(sgd(largest_loss)),
    "softmax over the batch": Case(sgd(softmax_over_batch_loss)),
    "while any": Case(sgd(while_any_loss)),
    "BatchNorm with running statistics": Case(batch_norm_step, extra=running_statistics),
    "root of the mean": Case(sgd(root_loss)),
}


@pytest.mark.parametrize("count", COUNTS)
@cases(PER_MICROBATCH)
def test_per_microbatch(case, count):
    """A step that is linear in its gradients and statistics: the mean of the steps of all microbatches."""
    state, batch = case.state(), case.batch()
    program, split = split_case(case, count, per_microbatch=True)
    assert_is_worked_through(split)
    size = BATCH // count
    step = jax.jit(case.step)
    each = [step(state, jax.tree.map(lambda x, k=k: x[k * size : (k + 1) * size], batch)) for k in range(count)]
    reference = jax.tree.map(lambda *leaves: sum(leaves) / count, *each)
    assert_same(run_split(case, program, split), reference)


def picked_scan_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Samples taken by index, inside of a loop."""
    order = jax.random.permutation(state["key"], batch["x"].shape[0])

    def body(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(h[order] @ params["w1"]), None

    h, _ = lax.scan(body, jnp.tanh(batch["x"] @ params["w1"]), None, length=2)
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("loss", [shuffled_loss, picked_scan_loss])
def test_samples_of_other_microbatches_have_no_stand_in(loss):
    with pytest.raises(MicrobatchError) as info:
        split_case(Case(sgd_of_state(loss), extra=typed_key), 2, per_microbatch=True)
    assert "per_microbatch" not in str(info.value)


def test_per_microbatch_is_exact_where_that_is_possible():
    case = LOSS_CASES["masked mean"]
    program, split = split_case(case, 2, per_microbatch=True)
    assert_same(run_split(case, program, split), full_batch(case))


# 6. What stands where.

ADAM = optax.adam(1e-2)


def plain_adam_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    value, grads = jax.value_and_grad(LOSSES["masked mean"])(state["params"], batch)
    updates, optimizer = ADAM.update(grads, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, {"loss": value}


PLAIN = Case(plain_adam_step, extra=lambda: {"optimizer": ADAM.init(mlp_params())})


def test_phases():
    program, split = split_case(PLAIN, 4)
    check_program(split.loop)
    assert not primitives_in(split.loop.eqns)["sqrt"] and not primitives_in(split.before)["sqrt"]
    assert primitives_in(split.after)["sqrt"] == len(mlp_params())
    mask = program.jaxpr.invars[program.in_paths.index("batch/mask")]
    (denominator,) = [eqn for eqn in split.before if eqn.primitive.name == "reduce_sum"]
    assert denominator.invars == [mask]
    assert mask in split.pieces and not primitives_in(split.after)["dot_general"]


def test_what_the_loop_reads_and_makes():
    program, split = split_case(PLAIN, 4)
    assert split.count == 4
    assert len(split.loop.invars) == 1 + len(split.invariants) + len(split.pieces)
    number, *rest = split.loop.invars
    assert (number.aval.shape, number.aval.dtype) == ((), jnp.int32)
    inside = rest[len(split.invariants) :]
    assert [v.aval.shape for v in inside] == [(v.aval.shape[0] // 4, *v.aval.shape[1:]) for v in split.pieces]
    path_of = dict(zip(program.jaxpr.invars, program.in_paths, strict=False))
    assert sorted(path_of[v] for v in split.pieces) == ["batch/mask", "batch/x", "batch/y"]
    assert {path_of.get(v) for v in split.invariants} >= {"state/params/w1", "state/params/w2"}
    assert not any("optimizer" in path_of.get(v, "") for v in split.invariants)


def test_gradients_of_each_layer_are_sums():
    _, split = split_case(PLAIN, 4)
    assert {r.placement for r in split.results} == {SUM}
    sizes = sorted(r.var.aval.size for r in split.results)
    assert sizes == [1, *sorted(p.size for p in mlp_params().values())]  # the loss, and every parameter's gradient


def test_samples_are_results_in_parts():
    case = METRIC_CASES["samples"]
    _, split = split_case(case, 4)
    shares = {r.var.aval.shape: r.placement for r in split.results}
    assert shares[(BATCH,)] == Split(0) and shares[(CLASSES, BATCH)] == Split(1)


@pytest.mark.parametrize("name", ["dropout", "dropout, old key"])
def test_random_bits_are_made_in_the_loop(name):
    case = MODELS[name]
    _, split = split_case(case, 4)

    def bits(eqns: Any) -> list[tuple[int, ...]]:
        drawn = [eqn.outvars[0].aval.shape for eqn in equations(eqns) if eqn.primitive.name == "threefry2x32"]
        return [shape for shape in drawn if len(shape) == 2]

    assert not bits(split.before) and not bits(split.after)
    assert (BATCH // 4, WIDTH) in bits(split.loop.eqns) and (BATCH, WIDTH) not in bits(split.loop.eqns)


def test_random_bits_of_a_scan_are_made_in_parts():
    case = MODELS["dropout in scan"]
    _, split = split_case(case, 4)
    drawn = {eqn.outvars[0].aval.shape for eqn in equations(split.loop.eqns) if eqn.primitive.name == "threefry2x32"}
    assert (BATCH // 4, WIDTH) in drawn and (BATCH, WIDTH) not in drawn


@pytest.mark.parametrize("name", ["adam", "dropout in scan", "cond with sums"])
def test_same_program_twice(name):
    case = MODELS[name]

    def text() -> str:
        program, batch = trace_case(case)
        return print_jaxpr(accumulate(program.jaxpr, split_microbatches(program.jaxpr, 2, batch)))

    assert text() == text()


# 7. On 8 devices.

LARGE = Case(sgd(LOSSES["masked mean"]), batch=lambda: batch_of(32))


def parallel(method: autopar.search.methods.Method) -> tuple[autopar.ParallelStep, Tree, Tree]:
    return autopar.parallelize(LARGE.step, method=method), LARGE.state(), LARGE.batch()


@pytest.mark.parametrize(
    "method",
    [DataParallel(num_microbatches=4), DataParallel(zero=3, num_microbatches=2), ShardParallel(num_microbatches=4)],
    ids=["zero0", "zero3", "shard"],
)
def test_parallel_equals_jit(method):
    step, state, batch = parallel(method)
    plan = step.plan(state, batch)
    assert plan.num_microbatches == method.num_microbatches and plan.microbatch_semantics == "exact"
    assert_same(step(state, batch), full_batch(LARGE))


def test_gradients_are_reduced_once():
    step, state, batch = parallel(DataParallel(num_microbatches=4))
    collectives = step.plan(state, batch).cost.collectives
    gradients = [c for c in collectives if c.bytes >= sum(p.nbytes for p in mlp_params().values())]
    assert [(c.kind, c.times) for c in gradients if c.kind != "all-gather"] == [("all-reduce", 1)]
    assert not [c for c in collectives if c.times == 4]


def test_nothing_is_communicated_in_the_loop():
    step, state, batch = parallel(DataParallel(num_microbatches=4))
    assert {c.times for c in step.plan(state, batch).cost.collectives} == {1}


def test_plan_is_saved_and_loaded(tmp_path):
    step, state, batch = parallel(DataParallel(num_microbatches=4))
    plan = step.plan(state, batch)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.num_microbatches, loaded.microbatch_semantics) == (4, "exact")
    assert loaded.cost.collectives == plan.cost.collectives and loaded.choices == plan.choices
    fresh = autopar.parallelize(LARGE.step, method=DataParallel(num_microbatches=4))
    assert_same(fresh.compile(state, batch, plan=loaded)(state, batch), full_batch(LARGE))


def test_batch_that_does_not_divide_is_named():
    step, state, batch = parallel(DataParallel(num_microbatches=5))
    with pytest.raises(BatchError, match="(?s)batch of 32 samples, num_microbatches=5.*32 is no multiple of 5"):
        step.plan(state, batch)


def test_refused_step_is_not_planned():
    step = autopar.parallelize(sgd(batch_norm_loss), method=DataParallel(num_microbatches=4))
    with pytest.raises(MicrobatchError, match=HERE):
        step.plan(LARGE.state(), LARGE.batch())


@pytest.mark.parametrize("method", [DataParallel, ShardParallel])
@pytest.mark.parametrize("count", [0, -1, 2.5, "4", True, None])
def test_number_that_is_none(method, count):
    with pytest.raises(AutoparError, match=rf"(?s)num_microbatches.*{method.__name__}\(num_microbatches={count!r}\)"):
        method(num_microbatches=count)


@pytest.mark.parametrize("method", [DataParallel, ShardParallel])
def test_unknown_semantics(method):
    with pytest.raises(AutoparError, match="(?s)semantics.*'fast'.*'exact', 'per_microbatch'"):
        method(num_microbatches=4, microbatch_semantics="fast")

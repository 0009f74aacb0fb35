"""Each microbatch with its own statistics, where the user has said so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.errors import MicrobatchError
from tests.ir.split.cases import (
    BATCH,
    CLASSES,
    WIDTH,
    Case,
    Tree,
    assert_is_worked_through,
    assert_same,
    cases_in_parts,
    descend,
    full_batch,
    mlp,
    run_split,
    sgd,
    sgd_of_state,
    split_case,
    squares,
    typed_key,
)
from tests.ir.split.losses import (
    LOSS_CASES,
    batch_norm_loss,
    root_loss,
    shuffled_loss,
    softmax_over_batch_loss,
    while_any_loss,
)


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


def early_norm_loss(params: Tree, batch: Tree) -> jax.Array:
    """What is done before the first statistics is a small part of the work."""
    x = batch["x"] @ params["w1"]
    h = jnp.tanh((x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3) + params["bias"])
    for _ in range(20):
        h = jnp.tanh(h @ params["w1"].T @ params["w1"])
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def balanced_experts_loss(params: Tree, batch: Tree) -> jax.Array:
    """Mixture of experts: the share of the samples that each expert gets, times its mean gate."""
    gates = jax.nn.softmax(mlp(params, batch["x"]))
    given = jax.nn.one_hot(gates.argmax(-1), CLASSES).mean(0)
    return squares(params, batch).mean() + CLASSES * (given * gates.mean(0)).sum()


def dice_loss(params: Tree, batch: Tree) -> jax.Array:
    p, y = jax.nn.sigmoid(mlp(params, batch["x"])), batch["y"] > 0
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def barred_root_loss(params: Tree, batch: Tree) -> jax.Array:
    """As `root_loss`, but a barrier hands the mean on, and the loss with it."""
    value = squares(params, batch)
    mean, _ = lax.optimization_barrier((value.mean(), value.sum()))
    return jnp.sqrt(mean)


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
    "BatchNorm early": Case(sgd(early_norm_loss)),
    "BatchNorm with running statistics": Case(batch_norm_step, extra=running_statistics),
    "root of the mean": Case(sgd(root_loss)),
    "root of the mean behind a barrier": Case(sgd(barred_root_loss)),
}


@cases_in_parts(PER_MICROBATCH)
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


@pytest.mark.parametrize("loss", [batch_norm_loss, early_norm_loss])
def test_nothing_is_made_of_the_whole_batch(loss):
    """Neither before the loop nor in it: gradients of statistics go to a microbatch's own samples."""
    _, split = split_case(Case(sgd(loss)), 2, per_microbatch=True)
    shapes = [var.aval.shape for eqn in (*split.before, *split.loop.eqns) for var in eqn.outvars]
    assert not [shape for shape in shapes if shape[:1] == (BATCH,)]


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


def drawn_mean_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    """Of samples that are drawn among those of the mask."""
    mask = batch["mask"] * jax.random.bernoulli(state["key"], 0.8, (BATCH,))
    return (squares(params, batch) * mask).sum() / jnp.maximum(mask.sum(), 1.0)


@pytest.mark.parametrize(
    "case", [LOSS_CASES["masked mean"], Case(sgd_of_state(drawn_mean_loss), extra=typed_key)], ids=["mask", "drawn"]
)
def test_per_microbatch_is_exact_where_that_is_possible(case):
    program, split = split_case(case, 2, per_microbatch=True)
    assert_same(run_split(case, program, split), full_batch(case))

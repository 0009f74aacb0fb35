"""Losses over a batch: those that microbatches make in parts, and those that need all samples at once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.ir.split.cases import (
    CLASSES,
    LENGTH,
    Case,
    Tree,
    cross_entropies,
    language_params,
    mlp,
    sgd,
    squares,
    token_losses,
)


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


def normalized_head_loss(params: Tree, batch: Tree) -> jax.Array:
    """Batch statistics in a small head, and labels and weights behind it."""
    h = batch["x"]
    for _ in range(6):
        h = jnp.tanh(h @ params["w1"])
    z = h @ params["w2"]
    z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)
    return (batch["weight"] * optax.softmax_cross_entropy_with_integer_labels(z, batch["label"])).mean()


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


def batch_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3)


def batch_norm_loss(params: Tree, batch: Tree) -> jax.Array:
    h = jnp.tanh(batch_norm(batch["x"] @ params["w1"]) + params["bias"])
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def root_loss(params: Tree, batch: Tree) -> jax.Array:
    return jnp.sqrt(jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2))


def softmax_over_batch_loss(params: Tree, batch: Tree) -> jax.Array:
    return (jax.nn.softmax(mlp(params, batch["x"]), axis=0) * batch["y"]).sum()


def shuffled_loss(params: Tree, state: Tree, batch: Tree) -> jax.Array:
    order = jax.random.permutation(state["key"], batch["x"].shape[0])
    h = jnp.tanh(batch["x"] @ params["w1"])[order]
    return ((h @ params["w2"] - batch["y"]) ** 2).mean()


def while_any_loss(params: Tree, batch: Tree) -> jax.Array:
    """All samples are halved until the largest is small."""
    x = lax.while_loop(lambda x: (jnp.abs(x) > 1.0).any(), lambda x: 0.5 * x, mlp(params, batch["x"]))
    return squares(params, {**batch, "y": lax.stop_gradient(x)}).mean()

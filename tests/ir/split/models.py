"""Models and training steps that are worked through in microbatches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.ir.split.cases import (
    BATCH,
    CLASSES,
    LAYERS,
    LENGTH,
    WIDTH,
    WORDS,
    Case,
    Tree,
    _normal,
    cross_entropies,
    descend,
    hardware_key,
    language_params,
    mlp,
    mlp_params,
    old_key,
    scale,
    sgd,
    sgd_of_state,
    squares,
    step_number,
    typed_key,
)
from tests.ir.split.losses import batch_norm_loss


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


def scanned_extremes_step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Of every layer the largest activation and the least of each unit are told."""

    def body(x: jax.Array, layer: Tree) -> tuple[jax.Array, Tree]:
        x = _layer(x, layer)
        return x, {"largest": x.max(), "least": x.min(0)}

    def loss_fn(params: Tree) -> tuple[jax.Array, Tree]:
        x, told = lax.scan(body, batch["x"], params["layers"])
        return ((x @ params["out"] - batch["y"]) ** 2).mean(), told

    (value, told), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    return {**state, "params": descend(state["params"], grads)}, {"loss": value, **told}


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
    "scan that tells extremes": Case(scanned_extremes_step, layered_params),
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

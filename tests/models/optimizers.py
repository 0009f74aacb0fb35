"""Optimizers and what stands around a step: conds, averages, loss scales, custom gradients; small models of other fields."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.data import BATCH, batches, dense, normal, on_device, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, apply, trained


def mlp_params(random, sizes=(20, 48, 48, 6)):
    return [dense(random, a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)]


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(apply(layer, x))
    return apply(layers[-1], x)


def pairs(random):
    return {"x": normal(random, BATCH, 20), "y": normal(random, BATCH, 6)}


def squares(params, batch):
    return ((mlp(params, batch["x"]) - batch["y"]) ** 2).mean()


@case("mlp_schedule_clip")
def mlp_schedule_clip():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule, eps=1e-3), optax.ema(0.9))
    return trained(squares, mlp_params(np.random.default_rng(0)), optimizer, pairs)


@case("mlp_multisteps")
def mlp_multisteps():
    """Every second step updates: a cond."""
    optimizer = optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), every_k_schedule=2)
    return trained(squares, mlp_params(np.random.default_rng(1)), optimizer, pairs)


@case("mlp_lamb_average")
def mlp_lamb_average():
    random = np.random.default_rng(2)
    params, optimizer = on_device(mlp_params(random)), optax.lamb(1e-2, eps=1e-3)

    def step(state, batch):
        loss, grads = jax.value_and_grad(squares)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, state["average"], params)
        return {"params": params, "average": average, "opt_state": opt_state}, {
            "loss": loss,
            "norm": optax.global_norm(grads),
        }

    # Biases start at zero, where LAMB's trust ratio would jump.
    params = jax.tree.map(lambda p: p + 0.1, params)
    return step, {"params": params, "average": params, "opt_state": optimizer.init(params)}, batches(pairs)


@case("mlp_newton_schulz")
def mlp_newton_schulz():
    """Orthogonalized momentum, as in Muon: products of matrices in the update."""
    random = np.random.default_rng(3)
    params = on_device(mlp_params(random))

    def orthogonal(g):
        x = g / (jnp.linalg.norm(g) + 1e-3)
        for _ in range(3):
            square = x.T @ x if x.shape[0] >= x.shape[1] else x @ x.T
            x = 1.5 * x - 0.5 * (x @ square if x.shape[0] >= x.shape[1] else square @ x)
        return x

    def step(state, batch):
        loss, grads = jax.value_and_grad(squares)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        params = jax.tree.map(lambda p, m: p - 0.02 * (orthogonal(m) if m.ndim == 2 else m), state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    return step, {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}, batches(pairs)


@case("mlp_loss_scale_bfloat16")
def mlp_loss_scale_bfloat16():
    """Mixed precision with a dynamic loss scale: the update is skipped where gradients are not finite."""
    random = np.random.default_rng(4)
    params, optimizer = on_device(mlp_params(random)), optax.sgd(0.05, momentum=0.9)

    def step(state, batch):
        def loss_fn(params):
            half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, batch))
            return squares(*half).astype(jnp.float32) * state["scale"]

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        grads = jax.tree.map(lambda g: g / state["scale"], grads)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))

        def update(_):
            updates, opt_state = optimizer.update(grads, state["opt_state"])
            return optax.apply_updates(state["params"], updates), opt_state

        params, opt_state = lax.cond(finite, update, lambda _: (state["params"], state["opt_state"]), None)
        scale = jnp.where(finite, jnp.minimum(state["scale"] * 2, 2.0**15), state["scale"] / 2)
        return {"params": params, "opt_state": opt_state, "scale": scale}, loss / state["scale"]

    state = {"params": params, "opt_state": optimizer.init(params), "scale": jnp.float32(2.0**10)}
    return step, state, batches(pairs), 3e-2, "bfloat16 has 8 bits: sums in another order differ by 2^-8 of their scale"


@case("mlp_custom_gradients")
def mlp_custom_gradients():
    @jax.custom_vjp
    def clip_gradient(x):
        return x

    clip_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    @jax.custom_jvp
    def softer(x):
        return jnp.log1p(jnp.exp(x))

    @softer.defjvp
    def _(primals, tangents):
        return softer(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]

    def loss_fn(params, batch):
        h = clip_gradient(softer(apply(params[0], batch["x"])))
        quantized = h + lax.stop_gradient(jnp.round(h * 8) / 8 - h)
        return ((mlp(params[1:], quantized) - batch["y"]) ** 2).mean()

    # Rounding h to eighths turns a last-bit difference into an eighth, rarely: none of these samples sits on the edge.
    return trained(loss_fn, mlp_params(np.random.default_rng(5)), adamw(), pairs)


@case("matrix_factorization")
def matrix_factorization():
    random = np.random.default_rng(6)
    params = {
        "users": normal(random, 40, 8) * 0.3,
        "items": normal(random, 56, 8) * 0.3,
        "bias": np.zeros(56, np.float32),
    }

    def loss_fn(params, batch):
        rated = (params["users"][batch["user"]] * params["items"][batch["item"]]).sum(-1) + params["bias"][
            batch["item"]
        ]
        return optax.sigmoid_binary_cross_entropy(rated, batch["liked"]).mean()

    def make(random):
        return {
            "user": tokens(random, BATCH, vocabulary=40),
            "item": tokens(random, BATCH, vocabulary=56),
            "liked": random.integers(0, 2, BATCH).astype(np.float32),
        }

    return trained(loss_fn, params, optax.adagrad(0.1), make)


@case("graph_segment_sum")
def graph_segment_sum():
    """Message passing along edges, and a readout per graph."""
    random = np.random.default_rng(7)
    params = {"message": dense(random, 24, 16), "update": dense(random, 28, 12), "read": dense(random, 12, 2)}

    def loss_fn(params, batch):
        nodes, sender, receiver = batch["nodes"], batch["edges"][..., 0], batch["edges"][..., 1]

        def one(nodes, sender, receiver):
            sent = jax.nn.relu(apply(params["message"], jnp.concatenate([nodes[sender], nodes[receiver]], -1)))
            heard = jax.ops.segment_sum(sent, receiver, 7)
            return jnp.tanh(apply(params["update"], jnp.concatenate([nodes, heard], -1)))

        nodes = jax.vmap(one)(nodes, sender, receiver)
        out = apply(params["read"], nodes.max(1))
        return ((out - batch["target"]) ** 2).mean()

    def make(random):
        return {
            "nodes": normal(random, BATCH, 7, 12),
            "edges": tokens(random, BATCH, 15, 2, vocabulary=7),
            "target": normal(random, BATCH, 2),
        }

    return trained(loss_fn, params, adamw(), make)


@case("gaussian_process")
def gaussian_process():
    """A small kernel matrix per sample: Cholesky, triangular solves, a spectrum by FFT."""
    params = {"length": np.float32(1.0), "noise": np.float32(0.5), "filter": np.ones(9, np.float32)}

    def loss_fn(params, batch):
        x, y = batch["x"], batch["y"]
        y = jnp.fft.irfft(jnp.fft.rfft(y) * params["filter"], n=16)
        distance = (x[:, :, None] - x[:, None, :]) ** 2
        kernel = jnp.exp(-distance / jax.nn.softplus(params["length"])) + jax.nn.softplus(params["noise"]) * jnp.eye(16)
        factor = jnp.linalg.cholesky(kernel)
        white = lax.linalg.triangular_solve(factor, y[..., None], left_side=True, lower=True)[..., 0]
        return (0.5 * (white**2).sum(-1) + jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum(-1)).mean()

    return trained(
        loss_fn,
        params,
        optax.sgd(0.01),
        lambda random: {"x": normal(random, BATCH, 16), "y": normal(random, BATCH, 16)},
    )

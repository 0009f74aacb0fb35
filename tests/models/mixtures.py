"""Mixtures of experts: dispatch by one-hot products with a capacity, and by sorting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.data import BATCH, batches, dense, norm, normal, on_device, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, apply, attention, layer_norm, next_token_loss, trained

WIDTH, EXPERTS, LENGTH, VOCABULARY = 32, 4, 8, 32


def params_of(random):
    return {
        "embed": normal(random, VOCABULARY, WIDTH) * 0.3,
        "norm1": norm(WIDTH),
        "norm2": norm(WIDTH),
        "qkv": dense(random, WIDTH, 3 * WIDTH, bias=False),
        "out": dense(random, WIDTH, WIDTH),
        "gate": dense(random, WIDTH, EXPERTS, bias=False),
        "up": normal(random, EXPERTS, WIDTH, 64) / 6,
        "down": normal(random, EXPERTS, 64, WIDTH) / 8,
        "head": dense(random, WIDTH, VOCABULARY),
    }


def text(random):
    return tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY)


def top2_with_capacity(params, x):
    """GShard's dispatch: each expert takes so many tokens, those that come too late are dropped."""
    groups, size, _ = x.shape
    capacity = 2 * size // EXPERTS + 1
    gates = jax.nn.softmax(apply(params["gate"], x))
    first = jnp.argmax(gates, -1)
    second = jnp.argmax(jnp.where(jax.nn.one_hot(first, EXPERTS, dtype=bool), -jnp.inf, gates), -1)
    mask1, mask2 = jax.nn.one_hot(first, EXPERTS), jax.nn.one_hot(second, EXPERTS)
    balance = (gates.mean(1) * mask1.mean(1)).sum(-1).mean() * EXPERTS
    place1 = (jnp.cumsum(mask1, 1) - mask1) * mask1
    place2 = (jnp.cumsum(mask2, 1) - mask2 + mask1.sum(1, keepdims=True)) * mask2
    mask1, mask2 = mask1 * (place1 < capacity), mask2 * (place2 < capacity)
    weight1, weight2 = (gates * mask1).sum(-1), (gates * mask2).sum(-1)
    total = weight1 + weight2 + 1e-6

    def combine(weight, mask, place):
        slot = jax.nn.one_hot((place * mask).sum(-1).astype(jnp.int32), capacity)
        return (weight / total)[..., None, None] * mask[..., None] * slot[..., None, :]

    combined = combine(weight1, mask1, place1) + combine(weight2, mask2, place2)
    sent = jnp.einsum("gsec,gsm->egcm", (combined > 0).astype(x.dtype), x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, params["up"]))
    back = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
    return jnp.einsum("gsec,egcm->gsm", combined, back), balance


@case("moe_top2_capacity")
def moe_top2_capacity():
    def loss_fn(params, ids):
        x = params["embed"][ids]
        x = x + attention(params, layer_norm(params["norm1"], x))
        mixed, balance = top2_with_capacity(params, layer_norm(params["norm2"], x))
        return next_token_loss(apply(params["head"], x + mixed), ids) + 0.01 * balance

    return trained(loss_fn, params_of(np.random.default_rng(0)), adamw(), text)


def sorted_experts(params, x):
    """Tokens sorted by expert, one ragged product, and back."""
    flat = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(apply(params["gate"], flat))
    weights, chosen = lax.top_k(scores, 2)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    sent = flat[order // 2]
    hidden = jax.nn.silu(lax.ragged_dot(sent, params["up"], sizes.astype(jnp.int32)))
    back = lax.ragged_dot(hidden, params["down"], sizes.astype(jnp.int32))
    back = back * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(flat).at[order // 2].add(back).reshape(x.shape)


@case("moe_sorted_ragged")
def moe_sorted_ragged():
    def loss_fn(params, ids):
        x = params["embed"][ids]
        x = x + sorted_experts(params, layer_norm(params["norm2"], x))
        return next_token_loss(apply(params["head"], x), ids)

    return trained(loss_fn, params_of(np.random.default_rng(1)), optax.sgd(0.1), text)


@case("moe_scanned_experts")
def moe_scanned_experts():
    """A loop over experts, each on all tokens, weighted by its gate."""
    params = on_device(params_of(np.random.default_rng(2)))
    optimizer = optax.sgd(0.1, nesterov=True, momentum=0.9)

    def loss_fn(params, ids):
        x = params["embed"][ids]
        gates = jax.nn.softmax(apply(params["gate"], x))

        def expert(total, parts):
            up, down, gate = parts
            return total + gate[..., None] * (jax.nn.gelu(x @ up) @ down), None

        mixed, _ = lax.scan(expert, jnp.zeros_like(x), (params["up"], params["down"], jnp.moveaxis(gates, -1, 0)))
        return next_token_loss(apply(params["head"], x + mixed), ids)

    def step(state, ids):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], ids)

        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return step, {"params": params, "opt_state": optimizer.init(params)}, batches(text)

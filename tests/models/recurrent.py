"""Recurrences: LSTM, bidirectional GRU with lengths, selective scans, loops to a fixed point."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.data import BATCH, dense, normal, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, apply, trained

LENGTH, WIDTH, VOCABULARY = 10, 16, 24


@case("haiku_lstm")
def haiku_lstm():
    def network(ids):
        x = hk.Embed(VOCABULARY, WIDTH)(ids)
        core = hk.LSTM(WIDTH)
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(ids.shape[0]), time_major=False)
        return hk.Linear(VOCABULARY)(outputs)

    model = hk.without_apply_rng(hk.transform(network))
    params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, LENGTH), jnp.int32))

    def loss_fn(params, ids):
        logits = model.apply(params, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    return trained(
        loss_fn,
        params,
        optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-2, eps=1e-3)),
        lambda random: tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY),
    )


@case("bidirectional_gru")
def bidirectional_gru():
    """A reverse scan, and samples of different lengths."""
    random = np.random.default_rng(1)

    def cell():
        return {"gates": dense(random, 2 * WIDTH, 2 * WIDTH), "new": dense(random, 2 * WIDTH, WIDTH)}

    params = {
        "embed": normal(random, VOCABULARY, WIDTH) * 0.3,
        "forward": cell(),
        "backward": cell(),
        "head": dense(random, 2 * WIDTH, 5),
    }

    def run(layer, x, present, reverse):
        def one(h, inputs):
            x, here = inputs
            reset, update = jnp.split(jax.nn.sigmoid(apply(layer["gates"], jnp.concatenate([x, h], -1))), 2, -1)
            new = jnp.tanh(apply(layer["new"], jnp.concatenate([x, reset * h], -1)))
            h = jnp.where(here[:, None], update * h + (1 - update) * new, h)
            return h, h

        last, _ = lax.scan(one, jnp.zeros_like(x[0]), (x, present), reverse=reverse)
        return last

    def loss_fn(params, batch):
        x = jnp.swapaxes(params["embed"][batch["ids"]], 0, 1)
        present = jnp.arange(LENGTH)[:, None] < batch["lengths"]
        both = jnp.concatenate(
            [run(params["forward"], x, present, False), run(params["backward"], x, present, True)], -1
        )
        return optax.softmax_cross_entropy_with_integer_labels(apply(params["head"], both), batch["label"]).mean()

    def make(random):
        return {
            "ids": tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY),
            "label": tokens(random, BATCH, vocabulary=5),
            "lengths": random.integers(3, LENGTH + 1, BATCH).astype(np.int32),
        }

    return trained(loss_fn, params, adamw(), make)


def selective_params(random):
    return {
        "embed": normal(random, VOCABULARY, WIDTH) * 0.3,
        "conv": normal(random, 3, 1, 2 * WIDTH) * 0.5,
        "in": dense(random, WIDTH, 4 * WIDTH, bias=False),
        "step": dense(random, 2 * WIDTH, 2 * WIDTH),
        "mix": dense(random, 2 * WIDTH, 8, bias=False),
        "decay": np.log(np.tile(np.arange(1, 5, dtype=np.float32), (2 * WIDTH, 1))),
        "skip": np.ones(2 * WIDTH, np.float32),
        "out": dense(random, 2 * WIDTH, WIDTH, bias=False),
        "head": dense(random, WIDTH, VOCABULARY, bias=False),
    }


def selective_layer(params, x, scanned):
    """A state-space layer whose step depends on the input (as in Mamba)."""
    x, gate = jnp.split(apply(params["in"], x), 2, -1)
    x = lax.conv_general_dilated(
        x, params["conv"], (1,), ((2, 0),), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
    )
    x = jax.nn.silu(x)
    delta = jax.nn.softplus(apply(params["step"], x))
    into, out = jnp.split(apply(params["mix"], x), 2, -1)
    decay = jnp.exp(-delta[..., None] * jnp.exp(params["decay"]))
    drive = (delta * x)[..., None] * into[:, :, None]
    if scanned:

        def one(h, inputs):
            a, b = inputs
            h = a * h + b
            return h, h

        _, states = lax.scan(one, jnp.zeros_like(drive[:, 0]), (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(drive, 1, 0)))
        states = jnp.moveaxis(states, 0, 1)
    else:
        _, states = lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, drive), axis=1)
    y = (states * out[:, :, None]).sum(-1) + params["skip"] * x
    return apply(params["out"], y * jax.nn.silu(gate))


def selective(scanned):
    def loss_fn(params, ids):
        x = params["embed"][ids]
        logits = apply(params["head"], x + selective_layer(params, x, scanned))
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    return trained(
        loss_fn,
        selective_params(np.random.default_rng(2)),
        adamw(),
        lambda random: tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY),
    )


@case("mamba_like_scan")
def mamba_like_scan():
    return selective(scanned=True)


@case("mamba_like_associative")
def mamba_like_associative():
    return selective(scanned=False)


@case("linear_attention_cumsum")
def linear_attention_cumsum():
    random = np.random.default_rng(4)
    params = {
        "embed": normal(random, VOCABULARY, WIDTH) * 0.3,
        "qkv": dense(random, WIDTH, 3 * WIDTH, bias=False),
        "head": dense(random, WIDTH, VOCABULARY, bias=False),
    }

    def loss_fn(params, ids):
        x = params["embed"][ids]
        q, k, v = jnp.split(apply(params["qkv"], x), 3, -1)
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        memory = jnp.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        total = jnp.cumsum(k, axis=1)
        mixed = jnp.einsum("bld,bldv->blv", q, memory) / ((q * total).sum(-1, keepdims=True) + 1e-3)
        logits = apply(params["head"], x + mixed)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    return trained(loss_fn, params, adamw(), lambda random: tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY))


@case("fixed_point_loops", refused="a loop ends when the last sample has converged")
def fixed_point_loops():
    """A while loop to a fixed point, its gradient by another (an implicit layer), and a fori_loop in front."""
    random = np.random.default_rng(5)
    params = {
        "in": dense(random, 12, WIDTH),
        "loop": {"kernel": normal(random, WIDTH, WIDTH) * 0.08},
        "head": dense(random, WIDTH, 3),
    }

    def iterate(f, start):
        def body(carry):
            z, _, count = carry
            new = f(z)
            return new, jnp.abs(new - z).max(), count + 1

        return lax.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < 60), body, (start, jnp.float32(1.0), 0))[0]

    @jax.custom_vjp
    def settle(kernel, x):
        return iterate(lambda z: jnp.tanh(z @ kernel + x), jnp.zeros_like(x))

    def forward(kernel, x):
        z = settle(kernel, x)
        return z, (kernel, x, z)

    def backward(saved, cotangent):
        kernel, x, z = saved
        _, pullback = jax.vjp(lambda z: jnp.tanh(z @ kernel + x), z)
        w = iterate(lambda w: pullback(w)[0] + cotangent, cotangent)
        return jax.vjp(lambda kernel, x: jnp.tanh(z @ kernel + x), kernel, x)[1](w)

    settle.defvjp(forward, backward)

    def loss_fn(params, batch):
        x = apply(params["in"], batch["x"])
        x = lax.fori_loop(0, 3, lambda _, x: x + 0.1 * jnp.sin(x), x)
        z = settle(params["loop"]["kernel"], x)
        return ((apply(params["head"], z) - batch["y"]) ** 2).mean()

    return trained(
        loss_fn, params, optax.sgd(0.1), lambda random: {"x": normal(random, BATCH, 12), "y": normal(random, BATCH, 3)}
    )

"""Transformers written with plain pytrees: unrolled, scanned, with remat; tied, grouped, rotary, relative, adapted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.data import BATCH, batches, dense, norm, normal, on_device, tokens
from tests.models.registry import case

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 3


def apply(layer, x):
    out = x @ layer["kernel"].astype(x.dtype)
    return out + layer["bias"].astype(x.dtype) if "bias" in layer else out


def layer_norm(layer, x):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * layer["scale"] + layer["bias"]


def attention(layer, x, mask=None, heads=HEADS):
    batch, length, width = x.shape
    q, k, v = jnp.split(apply(layer["qkv"], x), 3, axis=-1)
    q, k, v = (a.reshape(batch, length, heads, width // heads) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return apply(layer["out"], out.reshape(batch, length, width))


def block(layer, x):
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    x = x + attention(layer, layer_norm(layer["norm1"], x), causal)
    return x + apply(layer["down"], jax.nn.gelu(apply(layer["up"], layer_norm(layer["norm2"], x))))


def block_params(random, *lead, width=WIDTH):
    return {
        "norm1": norm(width, *lead),
        "qkv": dense(random, width, 3 * width, *lead, bias=False),
        "out": dense(random, width, width, *lead),
        "norm2": norm(width, *lead),
        "up": dense(random, width, 4 * width, *lead),
        "down": dense(random, 4 * width, width, *lead),
    }


def gpt_params(random, layers):
    return {
        "embed": normal(random, VOCABULARY, WIDTH) * 0.1,
        "positions": normal(random, LENGTH, WIDTH) * 0.1,
        "layers": layers,
        "norm": norm(WIDTH),
        "head": dense(random, WIDTH, VOCABULARY, bias=False),
    }


def text(random):
    return tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY)


def next_token_loss(logits, ids):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), ids[:, 1:])
    return losses.mean()


def trained(loss_fn, params, optimizer, make_batch=text):
    """The usual step around a loss of (params, batch)."""
    params = on_device(params)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, {"loss": loss}

    state = {"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}
    return step, state, batches(make_batch)


def adamw(rate=1e-2):
    # A large eps: with the usual one Adam blows the rounding noise of near-zero gradients up to full steps.
    return optax.adamw(rate, eps=1e-3)


@case("gpt_unrolled")
def gpt_unrolled():
    random = np.random.default_rng(0)
    params = gpt_params(random, [block_params(random) for _ in range(LAYERS)])

    def loss_fn(params, ids):
        x = params["embed"][ids] + params["positions"]
        for layer in params["layers"]:
            x = block(layer, x)
        return next_token_loss(apply(params["head"], layer_norm(params["norm"], x)), ids)

    return trained(loss_fn, params, adamw())


def scanned_loss(params, ids, body):
    x = params["embed"][ids] + params["positions"]
    x, _ = lax.scan(lambda x, layer: (body(layer, x), None), x, params["layers"])
    return next_token_loss(apply(params["head"], layer_norm(params["norm"], x)), ids)


@case("gpt_scan")
def gpt_scan():
    random = np.random.default_rng(1)
    params = gpt_params(random, block_params(random, LAYERS))
    return trained(lambda p, ids: scanned_loss(p, ids, block), params, adamw())


@case("gpt_scan_remat_clipped")
def gpt_scan_remat_clipped():
    random = np.random.default_rng(2)
    params = gpt_params(random, block_params(random, LAYERS))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), adamw())
    return trained(lambda p, ids: scanned_loss(p, ids, jax.checkpoint(block)), params, optimizer)


@case("gpt_scan_remat_dots")
def gpt_scan_remat_dots():
    """A remat policy: dots are kept."""
    random = np.random.default_rng(12)
    params = gpt_params(random, block_params(random, LAYERS))
    kept = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return trained(lambda p, ids: scanned_loss(p, ids, kept), params, optax.sgd(0.05, momentum=0.9))


@case("gpt_tied_dropout")
def gpt_tied_dropout():
    random = np.random.default_rng(3)
    params = gpt_params(random, [block_params(random) for _ in range(2)])
    del params["head"]
    params = on_device(params)
    optimizer = adamw()

    def dropout(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def loss_fn(params, ids, key):
        x = dropout(key, params["embed"][ids] + params["positions"])
        for number, layer in enumerate(params["layers"]):
            x = dropout(jax.random.fold_in(key, number), block(layer, x))
        return next_token_loss(layer_norm(params["norm"], x) @ params["embed"].T, ids)

    def step(state, ids):
        key, now = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], ids, now)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, loss

    state = {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(0)}
    return step, state, batches(text)


def rotary(x):
    length, width = x.shape[1], x.shape[-1]
    angles = np.arange(length)[:, None] / 100.0 ** (np.arange(0, width, 2) / width)
    cos, sin = jnp.asarray(np.cos(angles), x.dtype)[:, None], jnp.asarray(np.sin(angles), x.dtype)[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def llama_block(layer, x, groups=2):
    batch, length, width = x.shape
    size = width // HEADS

    def rms(scale, x):
        return (
            x
            * lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-5).astype(x.dtype)
            * scale.astype(x.dtype)
        )

    h = rms(layer["norm1"], x)
    q = rotary(apply(layer["q"], h).reshape(batch, length, HEADS, size)).reshape(
        batch, length, groups, HEADS // groups, size
    )
    k = rotary(apply(layer["k"], h).reshape(batch, length, groups, size))
    v = apply(layer["v"], h).reshape(batch, length, groups, size)
    scores = jnp.einsum("bqgnd,bkgd->bgnqk", q, k).astype(jnp.float32) / np.sqrt(size)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bgnqk,bkgd->bqgnd", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + apply(layer["o"], mixed.reshape(batch, length, width))
    h = rms(layer["norm2"], x)
    return x + apply(layer["down"], jax.nn.silu(apply(layer["gate"], h)) * apply(layer["up"], h))


def llama_params(random, *lead):
    half = WIDTH // 2
    return {
        "norm1": np.ones((*lead, WIDTH), np.float32),
        "norm2": np.ones((*lead, WIDTH), np.float32),
        **{
            name: dense(random, rows, columns, *lead, bias=False)
            for name, rows, columns in (
                ("q", WIDTH, WIDTH),
                ("k", WIDTH, half),
                ("v", WIDTH, half),
                ("o", WIDTH, WIDTH),
                ("gate", WIDTH, 96),
                ("up", WIDTH, 96),
                ("down", 96, WIDTH),
            )
        },
    }


def llama(dtype):
    random = np.random.default_rng(4)
    params = {
        "embed": normal(random, VOCABULARY, WIDTH) * 0.3,
        "layers": llama_params(random, 2),
        "head": dense(random, WIDTH, VOCABULARY, bias=False),
    }

    def loss_fn(params, ids):
        x = params["embed"][ids].astype(dtype)
        x, _ = lax.scan(lambda x, layer: (llama_block(layer, x), None), x, params["layers"])
        return next_token_loss(apply(params["head"], x), ids)

    return trained(loss_fn, params, optax.adam(1e-2, eps=1e-3))


@case("llama_grouped_rotary")
def llama_grouped_rotary():
    return llama(jnp.float32)


@case("llama_bfloat16")
def llama_bfloat16():
    why = "bfloat16 has 8 bits: gradients summed over 384 tokens in another order differ by 2^-4, their squares by 2^-3"
    return *llama(jnp.bfloat16), 0.2, why


@case("t5_relative_adafactor", fixed_batch=True)
def t5_relative_adafactor():
    random = np.random.default_rng(5)
    params = gpt_params(random, [block_params(random) for _ in range(2)])
    params["bias"] = normal(random, HEADS, 2 * LENGTH) * 0.1
    params["odd"] = dense(random, WIDTH, 101, bias=False)

    def loss_fn(params, ids):
        x = params["embed"][ids]
        distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None, :] + LENGTH
        bias = jnp.take(params["bias"], distance, axis=1)
        for layer in params["layers"]:
            h = layer_norm(layer["norm1"], x)
            q, k, v = jnp.split(apply(layer["qkv"], h), 3, axis=-1)
            q, k, v = (a.reshape(BATCH, LENGTH, HEADS, -1) for a in (q, k, v))
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
            x = x + apply(layer["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
            x = x + apply(layer["down"], jax.nn.relu(apply(layer["up"], layer_norm(layer["norm2"], x))))
        return next_token_loss(apply(params["odd"], layer_norm(params["norm"], x)), ids)

    why = "Adafactor divides by the root of a product of means of squares, which doubles rounding"
    return *trained(loss_fn, params, optax.adafactor(1e-2, min_dim_size_to_factor=16)), 3e-5, why


@case("gpt_gradient_accumulation", fixed_batch=True, refused="3 trips over samples are no 4 microbatches")
def gpt_gradient_accumulation():
    random = np.random.default_rng(6)
    params = on_device(gpt_params(random, block_params(random, 2)))
    optimizer = adamw()

    def step(state, ids):
        def microbatch(total, part):
            loss, grads = jax.value_and_grad(lambda p: scanned_loss(p, part, block))(state["params"])
            return jax.tree.map(jnp.add, total, (grads, loss)), loss

        zeros = (jax.tree.map(jnp.zeros_like, state["params"]), jnp.float32(0))
        (grads, loss), losses = lax.scan(microbatch, zeros, ids.reshape(3, BATCH // 3, LENGTH))
        grads = jax.tree.map(lambda g: g / 3, grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, (loss / 3, losses)

    return step, {"params": params, "opt_state": optimizer.init(params)}, batches(text)


@case("lora")
def lora():
    """Frozen weights and trained factors of low rank."""
    random = np.random.default_rng(7)
    frozen = on_device(gpt_params(random, [block_params(random) for _ in range(2)]))
    factors = on_device(
        [{"a": normal(random, WIDTH, 4) * 0.1, "b": normal(random, 4, 3 * WIDTH) * 0.1} for _ in range(2)]
    )
    optimizer = adamw()

    def loss_fn(factors, frozen, ids):
        x = frozen["embed"][ids] + frozen["positions"]
        for layer, factor in zip(frozen["layers"], factors, strict=True):
            qkv = {"kernel": layer["qkv"]["kernel"] + factor["a"] @ factor["b"]}
            x = block({**layer, "qkv": qkv}, x)
        return next_token_loss(apply(frozen["head"], layer_norm(frozen["norm"], x)), ids)

    def step(state, ids):
        loss, grads = jax.value_and_grad(loss_fn)(state["factors"], state["frozen"], ids)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["factors"])
        factors = optax.apply_updates(state["factors"], updates)
        return {"frozen": state["frozen"], "factors": factors, "opt_state": opt_state}, loss

    return step, {"frozen": frozen, "factors": factors, "opt_state": optimizer.init(factors)}, batches(text)


@case("two_towers")
def two_towers():
    """Every sample against every other: the loss joins the whole batch."""
    random = np.random.default_rng(8)
    params = {
        "image": [dense(random, 40, 64), dense(random, 64, 16)],
        "text": [dense(random, 24, 64), dense(random, 64, 16)],
        "scale": np.float32(2.0),
    }

    def tower(layers, x):
        x = apply(layers[1], jnp.tanh(apply(layers[0], x)))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss_fn(params, batch):
        logits = tower(params["image"], batch["image"]) @ tower(params["text"], batch["text"]).T * params["scale"]
        labels = jnp.arange(logits.shape[0])
        both = optax.softmax_cross_entropy_with_integer_labels
        return (both(logits, labels) + both(logits.T, labels)).mean() / 2

    return trained(
        loss_fn, params, adamw(), lambda random: {"image": normal(random, BATCH, 40), "text": normal(random, BATCH, 24)}
    )

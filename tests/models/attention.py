"""Attention and heads as they are written for long inputs: windows, blocks of keys, chunked losses, padded vocabularies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.data import BATCH, dense, norm, normal, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, apply, layer_norm, next_token_loss, trained

WIDTH, HEADS, LENGTH, WINDOW = 32, 4, 16, 4


def params_of(random, vocabulary):
    def layer():
        return {
            "norm": norm(WIDTH),
            "qkv": dense(random, WIDTH, 3 * WIDTH, bias=False),
            "out": dense(random, WIDTH, WIDTH),
            "up": dense(random, WIDTH, 64),
            "down": dense(random, 64, WIDTH),
        }

    return {
        "embed": normal(random, vocabulary, WIDTH) * 0.3,
        "positions": normal(random, LENGTH, WIDTH) * 0.3,
        "layers": [layer(), layer()],
        "head": dense(random, WIDTH, vocabulary, bias=False),
    }


def encode(params, ids, attend):
    """The network up to its head, with `attend` of q, k, v [batch, length, heads, size]."""
    x = params["embed"][ids] + params["positions"]
    for layer in params["layers"]:
        qkv = apply(layer["qkv"], layer_norm(layer["norm"], x)).reshape(*ids.shape, 3, HEADS, -1)
        x = x + apply(layer["out"], attend(*jnp.moveaxis(qkv, 2, 0)).reshape(x.shape))
        x = x + apply(layer["down"], jnp.square(jax.nn.relu(apply(layer["up"], x))))
    return x


def text(vocabulary):
    return lambda random: tokens(random, BATCH, LENGTH, vocabulary=vocabulary)


def window_attention(q, k, v):
    """Each block of queries sees its own block of keys and the one before."""
    q, k, v = (a.reshape(a.shape[0], -1, WINDOW, *a.shape[2:]) for a in (q, k, v))

    def with_previous(a):
        before = jnp.pad(a, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1]
        return jnp.concatenate([before, a], axis=2)

    k, v = with_previous(k), with_previous(v)
    scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, k) / np.sqrt(q.shape[-1])
    place, seen = np.arange(WINDOW)[:, None] + WINDOW, np.arange(2 * WINDOW)[None, :]
    band = (seen <= place) & (seen > place - WINDOW)
    first = np.arange(LENGTH // WINDOW)[:, None, None, None] == 0
    scores = jnp.where(band & ~(first & (seen < WINDOW)), scores, -1e9)
    out = jnp.einsum("bnhqk,bnkhd->bnqhd", jax.nn.softmax(scores), v)
    return out.reshape(out.shape[0], LENGTH, *out.shape[3:])


@case("window_attention_padded_vocabulary")
def window_attention_padded_vocabulary():
    """101 tokens padded to 104 rows: no logit, and so no gradient, for the last three."""

    def loss_fn(params, ids):
        logits = apply(params["head"], encode(params, ids, window_attention))
        return next_token_loss(jnp.where(jnp.arange(104) < 101, logits, -1e9), ids)

    return trained(loss_fn, params_of(np.random.default_rng(0), 104), adamw(), text(101))


def block_attention(q, k, v):
    """Softmax kept online over blocks of keys: running maximum, sum and result (as in flash attention)."""
    blocks = [jnp.moveaxis(a.reshape(a.shape[0], -1, WINDOW, *a.shape[2:]), 1, 0) for a in (k, v)]
    starts = jnp.arange(0, LENGTH, WINDOW)

    @jax.checkpoint
    def one(carry, block):
        highest, total, out = carry
        k, v, start = block
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(start + jnp.arange(WINDOW) <= jnp.arange(LENGTH)[:, None], scores, -1e9)
        higher = lax.stop_gradient(jnp.maximum(highest, scores.max(-1)))
        kept, weights = jnp.exp(highest - higher), jnp.exp(scores - higher[..., None])
        out = out * kept[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
        return (higher, total * kept + weights.sum(-1), out), None

    shape = (q.shape[0], HEADS, LENGTH)
    start = (jnp.full(shape, -1e9), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1])))
    (_, total, out), _ = lax.scan(one, start, (*blocks, starts))
    return jnp.swapaxes(out / total[..., None], 1, 2)


@case("block_attention_chunked_loss", fixed_batch=True)
def block_attention_chunked_loss():
    """Logits of 4 positions at a time: `lax.map` over chunks with remat, so that they are never all there."""

    def loss_fn(params, ids):
        x = encode(params, ids, block_attention)
        targets = jnp.roll(ids, -1, axis=1)

        @jax.checkpoint
        def chunk(part):
            x, target = part
            logits = apply(params["head"], x)
            return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]

        def chunks(a):
            return jnp.moveaxis(a.reshape(BATCH, -1, WINDOW, *a.shape[2:]), 1, 0)

        losses = jnp.moveaxis(lax.map(chunk, (chunks(x), chunks(targets))), 0, 1).reshape(BATCH, LENGTH)
        return losses[:, :-1].mean()

    return trained(loss_fn, params_of(np.random.default_rng(1), 48), adamw(), text(48))


@case("packed_documents", fixed_batch=True)
def packed_documents():
    """Several documents a row, told apart by segment; `jax.nn.dot_product_attention`; one loss for each document."""

    def loss_fn(params, batch):
        ids, segment = batch["ids"], batch["segment"]
        same = segment[:, :, None] == segment[:, None, :]

        def attend(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, mask=same[:, None], is_causal=True)

        logits = apply(params["head"], encode(params, ids, attend))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
        inside = segment[:, :-1] == segment[:, 1:]
        number = jnp.where(inside, segment[:, :-1], 3) + 4 * jnp.arange(BATCH)[:, None]
        total = jax.ops.segment_sum(losses.ravel(), number.ravel(), 4 * BATCH).reshape(BATCH, 4)[:, :3]
        count = jax.ops.segment_sum(jnp.ones(losses.size), number.ravel(), 4 * BATCH).reshape(BATCH, 4)[:, :3]
        return (total / jnp.maximum(count, 1)).sum() / (count > 0).sum()

    def make(random):
        ends = np.sort(random.integers(2, LENGTH, (BATCH, 2)), axis=1)
        segment = (np.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(-1).astype(np.int32)
        return {"ids": tokens(random, BATCH, LENGTH, vocabulary=48), "segment": segment}

    return trained(loss_fn, params_of(np.random.default_rng(2), 48), adamw(), make)

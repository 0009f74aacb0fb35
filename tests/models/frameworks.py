"""Transformers as users of Flax linen, Flax NNX, Equinox and Haiku write them."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from tests.models.data import BATCH, batches, normal, stirred, tokens
from tests.models.registry import case
from tests.models.transformers import adamw

VOCABULARY, LENGTH, WIDTH = 48, 12, 32
WIDE = nn.initializers.normal(0.5)
"""Embeddings as wide as trained ones: a layer norm of small numbers blows up their rounding."""


class LinenBlock(nn.Module):
    heads: int = 4
    cross: bool = False

    @nn.compact
    def __call__(self, x, memory=None, mask=None, deterministic=True):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False, deterministic=deterministic)(
            h, h, mask=mask
        )
        if self.cross:
            x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(nn.LayerNorm()(x), memory)
        h = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=deterministic)(nn.Dense(WIDTH)(h))


class LinenGPT(nn.Module):
    @nn.compact
    def __call__(self, ids, deterministic=True):
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=WIDE)
        x = embed(ids) + self.param("positions", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        for _ in range(2):
            x = LinenBlock()(x, mask=nn.make_causal_mask(ids), deterministic=deterministic)
        return embed.attend(nn.LayerNorm()(x))


@case("linen_gpt_tied")
def linen_gpt_tied():
    model = LinenGPT()
    params = stirred(model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=adamw())

    def step(state, batch):
        def loss_fn(params):
            key = jax.random.fold_in(jax.random.key(1), state.step)
            logits = state.apply_fn({"params": params}, batch["ids"], deterministic=False, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
            return losses.mean(), losses.mean(1)

        (loss, per_sample), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "per_sample": per_sample}

    state = state.replace(step=jnp.int32(0))
    return step, state, batches(lambda random: {"ids": tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY)})


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source, target, source_mask):
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=WIDE)(source)
        for _ in range(2):
            x = LinenBlock()(x, mask=nn.make_attention_mask(source_mask, source_mask))
        y = nn.Embed(VOCABULARY, WIDTH, embedding_init=WIDE)(target)
        for _ in range(2):
            y = LinenBlock(cross=True)(y, x, mask=nn.make_causal_mask(target))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(y))


@case("linen_encoder_decoder")
def linen_encoder_decoder():
    """Padding masks, label smoothing, and a mean over the tokens that are there."""
    model, optimizer = EncoderDecoder(), optax.chain(optax.clip_by_global_norm(1.0), adamw())
    blank = jnp.zeros((1, LENGTH), jnp.int32)
    params = stirred(model.init(jax.random.key(2), blank, blank, blank > -1))

    def loss_fn(params, batch):
        present = jnp.arange(LENGTH) < batch["lengths"][:, None]
        logits = model.apply(params, batch["source"], batch["target"], present)
        labels = optax.smooth_labels(jax.nn.one_hot(batch["target"], VOCABULARY), 0.1)
        losses = optax.softmax_cross_entropy(logits, labels)
        return (losses * present).sum() / present.sum()

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def make(random):
        pair = tokens(random, 2, BATCH, LENGTH, vocabulary=VOCABULARY)
        return {"source": pair[0], "target": pair[1], "lengths": random.integers(4, LENGTH + 1, BATCH).astype(np.int32)}

    return step, (params, optimizer.init(params)), batches(make)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.silu(self.up(self.norm2(x))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=WIDE, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for each in self.blocks:
            x = each(x)
        return self.head(x.mean(1))


@case("nnx_transformer")
def nnx_transformer():
    model = NnxTransformer(nnx.Rngs(0))
    nnx.update(model, stirred(nnx.state(model)))
    optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            logits = model(batch["ids"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    def make(random):
        return {
            "ids": tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY),
            "label": tokens(random, BATCH, vocabulary=10),
        }

    return step, state, batches(make)


class Encoder(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, heads, key):
        first, second = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
        self.mlp = eqx.nn.MLP(width, width, 40, 1, activation=jax.nn.gelu, key=second)

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class ViT(eqx.Module):
    """17 tokens with the class token, 3 channels, 5 heads: nothing divides."""

    patches: eqx.nn.Conv2d
    token: jax.Array
    positions: jax.Array
    blocks: list[Encoder]
    head: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 6)
        self.patches = eqx.nn.Conv2d(3, width, 4, 4, key=keys[0])
        self.token, self.positions = jnp.zeros((1, width)), 0.1 * jax.random.normal(keys[1], (17, width))
        self.blocks = [Encoder(width, 5, k) for k in keys[2:4]]
        self.head = eqx.nn.Linear(width, 10, key=keys[4])

    def __call__(self, image):
        x = self.patches(image)
        x = jnp.concatenate([self.token, x.reshape(x.shape[0], -1).T]) + self.positions
        for each in self.blocks:
            x = each(x)
        return self.head(x[0])


@case("equinox_vit")
def equinox_vit():
    model = ViT(30, jax.random.key(3))
    optimizer = adamw()
    params, static = eqx.partition(model, eqx.is_array)
    params = stirred(params)

    def step(state, batch):
        def loss_fn(params):
            logits = jax.vmap(eqx.combine(params, static))(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": eqx.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    def make(random):
        return {"image": normal(random, BATCH, 3, 16, 16), "label": tokens(random, BATCH, vocabulary=10)}

    return step, {"params": params, "opt_state": optimizer.init(params)}, batches(make)


def haiku_bert(ids, is_training=True):
    x = hk.Embed(VOCABULARY, WIDTH)(ids) + hk.get_parameter(
        "positions", (LENGTH, WIDTH), init=hk.initializers.RandomNormal(0.1)
    )
    for _ in range(2):
        h = hk.LayerNorm(-1, True, True)(x)
        q, k, v = (hk.Linear(WIDTH, with_bias=False, name=n)(h).reshape(*h.shape[:2], 4, -1) for n in ("q", "k", "v"))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3.0)
        x = x + hk.Linear(WIDTH)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        h = hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))))
        x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
    return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))


@case("haiku_bert_masked")
def haiku_bert_masked():
    model = hk.transform(haiku_bert)
    params = stirred(model.init(jax.random.PRNGKey(4), jnp.zeros((1, LENGTH), jnp.int32)))
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), eps=1e-3)

    def loss_fn(params, key, batch):
        masked = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.15, batch.shape)
        logits = model.apply(params, key, jnp.where(masked, 0, batch))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
        return (losses * masked).sum() / jnp.maximum(masked.sum(), 1)

    def step(state, batch):
        params, opt_state, key = state
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, now, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state, key), {"loss": loss}

    state = (params, optimizer.init(params), jax.random.PRNGKey(5))
    return step, state, batches(lambda random: tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY))

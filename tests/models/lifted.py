"""Layers looped by their framework's own transforms: linen's scan and remat, NNX's, Equinox's, Haiku's."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

from tests.models.data import BATCH, batches, normal, stirred, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, next_token_loss, trained

VOCABULARY, LENGTH, WIDTH, LAYERS = 40, 12, 32, 3
WIDE = nn.initializers.normal(0.5)


def text(random):
    return tokens(random, BATCH, LENGTH, vocabulary=VOCABULARY)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, use_bias=False)(h, h, mask=mask)
        h = nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(h), None


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=WIDE)
        layers = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = layers()(embed(ids), nn.make_causal_mask(ids))
        return embed.attend(nn.LayerNorm()(x))


@case("linen_scan_remat_dropout")
def linen_scan_remat_dropout():
    """Parameters stacked by linen, a dropout key for each layer, the key folded from the step."""
    model = LinenScanned()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, LENGTH), int))
    state = TrainState.create(apply_fn=model.apply, params=stirred(variables["params"]), tx=adamw())

    def step(state, ids):
        def loss_fn(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(2), state.step)}
            return next_token_loss(model.apply({"params": params}, ids, rngs=rngs), ids)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step, state.replace(step=jnp.int32(0)), batches(text)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, use_bias=False, rngs=rngs)
        self.gate, self.up = nnx.Linear(WIDTH, 48, rngs=rngs), nnx.Linear(WIDTH, 48, rngs=rngs)
        self.down, self.dropout = nnx.Linear(48, WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        h = self.norm2(x)
        return x + self.dropout(self.down(nnx.silu(self.gate(h)) * self.up(h)))


class NnxScanned(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=WIDE, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return NnxBlock(rngs)

        self.layers = stack(rngs)

    def __call__(self, ids):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(ids), self.layers))


@case("nnx_scan_dropout")
def nnx_scan_dropout():
    """Layers made under vmap and run under scan; their random streams are state that counts up."""
    model = NnxScanned(nnx.Rngs(0, dropout=1))
    nnx.update(model, stirred(nnx.state(model, nnx.Param)))
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw()), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, ids):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda model: next_token_loss(model(ids), ids))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return step, state, batches(text)


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=second)

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(x)


class EquinoxStacked(eqx.Module):
    embed: eqx.nn.Embedding
    layers: EquinoxBlock
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=first)
        self.layers = eqx.filter_vmap(EquinoxBlock)(jax.random.split(second, LAYERS))
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=third)

    def __call__(self, ids):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        @eqx.filter_checkpoint
        def one(x, layer):
            return eqx.combine(layer, static)(x), None

        x, _ = lax.scan(one, jax.vmap(self.embed)(ids), arrays)
        return jax.vmap(self.head)(x)


@case("equinox_stacked_remat")
def equinox_stacked_remat():
    """One module for all layers, its leaves stacked; the model itself is vmapped over samples."""
    params, static = eqx.partition(EquinoxStacked(jax.random.key(3)), eqx.is_array)

    def loss_fn(params, ids):
        return next_token_loss(jax.vmap(eqx.combine(params, static))(ids), ids)

    return trained(loss_fn, stirred(params), optax.lion(1e-3), text)


@case("haiku_layer_stack")
def haiku_layer_stack():
    """Mixer layers under `hk.layer_stack` with remat; batch statistics of the inputs are Haiku state."""

    def mixer(x):
        h = hk.LayerNorm(-1, True, True)(x)
        across = hk.nets.MLP([24, LENGTH], with_bias=False, activation=jax.nn.gelu)
        x = x + jnp.swapaxes(across(jnp.swapaxes(h, 1, 2)), 1, 2)
        return x + hk.nets.MLP([48, 20], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))

    def network(x):
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        x = hk.layer_stack(LAYERS)(hk.remat(mixer))(x)
        return hk.Linear(5)(x.mean(1))

    model, optimizer = hk.without_apply_rng(hk.transform_with_state(network)), adamw()
    params, statistics = model.init(jax.random.PRNGKey(5), jnp.zeros((2, LENGTH, 20)))
    params = stirred(params)

    def step(state, batch):
        def loss_fn(params):
            logits, statistics = model.apply(params, state["statistics"], batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (statistics, losses)

        (loss, (statistics, losses)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "statistics": statistics, "opt_state": opt_state}, {"loss": loss, "losses": losses}

    def make(random):
        return {"x": 0.5 + normal(random, BATCH, LENGTH, 20), "label": tokens(random, BATCH, vocabulary=5)}

    return step, {"params": params, "statistics": statistics, "opt_state": optimizer.init(params)}, batches(make)

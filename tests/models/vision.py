"""Convolutional networks: BatchNorm, depthwise and grouped convolutions, transposed ones, pooling."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from tests.models.data import BATCH, batches, dense, normal, on_device, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, apply


def images(size=8, channels=3, classes=10):
    return lambda random: {
        "image": normal(random, BATCH, size, size, channels),
        "label": tokens(random, BATCH, vocabulary=classes),
    }


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Residual(nn.Module):
    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train):
        norm = lambda: nn.BatchNorm(use_running_average=not train, momentum=0.9)  # noqa: E731
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3), use_bias=False)(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = Residual(8)(x, train)
        x = Residual(16, 2)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


@case("resnet_batchnorm", refused="batch statistics")
def resnet_batchnorm():
    model = ResNet()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9, nesterov=True))

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, updates = model.apply(variables, batch["image"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["label"]), (updates["batch_stats"], logits)

        (loss, (stats, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": stats, "opt_state": opt_state}, {"loss": loss, "accuracy": accuracy}

    return step, {**variables, "opt_state": optimizer.init(variables["params"])}, batches(images())


class Depthwise(nnx.Module):
    """Depthwise and grouped convolutions with squeeze-and-excite."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 16, (3, 3), strides=2, rngs=rngs)
        self.depthwise = nnx.Conv(16, 16, (3, 3), feature_group_count=16, rngs=rngs)
        self.grouped = nnx.Conv(16, 32, (3, 3), feature_group_count=4, padding="VALID", rngs=rngs)
        self.squeeze, self.excite = nnx.Linear(32, 8, rngs=rngs), nnx.Linear(8, 32, rngs=rngs)
        self.norm, self.head = nnx.GroupNorm(32, num_groups=4, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.swish(self.stem(x))
        x = x + nnx.swish(self.depthwise(x))
        x = self.norm(self.grouped(x))
        gate = nnx.sigmoid(self.excite(nnx.relu(self.squeeze(x.mean((1, 2))))))
        return self.head((x * gate[:, None, None]).mean((1, 2)))


@case("nnx_depthwise")
def nnx_depthwise():
    graph, params = nnx.split(Depthwise(nnx.Rngs(1)))
    optimizer = adamw()

    def step(state, batch):
        def loss_fn(params):
            return cross_entropy(nnx.merge(graph, params)(batch["image"]), batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return step, {"params": params, "opt_state": optimizer.init(params)}, batches(images())


class UNet(eqx.Module):
    down: list[eqx.nn.Conv2d]
    up: list[eqx.nn.ConvTranspose2d]
    mix: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.down = [eqx.nn.Conv2d(1, 8, 3, 2, 1, key=keys[0]), eqx.nn.Conv2d(8, 16, 3, 2, 1, key=keys[1])]
        self.up = [eqx.nn.ConvTranspose2d(16, 8, 2, 2, key=keys[2]), eqx.nn.ConvTranspose2d(8, 4, 2, 2, key=keys[3])]
        self.mix = [eqx.nn.Conv2d(16, 8, 3, padding=1, key=keys[4]), eqx.nn.Conv2d(5, 1, 3, padding=1, key=keys[5])]
        self.norms = [eqx.nn.GroupNorm(4, 8), eqx.nn.GroupNorm(4, 16)]

    def __call__(self, x):
        a = jax.nn.silu(self.norms[0](self.down[0](x)))
        b = jax.nn.silu(self.norms[1](self.down[1](a)))
        y = jax.nn.silu(self.mix[0](jnp.concatenate([self.up[0](b), a])))
        return self.mix[1](jnp.concatenate([self.up[1](y), x]))


@case("equinox_unet")
def equinox_unet():
    params, static = eqx.partition(UNet(jax.random.key(2)), eqx.is_array)
    optimizer = adamw(3e-3)

    def step(state, batch):
        def loss_fn(params):
            clean = jax.vmap(eqx.combine(params, static))(batch["noisy"])
            return jnp.abs(clean - batch["clean"]).mean() + 0.1 * ((clean - batch["clean"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    def make(random):
        clean = normal(random, BATCH, 1, 8, 8)
        return {"clean": clean, "noisy": clean + 0.1 * normal(random, BATCH, 1, 8, 8)}

    return step, {"params": params, "opt_state": optimizer.init(params)}, batches(make)


@case("wide_resnet_plain", refused="batch statistics")
def wide_resnet_plain():
    random = np.random.default_rng(3)

    def kernel(size, fan_in, out):
        return normal(random, size, size, fan_in, out) / np.sqrt(size * size * fan_in).astype(np.float32)

    params = on_device(
        {
            "stem": kernel(3, 3, 16),
            "head": dense(random, 32, 10),
            "blocks": [
                {"first": kernel(3, 16, 32), "second": kernel(3, 32, 32), "skip": kernel(1, 16, 32)},
                {"first": kernel(3, 32, 32), "second": kernel(3, 32, 32)},
            ],
        }
    )
    optimizer = optax.sgd(0.05, momentum=0.9)

    def convolve(x, kernel, stride=1):
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def normalize(x):
        return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-3)

    def loss_fn(params, batch):
        x = convolve(batch["image"], params["stem"])
        for number, each in enumerate(params["blocks"]):
            stride = 2 if number == 0 else 1
            h = jax.nn.relu(normalize(x))
            skip = convolve(h, each["skip"], stride) if "skip" in each else x
            x = skip + convolve(jax.nn.relu(normalize(convolve(h, each["first"], stride))), each["second"])
        logits = apply(params["head"], jax.nn.relu(x).mean((1, 2)))
        return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return step, {"params": params, "opt_state": optimizer.init(params)}, batches(images())


def convnext(x):
    x = hk.Conv2D(24, 2, 2)(x)
    h = hk.DepthwiseConv2D(1, 5)(x)
    h = hk.Linear(24)(jax.nn.gelu(hk.Linear(48)(hk.LayerNorm(-1, True, True)(h))))
    x = x + h * hk.get_parameter("scale", (24,), init=hk.initializers.Constant(0.1))
    x = hk.avg_pool(x, (2, 2, 1), (2, 2, 1), "VALID") + hk.max_pool(x, (3, 3, 1), (2, 2, 1), "SAME")
    return hk.Linear(10)(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect").mean((1, 2)))


@case("haiku_convnext_pooling")
def haiku_convnext_pooling():
    model = hk.without_apply_rng(hk.transform(convnext))
    params = model.init(jax.random.PRNGKey(4), jnp.zeros((1, 8, 8, 3)))
    optimizer = adamw()

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(model.apply(p, batch["image"]), batch["label"]))(
            params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, optimizer.init(params)), batches(images())

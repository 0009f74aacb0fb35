"""The U-Net of the benchmarks: a denoising diffusion model, whose layers are all different; AdamW with clipping.

In:     `Config`.
Out:    `make_step`: a train step and the types of its arguments; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from parts import apply, dense_params, make_train_step, norm_params, state_types


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are like those of Ho et al., NeurIPS 2020, for 64 x 64 pixels."""

    width: int = 128
    multiples: tuple[int, ...] = (1, 2, 4)
    blocks: int = 2
    attention: tuple[int, ...] = (2,)
    heads: int = 4
    groups: int = 32
    pixels: int = 64
    batch: int = 256


def make_step(config: Config) -> tuple[Callable[..., Any], Any, Any]:
    """The step, and the types of its state and batch."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    train_step = make_train_step(partial(loss_of, config=config), optimizer)
    state = state_types(jax.eval_shape(partial(init_params, config)), optimizer)
    images = jax.ShapeDtypeStruct((config.batch, config.pixels, config.pixels, 3), jnp.float32)
    time = jax.ShapeDtypeStruct((config.batch,), jnp.int32)
    return train_step, state, {"images": images, "noise": images, "time": time}


def init_params(config: Config) -> Any:
    """Parameters: lists of levels of blocks, down, in the middle and up again."""
    time = 4 * config.width

    def conv(size, channels_in, channels):
        return {"kernel": jnp.zeros((size, size, channels_in, channels)), "bias": jnp.zeros(channels)}

    def block(channels_in, channels, attends):
        made = {
            "norm1": norm_params(channels_in),
            "conv1": conv(3, channels_in, channels),
            "time": dense_params(time, channels),
            "norm2": norm_params(channels),
            "conv2": conv(3, channels, channels),
        }
        if channels_in != channels:
            made["skip"] = dense_params(channels_in, channels)
        if attends:
            made["norm3"], made["qkv"], made["out"] = (
                norm_params(channels),
                dense_params(channels, 3 * channels),
                dense_params(channels, channels),
            )
        return made

    channels, left, down = config.width, [config.width], []
    for level, multiple in enumerate(config.multiples):
        blocks = []
        for _ in range(config.blocks):
            blocks.append(block(channels, multiple * config.width, level in config.attention))
            channels = multiple * config.width
            left.append(channels)
        level_down = {"blocks": blocks}
        if level + 1 < len(config.multiples):
            level_down["shrink"] = conv(3, channels, channels)
            left.append(channels)
        down.append(level_down)
    middle, up = [block(channels, channels, True), block(channels, channels, False)], []
    for level, multiple in reversed(list(enumerate(config.multiples))):
        blocks = []
        for _ in range(config.blocks + 1):
            blocks.append(block(channels + left.pop(), multiple * config.width, level in config.attention))
            channels = multiple * config.width
        up.append({"blocks": blocks, **({"grow": conv(3, channels, channels)} if level else {})})
    return {
        "time": [dense_params(config.width, time), dense_params(time, time)],
        "first": conv(3, 3, config.width),
        "down": down,
        "middle": middle,
        "up": up,
        "norm": norm_params(channels),
        "last": conv(3, channels, 3),
    }


def loss_of(params: Any, batch: Any, config: Config) -> jax.Array:
    """Mean squared error of the noise that was guessed; time, of a thousand, says how much there is."""
    level = jnp.sin(jnp.pi / 2000 * batch["time"].astype(jnp.float32))[:, None, None, None] ** 2
    noisy = jnp.sqrt(1 - level) * batch["images"] + jnp.sqrt(level) * batch["noise"]
    angles = batch["time"].astype(jnp.float32)[:, None] * jnp.exp(-jnp.linspace(0.0, 9.2, config.width // 2))
    time = apply(params["time"][0], jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
    time = jax.nn.silu(apply(params["time"][1], jax.nn.silu(time)))
    x = convolve(params["first"], noisy)
    left = [x]
    for part in params["down"]:
        for block in part["blocks"]:
            x = residual(block, x, time, config)
            left.append(x)
        if "shrink" in part:
            x = convolve(part["shrink"], x, 2)
            left.append(x)
    for block in params["middle"]:
        x = residual(block, x, time, config)
    for part in params["up"]:
        for block in part["blocks"]:
            x = residual(block, jnp.concatenate([x, left.pop()], -1), time, config)
        if "grow" in part:
            x = convolve(part["grow"], jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
    guessed = convolve(params["last"], jax.nn.silu(normalize(params["norm"], x, config.groups)))
    return ((guessed - batch["noise"]) ** 2).mean()


def residual(block: Any, x: jax.Array, time: jax.Array, config: Config) -> jax.Array:
    """Two convolutions beside an identity, then attention."""
    y = convolve(block["conv1"], jax.nn.silu(normalize(block["norm1"], x, config.groups)))
    y = y + apply(block["time"], time)[:, None, None, :]
    y = convolve(block["conv2"], jax.nn.silu(normalize(block["norm2"], y, config.groups)))
    x = y + (apply(block["skip"], x) if "skip" in block else x)
    return x + attention(block, normalize(block["norm3"], x, config.groups), config.heads) if "qkv" in block else x


def attention(block: Any, x: jax.Array, heads: int) -> jax.Array:
    """Self-attention of pixels."""
    batch, rows, columns, channels = x.shape
    x = x.reshape(batch, rows * columns, channels)
    q, k, v = jnp.split(apply(block["qkv"], x).reshape(batch, rows * columns, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (channels // heads) ** 0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return apply(block["out"], mixed.reshape(batch, rows, columns, channels))


def normalize(layer: Any, x: jax.Array, groups: int) -> jax.Array:
    """Group norm."""
    batch, rows, columns, channels = x.shape
    grouped = x.reshape(batch, rows, columns, groups, channels // groups)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    centred = grouped - mean
    scale = jax.lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return (centred * scale).reshape(x.shape) * layer["scale"] + layer["bias"]


def convolve(layer: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=numbers)
    return x + layer["bias"]

"""The Wide-ResNet of the benchmarks: bottleneck blocks, batch normalization, SGD with momentum.

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
from parts import make_train_step, state_types


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are Wide-ResNet-50's, twice as wide (Zagoruyko and Komodakis, BMVC 2016, sec. 3).

    `base`: channels of the stem, and a quarter of those that leave the first blocks. `width`: inside these. `entry`: behind
    their first convolution, if that is another number.
    """

    depths: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 128
    base: int = 64
    entry: int = 0
    classes: int = 1000
    pixels: int = 224
    batch: int = 256


def make_step(config: Config) -> tuple[Callable[..., Any], Any, Any]:
    """The step, and the types of its state and batch."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    train_step = make_train_step(partial(loss_of, config=config), optimizer)
    state = state_types(jax.eval_shape(partial(init_params, config)), optimizer)
    images = jax.ShapeDtypeStruct((config.batch, config.pixels, config.pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((config.batch,), jnp.int32)
    return train_step, state, {"images": images, "labels": labels}


def init_params(config: Config) -> Any:
    """Parameters, a list of blocks."""

    def conv(size, channels_in, channels):
        return {
            "kernel": jnp.zeros((size, size, channels_in, channels)),
            "scale": jnp.ones(channels),
            "bias": jnp.zeros(channels),
        }

    blocks, channels_in = [], config.base
    for stage, depth in enumerate(config.depths):
        inner, channels = config.width << stage, 4 * config.base << stage
        entry = config.entry << stage or inner
        for number in range(depth):
            block = {
                "reduce": conv(1, channels_in, entry),
                "middle": conv(3, entry, inner),
                "expand": conv(1, inner, channels),
            }
            if number == 0:
                block["shortcut"] = conv(1, channels_in, channels)
            blocks.append(block)
            channels_in = channels
    return {"stem": conv(7, 3, config.base), "blocks": blocks, "head": jnp.zeros((channels_in, config.classes))}


def loss_of(params: Any, batch: Any, config: Config) -> jax.Array:
    """Mean cross entropy of the class."""
    x = jax.nn.relu(convolve(params["stem"], batch["images"], 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    first = {sum(config.depths[:stage]) for stage in range(1, len(config.depths))}
    for number, block in enumerate(params["blocks"]):
        stride = 2 if number in first else 1
        y = jax.nn.relu(convolve(block["reduce"], x))
        y = jax.nn.relu(convolve(block["middle"], y, stride))
        y = convolve(block["expand"], y)
        x = jax.nn.relu(y + (convolve(block["shortcut"], x, stride) if "shortcut" in block else x))
    logits = x.mean((1, 2)) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def convolve(layer: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution and batch normalization."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=numbers)
    mean = x.mean((0, 1, 2))
    variance = ((x - mean) ** 2).mean((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["bias"]

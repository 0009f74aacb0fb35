"""Cases of whole layers with their gradients, and of updates, to measure how well compilers fuse.

In:     whether the devices are CPU devices.
Out:    `Case`s whose programs and kernels are those of a plan (`emitted.py`).
Method: thin layers, whose products take little time: most of it is passes over memory and launches, which the cost model
        counts as with perfect fusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.calibrate.cases import SMALL, Case, normed
from autopar.calibrate.emitted import emitted
from autopar.cost.kernels import MemoryPass


def blocks(is_cpu: bool) -> Iterator[Case]:
    """A transformer layer and its gradient, alone and in a loop; and the update of a parameter, which fuses differently."""
    width, heads = (128, 4) if is_cpu else (512, 8)
    length = 128 if is_cpu else 1024
    yield _layer(8, length, width, heads, 1, is_cpu)
    yield _update(2**20 if is_cpu else 2**24)  # exceeds caches, as parameters do between two steps
    yield _layer(2, length, width, heads, 2, is_cpu)


def _layer(batch: int, length: int, width: int, heads: int, layers: int, is_cpu: bool) -> Case:
    shapes = ((batch, length, width), (layers, width, 3 * width), (layers, width, width), (layers, width))

    def layer(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        mixed, up, scale = weights
        queries, keys, values = (
            part.reshape(batch, length, heads, width // heads)
            for part in jnp.split((normed(x) * scale) @ mixed, 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
        found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)
        x = x + found.reshape(x.shape)
        return x + jax.nn.gelu((normed(x) * scale) @ up)

    def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
        if layers == 1:
            return jnp.mean(layer(x, [w[0] for w in weights]) ** 2)
        return jnp.mean(lax.scan(lambda x, own: (layer(x, own), None), x, weights)[0] ** 2)

    def turn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        along, *others = jax.grad(loss, argnums=tuple(range(len(shapes))))(x, *weights)
        return x * 0.5 + SMALL * along + SMALL * sum(grad.sum() for grad in others)

    text = f"{'a layer' if layers == 1 else f'a loop of {layers} layers'} of {width}, {batch} x {length} tokens"
    run, kernels = emitted(turn, shapes, "float32", {0: frozenset({0})}, is_cpu)
    return Case("layer", text, shapes, "float32", run if is_cpu else turn, kernels)


def _update(size: int) -> Case:
    """Adam's update of one parameter."""

    def turn(
        value: jax.Array, mean: jax.Array, square: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        return value - SMALL * mean / (jnp.sqrt(square) + 1e-8), mean, square

    kernel = MemoryPass(7 * 4.0 * size, 1.0, "parameters")  # reads four arrays, writes three
    return Case("update", f"Adam of {size} float32", ((size,),) * 4, "float32", turn, (kernel,), num_made=3)

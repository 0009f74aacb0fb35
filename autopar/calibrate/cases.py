"""Defines the cases that are measured: loops of one kernel or collective each, with their kernels in the cost model.

In:     the number of devices, whether they are CPU devices.
Out:    `Case`s in the order in which they are measured, the most important first, since the time may run out.
Method: all devices do the same at the same time, as in a step. Each turn of a loop depends on the one before, so that none
        can be optimized away, and magnitudes stay constant: a product is `x -> x0 / 2 + small * (x w) v`, whose addition is
        a pass of its own in the model, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.calibrate.emitted import emitted
from autopar.cost.kernels import FusedProducts, Kernel, MemoryPass, Product
from autopar.cost.steps import COLLECTIVE_KINDS, CollectiveKind

SMALL = 1e-6
"""Factor that keeps magnitudes constant however long a loop runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """A loop to be measured.

    Attributes:
        kind: `"product"`, `"pass"`, `"all-reduce"`, ...
        text: Description: shapes and dtypes.
        shapes: Local shapes of the arrays: first of those carried from turn to turn, then of those only read.
        dtype: Their dtype.
        turn: One turn on one device, from these arrays to the carried ones; the axis of a group is `"x"`.
        num_made: Number of carried arrays; if several, `turn` returns a tuple.
        kernels: The kernels of a turn in the cost model.
        collectives: The collectives of a turn in the cost model: (kind, bytes on one device).
        group: Number of devices in a group that communicates; 1: no communication.
        is_fitted: Whether parameters are fitted to it; else it only tests them.
    """

    kind: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    turn: Callable[..., jax.Array | tuple[jax.Array, ...]]
    kernels: tuple[Kernel, ...]
    collectives: tuple[tuple[CollectiveKind, float], ...] = ()
    group: int = 1
    is_fitted: bool = True
    num_made: int = 1


def all_cases(num_devices: int, is_cpu: bool, blocks: Iterable[Case] = ()) -> list[Case]:
    """All cases for a host: the first of each kind, then the second of each, and so on; `blocks` are another kind."""
    groups = [size for size in range(num_devices, 1, -1) if num_devices % size == 0 and (size & (size - 1)) == 0]
    groups = list(dict.fromkeys([num_devices, *groups])) if num_devices > 1 else []
    kinds = [
        list(_passes(is_cpu)),
        list(_rows(is_cpu)),
        list(_products(is_cpu)),
        list(_turned(is_cpu)),
        list(blocks),
        list(_convolutions(is_cpu)),
        list(_attention(is_cpu)),
        *(list(_collectives(kind, groups, is_cpu)) for kind in _COLLECTIVES),
        list(_indexing(is_cpu)),
    ]
    rounds = itertools.zip_longest(*kinds)
    return [case for each in rounds for case in each if case is not None]


# Kernels.


def _passes(is_cpu: bool) -> Iterator[Case]:
    sizes = (2**20, 2**18, 2**22, 2**19, 2**21) if is_cpu else (2**26, 2**24, 2**28, 2**20)
    for size in sizes:
        yield Case(
            "pass",
            f"x / 2 + y of {size} float32",
            ((size,), (size,)),
            "float32",
            lambda x, y: x * 0.5 + y,
            (MemoryPass(12.0 * size),),
        )


def normed(x: jax.Array) -> jax.Array:
    """Rows with mean 0 and variance 1."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _rows(is_cpu: bool) -> Iterator[Case]:
    """Work between products in models: norms, softmax, an activation, a transpose."""
    rows, width = (2**11, 256) if is_cpu else (2**15, 2**11)
    size = 4.0 * rows * width

    def norm(x: jax.Array, y: jax.Array) -> jax.Array:
        return normed(x) + y

    def softmax(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.nn.softmax(x) + y

    def activation(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.nn.gelu(x) * 0.5 + y

    def transpose(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x.reshape(2, rows // 2, width).swapaxes(1, 2) * 0.5).reshape(rows, width) + y

    for name, turn, kernels in (
        ("norm", norm, (MemoryPass(size), MemoryPass(size), MemoryPass(3 * size))),
        ("softmax", softmax, (MemoryPass(size), MemoryPass(size), MemoryPass(3 * size))),
        ("gelu", activation, (MemoryPass(3 * size),)),
        ("transpose", transpose, (MemoryPass(3 * size, turned_bytes=size),)),
    ):
        kind = "transpose" if name == "transpose" else "pass"
        yield Case(kind, f"{name} of [{rows}, {width}] float32", ((rows, width),) * 2, "float32", turn, kernels)


def _products(is_cpu: bool) -> Iterator[Case]:
    """Products of (count, rows, columns, depth): large, small, tall, batched."""
    if is_cpu:
        shapes = [(1, 256, 256, 256), (1, 64, 1024, 1024), (1, 512, 512, 64), (1, 64, 64, 64), (1, 32, 1024, 1024)]
        shapes += [(16, 64, 64, 64), (1, 1024, 64, 256), (1, 64, 1024, 256), (1, 128, 128, 128), (1, 1024, 1024, 64)]
        shapes += [(1, 512, 512, 512)]
        few = [(1, 256, 256, 256), (1, 64, 1024, 256)]
        both = [*((shape, "float32") for shape in shapes), *((shape, "bfloat16") for shape in few)]
    else:
        shapes = [(1, 8192, 8192, 8192), (1, 1024, 1024, 1024), (1, 4096, 4096, 4096), (1, 8192, 1024, 4096)]
        shapes += [(1, 512, 4096, 4096), (1, 2048, 2048, 2048), (64, 512, 512, 128), (1, 8192, 4096, 1024)]
        shapes += [(1, 4096, 1536, 1536), (1, 512, 512, 512), (1, 8192, 16384, 4096)]
        few = [(1, 8192, 8192, 8192), (1, 2048, 2048, 2048)]
        both = [*((shape, "bfloat16") for shape in shapes), *((shape, "float32") for shape in few)]
        both.insert(2, both.pop(-2))
    first, *others = both
    yield product(*first[0], first[1])  # a rate is worth more than a launch
    yield product(1, 8, 8, 8, "float32", "launch")
    for shape, dtype in others:
        yield product(*shape, dtype)


def product(count: int, rows: int, columns: int, depth: int, dtype: str, kind: str = "product") -> Case:
    """Two products per turn: `[rows, depth] x [depth, columns]`, and the result times `[columns, depth]`."""
    there = Product(count, rows, columns, depth, _bytes(dtype, count, rows, columns, depth), (dtype, dtype))
    back = Product(count, rows, depth, columns, there.num_bytes, (dtype, dtype))
    size = count * rows * depth
    text = f"[{rows}, {depth}] x [{depth}, {columns}] and back, {dtype}"
    return Case(
        kind,
        f"{count} x {text}" if count > 1 else text,
        ((count, rows, depth), (count, rows, depth), (count, depth, columns), (count, columns, depth)),
        dtype,
        lambda x, x0, w, v: x0 * 0.5 + SMALL * ((x @ w) @ v),
        (there, back, MemoryPass(3.0 * size * jnp.dtype(dtype).itemsize)),
    )


def _turned(is_cpu: bool) -> Iterator[Case]:
    """Products that contract the leading dim of the first operand, as those of weight gradients do."""
    sides = ((256, 1024, 64), (256, 256, 256), (256, 256, 1024)) if is_cpu else ((4096, 4096, 4096), (1024, 8192, 2048))
    dtype = "float32" if is_cpu else "bfloat16"
    for rows, columns, depth in sides:
        num_bytes = _bytes(dtype, 1, rows, columns, depth)
        there, back = (
            Product(1, rows, columns, depth, num_bytes, (dtype, dtype), is_turned=True),
            Product(1, depth, columns, rows, num_bytes, (dtype, dtype), is_turned=True),
        )

        def turn(x: jax.Array, x0: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            across = lambda a, b: lax.dot_general(a, b, (((0,), (0,)), ((), ())))  # noqa: E731
            return x0 * 0.5 + SMALL * across(v, across(w, x))

        shapes = ((depth, columns), (depth, columns), (depth, rows), (rows, depth))
        yield Case(
            "turned",
            f"[{depth}, {rows}]' x [{depth}, {columns}] and back, {dtype}",
            shapes,
            dtype,
            emitted(turn, shapes, dtype)[0] if is_cpu else turn,
            (there, back, MemoryPass(3.0 * depth * columns * jnp.dtype(dtype).itemsize)),
        )


def _bytes(dtype: str, count: int, rows: int, columns: int, depth: int) -> float:
    return float(count * (rows * depth + depth * columns + rows * columns) * jnp.dtype(dtype).itemsize)


def _convolutions(is_cpu: bool) -> Iterator[Case]:
    """A convolution with both of its gradients, which take longer than it does; then convolutions alone."""
    if is_cpu:
        sizes = [(4, 16, 64, "float32"), (2, 32, 32, "float32")]
    else:
        sizes = [(64, 32, 512, "bfloat16"), (64, 64, 128, "bfloat16")]
    yield _with_gradients(*sizes[0], is_cpu)
    for images, side, channels, dtype in sizes:
        pixels = images * side * side
        num_bytes = (2 * pixels * channels + 9 * channels * channels) * jnp.dtype(dtype).itemsize
        kernel = Product(1, pixels, channels, 9 * channels, num_bytes, (dtype, dtype), is_convolution=True)
        shape = (images, side, side, channels)

        def turn(x: jax.Array, x0: jax.Array, w: jax.Array) -> jax.Array:
            return x0 * 0.5 + SMALL * _convolved(x, w)

        yield Case(
            "convolution",
            _of_images(images, side, channels, dtype),
            (shape, shape, (3, 3, channels, channels)),
            dtype,
            turn,
            (kernel, MemoryPass(3.0 * pixels * channels * jnp.dtype(dtype).itemsize)),
        )


def _with_gradients(images: int, side: int, channels: int, dtype: str, is_cpu: bool) -> Case:
    shapes = (images, side, side, channels), (3, 3, channels, channels)

    def turn(x: jax.Array, w: jax.Array) -> jax.Array:
        own, of_filter = jax.grad(lambda x, w: jnp.mean(_convolved(x, w) ** 2), argnums=(0, 1))(x, w)
        return x * 0.5 + SMALL * own + SMALL * of_filter.sum()

    run, kernels = emitted(turn, shapes, dtype, {0: frozenset({0})}, is_cpu)
    text = f"{_of_images(images, side, channels, dtype)}, with its gradients"
    return Case("convolution", text, shapes, dtype, run if is_cpu else turn, kernels)


def _convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _of_images(images: int, side: int, channels: int, dtype: str) -> str:
    return f"{images} images of {side} x {side} x {channels}, 3 x 3, {dtype}"


def _attention(is_cpu: bool) -> Iterator[Case]:
    """cuDNN's attention kernel; XLA's CPU backend has none."""
    if is_cpu:
        return
    for batch, length, heads, depth in ((4, 4096, 16, 128), (8, 2048, 16, 64)):
        shape = (batch, length, heads, depth)
        size = math.prod(shape)
        flops = 4.0 * batch * heads * length * length * depth

        def turn(x: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(x, k, v, implementation="cudnn")

        yield Case(
            "attention",
            f"{batch} x {heads} heads of {depth}, {length} long, bfloat16",
            (shape,) * 3,
            "bfloat16",
            turn,
            (FusedProducts(flops, 8.0 * size, ("bfloat16",) * 3),),
        )


def _indexing(is_cpu: bool) -> Iterator[Case]:
    """Gathers and scatters of rows."""
    rows, width = (2**12, 64) if is_cpu else (2**17, 512)
    moved = 4.0 * rows * width

    def pick(x: jax.Array, table: jax.Array) -> jax.Array:
        number = (jnp.arange(rows) * 7919 + x[0, 0].astype(jnp.int32)) % rows
        return table[number] * 0.5

    def place(x: jax.Array, updates: jax.Array) -> jax.Array:
        return (x * 0.5).at[(jnp.arange(rows) * 7919) % rows].add(updates)

    for kind, turn, kernels in (
        ("gather", pick, (MemoryPass(2 * moved),)),
        ("scatter", place, (MemoryPass(2 * moved), MemoryPass(3 * moved))),
    ):
        shape = (rows, width)
        yield Case(kind, f"{rows} rows of {width} float32", (shape, shape), "float32", turn, kernels, is_fitted=False)


# Collectives.


def _collectives(kind: CollectiveKind, groups: Sequence[int], is_cpu: bool) -> Iterator[Case]:
    """A collective by size and group; short ones on CPUs between products, as in steps.

    A long and a short one, which tell rate and latency apart, in each group before other sizes.
    """
    first, others = ((2**20, 0), (2**22,)) if is_cpu else ((2**26, 2**14), (2**20, 2**23, 2**28))
    for size, group in (*((s, g) for g in groups for s in first), *((s, g) for s in others for g in groups)):
        yield collective(kind, size, group) if size else between_products(kind, group)


_COLLECTIVES = tuple(kind for kind in COLLECTIVE_KINDS if kind != "ragged-all-to-all")
"""What is measured of them: an all-to-all of unequal counts is taken to be one of equal counts."""


def collective(kind: CollectiveKind, num_bytes: int, group: int) -> Case:
    """One collective in groups of neighbours; the rest of a turn is a pass in the model, too."""
    count = max(1, num_bytes // 4 // group) * group
    part = count // group
    neighbours = [(k, (k + 1) % group) for k in range(group)]

    def all_reduce(x: jax.Array) -> jax.Array:
        return lax.psum(x, "x") * (1.0 / group)

    def all_gather(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x, "x", tiled=True)
        return lax.dynamic_slice(whole, (lax.axis_index("x") * part,), (part,))

    def reduce_scatter(x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, lax.psum_scatter(x, "x", tiled=True) * (1.0 / group), (0,))

    def all_to_all(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "x", 0, 0, tiled=True)

    def permute(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "x", neighbours)

    whole, own = (MemoryPass(8.0 * count),), (MemoryPass(8.0 * part),)
    turn, shape, kernels = {
        "all-reduce": (all_reduce, (count,), whole),
        "all-gather": (all_gather, (part,), own),
        "reduce-scatter": (reduce_scatter, (count,), own),
        "all-to-all": (all_to_all, (group, part), ()),
        "collective-permute": (permute, (count,), whole),  # the loop copies what arrived
    }[kind]
    text = f"{4 * count} bytes on each of {group} devices"
    return Case(kind, text, (shape,), "float32", turn, kernels, ((kind, 4.0 * count),), group)  # type: ignore[arg-type]


def between_products(kind: CollectiveKind, group: int) -> Case:
    """A short collective of what products make, which read its result: where devices share cores, these may rest until the
    last device has made its own, which a row of collectives alone does not show."""
    near = product(1, 32, 64, 64, "float32")
    whole, parts = near.shapes[0], group if kind == "all-gather" else 1
    sent = collective(kind, 4 * math.prod(whole) * parts, group)

    def turn(x: jax.Array, *others: jax.Array) -> jax.Array:
        made = near.turn(x, *others)
        assert isinstance(made, jax.Array), "it carries one array"
        return jnp.reshape(sent.turn(made.reshape(sent.shapes[0])), whole)

    text, kernels = f"{sent.text}, between products", (*near.kernels, *sent.kernels)
    return Case(kind, text, near.shapes, near.dtype, turn, kernels, sent.collectives, group)


def dispatched() -> Any:
    """A program that does next to nothing, to measure dispatch."""
    return lambda *arrays: [x + 1 for x in arrays]

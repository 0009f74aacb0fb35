"""Seconds of one kernel on one device.

In:     what a kernel does (`Product`, `FusedProducts`, `Pass`), the device.
Out:    seconds.
Method: a kernel is launched, then it computes and moves bytes at once, and the longer of the two counts (the roofline:
        Williams, Waterman & Patterson, CACM 2009). How fast a product computes depends on its shape: it is cut into tiles,
        the tiles are dealt out to the cores in waves, and a wave takes the time of a tile (NVIDIA, "Matrix multiplication
        background user's guide": tile and wave quantization). A tile is loaded while it is multiplied, which costs small
        tiles more, and a core needs a moment to begin with one and to write it. Of the tiles that a library has, the best.
        Kernels of several products read their operands before the first one and write behind the last: that adds to the
        rest, so that attention over few tokens is slower for its FLOPs (Dao, "FlashAttention-2", 2023, figures 5 to 7).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from autopar.mesh import Device

SMALLEST_TILE = 32
"""No side of a tile is shorter: fewer rows do not fill the units that multiply."""


@dataclass(frozen=True, slots=True)
class Product:
    """Products of matrices, `[rows, depth] x [depth, columns]`, so many at once.

    Attributes:
        count: How many.
        rows: Of the first operand and the result.
        columns: Of the second and the result.
        depth: What is summed over.
        num_bytes: Read and written.
        dtypes: Names of the operands' element types.
        highest: Whether all digits of float32 are asked for.
        work: FLOPs of one multiplication with its addition; complex ones have more.
        is_convolution: Whether it is the implicit product of one.
        is_turned: Whether the first operand lies with its depth before its rows.
    """

    count: int
    rows: int
    columns: int
    depth: int
    num_bytes: float
    dtypes: tuple[str, ...]
    highest: bool = False
    work: float = 2.0
    is_convolution: bool = False
    is_turned: bool = False


@dataclass(frozen=True, slots=True)
class FusedProducts:
    """A kernel of several products whose intermediate results stay inside, or any other that computes much."""

    flops: float
    num_bytes: float
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """Elementwise work and sums: bytes that go through; `launches` kernels, or parts of one.

    What models do is counted as if compilers made one kernel of all that stands together; `on` what it works tells which of
    the device's numbers says how much more they do. What is measured by itself is counted as it is. Of the bytes,
    `turned_bytes` are of arrays that lie in another order of dims than that in which they are read.
    """

    num_bytes: float
    launches: float = 1.0
    on: Literal["samples", "parameters", "alone"] = "alone"
    turned_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Bytes between the memories of a device and of its host."""

    num_bytes: float


Kernel = Product | FusedProducts | Pass | HostCopy


@functools.lru_cache(maxsize=1 << 16)
def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Time of a kernel, its launch included."""
    reached = device.achieved
    rate = device.memory_bytes_per_second * reached.memory
    moving = kernel.num_bytes / rate
    match kernel:
        case Product():
            return reached.launch_seconds + max(product_seconds(kernel, device), moving)
        case FusedProducts(flops, _, dtypes):
            return reached.launch_seconds + flops / (device.product_flops_per_second(dtypes) * reached.fused) + moving
        case Pass(_, launches, on, turned_bytes):
            times = {"samples": reached.passes, "parameters": reached.update_passes, "alone": 1.0}[on]
            picking = (reached.turning - 1) * turned_bytes / rate
            return times * (reached.launch_seconds * launches + moving + picking)
        case HostCopy(num_bytes):
            return reached.launch_seconds + num_bytes / device.host_bytes_per_second


def product_seconds(kernel: Product, device: Device) -> float:
    """Time to multiply, the operands at hand: waves of tiles, on the tile that is best for this shape."""
    reached = device.achieved
    rate = device.product_flops_per_second(kernel.dtypes, kernel.highest) * reached.product
    if kernel.is_convolution:
        rate *= reached.convolution
    if kernel.is_turned:
        rate *= reached.turned
    if any(jnp.dtype(name).itemsize == 1 for name in kernel.dtypes):
        rate *= reached.narrow
    if not reached.cores:
        return kernel.work * kernel.count * kernel.rows * kernel.columns * kernel.depth / rate
    largest = reached.balance * (1 / reached.tile[0] + 1 / reached.tile[1]) / 2
    best = math.inf
    for rows, columns in _tiles(*reached.tile):
        tiles = kernel.count * math.ceil(kernel.rows / rows) * math.ceil(kernel.columns / columns)
        waves = math.ceil(tiles / reached.cores)
        loading = (1 + reached.balance * (1 / rows + 1 / columns) / 2) / (1 + largest)
        tile = kernel.work * rows * columns * kernel.depth * loading / (rate / reached.cores)
        best = min(best, waves * (tile + reached.tile_seconds))
    return best


@functools.cache
def _tiles(rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Tiles that a library has: the largest, either way round, and halves of it."""

    def halves(side: int) -> Iterator[int]:
        while side >= SMALLEST_TILE:
            yield side
            side //= 2

    pairs = [(a, b) for a in halves(rows) for b in halves(columns)]
    return tuple(dict.fromkeys([*pairs, *((b, a) for a, b in pairs)]))

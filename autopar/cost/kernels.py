"""Prices one kernel on one device.

In:     a description of the kernel (`Product`, `FusedProducts`, `MemoryPass`, `HostCopy`), the device.
Out:    seconds.
Method: launch, then the longer of computing and moving bytes (the roofline: Williams, Waterman & Patterson, CACM 2009). A
        product's rate depends on its shape: it is cut into tiles, which the cores process in waves, each in the time of a
        tile (NVIDIA, "Matrix multiplication background user's guide": tile and wave quantization). Loading a tile overlaps
        with multiplying, which costs small tiles more, and each tile has a fixed overhead. The best of a library's tiles
        counts. Fused products read their operands before the first product and write after the last, which adds to the
        time to compute, so that attention over few tokens is slower for its FLOPs (Dao, "FlashAttention-2", 2023, figures
        5 to 7).
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
"""Least side of a tile: fewer rows do not fill the matrix units."""


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of matrix products, `[rows, depth] x [depth, columns]`.

    Attributes:
        count: Number of products.
        rows: Rows of the first operand and the result.
        columns: Columns of the second operand and the result.
        depth: Length of the contracted dim.
        num_bytes: Bytes read and written.
        dtypes: Names of the operands' element types.
        highest: Whether full float32 precision is requested.
        work: FLOPs of one multiplication with its addition; complex ones have more.
        is_convolution: Whether it is the implicit product of a convolution.
        is_turned: Whether the contracted dim comes before the rows in the first operand.
        turned_bytes: Bytes of operands that lie in no order of dims that libraries multiply from: batch first, then rows and
            depth as one dim each. They are copied first.
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
    turned_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class FusedProducts:
    """A kernel of several products whose intermediate results are not written to memory, or any other that computes much."""

    flops: float
    num_bytes: float
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """Elementwise work and reductions: bytes moved by `launches` kernels, or by a fraction of one.

    Work of models is counted as perfectly fused; `on` selects the device's factor for what compilers do beyond that. Work
    that is measured `"alone"` has no factor. `turned_bytes` are those of arrays that are stored in another order of dims than
    they are read in.
    """

    num_bytes: float
    launches: float = 1.0
    on: Literal["samples", "parameters", "alone"] = "alone"
    turned_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy between the memories of a device and its host."""

    num_bytes: float


Kernel = Product | FusedProducts | MemoryPass | HostCopy


@functools.lru_cache(maxsize=1 << 16)
def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of a kernel, its launch included."""
    reached = device.achieved
    rate = device.memory_bytes_per_second * reached.memory
    moving = kernel.num_bytes / rate
    match kernel:
        case Product():
            copying = device.turning_seconds(kernel.turned_bytes)
            return reached.launch_seconds + max(product_seconds(kernel, device), moving) + copying
        case FusedProducts(flops, _, dtypes):
            return reached.launch_seconds + flops / (device.product_flops_per_second(dtypes) * reached.fused) + moving
        case MemoryPass(_, launches, on, turned_bytes):
            times = {"samples": reached.passes, "parameters": reached.update_passes, "alone": 1.0}[on]
            return times * (reached.launch_seconds * launches + moving + device.turning_seconds(turned_bytes))
        case HostCopy(num_bytes):
            return reached.launch_seconds + num_bytes / device.host_bytes_per_second


def product_seconds(kernel: Product, device: Device) -> float:
    """Seconds to multiply, without reading operands: waves of tiles, for the tile that is best for this shape."""
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
    """The tiles of a library: the largest, with sides halved, in either orientation."""

    def halves(side: int) -> Iterator[int]:
        while side >= SMALLEST_TILE:
            yield side
            side //= 2

    pairs = [(a, b) for a in halves(rows) for b in halves(columns)]
    return tuple(dict.fromkeys([*pairs, *((b, a) for a, b in pairs)]))

"""One accelerator: its compute rates, and the rate and size of its memory.

In:     numbers from a datasheet, or measured.
Out:    `Device`, with what its kernels reach (`Achieved`); `catalog.py` has the common ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from autopar.errors import ClusterError, check_number

_FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float32": ("tfloat32",),
    "float64": ("float32",),
    "complex64": ("float32",),
    "complex128": ("float64", "float32"),
    "int8": ("float8", "bfloat16", "float16"),
    "uint8": ("int8", "float8", "bfloat16", "float16"),
    "int4": ("int8", "float8", "bfloat16", "float16"),
}
"""For a dtype without a rate of its own, the dtypes whose rate it takes, in order; else the slowest of all."""


@dataclass(frozen=True, slots=True)
class Achieved:
    """What kernels reach of a device's datasheet rates: a few numbers, each of which can be measured by itself.

    The defaults reach the datasheet. `cost/kernels.py` says how the numbers are used.

    Attributes:
        product: Fraction of the peak that large products sustain, at the clock that power allows.
        memory: Fraction of the memory's rate that long streams reach.
        fused: Fraction of the peak that kernels of several products reach, such as attention that never writes its scores.
        launch_seconds: From the end of a kernel to the start of the next.
        cores: Cores that the tiles of a product are distributed over; 0: products of any size run at the same rate.
        tile: Rows and columns of the largest tile of a product that one core computes.
        tile_seconds: To fill a core's pipeline with a tile, and to write the tile when it is done.
        balance: A tile whose 2 / (1 / rows + 1 / columns) is this takes as long to load as to multiply.
        overlap: Fraction of a collective that does not slow kernels beside it; 0: kernels wait for collectives.
        convolution: Rate of convolutions relative to products of their size.
        narrow: `product` of 8 bits and fewer relative to that of wider dtypes: they need more power.
        host_cores: Cores of a host that all its devices share, as virtual CPU devices do: the rates hold while all devices
            are busy, and are higher while fewer are (`sharing_speed`); 0: every device has its own.
        dispatch_seconds: To start a program on the devices of a host. It counts where these share the host's cores, which
            cannot compute meanwhile, and rest until the last device is done; other devices compute while the next program is
            started.
        array_seconds: The same for each array that the program takes or makes, until it is freed.
        copy_seconds: To start copies of an array to as many other devices of the host, if these share its cores; 0: not
            measured, as long as to start a program.
        fresh_bytes_per_second: Rate at which a program gets memory for its results, if each run allocates from the system
            anew, as XLA's CPU programs do; inf: memory is kept.
        kept_bytes: A program that needs no more than this reuses memory that the C library keeps.
        passes: How often elementwise work on samples goes through memory, and in how many kernels, relative to one kernel
            for all adjacent elementwise work; compilers for GPUs come near 1, XLA's for CPUs does not.
        update_passes: The same for work on parameters alone, such as an optimizer's.
        turned: Rate of products whose first operand has the summed dim before its rows, as gradients of weights have,
            relative to others. Libraries for GPUs read both layouts equally fast, those for CPUs do not.
        turning: How many times as long a pass takes that reads an array in another order of dims than its layout's.
            Kernels on GPUs transpose tiles in fast memory; loops on CPUs compute the place of each element, and use one
            of each cache line.
        awaited: Kinds of collective beside which no kernel runs, whatever `overlap` is.

    Raises:
        ClusterError: A fraction that is not between 0 and 1, or a negative number.
    """

    product: float = 1.0
    memory: float = 1.0
    fused: float = 1.0
    launch_seconds: float = 0.0
    cores: int = 0
    tile: tuple[int, int] = (128, 256)
    tile_seconds: float = 0.0
    balance: float = 0.0
    overlap: float = 0.0
    convolution: float = 1.0
    narrow: float = 1.0
    host_cores: int = 0
    dispatch_seconds: float = 0.0
    array_seconds: float = 0.0
    copy_seconds: float = 0.0
    fresh_bytes_per_second: float = math.inf
    kept_bytes: float = 0.0
    passes: float = 1.0
    update_passes: float = 1.0
    turned: float = 1.0
    turning: float = 1.0
    awaited: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shares = "product", "memory", "fused", "overlap"
        factors = "convolution", "narrow", "passes", "update_passes", "turned", "turning"
        positive = *shares[:3], *factors, "fresh_bytes_per_second"
        for name in (part.name for part in dataclasses.fields(self) if part.name not in ("tile", "awaited")):
            least, most = None if name in positive else 0, 1.0 if name in shares else math.inf
            check_number("Achieved", name, getattr(self, name), least=least, most=most, kind=ClusterError)

    @property
    def waits_for_memory(self) -> bool:
        """Whether a program's time depends on the bytes that it allocates."""
        return self.fresh_bytes_per_second < math.inf

    def program_seconds(self, num_bytes: float, num_arrays: int = 0) -> float:
        """Seconds of a program besides kernels and collectives: to start, and to allocate `num_bytes` beyond its operands.

        `num_arrays`: how many it takes and makes.
        """
        starting = self.dispatch_seconds + num_arrays * self.array_seconds if self.host_cores else 0.0
        return starting + self._fresh_seconds(num_bytes)

    def crossing_seconds(self, num_bytes: float) -> float:
        """Seconds of an array's copies to other devices of a host, besides moving `num_bytes` on each, which they allocate."""
        if not self.copy_seconds:
            return self.program_seconds(num_bytes, num_arrays=2)
        return (self.copy_seconds if self.host_cores else 0.0) + self._fresh_seconds(num_bytes)

    def _fresh_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.fresh_bytes_per_second if num_bytes > self.kept_bytes else 0.0

    def sharing_speed(self, num_busy: int, num_devices: int) -> float:
        """Speed of busy devices relative to their rates while others of their host idle; a device uses one core at most."""
        if not self.host_cores:
            return 1.0
        return num_devices / max(num_busy, min(self.host_cores, num_devices))


@dataclass(frozen=True)
class Device:
    """Rates and memory of one accelerator.

    Attributes:
        name: For people.
        peak_flops: FLOP/s: one number for every dtype, or a mapping from dtype names (`"bfloat16"`, `"float32"`).
        memory_bytes: Bytes of memory.
        memory_bytes_per_second: Rate of reading or writing it.
        achieved: What its kernels reach of these rates.
        watts: Rated power; None: not stated. It has no influence on plans.
        host_bytes_per_second: Rate of copies to its host's memory or back, in one direction; by default that of PCIe 3.0.
        host_memory_bytes: Its share of its host's memory; inf: not stated, and offloaded state is assumed to fit.

    Raises:
        ClusterError: A rate or size is no positive number.
    """

    name: str = "custom"
    peak_flops: float | Mapping[str, float] = 1e12
    memory_bytes: float = math.inf
    memory_bytes_per_second: float = math.inf
    achieved: Achieved = Achieved()
    watts: float | None = field(default=None, compare=False, repr=False)
    host_bytes_per_second: float = field(default=12.8e9, repr=False)
    host_memory_bytes: float = field(default=math.inf, repr=False)

    def __post_init__(self) -> None:
        for name, value in (
            *(("peak_flops", rate) for rate in self._rates() or [0.0]),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_second", self.memory_bytes_per_second),
            ("host_bytes_per_second", self.host_bytes_per_second),
            ("host_memory_bytes", self.host_memory_bytes),
        ):
            do = "pass Device(name, FLOP/s, bytes, bytes per second)."
            check_number("Device", name, value, kind=ClusterError, do=do)
        if isinstance(self.peak_flops, Mapping):
            object.__setattr__(
                self, "peak_flops", MappingProxyType({str(k): float(v) for k, v in self.peak_flops.items()})
            )

    def _rates(self) -> list[float]:
        return list(self.peak_flops.values()) if isinstance(self.peak_flops, Mapping) else [self.peak_flops]

    def turning_seconds(self, num_bytes: float) -> float:
        """Seconds that a pass over so many bytes takes longer because it reads them in another order of dims than they lie."""
        return (self.achieved.turning - 1) * num_bytes / (self.memory_bytes_per_second * self.achieved.memory)

    def row_seconds(self, num_bytes: float) -> float:
        """Seconds to read and write so many bytes to copy rows of stacks in a loop, as programs for CPUs do; as for updates."""
        times = self.achieved.update_passes if self.achieved.host_cores else 0.0
        return times * num_bytes / (self.memory_bytes_per_second * self.achieved.memory)

    def flops_per_second(self, dtype: Any) -> float:
        """Peak FLOP/s in a dtype; one without a rate of its own takes a related dtype's."""
        if not isinstance(self.peak_flops, Mapping):
            return float(self.peak_flops)
        name = jnp.dtype(dtype).name
        for candidate in (name, *_FALLBACKS.get(name, ())):
            if candidate in self.peak_flops:
                return self.peak_flops[candidate]
        for narrow, wider in (("float4", jnp.float8_e4m3fn), ("float8", jnp.bfloat16)):
            if name.startswith(narrow):
                return self.peak_flops.get(narrow, self.flops_per_second(wider))
        return min(self.peak_flops.values())

    def product_flops_per_second(self, dtypes: Sequence[Any], highest: bool = False) -> float:
        """Peak FLOP/s of a product with operands of these dtypes, whatever dtype it accumulates in.

        Args:
            dtypes: Those of the operands.
            highest: Whether the program asks for full float32 precision; otherwise JAX rounds float32 operands, to TF32 on
                GPUs that have it and to bfloat16 on TPUs.
        """
        return min(self._product_rate(jnp.dtype(dtype), highest) for dtype in dtypes)

    def _product_rate(self, dtype: Any, highest: bool) -> float:
        if not isinstance(self.peak_flops, Mapping) or dtype != jnp.float32:
            return self.flops_per_second(dtype)
        if highest:
            # A device without float32 products splits the operands and does six narrower products.
            return self.peak_flops.get("float32", self.flops_per_second(dtype) / 6)
        return self.peak_flops.get("tfloat32", self.flops_per_second(dtype))

    def __hash__(self) -> int:
        rates = (tuple(self._rates()), self.memory_bytes, self.memory_bytes_per_second)
        return hash((self.name, rates, self.achieved, self.host_bytes_per_second, self.host_memory_bytes))

    def __reduce__(self) -> tuple[Any, ...]:
        peak = dict(self.peak_flops) if isinstance(self.peak_flops, Mapping) else self.peak_flops
        sizes = self.memory_bytes, self.memory_bytes_per_second
        host = self.host_bytes_per_second, self.host_memory_bytes
        return Device, (self.name, peak, *sizes, self.achieved, self.watts, *host)

    def __str__(self) -> str:
        return self.name

"""One accelerator: how fast it computes and reads memory, and how much of that it has.

In:     numbers from a datasheet, or measured.
Out:    `Device`, with what its kernels reach of it (`Achieved`); `catalog.py` holds those that people use.
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

_STAND_INS: Mapping[str, tuple[str, ...]] = {
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
"""Whose rate counts for a dtype that has none of its own; at the end the slowest one."""


@dataclass(frozen=True, slots=True)
class Achieved:
    """What kernels reach of a device's datasheet: a few numbers, each of which can be measured by itself.

    The defaults are a device that always reaches it. `cost/kernels.py` says how the numbers are used.

    Attributes:
        product: Part of its peak that large products keep up, at the clock that its power allows.
        memory: Part of its memory's rate that long streams reach.
        fused: Part of its peak that kernels of several products reach, such as attention that never writes its scores.
        launch_seconds: From the end of a kernel to the beginning of the next.
        cores: Cores among which the tiles of a product are dealt out; 0: products of every size take their share.
        tile: Rows and columns of the largest tile of a product that one core works at.
        tile_seconds: To fill a core's pipeline with a tile, and to write the tile when it is done.
        balance: A tile whose 2 / (1 / rows + 1 / columns) is this takes as long to load as to multiply.
        overlap: Part of a collective that leaves kernels alone which run meanwhile; 0: kernels wait for collectives.
        convolution: Rate of convolutions, as a part of that of products of their size.
        narrow: Part of their peak that products of 8 bits and fewer keep up, over that of wider ones: they need more power.
        host_cores: Cores of a host that all its devices share, as virtual CPU devices do: the rates are those of a device
            while all of them work, and fewer that work are faster (`sharing_speed`); 0: every device has its own.
        dispatch_seconds: To start a program on the devices of a host. It counts where these share the host's cores, which
            cannot compute meanwhile; others compute while the next program is started.
        fresh_bytes_per_second: Rate at which a program gets memory for what it makes, where each run asks the system for it
            anew, as XLA's CPU programs do; inf: memory is kept.
        kept_bytes: A program that needs no more than this is given memory that is there, as C libraries keep some.
        passes: How often elementwise work on samples goes through memory, and in how many kernels, for each time that it
            would if all of it that stands together were one kernel; compilers for GPUs come near 1, XLA's for CPUs does not.
        update_passes: The same of work on parameters alone, such as an optimizer's.
        turned: Rate of products whose first operand lies the other way round, what is summed over before its rows, as a part
            of that of others: gradients of weights are such. Libraries for GPUs read either way as fast, those for CPUs not.
        turning: How many times as long a pass takes over an array that it reads in another order of dims than that in which
            the array lies. Kernels of GPUs turn tiles in fast memory; loops on CPUs get one element of each line.

    Raises:
        ClusterError: A share that is not between 0 and 1, or something negative.
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
    fresh_bytes_per_second: float = math.inf
    kept_bytes: float = 0.0
    passes: float = 1.0
    update_passes: float = 1.0
    turned: float = 1.0
    turning: float = 1.0

    def __post_init__(self) -> None:
        shares = "product", "memory", "fused", "overlap"
        factors = "convolution", "narrow", "passes", "update_passes", "turned", "turning"
        positive = *shares[:3], *factors, "fresh_bytes_per_second"
        for name in (part.name for part in dataclasses.fields(self) if part.name != "tile"):
            least, most = None if name in positive else 0, 1.0 if name in shares else math.inf
            check_number("Achieved", name, getattr(self, name), least=least, most=most, kind=ClusterError)

    def program_seconds(self, num_bytes: float) -> float:
        """What a program takes besides kernels and collectives: to start, and to get memory besides its operands."""
        starting = self.dispatch_seconds if self.host_cores else 0.0
        return starting + (num_bytes / self.fresh_bytes_per_second if num_bytes > self.kept_bytes else 0.0)

    def sharing_speed(self, num_busy: int, num_devices: int) -> float:
        """How much faster devices are than their rates while others of their host rest: none uses more than a core."""
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
        watts: Power that it is rated for; None: not stated. Nothing is decided by it.
        host_bytes_per_second: That copies to its host's memory or back reach, in one direction; over PCIe 3.0 if it is not
            stated.
        host_memory_bytes: Its share of its host's memory; inf: not stated, and what is offloaded is taken to fit.

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

    def flops_per_second(self, dtype: Any) -> float:
        """Peak FLOP/s in a dtype; one that has no rate of its own is computed at a relative's."""
        if not isinstance(self.peak_flops, Mapping):
            return float(self.peak_flops)
        name = jnp.dtype(dtype).name
        for candidate in (name, *_STAND_INS.get(name, ())):
            if candidate in self.peak_flops:
                return self.peak_flops[candidate]
        for narrow, wider in (("float4", jnp.float8_e4m3fn), ("float8", jnp.bfloat16)):
            if name.startswith(narrow):
                return self.peak_flops.get(narrow, self.flops_per_second(wider))
        return min(self.peak_flops.values())

    def product_flops_per_second(self, dtypes: Sequence[Any], highest: bool = False) -> float:
        """Peak FLOP/s of a product of operands of these dtypes, whatever it is added up in.

        Args:
            dtypes: Of the operands.
            highest: Whether the program asks for all digits of float32; JAX multiplies those rounded unless it does, as
                TF32 on GPUs that have it and as bfloat16 on TPUs.
        """
        return min(self._product_rate(jnp.dtype(dtype), highest) for dtype in dtypes)

    def _product_rate(self, dtype: Any, highest: bool) -> float:
        if not isinstance(self.peak_flops, Mapping) or dtype != jnp.float32:
            return self.flops_per_second(dtype)
        if highest:
            # Six products of its parts make one where there is no rate for float32 itself.
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

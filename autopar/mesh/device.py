"""One accelerator: how fast it computes and reads memory, and how much of that it has.

In:     numbers from a datasheet, or measured.
Out:    `Device`; `catalog.py` holds those that people use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from autopar.errors import ClusterError

_STAND_INS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("float16", "float32"),
    "float16": ("bfloat16", "float32"),
    "float32": ("tfloat32",),
    "float64": ("float32",),
    "complex64": ("float32",),
    "complex128": ("float64", "float32"),
    "int8": ("float8", "bfloat16"),
    "uint8": ("int8", "float8", "bfloat16"),
    "int4": ("int8", "float8", "bfloat16"),
}
"""Whose rate counts for a dtype that has none of its own; at the end the slowest one."""


@dataclass(frozen=True)
class Device:
    """Rates and memory of one accelerator.

    Attributes:
        name: For people.
        peak_flops: FLOP/s: one number for every dtype, or a mapping from dtype names (`"bfloat16"`, `"float32"`).
        memory_bytes: Bytes of memory.
        memory_bytes_per_second: Rate of reading or writing it.

    Raises:
        ClusterError: A rate or size is no positive number.
    """

    name: str = "custom"
    peak_flops: float | Mapping[str, float] = 1e12
    memory_bytes: float = math.inf
    memory_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        for field, value in (
            *(("peak_flops", rate) for rate in self._rates() or [0.0]),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_second", self.memory_bytes_per_second),
        ):
            if not isinstance(value, Real) or not value > 0:
                raise ClusterError(
                    "a device needs positive rates.",
                    given=f"Device({self.name!r}, {field}={value!r})",
                    wrong=f"{field} must be a number, more than 0.",
                    do="pass Device(name, FLOP/s, bytes, bytes per second).",
                )
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
        if name.startswith("float8"):
            return self.peak_flops.get("float8", self.flops_per_second(jnp.bfloat16))
        return min(self.peak_flops.values())

    def __hash__(self) -> int:
        return hash((self.name, tuple(self._rates()), self.memory_bytes, self.memory_bytes_per_second))

    def __reduce__(self) -> tuple[Any, ...]:
        peak = dict(self.peak_flops) if isinstance(self.peak_flops, Mapping) else self.peak_flops
        return Device, (self.name, peak, self.memory_bytes, self.memory_bytes_per_second)

    def __str__(self) -> str:
        return self.name

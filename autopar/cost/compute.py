"""Seconds of an operation on one device: the roofline."""

from __future__ import annotations

from typing import Any

from autopar.mesh import Device


def compute_seconds(flops: float, num_bytes: float, device: Device, dtype: Any) -> float:
    """Time of one operation: the longer of computing and of moving its bytes.

    Williams, Waterman & Patterson, "Roofline: an insightful visual performance model", CACM 2009.

    Args:
        flops: Floating-point operations of this device's share.
        num_bytes: Bytes it reads and writes in memory.
        device: Peak rates.
        dtype: In which it computes.
    """
    return max(flops / device.flops_per_second(dtype), num_bytes / device.memory_bytes_per_second)

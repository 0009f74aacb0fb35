"""One accelerator: rates and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Device:
    name: str = "custom"
    peak_flops: float | Mapping[str, float] = field(default=1e12, hash=False)
    memory_bytes: float = math.inf
    memory_bytes_per_second: float = math.inf

    def flops_per_second(self, dtype: Any) -> float:
        if isinstance(self.peak_flops, Mapping):
            return self.peak_flops.get(np.dtype(dtype).name, min(self.peak_flops.values()))
        return self.peak_flops

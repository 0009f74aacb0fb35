"""The cost model: seconds and bytes of kernels, collectives and reshards, as pure functions."""

from autopar.cost.collectives import collective_seconds
from autopar.cost.kernels import kernel_seconds
from autopar.cost.reshard import reshard_seconds

__all__ = ["collective_seconds", "kernel_seconds", "reshard_seconds"]

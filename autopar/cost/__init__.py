"""Seconds and bytes, as pure functions."""

from autopar.cost.collectives import collective_seconds
from autopar.cost.compute import compute_seconds
from autopar.cost.reshard import cheapest_reshard, reshard_seconds

__all__ = ["cheapest_reshard", "collective_seconds", "compute_seconds", "reshard_seconds"]

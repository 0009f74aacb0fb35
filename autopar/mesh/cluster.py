"""Clusters."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from autopar.mesh.device import Device
from autopar.mesh.link import Link


@dataclass(frozen=True)
class Cluster:
    hosts: int = 1
    devices_per_host: int = 1
    device: Device = Device()
    intra: Link = Link(1e-6, 1e10)
    inter: Link = Link(1e-6, 1e10)
    devices: tuple | None = field(default=None, compare=False, repr=False)

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @classmethod
    def local(cls, devices=None, device=None, intra=None, inter=None):
        devices = tuple(devices or jax.devices())
        return cls(1, len(devices), device or Device("cpu", 5e10, 4e9, 1e10), intra or Link(2e-5, 2e9), inter or Link(2e-5, 2e9), devices)

"""Logical meshes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.mesh.link import Link


@dataclass(frozen=True)
class LogicalMesh:
    shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None = None
    links: tuple[Link, ...] | None = None

    def __post_init__(self) -> None:
        if self.axis_names is None:
            object.__setattr__(self, "axis_names", tuple("xyzwvu"[: len(self.shape)]))
        if self.links is None:
            object.__setattr__(self, "links", (Link(1e-6, 1e10),) * len(self.shape))
        object.__setattr__(self, "_sizes", dict(zip(self.axis_names, self.shape)))

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def axis_sizes(self) -> dict[str, int]:
        return self._sizes

    def size_of(self, axis: str) -> int:
        return self._sizes[axis]

    def link_of(self, axis: str) -> Link:
        return self.links[self.axis_names.index(axis)]


def logical_meshes(cluster, num_devices=None, max_axes=3):
    n = num_devices or cluster.num_devices
    found = []

    def split(rest, sizes):
        if rest == 1:
            found.append(tuple(sizes) or (1,))
        elif len(sizes) < max_axes:
            for k in range(2, rest + 1):
                if rest % k == 0 and (not sizes or k >= sizes[-1]):
                    split(rest // k, [*sizes, k])

    split(n, [])
    return [LogicalMesh(s, None, (cluster.intra,) * len(s)) for s in found]

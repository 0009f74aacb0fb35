"""Logical meshes: devices arranged along named axes, each axis with the link of its messages.

In:     a cluster and a number of its devices.
Out:    every mesh worth planning for.
Method: a cluster has two physical axes, hosts and devices in a host; each may be split into several logical ones, hosts
        outermost, which is the order of the device list. Axes over the same link cost the same in any order, so only one
        order is enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import DeviceCountError, MeshError
from autopar.markup import facts
from autopar.mesh.cluster import Cluster, more_devices_text
from autopar.mesh.link import Link

_NEUTRAL = Link(1e-6, 1e10)
_NAMES = "xyzwvu"


@dataclass(frozen=True, repr=False)
class LogicalMesh:
    """Devices along named axes, row-major.

    Attributes:
        shape: Size of each axis.
        axis_names: Their names; `x`, `y`, `z` by default.
        links: The link of each axis; equal ones by default.

    Raises:
        MeshError: Sizes below one, or names or links that do not match the shape.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = None  # type: ignore[assignment]  # filled in below
    links: tuple[Link, ...] = None  # type: ignore[assignment]
    _sizes: Mapping[str, int] = field(init=False, repr=False, compare=False, hash=False)
    _hash: int = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        names = tuple(_NAMES[: len(shape)]) if self.axis_names is None else tuple(self.axis_names)
        links = (_NEUTRAL,) * len(shape) if self.links is None else tuple(self.links)
        problem = ""
        if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
            problem = "an axis has a whole number of devices, 1 or more."
        elif len(names) != len(shape) or len(set(names)) != len(names):
            problem = f"{len(shape)} axes need as many names, all different."
        elif len(links) != len(shape):
            problem = f"{len(shape)} axes need as many links, there are {len(links)}."
        if problem:
            raise MeshError(
                "this is no mesh.",
                given=f"LogicalMesh({self.shape}, {self.axis_names}, links={self.links})",
                wrong=problem,
                do="pass LogicalMesh((2, 4)) or LogicalMesh((2, 4), links=(Link(...), Link(...))).",
                shape=shape,
                num_devices=0,
            )
        for name, value in (
            ("shape", shape),
            ("axis_names", names),
            ("links", links),
            ("_sizes", dict(zip(names, shape, strict=True))),
            ("_hash", hash((shape, names, links))),
        ):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """Size of each axis by name, in mesh order."""
        return self._sizes

    def size_of(self, axis: str) -> int:
        """Size of one axis."""
        return self._sizes[axis]

    def link_of(self, axis: str) -> Link:
        """Link of one axis."""
        return self.links[self.axis_names.index(axis)]

    def __repr__(self) -> str:
        return f"LogicalMesh{self}"

    def _repr_html_(self) -> str:
        axes = zip(self._sizes.items(), self.links, strict=True)
        return facts(
            f"Logical mesh of {self.num_devices} devices", [(f"{a} = {n}", str(link)) for (a, n), link in axes]
        )

    def __str__(self) -> str:
        return "(" + ", ".join(f"{name}={size}" for name, size in self._sizes.items()) + ")"


def logical_mesh(cluster: Cluster, shape: tuple[int, ...]) -> LogicalMesh:
    """The mesh of a shape over a cluster's devices in their order; an axis that crosses hosts gets the link between them.

    Raises `DeviceCountError`: the shape's product is not the number of devices.
    """
    if math.prod(shape) != cluster.num_devices:
        raise DeviceCountError(
            "the mesh does not fit the cluster.",
            given=f"mesh_shape={tuple(shape)} for {cluster.num_devices} devices",
            wrong=f"it has {math.prod(shape)} places.",
            do=f"choose a shape whose product is {cluster.num_devices}, or pass cluster=Cluster.local(devices=...)."
            + more_devices_text(cluster, math.prod(shape)),
            wanted=math.prod(shape),
            available=cluster.num_devices,
        )
    return linked_mesh(cluster, shape)


def linked_mesh(cluster: Cluster, shape: tuple[int, ...], axis_names: tuple[str, ...] | None = None) -> LogicalMesh:
    """The mesh of a shape over neighbouring devices: each axis gets the link of the level that it spans."""
    links = [_link_along(cluster, size, math.prod(shape[axis + 1 :])) for axis, size in enumerate(shape)]
    return LogicalMesh(tuple(shape), axis_names or tuple(_NAMES[: len(shape)]), tuple(links))


def _link_along(cluster: Cluster, size: int, stride: int) -> Link:
    """The link of an axis of `size` devices, each `stride` places after the one before."""
    level = cluster.level_over(size * stride)
    link, in_host = cluster.link_at(level).within(size), cluster.devices_per_host // stride
    if not level or link.torus or not 1 < in_host < size:
        return link
    return replace(link, in_host=(in_host, cluster.intra.within(in_host).bytes_per_second))


def logical_meshes(cluster: Cluster, num_devices: int | None = None, max_axes: int = 3) -> list[LogicalMesh]:
    """Every mesh over `num_devices` of the cluster in which each axis has one link, few axes first.

    Args:
        cluster: The machine.
        num_devices: How many of its devices, whole hosts or a part of one; None: all.
        max_axes: The most axes. With 1, devices of several hosts form one axis over the slow link.

    Raises:
        MeshError: `num_devices` are neither whole hosts nor within one.
    """
    count = cluster.num_devices if num_devices is None else num_devices
    hosts, inside = 1, count
    if count > cluster.devices_per_host:
        hosts, inside = count // cluster.devices_per_host, cluster.devices_per_host
    if hosts * inside != count or not 1 <= hosts <= cluster.hosts:
        raise MeshError(
            "no mesh has so many devices.",
            given=f"{count} devices of {cluster}",
            wrong=f"they are not whole hosts of {cluster.devices_per_host} devices.",
            do=f"take a multiple of {cluster.devices_per_host}, or at most so many.",
            shape=(),
            num_devices=count,
        )
    found = [
        LogicalMesh(
            (*(size for size, _ in outer), *inner) or (1,),
            links=(
                *(link.within(size) for size, link in outer),
                *(cluster.intra.within(size) for size in inner or (1,) * (not outer)),
            ),
        )
        for outer in _outer_axes(cluster, hosts)
        for inner in _factorizations(inside)
        if len(outer) + len(inner) <= max_axes
    ]
    if not found:
        found = [LogicalMesh((count,), links=(_link_along(cluster, count, 1),))]
    return sorted(found, key=lambda mesh: len(mesh.shape))


def _outer_axes(cluster: Cluster, hosts: int) -> Iterator[tuple[tuple[int, Link], ...]]:
    """The ways to arrange hosts in axes, as (size, link): axes between pods first, then axes within pods."""
    per_pod = cluster.hosts_per_pod
    slow = cluster.across
    if slow is None or hosts <= per_pod or hosts % per_pod:
        link = cluster.inter if slow is None or hosts <= per_pod else slow
        for sizes in _factorizations(hosts):
            yield tuple((size, link) for size in sizes)
        return
    for far in _factorizations(hosts // per_pod):
        for near in _factorizations(per_pod):
            yield (*((size, slow) for size in far), *((size, cluster.inter) for size in near))
    if per_pod > 1:
        yield ((hosts, slow),)


def finer_meshes(cluster: Cluster, num_devices: int, wide: bool = True) -> list[LogicalMesh]:
    """Meshes that are tried last, since they take longer to plan for or win little.

    On several hosts: meshes of two axes whose first spans the hosts and a part of each, so that data and tensor parallelism
    can have any degree. If `wide`: then the meshes of three axes, those first whose axes over hosts are most even: what is best
    on them makes the others, on which little fits memory, short to rule out.
    """
    inside = cluster.devices_per_host
    several = num_devices > inside and num_devices % inside == 0
    parts = [size for size in range(inside // 2, 1, -1) if inside % size == 0] if several else []
    mixed = [linked_mesh(cluster, (num_devices // size, size)) for size in parts]
    three = [mesh for mesh in logical_meshes(cluster, num_devices) if wide and len(mesh.shape) > 2]
    return [*mixed, *sorted(three, key=lambda mesh: max(mesh.shape[:-1]))]


def _factorizations(number: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a product of ascending factors; () for 1."""
    if number == 1:
        yield ()
        return
    for first in range(least, number + 1):
        if number % first == 0 and (first == number or number // first >= first):
            for rest in _factorizations(number // first, first):
                yield (first, *rest)

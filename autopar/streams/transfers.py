"""Plans transfers between meshes: which device sends which tile to which.

In:     a tensor's shape, its sharding on the source mesh and the one wanted on the target mesh; any two mesh shapes.
Out:    `TransferPlan`: the tiles that cross, the sharding they arrive in, and copies inside the target mesh; `Crossing`: how
        an array crosses within one process.
Method: where the target is replicated, its sharding is first split further over those axes, so that every byte crosses
        once, along the dims that the source splits if possible, so that shards cross as they lie; an all-gather inside the
        target mesh then makes the copies. Where no dim divides, one copy is sent, and forwarded inside. Devices that hold
        equal source tiles share the sending.
        Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, sec. 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass

from autopar.grouping import grouped
from autopar.mesh import ArrayType, Box, LogicalMesh, Sharding, boxes


@dataclass(frozen=True, slots=True)
class Tile:
    """A box that one device of the source sends to one of the target; devices are numbered in mesh order."""

    source: int
    target: int
    box: Box

    @property
    def num_elements(self) -> int:
        """Elements that cross."""
        return math.prod(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How a tensor gets from one mesh to another.

    Attributes:
        tiles: The tiles that cross.
        middle: The sharding in which they arrive, from which an all-gather makes the wanted one.
        forwards: (from, to) devices of the target: copies made inside it, where `middle` could not be split further.
    """

    tiles: tuple[Tile, ...]
    middle: Sharding
    forwards: tuple[tuple[int, int], ...]

    @property
    def num_elements(self) -> int:
        """Elements that cross between the meshes."""
        return sum(tile.num_elements for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class Crossing:
    """How an array gets from one mesh to another of the same process.

    Attributes:
        middle: The sharding in which it arrives, from which an all-gather makes the wanted one.
        is_cut: Whether programs on both meshes cut and join tiles; otherwise shards cross as they lie.
    """

    middle: Sharding
    is_cut: bool


@functools.lru_cache(maxsize=4096)
def crossing(source: ArrayType, target: ArrayType) -> Crossing:
    """How an array of these types crosses."""
    held = source.boxes()
    if held == target.boxes():
        return Crossing(target.sharding, False)
    middle = _split_further(source.shape, target.sharding, target.mesh, held[0])
    return Crossing(middle, held != boxes(source.shape, middle, target.mesh))


def plan_transfer(source: ArrayType, target: ArrayType) -> TransferPlan:
    """Plan the transfer of an array, which is no partial sum, from the type on its mesh to the one wanted on another."""
    shape, held, wanted = source.shape, source.boxes(), target.boxes()
    if held == wanted and source.sharding.num_shards(source.mesh) == len(held):
        return TransferPlan(tuple(Tile(k, k, box) for k, box in enumerate(wanted)), target.sharding, ())
    middle = _split_further(shape, target.sharding, target.mesh, held[0])
    arriving = boxes(shape, middle, target.mesh)
    firsts = {box: device for device, box in reversed([*enumerate(arriving)])}
    forwards = [(firsts[box], device) for device, box in enumerate(arriving) if firsts[box] != device]
    asked = sorted((device, box) for box, device in firsts.items())
    return TransferPlan(tuple(tiles_of(held, asked, [0] * len(held))), middle, tuple(forwards))


def tiles_of(held: Sequence[Box], wanted: Iterable[tuple[int, Box]], load: MutableSequence[int]) -> Iterator[Tile]:
    """The tiles that make up the wanted (device, box) pairs, each sent by the least loaded of the devices that hold it.

    `load`: elements that each device sends so far; updated.
    """
    holders = grouped((box, device) for device, box in enumerate(held))
    for target, box in wanted:
        for part, devices in holders.items():
            common = intersection(part, box)
            if common is not None:
                sender = min(devices, key=lambda d: (load[d], abs(d - target), d))
                tile = Tile(sender, target, common)
                load[sender] += tile.num_elements
                yield tile


def intersection(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None: it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _split_further(shape: Sequence[int], sharding: Sharding, mesh: LogicalMesh, held: Box) -> Sharding:
    """Split a sharding over the axes along which it is replicated, wherever a dim divides.

    Dims of which a device of the source holds less, as its box `held` says, come first.
    """
    dims = [list(axes) for axes in sharding.dims]
    used = {axis for axes in dims for axis in axes}
    order = {axis: k for k, axis in enumerate(mesh.axis_sizes)}
    for axis, size in mesh.axis_sizes.items():
        if axis in used or size == 1:
            continue
        here = [length // math.prod(mesh.size_of(a) for a in dims[d]) for d, length in enumerate(shape)]
        for d in sorted(range(len(shape)), key=lambda d: held[d][1] - held[d][0] >= here[d]):  # noqa: B023
            length, parts = shape[d], math.prod(mesh.size_of(a) for a in dims[d]) * size
            # Only axes minor to those of the dim: then each shard of the wanted sharding stays contiguous.
            behind = all(order[a] < order[axis] for a in dims[d])
            if length % parts == 0 and length and behind:
                dims[d].append(axis)
                used.add(axis)
                break
    return Sharding(tuple(tuple(axes) for axes in dims), sharding.partial)

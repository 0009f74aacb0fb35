"""Who writes which part of a checkpoint: each part once, by one that holds it, the work shared; no Ray needed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.errors import DonatedError
from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray
from autopar.runtime.ray.driver.saves import take, tiles_of
from autopar.runtime.ray.seats import by_mesh, seats_of
from tests.ray.kinds import SHAPE, kinds

MESHES = (LogicalMesh((1,)), LogicalMesh((4,)), LogicalMesh((2, 2)))


class Workers:
    """Those of two meshes on hosts of two devices; what they were asked is noted."""

    def __init__(self, blind=(), first=4, second=4):
        self.seats = seats_of(((0, first), (4, second)), devices_per_host=2)
        self.blind, self.taken, self.written = blind, {}, {}

    def seats_on(self, mesh):
        return by_mesh(self.seats)[mesh]

    def release(self, mesh, key):
        pass

    def number(self):
        return range(7, 8)

    def unseen(self, workers, token, writing):
        return {n: "it is blind" if n in self.blind else "" for n in workers}

    def call(self, method, arguments, harmless):
        assert method == "take" and harmless
        self.taken = {number: own for number, (_, own) in arguments.items()}

    def write(self, save, arguments):
        self.written = arguments
        return {n: {"d/file": (n, "")} for n in arguments}


def array(workers, *parts, dim=0):
    """Of each part, along a dim, the (mesh, kind)s of its copies."""
    return RemoteArray([Part(tuple(Copy(workers, mesh, kind, 5) for mesh, kind in copies)) for copies in parts], dim)


def load(workers):
    return {seat.number: 0 for seat in workers.seats if seat.number not in workers.blind}


@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("first", MESHES, ids=str)
@pytest.mark.parametrize("second", MESHES, ids=str)
def test_every_element_has_one_writer_that_holds_it(first, second, dim):
    """Parts behind each other on two meshes, split in different ways."""
    workers = Workers((), first.num_devices, second.num_devices)
    for above in kinds(first):
        for below in kinds(second):
            stacked = array(workers, [(0, above)], [(1, below)], dim=dim)
            written = np.zeros(stacked.shape, int)
            for tile in tiles_of(stacked, load(workers)):
                written[tuple(slice(*side) for side in tile.box)] += 1
                seat, (_, kind, device) = workers.seats[tile.worker], tile.place
                assert device in seat.devices and (kind is above or seat.mesh == 1)
                own = list(tile.box)
                own[dim] = tuple(place - (SHAPE[dim] if seat.mesh else 0) for place in own[dim])
                assert tuple(own) == kind.boxes()[device]
            assert (written == 1).all()


def test_the_work_is_shared():
    """Copies on all workers of two meshes: the writers take turns."""
    workers, bytes_of = Workers(), load(Workers())
    kind = ArrayType((8, 4), np.dtype("float32"), Sharding(((), ())), LogicalMesh((4,)))
    for _ in range(8):
        (tile,) = tiles_of(array(workers, [(0, kind), (1, kind)]), bytes_of)
        assert tile.box == ((0, 8), (0, 4))
    assert list(bytes_of.values()) == [2 * 128] * 4


def test_who_cannot_write_is_left_out(tmp_path):
    workers = Workers(blind=(0,))
    copied = ArrayType((8, 4), np.dtype("float32"), Sharding(((), ())), LogicalMesh((4,)))
    split = ArrayType((8, 4), np.dtype("float32"), Sharding((("x",), ())), LogicalMesh((4,)))
    arrays = [array(workers, [(0, copied)]), array(workers, [(0, split)]), array(workers, [(1, split)])]
    taken, refused = take(arrays, tmp_path)
    assert [t is None for t in taken] == [False, True, False], "worker 0 alone holds its rows of the second"
    assert refused == {"worker 0 (mesh 0, host 0)": "it is blind"}
    assert set(workers.taken) == {1, 2, 3} and taken[2].boxes[1] == ((2, 4), (0, 4))
    before, sees = tiles_of(arrays[1], bytes_of := load(workers)), dict.fromkeys(bytes_of, 0)
    assert before is None and bytes_of == sees, "nothing of it counts"


def test_what_is_shared_is_copied_once_and_written_twice(tmp_path):
    from autopar.runtime.ray.worker.disk import OnDisk

    workers = Workers()
    split = ArrayType((8, 4), np.dtype("float32"), Sharding((("x",), ())), LogicalMesh((4,)))
    (taken,), _ = take([array(workers, [(0, split)])], tmp_path)
    names = [(taken.number, OnDisk(name, (8, 4), "float32", (2, 4))) for name in ("a", "b")]
    digests = taken.snapshot.write(tmp_path, "part", names)
    assert [len(places) for places in workers.taken.values()] == [2, 2]
    _, arrays, boxes = workers.written[1]
    assert [a.name for a in arrays] == ["a", "b"]
    assert [(which, tile, box[0]) for which, tile, box in boxes] == [
        (0, 0, (4, 6)),
        (0, 1, (6, 8)),
        (1, 0, (4, 6)),
        (1, 1, (6, 8)),
    ]
    assert digests == {"part0/d/file": (0, ""), "part1/d/file": (1, "")}


def test_what_is_deleted_is_not_taken(tmp_path):
    kind = ArrayType((8, 4), np.dtype("float32"), Sharding(((), ())), LogicalMesh((4,)))
    gone = array(Workers(), [(0, kind)])
    gone.parts[0].copies[0].is_deleted = True
    with pytest.raises(DonatedError):
        take([gone], tmp_path)


def test_copies_are_let_go_of_as_they_are_written(tmp_path):
    """A worker's own part, without one: files are there and tell what they are; its copies are gone."""
    import tensorstore

    from autopar.runtime.digest import digest
    from autopar.runtime.ray.worker.disk import Disk, OnDisk

    disk, data = Disk(), np.arange(12, dtype=np.int8).reshape(3, 4)
    disk.take(3, [data])
    arrays = [OnDisk("a", (6, 4), "int8", (3, 4)), OnDisk("b", (3, 4), "uint8", (3, 4))]
    folder = tmp_path / "part"
    found = disk.write(3, str(folder), arrays, [(0, 0, ((3, 6), (0, 4))), (1, 0, ((0, 3), (0, 4)))])
    assert found == {str(p.relative_to(folder)): digest(p) for p in folder.rglob("*") if p.is_file()}
    assert any(name.startswith("d/") for name in found) and not disk._tiles
    for name, want in (("a", data), ("b", data.view(np.uint8))):
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
        read = tensorstore.open({"driver": "zarr", "kvstore": kvstore}).result()
        rows = slice(3, 6) if name == "a" else slice(0, 3)
        np.testing.assert_array_equal(read[rows].read().result(), want)
    with pytest.raises(InterruptedError):
        disk.write(3, str(folder), arrays, [])
    assert math.isfinite(disk.standing_seconds())

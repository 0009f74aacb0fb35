"""Arrays that others write: what orbax makes of their folders. The others are threads here; on Ray: tests/ray."""

from __future__ import annotations

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from autopar import checkpoint
from autopar.checkpoint import manifest
from autopar.errors import CheckpointError
from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.runtime.digest import digest
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray
from autopar.runtime.ray.seats import by_mesh, seats_of
from autopar.runtime.ray.worker.disk import Disk, unseen
from tests.checkpoint_model import there

MESH = LogicalMesh((2, 2))
ROWS, COLUMNS, BOTH = Sharding((("x",), ())), Sharding(((), ("y",))), Sharding((("x",), ("y",)))


class Workers:
    """Two meshes of two workers each, with disks of their own; `values` are whole arrays by mesh and key."""

    def __init__(self):
        self.seats, self.values, self.fetched = seats_of(((0, 4), (4, 4)), 2), {}, 0
        self.disks = [Disk() for _ in self.seats]
        self.blind: tuple[int, ...] = ()

    def hold(self, *parts):
        """An array of parts (value, mesh, sharding)."""
        made = []
        for value, mesh, sharding in parts:
            value = np.asarray(value)
            key = len(self.values)
            self.values[key] = value
            sharding = sharding or Sharding(((),) * value.ndim)
            made.append(Part((Copy(self, mesh, ArrayType(value.shape, value.dtype, sharding, MESH), key),)))
        return RemoteArray(made)

    def seats_on(self, mesh):
        return by_mesh(self.seats)[mesh]

    def release(self, mesh, key):
        pass

    def fetch(self, mesh, key, kind):
        self.fetched += 1
        return self.values[key]

    def number(self):
        return range(1)

    def unseen(self, workers, token, writing):
        word = digest(token)[1]
        return {n: unseen(f"{token}x" if n in self.blind else str(token), word, writing) for n in workers}

    def call(self, method, arguments, harmless):
        assert method == "take" and harmless, "a failure ends no worker"
        for n, (save, places) in arguments.items():
            boxes = [(self.values[key], kind.boxes()[device]) for key, kind, device in places]
            self.disks[n].take(save, [value[tuple(slice(*side) for side in box)].copy() for value, box in boxes])

    def write(self, save, arguments):
        found = {}
        threads = [
            threading.Thread(target=lambda n=n, own=own: found.update({n: self.disks[n].write(save, *own)}))
            for n, own in arguments.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def forget(self, save):
        for disk in self.disks:
            disk.forget(save)


def whole(array):
    return np.concatenate([part.copies[0].owner.values[part.copies[0].key] for part in array.parts])


def assert_same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def layers(count, first=0):
    return first + np.arange(count * 8, dtype=np.float32).reshape(count, 8)


def test_parts_become_one_array(tmp_path, monkeypatch):
    """Stages alike and unlike, of 4 and 2 layers; one that lies on one mesh; whole ones; beside arrays of this process."""
    workers = Workers()
    state = {
        "alike": workers.hold((layers(4), 0, ROWS), (layers(4, 100), 1, ROWS)),
        "unlike": workers.hold((layers(4), 0, BOTH), (layers(2, 100), 1, COLUMNS)),
        "one": {"mesh": workers.hold((layers(6), 1, BOTH))},
        "whole": workers.hold((layers(3), 0, None)),
        "here": jnp.arange(4.0),
        "number": 7,
    }
    read = []
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(manifest, "digest", lambda path, sync: read.append(str(path)) or digest(path, sync=sync))
        checkpoint.save(tmp_path, state, 3).wait()
    assert read and not any("process_g" in path for path in read), "what others have written is not read again"
    assert workers.fetched == 0 and not any(disk._tiles for disk in workers.disks)
    like = {
        name: whole(state[name]) if isinstance(state[name], RemoteArray) else state[name]
        for name in ("alike", "unlike", "whole", "here", "number")
    } | {"one": {"mesh": layers(6)}}
    jax.tree.map(assert_same, checkpoint.restore(tmp_path, like), like)
    jax.tree.map(assert_same, ocp.StandardCheckpointer().restore(tmp_path / "3"), like)
    folders = {p.name for p in (tmp_path / "3").iterdir() if p.is_dir()}
    assert folders >= {"ocdbt.process_0", *(f"ocdbt.process_g0w{n}" for n in range(4))}


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "float8_e4m3fn", "float8_e4m3", "int4", "uint2", "complex64"])
def test_dtypes(tmp_path, dtype):
    workers, data = Workers(), np.asarray(jnp.arange(16).astype(dtype).reshape(8, 2))
    state = {"a": workers.hold((data, 0, BOTH)), "scalar": workers.hold((data[1, 1], 0, None))}
    state["b"] = state["a"]
    checkpoint.save(tmp_path, state, 0).wait()
    assert workers.fetched == 0
    like = {"a": data, "b": data, "scalar": data[1, 1]}
    jax.tree.map(assert_same, checkpoint.restore(tmp_path, like), like)


def test_two_groups_of_workers(tmp_path):
    """State of two steps, of other layouts: their folders have other names."""
    state = [Workers().hold((layers(4, 10 * k), 0, ROWS)) for k in range(2)]
    checkpoint.save(tmp_path, state, 0).wait()
    like = [layers(4, 0), layers(4, 10)]
    jax.tree.map(assert_same, checkpoint.restore(tmp_path, like), like)


def test_a_state_that_is_one_array(tmp_path):
    checkpoint.save(tmp_path, Workers().hold((layers(4), 0, ROWS), (layers(4, 9), 1, BOTH)), 0).wait()
    want = np.concatenate([layers(4), layers(4, 9)])
    assert_same(checkpoint.restore(tmp_path, want), want)


def test_empty_arrays_are_in_the_manifest_alone(tmp_path):
    state = [Workers().hold((np.zeros((0, 8), np.float32), 0, ROWS))]
    checkpoint.save(tmp_path, state, 0).wait()
    assert checkpoint.restore(tmp_path, [np.zeros((0, 8), np.float32)])[0].shape == (0, 8)


def test_nobody_sees_the_folder(tmp_path):
    workers = Workers()
    workers.blind = (0, 1, 2, 3)
    state = {"a": workers.hold((layers(4), 0, ROWS), (layers(4, 9), 1, ROWS))}
    with pytest.warns(UserWarning, match=r"worker 0 \(mesh 0, host 0\), and 3 others cannot write to"):
        checkpoint.save(tmp_path, state, 0).wait()
    assert workers.fetched == 2
    like = {"a": whole(state["a"])}
    jax.tree.map(assert_same, checkpoint.restore(tmp_path, like), like)


def test_copies_go_if_writing_does_not_begin(tmp_path, monkeypatch):
    import autopar.checkpoint.storage as storage

    def broken(tree, folder):
        raise OSError("no space")

    workers = Workers()
    monkeypatch.setattr(storage, "start_writing", broken)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, {"a": workers.hold((layers(4), 0, ROWS))}, 0)
    assert not any(disk._tiles for disk in workers.disks) and there(tmp_path) == []


@pytest.mark.parametrize("harm", ["gone", "longer"])
def test_a_file_that_is_other_here_than_where_it_was_written(tmp_path, monkeypatch, harm):
    """A filesystem that does not show this process what a worker has written."""
    workers = Workers()

    def write(save, arguments, own=workers.write):
        found = own(save, arguments)
        name = next(name for name in found[0] if name.startswith("d/"))
        size, content = found[0].pop(name)
        found[0][name if harm == "longer" else name + "0"] = size + 1, content
        return found

    workers.write = write
    words = "bytes here, and" if harm == "longer" else "is not seen here"
    with pytest.warns(UserWarning, match="NOT written"), pytest.raises(CheckpointError, match=words):
        saving = checkpoint.save(tmp_path, {"a": workers.hold((layers(4), 0, ROWS))}, 0)
        saving._thread.join()
        saving.wait()
    assert there(tmp_path) == []

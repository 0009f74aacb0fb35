"""Transfers between meshes: every element arrives, each byte crosses once, holders of copies take turns."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from autopar.cost.collectives import collective_seconds
from autopar.mesh import Achieved, ArrayType, Device, Link, LogicalMesh, Sharding, boxes
from autopar.runtime import transfer
from autopar.runtime.transfer import make_transfer
from autopar.streams.clock import local_seconds
from autopar.streams.transfers import plan_transfer

LINK = Link(1e-6, 1e9)
SHAPE = (12, 24)


def mesh(*shape):
    return LogicalMesh(shape, links=(LINK,) * len(shape))


def array(sharding, of, shape=SHAPE):
    return ArrayType(shape, np.dtype(np.float32), sharding, of)


def shardings(of):
    """Every sharding of a matrix on a mesh."""
    axes = list(of.axis_sizes)
    for places in itertools.product((None, 0, 1), repeat=len(axes)):
        dims = tuple(tuple(a for a, p in zip(axes, places, strict=True) if p == d) for d in range(2))
        sharding = Sharding(dims)
        if sharding.is_valid(SHAPE, of):
            yield sharding


MESHES = [mesh(1), mesh(2), mesh(3), mesh(4), mesh(2, 2)]
PAIRS = [(a, b, s, t) for a, b in itertools.product(MESHES, repeat=2) for s in shardings(a) for t in shardings(b)]


def test_each_byte_crosses_once():
    assert len(PAIRS) > 400
    for source_mesh, target_mesh, source, target in PAIRS:
        plan = plan_transfer(array(source, source_mesh), array(target, target_mesh))
        assert plan.num_elements == SHAPE[0] * SHAPE[1], (source_mesh, source, target_mesh, target)
        assert not plan.forwards
        held, arriving = boxes(SHAPE, source, source_mesh), boxes(SHAPE, plan.middle, target_mesh)
        whole = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
        got = [np.full(SHAPE, -1) for _ in arriving]
        for tile in plan.tiles:
            at = tuple(slice(*b) for b in tile.box)
            assert all(h[0] <= b[0] and b[1] <= h[1] for h, b in zip(held[tile.source], tile.box, strict=True))
            got[tile.target][at] = whole[at]
        for device, box in enumerate(arriving):
            at = tuple(slice(*b) for b in box)
            np.testing.assert_array_equal(got[device][at], whole[at])


def test_holders_of_copies_take_turns():
    plan = plan_transfer(array(Sharding.replicated(2), mesh(4)), array(Sharding((("x",), ())), mesh(4)))
    assert sorted(tile.source for tile in plan.tiles) == [0, 1, 2, 3]


def test_shards_cross_as_they_lie():
    """Where the target holds copies: it gathers along the dim that the source splits; along another each shard was cut."""
    split = Sharding(((), ("x",)))
    plan = plan_transfer(array(split, mesh(4)), array(Sharding.replicated(2), mesh(4)))
    assert plan.middle == split
    assert [tile.box for tile in plan.tiles] == boxes(SHAPE, split, mesh(4))


def test_a_scalar_crosses_once_and_is_handed_on():
    plan = plan_transfer(array(Sharding(()), mesh(2), ()), array(Sharding(()), mesh(3), ()))
    assert plan.num_elements == 1 and plan.forwards == ((0, 1), (0, 2))


def places(of, devices):
    return jax.sharding.Mesh(np.array(devices[: of.num_devices]).reshape(of.shape), of.axis_names)


@pytest.mark.parametrize("source_mesh, target_mesh", list(itertools.product([mesh(4), mesh(2, 2)], repeat=2)))
def test_an_array_between_two_stages_of_the_same_devices_is_another(source_mesh, target_mesh):
    """The sender's program may take its memory over."""
    have, want = (array(Sharding.replicated(2), of) for of in (source_mesh, target_mesh))
    here, there = (places(of, jax.devices()) for of in (source_mesh, target_mesh))
    sent = jax.device_put(np.ones(SHAPE, np.float32), have.on(here))
    got = make_transfer(have, here, want, there)(sent)
    sent.delete()
    np.testing.assert_array_equal(np.asarray(got), 1)


def test_one_program_per_device_cuts_all_that_it_sends(monkeypatch):
    cut, cuts = transfer._slices, []
    monkeypatch.setattr(transfer, "_slices", lambda *given: cuts.append(given) or cut(*given))
    of = mesh(4)
    rows, columns = array(Sharding((("x",), ())), of), array(Sharding(((), ("x",))), of)
    here, there = places(of, jax.devices()), places(of, jax.devices()[4:])
    value = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    move = make_transfer(rows, here, columns, there)
    parts = move.start(jax.device_put(value, rows.on(here)))
    assert len(cuts) == 4 and len(parts) == 16
    assert all(part.devices() <= set(there.devices.flat) for part in parts)
    np.testing.assert_array_equal(np.asarray(move.finish(parts)), value)


def test_a_transfer_costs_what_it_starts():
    """On devices that share cores: a copy; or programs that cut, copies, and programs that join; and a gather."""
    device = Device("cpu", achieved=Achieved(host_cores=2, dispatch_seconds=1.0))
    by_rows, by_columns, whole = (
        ArrayType(SHAPE, np.dtype(np.float32), sharding, mesh(4))
        for sharding in (Sharding((("x",), ())), Sharding(((), ("x",))), Sharding.replicated(2))
    )
    gather = collective_seconds("all-gather", 4.0 * SHAPE[0] * SHAPE[1], ("x",), mesh(4))
    assert local_seconds(by_rows, by_rows, device) == local_seconds(whole, whole, device) == 1.0
    assert local_seconds(by_rows, by_columns, device) == 3.0
    assert local_seconds(by_columns, whole, device) == pytest.approx(2.0 + gather)
    measured = Device(
        "cpu", achieved=Achieved(host_cores=2, dispatch_seconds=1.0, array_seconds=0.5, copy_seconds=0.25)
    )
    assert local_seconds(by_rows, by_rows, measured) == 0.25
    assert local_seconds(by_rows, by_columns, measured) == 0.25 + 2 * 2.0


@pytest.mark.parametrize("seed, shape", [*((seed, SHAPE) for seed in range(6)), (6, (0, 24)), (7, (0, 24))])
def test_arrays_arrive(seed, shape):
    rng = np.random.default_rng(seed)
    devices = jax.devices()
    small = [pair for pair in PAIRS if pair[0].num_devices + pair[1].num_devices <= 8]
    value = rng.normal(size=shape).astype(np.float32)
    for k in rng.choice(len(small), 6, replace=False):
        source_mesh, target_mesh, source, target = small[k]
        have = ArrayType(shape, np.dtype(np.float32), source, source_mesh)
        want = ArrayType(shape, np.dtype(np.float32), target, target_mesh)
        here, there = places(source_mesh, devices), places(target_mesh, devices[source_mesh.num_devices :])
        got = make_transfer(have, here, want, there)(jax.device_put(value, have.on(here)))
        assert got.sharding.is_equivalent_to(want.on(there), 2)
        np.testing.assert_array_equal(np.asarray(got), value)

"""Tori of TPUs: which rate groups of chips have, and what collectives along one or several axes take."""

import pytest

from autopar.cost import collective_seconds
from autopar.entry import Entry
from autopar.mesh import Cluster, LogicalMesh
from autopar.mesh.link import slice_sides, torus_parts
from autopar.mesh.logical_mesh import logical_mesh
from autopar.plan.record import _link, _link_record


@pytest.mark.parametrize(
    "chips, axes, sides",
    [
        (8, 2, (2, 4)),
        (256, 2, (16, 16)),
        (32, 3, (2, 4, 4)),
        (128, 3, (4, 4, 8)),
        (2048, 3, (8, 16, 16)),
        (6144, 3, (16, 16, 24)),
    ],
)
def test_slices_are_those_that_are_sold(chips, axes, sides):
    assert slice_sides(chips, axes) == sides


@pytest.mark.parametrize(
    "chips, axes, closes_at, parts",
    [
        (256, 2, 16, {8: 0.5, 16: 1.0, 17: 1.0, 256: 2.0}),
        (16, 2, 16, {4: 0.5, 16: 1.0}),  # 4 x 4: two chains
        (64, 3, 4, {2: 0.5, 4: 1.0, 16: 2.0, 64: 3.0}),
        (32, 3, 4, {4: 0.5, 16: 1.0, 32: 1.5}),  # less than a cube: nothing closes
        (1, 2, 16, {1: 0.5}),
    ],
)
def test_parts(chips, axes, closes_at, parts):
    link = Cluster.of("1x4 v4").intra
    found = torus_parts(chips, axes, closes_at)
    assert [size for size, _ in found] == sorted({size for size, _ in found})
    reached = {size: next((part for most, part in found if size <= most), 1.0) for size in parts}
    assert reached == parts
    assert link.bytes_per_second == pytest.approx(90e9)


def seconds(kind, num_bytes, axes, mesh):
    return collective_seconds(kind, num_bytes, axes, mesh)


def test_collectives_use_all_axes_that_they_lie_along():
    pod = Cluster.of("32x8 v5e")
    flat, square = logical_mesh(pod, (256,)), logical_mesh(pod, (16, 16))
    one, both = (seconds("all-gather", 1e9, axes, square) for axes in (("x",), ("x", "y")))
    assert both == pytest.approx(one / 2, rel=0.1), "twice the rings, sixteen times the devices"
    assert seconds("all-gather", 1e9, ("x",), flat) == pytest.approx(both, rel=0.1)
    assert one == pytest.approx(1e9 * 15 / 16 / 90e9, rel=0.02)
    half = logical_mesh(pod, (32, 8))
    assert seconds("all-gather", 1e9, ("y",), half) == pytest.approx(1e9 * 7 / 8 / 45e9, rel=0.02), "a part of a ring"


def test_what_goes_far_around_a_ring_is_passed_on():
    """The bytes of an all-to-all cross a quarter of the ring: with V on all chips, V / 4 / rate."""
    mesh = logical_mesh(Cluster.of("32x8 v5e"), (16, 16))
    assert seconds("all-to-all", 1e9, ("x",), mesh) == pytest.approx(16e9 / 4 / 90e9 * 15 / 16, rel=0.02)


@pytest.mark.parametrize(
    "chips, shape, quarters",
    [
        ("32x8 v5e", (256,), 16),
        ("16x4 v5p", (64,), 4),
        ("16x4 v5p", (16, 4), 4),
        ("2x4 v5p", (8,), 4),
        ("4x4 v5e", (16,), 8),
    ],
)
def test_what_goes_over_several_axes_takes_the_rings_of_each(chips, shape, quarters):
    """Bytes cross a quarter of each axis on its own links, so that only the longest counts, twice as much if it is open."""
    pod = Cluster.of(chips)
    mesh = logical_mesh(pod, shape)
    size = mesh.size_of("x")
    expected = quarters * 1e9 / 4 / pod.intra.bytes_per_second * (size - 1) / size
    assert seconds("all-to-all", 1e9, ("x",), mesh) == pytest.approx(expected, rel=0.02)


def test_plan_files_keep_a_torus():
    link = Cluster.of("16x4 v5p").inter
    assert link.torus and _link(Entry(_link_record(link), "link")) == link
    plain = LogicalMesh((2,)).links[0]
    assert len(_link_record(plain)) == 4 and _link(Entry(_link_record(plain), "link")) == plain

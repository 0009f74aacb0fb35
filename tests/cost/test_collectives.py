"""Collective costs: the formulas against rings simulated hop by hop, and what must hold whatever the numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    collective_seconds,
    reduce_scatter_seconds,
    transfer_seconds,
    tree_all_reduce_seconds,
)
from autopar.entry import Entry
from autopar.mesh import Cluster, Link, LogicalMesh, linked_mesh
from autopar.plan.record import _link, _link_record

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def simulate_ring(size, elements, link, reduce, gather):
    """Seconds of a ring over real arrays; checks that everybody ends with the sum."""
    data = np.arange(size * elements, dtype=float).reshape(size, size, elements // size)
    total, seconds = data.sum(0), 0.0
    state = data.copy()
    if reduce:
        for hop in range(size - 1):
            sent = [state[d, (d - hop) % size].copy() for d in range(size)]
            for d in range(size):
                state[(d + 1) % size, (d - hop) % size] += sent[d]
            seconds += link.latency_seconds + sent[0].size * 8 / link.bytes_per_second
        for d in range(size):
            np.testing.assert_allclose(state[d, (d + 1) % size], total[(d + 1) % size])
    if gather:
        for hop in range(size - 1):
            sent = [state[d, (d + 1 - hop) % size].copy() for d in range(size)]
            for d in range(size):
                state[(d + 1) % size, (d + 1 - hop) % size] = sent[d]
            seconds += link.latency_seconds + sent[0].size * 8 / link.bytes_per_second
    if reduce and gather:
        np.testing.assert_allclose(state, np.broadcast_to(total, state.shape))
    return seconds


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_rings(size):
    link, elements = Link(1e-6, 1e9), size * 12
    num_bytes = elements * 8
    assert all_reduce_seconds(num_bytes, size, link) == pytest.approx(simulate_ring(size, elements, link, True, True))
    assert reduce_scatter_seconds(num_bytes, size, link) == pytest.approx(
        simulate_ring(size, elements, link, True, False)
    )
    assert all_gather_seconds(num_bytes, size, link) == pytest.approx(simulate_ring(size, elements, link, False, True))


def test_group_of_one_is_free():
    link = Link(1e-6, 1e9)
    for cost in (
        all_reduce_seconds,
        all_gather_seconds,
        reduce_scatter_seconds,
        all_to_all_seconds,
        tree_all_reduce_seconds,
    ):
        assert cost(1000, 1, link) == 0.0
    assert collective_seconds("all-reduce", 1000, ("x",), LogicalMesh((1,))) == 0.0
    assert collective_seconds("all-reduce", 1000, (), LogicalMesh((8,))) == 0.0


def test_one_all_reduce_beats_its_two_halves():
    mesh = LogicalMesh((4,), links=(Link(1e-6, 1e6),))
    halves = collective_seconds("reduce-scatter", 4096, ("x",), mesh) + collective_seconds(
        "all-gather", 4096, ("x",), mesh
    )
    assert collective_seconds("all-reduce", 4096, ("x",), mesh) < halves
    assert halves - collective_seconds("all-reduce", 4096, ("x",), mesh) == pytest.approx(1e-6)


def test_slow_axis_carries_what_the_fast_one_leaves():
    fast, slow = Link(1e-6, 1e11), Link(1e-6, 1e9)
    mesh = LogicalMesh((2, 8), links=(slow, fast))
    seconds = collective_seconds("all-reduce", 8e6, ("x", "y"), mesh)
    by_hand = 2 * reduce_scatter_seconds(8e6, 8, fast) + all_reduce_seconds(1e6, 2, slow) + 1e-6
    assert seconds == pytest.approx(by_hand)
    assert seconds < collective_seconds("all-reduce", 8e6, ("x",), LogicalMesh((16,), links=(slow,)))


def test_tree_for_small_messages():
    mesh = LogicalMesh((8,), links=(Link(1e-5, 1e9),))
    assert collective_seconds("all-reduce", 4, ("x",), mesh) == pytest.approx(
        1e-5 + tree_all_reduce_seconds(4, 8, mesh.links[0])
    )


links = st.builds(Link, st.floats(1e-7, 1e-4), st.floats(1e8, 1e12))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(KINDS), st.sampled_from([(2, 4), (8, 2), (3, 5)]), links, links, st.floats(1, 1e9))
def test_monotone(kind, shape, first, second, num_bytes):
    mesh, axes = LogicalMesh(shape, links=(first, second)), ("x", "y")
    seconds = collective_seconds(kind, num_bytes, axes, mesh)
    assert seconds > 0
    assert collective_seconds(kind, 2 * num_bytes, axes, mesh) >= seconds
    better = LogicalMesh(shape, links=(Link(first.latency_seconds / 2, first.bytes_per_second * 2), second))
    assert collective_seconds(kind, num_bytes, axes, better) <= seconds * (1 + 1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(links, links, links, st.floats(1, 1e9))
def test_best_order_of_three_axes(first, second, third, num_bytes):
    mesh = LogicalMesh((2, 2, 4), links=(first, second, third))
    best = math.inf
    for order in itertools.permutations(zip(mesh.shape, mesh.links, strict=True)):
        left, total = num_bytes, 0.0
        for size, link in order:
            total, left = total + all_gather_seconds(left, size, link), left / size
        best = min(best, total)
    launch = max(link.latency_seconds for link in mesh.links)
    assert collective_seconds("all-gather", num_bytes, ("x", "y", "z"), mesh) == pytest.approx(best + launch)


def test_unknown_kind():
    with pytest.raises(AssertionError, match="broadcast"):
        collective_seconds("broadcast", 1, ("x",), LogicalMesh((2,)))


def test_transfer():
    assert transfer_seconds(8e9, 4, 2, Link(1.0, 1e9)) == 1.0 + 4.0
    assert transfer_seconds(0, 4, 2, Link(1.0, 1e9)) == 0.0


def test_a_switch_adds_up_faster_than_a_ring():
    ring, switched = Link(3e-6, 360e9), Link(3e-6, 360e9, switch_bytes_per_second=274e9)
    times = [
        collective_seconds("all-reduce", 1e9, ("x",), LogicalMesh((8,), links=(link,))) for link in (ring, switched)
    ]
    assert times[1] == pytest.approx(1e9 / 274e9, rel=0.01)
    assert times[1] < times[0]
    for kind in ("all-gather", "reduce-scatter"):
        assert collective_seconds(kind, 1e9, ("x",), LogicalMesh((8,), links=(ring,))) == collective_seconds(
            kind, 1e9, ("x",), LogicalMesh((8,), links=(switched,))
        )


@pytest.mark.parametrize("devices, bus", [(2, 370), (3, 370), (4, 370), (6, 440), (7, 460), (8, 480)])
def test_all_reduce_of_h100s_is_as_fast_as_measured(devices, bus):
    """nccl-tests with NVLink SHARP on one host: GB/s of bus bandwidth, 2 (p - 1) / p of the bytes by the seconds."""
    mesh = LogicalMesh((devices,), links=(Cluster.of("1x8 h100").intra,))
    reached = 2 * (devices - 1) / devices * 4e9 / collective_seconds("all-reduce", 4e9, ("x",), mesh)
    assert reached == pytest.approx(bus * 1e9, rel=0.04)


def test_short_messages_take_another_protocol():
    plain, nccl = Link(3.4e-6, 360e9), Link(3.4e-6, 360e9, has_short_messages=True)

    def seconds(num_bytes, link):
        return collective_seconds("all-gather", num_bytes, ("x",), LogicalMesh((8,), links=(link,)))

    assert seconds(1e3, nccl) < 0.5 * seconds(1e3, plain)
    assert seconds(1e9, nccl) == seconds(1e9, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory(kind):
    """One meeting, whatever the mesh's axes; the bytes that are copied do not depend on how many take part."""
    link = Link(1e-5, 1e9, shared_memory=True)
    one, two = LogicalMesh((8,), links=(link,)), LogicalMesh((2, 4), links=(link, link))
    seconds = collective_seconds(kind, 1e6, ("x",), one)
    assert collective_seconds(kind, 1e6, ("x", "y"), two) == pytest.approx(seconds)
    assert seconds - collective_seconds(kind, 0.0, ("x",), one) == pytest.approx(
        collective_seconds(kind, 1e6, ("x",), two) - collective_seconds(kind, 0.0, ("x",), two)
    )
    assert collective_seconds(kind, 0.0, ("x",), one) == pytest.approx(8e-5)
    assert collective_seconds(kind, 1e6, ("x",), LogicalMesh((1,), links=(link,))) == 0.0


def test_an_all_to_all_in_shared_memory_cuts_and_joins_too():
    """XLA copies the operand into one array for each participant, and what comes back into one: twice as many passes."""
    mesh = LogicalMesh((8,), links=(Link(0.0, 1e9, shared_memory=True),))
    sent, exchanged = (collective_seconds(kind, 1e6, ("x",), mesh) for kind in ("collective-permute", "all-to-all"))
    assert exchanged == pytest.approx(2 * sent)


def test_rings_through_hosts_use_the_cards_of_all_their_devices():
    """An axis over hosts and a part of each is as fast as hosts and parts on axes of their own."""
    cluster = Cluster(4, 8, intra=Link(1e-6, 4e11), inter=Link(1e-6, 5e10))
    joined, apart = (linked_mesh(cluster, shape) for shape in ((16, 2), (4, 4, 2)))
    for kind in KINDS[:4]:
        one = collective_seconds(kind, 1e9, ("x",), joined)
        two = collective_seconds(kind, 1e9, ("x", "y"), apart)
        assert two == pytest.approx(one, rel=1e-3), kind
        assert collective_seconds(kind, 1e9, ("x", "y"), joined) == pytest.approx(
            collective_seconds(kind, 1e9, ("x", "y", "z"), apart), rel=1e-3
        )
    own = collective_seconds("collective-permute", 1e9, ("x",), joined)
    assert own == pytest.approx(1e9 / 5e10, rel=1e-3), "a message takes its device's card"
    link = joined.links[0]
    assert link.in_host == (4, 4e11) and _link(Entry(_link_record(link), "link")) == link

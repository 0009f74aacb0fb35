"""Prices collectives by latency and bandwidth per mesh axis.

In:     bytes on one device, the size of the group, the link.
Out:    seconds of one collective over one axis; `collective_seconds` for several axes at once; `transfer_seconds` between
        two meshes; `sent_bytes`: for each axis, the bytes that one device sends along it, at the least.
Method: ring algorithms; for all-reduces also a tree, which is faster for small ones, or in-network reduction by the switch.
        Short messages may use a protocol of less latency and a lower rate, as in NCCL. Over several axes a collective goes
        axis by axis, so that slow links carry only what is left after the fast ones, the best order counting; or through all
        devices of all axes at once, which pass data on by the cards of a host together. Each cost is
        affine in the bytes, so that a collective over given axes is the minimum of a few lines, which are computed once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import assert_never

from autopar.cost.steps import CollectiveKind
from autopar.mesh import Link, LogicalMesh

_Line = tuple[float, float]
"""Seconds = first + second * bytes."""
_LEAST_IN_SWITCH = 5
"""With fewer devices, reduction by the switch gains nothing: 2 to 8 H100s reach 370, 370, 370, 420, 440, 460 and 480 GB/s of
bus bandwidth with NVLink SHARP, and 365 to 370 with rings (nccl-tests; NVIDIA/nccl, issue 1455)."""
_PROTOCOLS = ((1.0, 1.0), (0.56, 0.92), (0.14, 0.25))
"""Factors on the latency of a hop and on the rate, for NCCL's protocols Simple, LL128 and LL on a ring; from the figures by
which it chooses between them (`src/graph/tuning.cc`: 3.4, 1.9 and 0.47 us over NVLink)."""


def all_reduce_seconds(num_bytes: float, group_size: int, link: Link) -> float:
    """Time of one ring all-reduce: 2 (p - 1) hops of num_bytes / p each.

    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009.

    Args:
        num_bytes: Size of the array on one device, before reduction.
        group_size: Devices taking part, p >= 1.
        link: Slowest hop.

    Returns:
        Seconds; 0.0 for a group of one.
    """
    hops = 2 * (group_size - 1)
    return hops * (link.latency_seconds + num_bytes / group_size / link.ring_bytes_per_second)


def tree_all_reduce_seconds(num_bytes: float, group_size: int, link: Link) -> float:
    """Time of one all-reduce along a binary tree: 2 ceil(log2 p) hops of num_bytes each, for latency-bound messages.

    Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005, sec. 4.5.
    """
    hops = 2 * math.ceil(math.log2(group_size))
    return hops * (link.latency_seconds + num_bytes / link.ring_bytes_per_second)


def all_gather_seconds(num_bytes: float, group_size: int, link: Link) -> float:
    """Time of one ring all-gather: p - 1 hops of num_bytes / p each.

    Args:
        num_bytes: Size of the result on one device.
        group_size: Devices taking part.
        link: Slowest hop.
    """
    return (group_size - 1) * (link.latency_seconds + num_bytes / group_size / link.ring_bytes_per_second)


def reduce_scatter_seconds(num_bytes: float, group_size: int, link: Link) -> float:
    """Time of one ring reduce-scatter, as of an all-gather; `num_bytes` is the operand's size on one device."""
    return all_gather_seconds(num_bytes, group_size, link)


def all_to_all_seconds(num_bytes: float, group_size: int, link: Link) -> float:
    """Time of one pairwise all-to-all: p - 1 messages of num_bytes / p each; `num_bytes` is one device's operand.

    Thakur, Rabenseifner & Gropp, 2005, sec. 4.4. Messages to other hosts take a device's own card, beside those within its
    host. On a torus, messages occupy all links on their way: a quarter of the ring on average, along each axis that the group
    fills (Austin et al., "How to scale your model", 2025, ch. 3).
    """
    in_host, inside = link.in_host
    moving = max((in_host - 1) / inside, (group_size - in_host) / link.bytes_per_second)
    if link.torus:
        axes = link.axes(group_size)
        moving *= max(1.0, axes * group_size ** (1 / axes) / 4)
    return (group_size - 1) * link.latency_seconds + moving * num_bytes / group_size


def switch_all_reduce_seconds(num_bytes: float, link: Link) -> float:
    """Time of one all-reduce in the switch: all bytes go there and back once, at the rate at which it reduces.

    Graham et al., "Scalable hierarchical aggregation protocol (SHArP)", COMHPC 2016.
    """
    return 2 * link.latency_seconds + num_bytes / link.switch_bytes_per_second


def shared_memory_seconds(kind: CollectiveKind, num_bytes: float, group_size: int, link: Link) -> float:
    """Time of one collective among devices that share memory: a latency per device, then copies.

    All devices copy at once, each at the link's rate, whatever the size of the group.
    """
    return link.latency_seconds * group_size + _PASSES[kind] * num_bytes / link.bytes_per_second


_PASSES: dict[CollectiveKind, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 4.0,
    "collective-permute": 2.0,
    "ragged-all-to-all": 2.0,
}
"""Passes over memory of a device's bytes (as `collective_seconds` counts them): one for bytes that all-gather writes and
reduce-scatter reads; two for an all-reduce, which reads and writes, and for the others, which read in one place and write in
another. Before an all-to-all XLA cuts the operand into one array for each participant, and joins what comes back: two more.
Measured on XLA's CPU collectives."""


def collective_seconds(kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...], mesh: LogicalMesh) -> float:
    """Time of one collective over one or several axes of a mesh, its launch included.

    Args:
        kind: Kind of collective.
        num_bytes: Operand bytes on one device; for an all-gather, result bytes.
        axes: Mesh axes; those of size 1 take no time.
        mesh: Sizes and links.

    Returns:
        Seconds in the best order of the axes, plus one latency of the slowest link for the launch, so that of two ways to
        move the same bytes the one with fewer collectives wins.
    """
    return min((fixed + rate * num_bytes for fixed, rate in _lines(kind, axes, mesh)), default=0.0)


@functools.lru_cache(maxsize=4096)
def _lines(kind: CollectiveKind, axes: tuple[str, ...], mesh: LogicalMesh) -> tuple[_Line, ...]:
    groups = [(mesh.size_of(axis), mesh.link_of(axis)) for axis in axes if mesh.size_of(axis) > 1]
    if not groups:
        return ()
    if all(link.shared_memory for _, link in groups):
        size, link = math.prod(size for size, _ in groups), groups[0][1]
        fixed = shared_memory_seconds(kind, 0.0, size, link)
        return ((fixed, shared_memory_seconds(kind, 1.0, size, link) - fixed),)
    launch = max(link.latency_seconds for _, link in groups)
    found = [
        (launch + fixed, rate)
        for ways in _protocols(groups)
        for order in itertools.permutations(ways)
        for fixed, rate in _orders(kind, order)
    ]
    # Drop lines that start higher and rise at least as fast as another.
    return tuple(line for line in dict.fromkeys(sorted(found)) if not any(o < line and o[1] <= line[1] for o in found))


def _protocols(groups: Sequence[tuple[int, Link]]) -> Iterator[list[tuple[int, Link]]]:
    """The axes under each protocol that all their links have; on a torus, one after the other, or all at once."""
    if all(link.torus for _, link in groups):
        yield [(size, link.along(size)) for size, link in groups]
        if len(groups) > 1:
            size, hops = math.prod(size for size, _ in groups), sum(size - 1 for size, _ in groups)
            link = groups[0][1].along(size)
            yield [(size, dataclasses.replace(link, latency_seconds=link.latency_seconds * hops / (size - 1)))]
        return
    ways = [list(groups)] if len(groups) == 1 else [list(groups), [_as_one(groups)]]
    yield from ways
    if all(link.has_short_messages for _, link in groups):
        for latency, rate in _PROTOCOLS[1:]:
            yield from ([(size, _under(link, latency, rate)) for size, link in way] for way in ways)


def _as_one(groups: Sequence[tuple[int, Link]]) -> tuple[int, Link]:
    """Axes as one, outer ones first: rings go through all devices of the inner axes, and leave them by the cards of each."""
    size, whole = groups[-1]
    hops = (size - 1) * whole.latency_seconds
    for count, link in reversed(groups[:-1]):
        in_host, inside = link.in_host
        whole = dataclasses.replace(link, in_host=(size * in_host, min(inside, whole.ring_bytes_per_second)))
        hops = count * hops + (count - 1) * link.latency_seconds
        size *= count
    return size, dataclasses.replace(whole, latency_seconds=hops / (size - 1), switch_bytes_per_second=0.0)


def _under(link: Link, latency: float, rate: float) -> Link:
    """A link under another protocol: factors on its latency and rates; the switch reduces long messages only."""
    in_host, inside = link.in_host
    return Link(link.latency_seconds * latency, link.bytes_per_second * rate, in_host=(in_host, inside * rate))


def _orders(kind: CollectiveKind, groups: tuple[tuple[int, Link], ...]) -> Iterator[_Line]:
    """Algorithms for one order of the axes, each as (seconds for no bytes, seconds per byte)."""
    match kind:
        case "all-reduce":
            # Scatter the sum along the first axes, reduce the rest along the last, gather back.
            *outer, (size, link) = groups
            is_ring = bool(link.torus)  # links between neighbours only: no trees
            steps = [(lambda n, p=p, a=a: 2 * reduce_scatter_seconds(n, p, a)) for p, a in outer]
            share = 1.0 / math.prod(p for p, _ in outer)
            shares = [1.0 / math.prod(p for p, _ in outer[:k]) for k in range(len(outer))]
            for last in (all_reduce_seconds,) if is_ring else (all_reduce_seconds, tree_all_reduce_seconds):
                yield _sum_of([*zip(steps, shares, strict=True), (lambda n, last=last: last(n, size, link), share)])
            if not is_ring:
                yield _sum_of([((lambda n, p=p, a=a: tree_all_reduce_seconds(n, p, a)), 1.0) for p, a in groups])
            if link.switch_bytes_per_second and size >= _LEAST_IN_SWITCH:
                yield _sum_of(
                    [*zip(steps, shares, strict=True), ((lambda n: switch_all_reduce_seconds(n, link)), share)]
                )
        case "all-gather" | "reduce-scatter":
            shares = [1.0 / math.prod(p for p, _ in groups[:k]) for k in range(len(groups))]
            yield _sum_of(
                [
                    ((lambda n, p=p, a=a: all_gather_seconds(n, p, a)), s)
                    for (p, a), s in zip(groups, shares, strict=True)
                ]
            )
        case "all-to-all" | "ragged-all-to-all":  # groups are taken as equally large
            yield _sum_of([((lambda n, p=p, a=a: all_to_all_seconds(n, p, a)), 1.0) for p, a in groups])
        case "collective-permute":
            # Every device sends its operand to one other, at worst over the slowest link.
            yield max(a.latency_seconds for _, a in groups), 1.0 / min(a.bytes_per_second for _, a in groups)
        case _:
            assert_never(kind)


def _sum_of(parts: list) -> _Line:
    """The sum of affine costs, each of a share of the bytes."""
    fixed = sum(cost(0.0) for cost, _ in parts)
    return fixed, sum((cost(share) - cost(0.0)) for cost, share in parts)


def transfer_seconds(num_bytes: float, num_senders: int, num_receivers: int, link: Link) -> float:
    """Time of a transfer between two meshes in which every byte crosses once and both sides share the work.

    Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, sec. 3.

    Args:
        num_bytes: Size of the whole tensor.
        num_senders: Devices that hold parts of it.
        num_receivers: Devices that want parts of it.
        link: Between a sender and a receiver.
    """
    lanes = min(num_senders, num_receivers)
    return link.latency_seconds + num_bytes / lanes / link.bytes_per_second if num_bytes else 0.0


def sent_bytes(
    kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...], mesh: LogicalMesh
) -> Iterator[tuple[str, float]]:
    """(axis, bytes that one device sends along it): the least necessary, inner axes first.

    Chan et al., "Collective communication: theory, practice, and experience", 2007, sec. 4. An outer axis carries what is
    left after the inner ones.

    Args:
        kind: Kind of collective.
        num_bytes: Operand bytes on one device; for an all-gather, result bytes.
        axes: Mesh axes.
        mesh: The mesh.
    """
    inner_first = [axis for axis in reversed(tuple(mesh.axis_sizes)) if axis in axes and mesh.size_of(axis) > 1]
    left = float(num_bytes)
    for axis in inner_first:
        size = mesh.size_of(axis)
        if kind == "collective-permute":
            yield axis, left
            return
        yield axis, (2 if kind == "all-reduce" else 1) * left * (size - 1) / size
        if kind not in ("all-to-all", "ragged-all-to-all"):
            left /= size

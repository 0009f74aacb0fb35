"""Ties identical layers: equal nodes of a large graph share their choice, so that planning time hardly grows with depth.

In:     `Graph`.
Out:    the class of each node; nodes of one class take the same choice.
Method: a stretch of the program that repeats with a period is a row of equal layers: equations at the same place of the
        period start with the same colour. A few rounds of colour refinement (Weisfeiler and Leman, 1968) then distinguish
        nodes by their surroundings: the updates of two weights of one shape are tied only if their gradients come from the
        same place of a layer, and the first and the last layer may differ from those in between. Small graphs are not
        tied; the answer of large ones is untied in the end (`untie.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from autopar.intra_op.graph import Graph
from autopar.tuning import TUNING

T = TypeVar("T")


def tie_nodes(graph: Graph, pins: Mapping[int, object], untied_nodes: int = TUNING.untied_nodes) -> list[int]:
    """Class of each node, numbered in order of first appearance.

    Args:
        graph: The decision graph.
        pins: For restricted nodes, the key of their restrictions: only equally restricted nodes are tied.
        untied_nodes: Graphs of at most so many nodes are not tied.
    """
    if len(graph.nodes) <= untied_nodes:
        return list(range(len(graph.nodes)))
    kinds: dict[object, int] = {}
    signatures = np.array(
        [
            kinds.setdefault(
                (n.signature, n.weight, n.shardings if n.kind == "port" else None, pins.get(n.index)),
                len(kinds),
            )
            for n in graph.nodes
        ]
    )
    places = repeated_places(graph, signatures)
    colours = _mix(signatures.astype(np.uint64) * np.uint64(1_000_003) + places.astype(np.uint64) + np.uint64(1))
    source = np.array([e.source for e in graph.edges])
    target = np.array([e.target for e in graph.edges])
    slot = np.array([max(e.slot, -1) + 1 for e in graph.edges], dtype=np.uint64)  # all outputs alike
    for _ in range(TUNING.tie_rounds):
        heard = np.zeros_like(colours)
        np.add.at(heard, target, _mix(colours[source] * np.uint64(31) + slot))
        np.add.at(heard, source, _mix(colours[target] * np.uint64(37) + slot * np.uint64(7) + np.uint64(5)))
        colours = _mix(colours * np.uint64(3) + heard)
    # Hashed colours alone might collide; paired with the kind, nodes of one class certainly have equal choices.
    classes: dict[tuple[int, int], int] = {}
    return [classes.setdefault((int(k), int(c)), len(classes)) for k, c in zip(signatures, colours, strict=True)]


def of_classes(class_of: Sequence[int], of_nodes: Sequence[T]) -> tuple[T, ...]:
    """What belongs to each class, given what belongs to each node: that of the class's first node."""
    first = dict(zip(reversed(class_of), reversed(of_nodes), strict=True))
    return tuple(first[number] for number in range(len(first)))


def _mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit finalizer (splitmix64), elementwise."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def repeated_places(graph: Graph, signatures: np.ndarray) -> np.ndarray:
    """For each node, its place in a repeated layer (run * 2^20 + offset in the period), or -1.

    A period with one contraction is doubled, so that a row split may follow a column split in a chain of equal layers.
    """
    places = np.full(len(graph.nodes), -1, dtype=np.int64)
    ops = np.array([n.index for n in graph.nodes if n.kind == "op"])
    heavy = np.array([len(graph.nodes[i].rule.operands) > 1 and bool(graph.nodes[i].rule.summed) for i in ops])
    sequence = signatures[ops]
    run = 0
    for first, stop, period in _repetitions(sequence):
        same = sequence[first : stop - period] == sequence[first + period : stop]
        free = places[ops[first:stop]] < 0
        for start, length in _runs(same & free[:-period] & free[period:]):
            begin, repeats = first + start, length // period + 1
            unit = 2 * period if heavy[begin : begin + period].sum() == 1 else period
            if repeats * period < TUNING.tie_repeats * unit or repeats < TUNING.tie_repeats:
                continue
            where = np.arange(begin, begin + length + period)
            places[ops[where]] = run * (1 << 20) + (where - begin) % unit
            run += 1
    return places


def _repetitions(sequence: np.ndarray) -> list[tuple[int, int, int]]:
    """(start, stop, period) of stretches that repeat with a period, the longest first.

    A row of layers is longer than repetitions within a layer, even if these occur elsewhere, too: in the updates.
    """
    if len(sequence) <= TUNING.tie_stretch:
        return []
    count = len(sequence) - TUNING.tie_stretch + 1
    hashes = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for k in range(TUNING.tie_stretch):
            hashes = _mix(hashes * np.uint64(31) + sequence[k : k + count].astype(np.uint64))
    order = np.argsort(hashes, kind="stable")
    distances = np.diff(order)[hashes[order[1:]] == hashes[order[:-1]]]
    periods, counts = np.unique(distances, return_counts=True)
    periods = periods[counts >= TUNING.tie_repeats - 1]
    found = []
    for period in map(int, periods):
        for start, length in _runs(sequence[:-period] == sequence[period:]):
            if length >= (TUNING.tie_repeats - 1) * period:
                found.append((start, start + length + period, period))
    return sorted(found, key=lambda each: (each[0] - each[1], each[2], each[0]))


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """(start, length) of each run of True."""
    padded = np.concatenate([[False], flags, [False]]).astype(np.int8)
    edges = np.diff(padded)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [(int(s), int(e - s)) for s, e in zip(starts, ends, strict=True)]

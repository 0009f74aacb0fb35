"""Lays a choice problem out in flat arrays for message passing, with the cost tables of many edges side by side.

In:     `Problem` without memory rows.
Out:    `Layout`: its `Level`s, each with the costs of its nodes and the `Batch`es of edges into and out of it.
Method: nodes are ordered so that neighbours are close, and renumbered by level along that order. Every (node, choice) is an
        entry of one flat array, every message a run of another. Tables are batched by the sender's number of choices,
        which is padded to a few sizes; pads read from and add to an unused last entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from autopar.grouping import grouped
from autopar.intra_op.edge_batch import Batch, Shrunk, shrink
from autopar.intra_op.problem import Problem


class Hears(NamedTuple):
    """Incoming messages: their positions, entry by entry, and where those of each entry begin; each entry has at least one,
    the pad, which is 0."""

    positions: np.ndarray
    begins: np.ndarray

    def sums(self, messages: np.ndarray) -> np.ndarray:
        """Per entry, the sum of its incoming messages."""
        return np.asarray(np.add.reduceat(messages.take(self.positions), self.begins))


@dataclass(slots=True, eq=False)
class Level:
    """Nodes without edges between them.

    Attributes:
        number: Index of the level.
        nodes: Its nodes, by their new numbers.
        entries: Its slice of all entries.
        costs: Per entry.
        starts: First entry of each node, within the level.
        lengths: Number of choices of each node.
        share: Per entry, the fraction of costs per edge: 1 / max(edges to earlier nodes, edges to later ones).
        num_into: Per entry, the number of edges to earlier nodes.
        heard: Per entry, the incoming messages.
        heard_later: Per entry, the incoming messages from later nodes.
        out: Edges to later nodes, sending forward.
        into: Edges to earlier nodes, sending back.
    """

    number: int
    nodes: np.ndarray
    entries: slice
    costs: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    share: np.ndarray
    num_into: np.ndarray
    heard: Hears
    heard_later: Hears
    out: list[Batch] = field(default_factory=list)
    into: list[Batch] = field(default_factory=list)

    def shared(self, total: np.ndarray) -> np.ndarray:
        """Per entry, the share of its total that goes to one edge; a last 0 for pads."""
        part = np.empty(len(total) + 1)
        np.multiply(total, self.share, out=part[:-1])
        part[-1] = 0.0
        return part

    def choose(self, choices: np.ndarray, costs: np.ndarray, batches: Sequence[Batch]) -> None:
        """Give each node of the level its best choice, given the choices of the receivers of `batches`.

        Args:
            choices: By new number of the node; changed.
            costs: Per entry of the level; overwritten.
            batches: Batches that this level sends.
        """
        for batch in batches:
            beside = batch.beside(choices[batch.receivers])
            real = batch.sending < len(costs)
            costs += np.bincount(batch.sending[real], beside[real], len(costs))
        least = np.repeat(np.minimum.reduceat(costs, self.starts), self.lengths)
        best = np.flatnonzero(costs <= least)  # at least one for each node
        choices[self.nodes] = best[best.searchsorted(self.starts)] - self.starts


class _Sending(NamedTuple):
    """All edges, sending in one direction.

    Attributes:
        senders: Per edge, the sending node.
        receivers: Per edge, the receiving node.
        back: Per edge, where the message the other way begins.
        ahead: Per edge, where the message to be sent begins.
        tables: Per edge, `[sender's choice, receiver's choice]`, without equal rows and columns.
    """

    senders: np.ndarray
    receivers: np.ndarray
    back: np.ndarray
    ahead: np.ndarray
    tables: list[Shrunk]

    def groups(self, level_of: np.ndarray, lengths: np.ndarray) -> dict[tuple[int, int], list[int]]:
        """(level of the sender, its number of choices, padded) -> edges."""
        senders = enumerate(self.senders.tolist())
        return grouped(((int(level_of[node]), _padded(int(lengths[node]))), k) for k, node in senders)


class Layout:
    """All levels of a problem.

    Attributes:
        num_nodes: Number of nodes.
        num_entries: Number of choices of all nodes together.
        num_messages: Length of the array of all messages, whose last entry is for pads.
        levels: The levels, in order.
    """

    def __init__(self, problem: Problem, forbidden: float):
        """Lay out a problem; `forbidden` replaces infinite costs."""
        count = len(problem.costs)
        ends = np.array(list(problem.edges), dtype=np.int64).reshape(-1, 2)
        rank = _ranks(count, ends)
        turned = rank[ends[:, 0]] > rank[ends[:, 1]]
        ends[turned] = ends[turned, ::-1]
        level_of = _levels(rank, ends)
        self.order = np.lexsort((np.arange(count), level_of))
        new = np.empty(count, np.int64)
        new[self.order] = np.arange(count)
        self.num_nodes = count
        self.lengths = np.array([len(problem.costs[n]) for n in self.order], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(self.lengths)])
        self.num_entries = int(self.first[-1])
        costs = np.concatenate([np.asarray(problem.costs[n], dtype=np.float64) for n in self.order] or [np.zeros(0)])
        costs = np.where(np.isfinite(costs), costs, forbidden)
        distinct = {id(m): m for m in problem.edges.values()}
        shrunk = {key: shrink(np.where(np.isfinite(m), m, forbidden)) for key, m in distinct.items()}
        both = {key: (table, table.turned) for key, table in shrunk.items()}
        ways = [(id(m), back) for m, back in zip(problem.edges.values(), turned.tolist(), strict=True)]
        source, target = new[ends[:, 0]], new[ends[:, 1]]
        # Messages of edge k: first the one to its target, then the one to its source.
        sizes = np.stack([self.lengths[target], self.lengths[source]], axis=1).ravel()
        begins = np.concatenate([[0], np.cumsum(sizes)])
        self.num_messages = int(begins[-1]) + 1
        down, up = begins[:-1].reshape(-1, 2).T
        sorted_levels = level_of[self.order]
        forward = _Sending(source, target, up, down, [both[key][back] for key, back in ways])
        back = _Sending(target, source, down, up, [both[key][not back] for key, back in ways])
        self.levels = self._levels(costs, sorted_levels, forward)
        outs, intos = [level.out for level in self.levels], [level.into for level in self.levels]
        for sending, batches in ((forward, outs), (back, intos)):
            for (number, choices), edges in sending.groups(sorted_levels, self.lengths).items():
                batches[number].append(self._batch(sending, np.array(edges), choices, self.levels[number], forbidden))

    def _levels(self, costs: np.ndarray, level_of: np.ndarray, forward: _Sending) -> list[Level]:
        """The levels, without their edges."""
        count, source, target = self.num_nodes, forward.senders, forward.receivers
        num_out, num_into = np.bincount(source, minlength=count), np.bincount(target, minlength=count)
        share = 1.0 / np.maximum(np.maximum(num_out, num_into), 1)
        heard_later = self._hears(source, forward.back)
        heard = self._hears(np.concatenate([source, target]), np.concatenate([forward.back, forward.ahead]))
        firsts = np.flatnonzero(np.diff(level_of, prepend=-1, append=level_of[-1] + 1 if count else 0))
        levels = []
        for number, (a, b) in enumerate(itertools.pairwise(firsts)):
            entries, lengths = slice(int(self.first[a]), int(self.first[b])), self.lengths[a:b]
            levels.append(
                Level(
                    number,
                    np.arange(a, b),
                    entries,
                    costs[entries],
                    self.first[a:b] - self.first[a],
                    lengths,
                    np.repeat(share[a:b], lengths),
                    np.repeat(num_into[a:b], lengths),
                    _of_entries(heard, entries),
                    _of_entries(heard_later, entries),
                )
            )
        return levels

    def _batch(self, sending: _Sending, edges: np.ndarray, choices: int, level: Level, forbidden: float) -> Batch:
        """Batch edges that send from a level, whose senders' choices are padded to so many."""
        made = [sending.tables[k] for k in edges.tolist()]
        widths = np.array([one.table.shape[1] for one in made])
        by_column = np.argsort(widths, kind="stable")
        firsts = _firsts(widths, by_column)
        rows = choices
        if any(one.rows is not None for one in made):  # then there is a row for pads, and a pad for each edge
            rows, choices = 1 + max(len(one.table) for one in made), 1 + choices
        tables = np.full((rows, int(widths.sum())), forbidden)
        for one, column in zip(made, firsts.tolist(), strict=True):
            tables[: one.table.shape[0], column : column + one.table.shape[1]] = one.table
        lengths = self.lengths[sending.receivers[edges]]
        begins = _firsts(lengths, by_column)
        own = np.repeat(by_column, lengths[by_column])
        inside = np.arange(len(own)) - begins[own]
        senders, receivers = sending.senders[edges], sending.receivers[edges]
        entries = self._places(self.first[senders], self.lengths[senders], choices, self.num_entries)
        return Batch(
            tables,
            receivers,
            begins,
            own,
            np.where(entries < self.num_entries, entries - level.entries.start, len(level.costs)),
            self._places(sending.back[edges], self.lengths[senders], choices, self.num_messages - 1),
            sending.ahead[edges][own] + inside,
            (entries, self.first[receivers][own] + inside),
            by_column,
            np.argsort(own, kind="stable"),
            firsts,
            made,
        )

    def in_order(self, choices: np.ndarray) -> tuple[int, ...]:
        """Choices in the problem's order of nodes."""
        found = np.empty(self.num_nodes, np.int64)
        found[self.order] = choices
        return tuple(found.tolist())

    def by_node(self, entries: np.ndarray) -> tuple[np.ndarray, ...]:
        """Values of all entries, in the problem's order of nodes."""
        found: list[np.ndarray] = [np.zeros(0)] * self.num_nodes
        for place, node in enumerate(self.order.tolist()):
            found[node] = entries[self.first[place] : self.first[place + 1]]
        return tuple(found)

    def _hears(self, nodes: np.ndarray, begins: np.ndarray) -> Hears:
        """Incoming messages of all entries, given the receiving nodes and the beginnings of messages."""
        lengths = self.lengths[nodes]
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        everyone = np.arange(self.num_entries)
        entries = np.concatenate([everyone, np.repeat(self.first[nodes], lengths) + inside])
        positions = np.concatenate([np.full_like(everyone, self.num_messages - 1), np.repeat(begins, lengths) + inside])
        counts = np.bincount(entries, minlength=self.num_entries)
        return Hears(positions[np.argsort(entries, kind="stable")], np.cumsum(counts) - counts)

    @staticmethod
    def _places(begins: np.ndarray, lengths: np.ndarray, rows: int, pad: int) -> np.ndarray:
        """`[row, edge]`: position of each choice; `pad` beyond the last one."""
        inside = np.arange(rows)[:, None]
        return np.where(inside < lengths, begins + inside, pad)


def _firsts(widths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Per edge its first column, where edges of these widths lie side by side in an order."""
    firsts = np.empty(len(widths), np.int64)
    firsts[order] = np.cumsum(widths[order]) - widths[order]
    return firsts


def _of_entries(hears: Hears, entries: slice) -> Hears:
    """The incoming messages of a slice of entries, in arrays of their own."""
    ends = np.append(hears.begins, len(hears.positions))
    first, last = ends[entries.start], ends[entries.stop]
    return Hears(hears.positions[first:last], hears.begins[entries] - first)


def _ranks(count: int, ends: np.ndarray) -> np.ndarray:
    """Each node's rank in an order that keeps neighbours close (reverse Cuthill-McKee): messages then get from one end of a
    program to the other in one pass."""
    if not len(ends):
        return np.arange(count)
    both = np.concatenate([ends, ends[:, ::-1]]).T
    graph = csr_array((np.ones(both.shape[1]), (both[0], both[1])), shape=(count, count))
    return np.argsort(reverse_cuthill_mckee(graph, symmetric_mode=True))


def _levels(rank: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Level of each node: the length of the longest path along the edges to it."""
    later: list[list[int]] = [[] for _ in rank]
    for u, v in ends.tolist():
        later[u].append(v)
    level = [0] * len(rank)
    for u in np.argsort(rank).tolist():
        for v in later[u]:
            level[v] = max(level[v], level[u] + 1)
    return np.array(level, dtype=np.int64)


def _padded(length: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: by at most a half."""
    size = 1
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else (size * 4 // 3 if size > 1 else 2)
    return size

"""A choice problem laid out for message passing: flat arrays, one level after the other, tables of like shape together.

In:     `Problem` without memory rows.
Out:    `Layout`: its `Level`s, each with its nodes' costs and the `Batch`es of edges into and out of it.
Method: nodes are numbered anew by level; every (node, choice) is one entry of a flat array, every message a run of
        another. Tables are padded to few sizes, pads read and write a last entry that nobody else does; what comes in
        at a node is summed by a sparse matrix of ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_array

from autopar.intra_op.problem import Problem
from autopar.tuning import TUNING


@dataclass(slots=True, eq=False)
class Batch:
    """Edges that send from one level, their tables as `[choice that sends, edge, choice that hears]`: the least over the
    choices that send is then taken of long rows.

    Attributes:
        tables: Padded; pads are forbidden.
        listeners: Nodes that hear.
        sending: Position of each choice that sends within its level, `[choice, edge]`.
        back: Of each, position of the message that came the other way.
        ahead: Position of the message to be sent, `[edge, choice that hears]`.
        entries: Of each choice that sends, and of each that hears, its position among all entries, each as above.
        chunks: Edges that are computed at once.
    """

    tables: np.ndarray
    listeners: np.ndarray
    sending: np.ndarray
    back: np.ndarray
    ahead: np.ndarray
    entries: tuple[np.ndarray, np.ndarray]
    chunks: list[slice] = field(init=False)

    def __post_init__(self) -> None:
        count, size = self.tables.shape[1], max(1, TUNING.message_chunk // max(1, self.tables[:, 0].size))
        self.chunks = [slice(k, min(k + size, count)) for k in range(0, count, size)]

    def send(self, messages: np.ndarray, part: np.ndarray) -> float:
        """Send what the senders' share and the tables say is least, less its least entry; returns the sum of those.

        Args:
            messages: All messages; changed.
            part: Of each entry of the senders' level, the share of its costs that goes to one edge; 0 at the end, for pads.
        """
        told = part[self.sending] - messages[self.back]
        if len(self.chunks) == 1:
            heard = (self.tables + told[:, :, None]).min(axis=0)
        else:
            heard = np.concatenate([(self.tables[:, k] + told[:, k, None]).min(axis=0) for k in self.chunks])
        least = heard.min(axis=1)
        messages[self.ahead] = heard - least[:, None]
        messages[-1] = 0.0
        return float(least.sum())

    def add_excess(self, excess: np.ndarray, messages: np.ndarray, part: np.ndarray) -> None:
        """Add to each choice at either end what the best pair with it exceeds the best pair of all."""
        told, heard = part[self.sending] - messages[self.back], messages[self.ahead]
        for k in self.chunks:
            pairs = self.tables[:, k] + (told[:, k, None] - heard[None, k])
            least = pairs.min(axis=(0, 2))
            sends, hears = (
                (self.entries[0][:, k], pairs.min(axis=2) - least),
                (self.entries[1][k], pairs.min(axis=0) - least[:, None]),
            )
            for at, more in (sends, hears):
                real = at < len(excess)
                excess += np.bincount(at[real], more[real], len(excess))


@dataclass(slots=True, eq=False)
class Level:
    """Nodes without an edge between them.

    Attributes:
        number: Of the level.
        nodes: Their (new) numbers.
        entries: Their entries among all.
        costs: Of each entry.
        starts: First entry of each node, within the level.
        lengths: Number of choices of each node.
        share: Of each entry, one part of its costs: there are as many as edges to the busier side.
        num_into: Of each entry, edges to earlier nodes.
        heard: Sums for each entry the messages that come in.
        heard_later: Those from later nodes only.
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
    heard: csr_array
    heard_later: csr_array
    out: list[Batch] = field(default_factory=list)
    into: list[Batch] = field(default_factory=list)

    def shared(self, total: np.ndarray) -> np.ndarray:
        """What each entry hands to one edge of its costs; 0 at the end, for pads."""
        part = np.empty(len(total) + 1)
        np.multiply(total, self.share, out=part[:-1])
        part[-1] = 0.0
        return part

    def choose(self, choices: np.ndarray, costs: np.ndarray, batches: Sequence[Batch]) -> None:
        """Give each node its best choice, beside what the nodes at the other end of `batches` have chosen.

        Args:
            choices: By (new) number of the node; changed.
            costs: Of each entry of the level; used up.
            batches: Of this level.
        """
        for batch in batches:
            taken = choices[batch.listeners]
            beside = batch.tables[:, np.arange(len(taken)), taken]
            real = batch.sending < len(costs)
            costs += np.bincount(batch.sending[real], beside[real], len(costs))
        least = np.repeat(np.minimum.reduceat(costs, self.starts), self.lengths)
        best = np.flatnonzero(costs <= least)
        owner = np.searchsorted(self.starts, best, side="right") - 1
        _, first = np.unique(owner, return_index=True)
        choices[self.nodes] = best[first] - self.starts


class Layout:
    """All levels of a problem.

    Attributes:
        num_nodes: Number of nodes.
        num_entries: Number of all their choices.
        num_messages: Length of the array of all messages; its last entry is for pads.
        levels: In order.
    """

    def __init__(self, problem: Problem, forbidden: float):
        """Lay out a problem; `forbidden` stands for infinite costs."""
        count = len(problem.costs)
        ends = np.array(list(problem.edges), dtype=np.int64).reshape(-1, 2)
        level_of = _levels(count, problem)
        self.order = np.lexsort((np.arange(count), level_of))
        new = np.empty(count, np.int64)
        new[self.order] = np.arange(count)
        self.num_nodes = count
        self.lengths = np.array([len(problem.costs[n]) for n in self.order], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(self.lengths)])
        self.num_entries = int(self.first[-1])
        costs = np.concatenate([np.asarray(problem.costs[n], dtype=np.float64) for n in self.order] or [np.zeros(0)])
        costs = np.where(np.isfinite(costs), costs, forbidden)
        tables = list(problem.edges.values())
        source, target = new[ends[:, 0]], new[ends[:, 1]]
        # Messages: of edge k first the one to its target, then the one to its source.
        sizes = np.stack([self.lengths[target], self.lengths[source]], axis=1).ravel()
        begins = np.concatenate([[0], np.cumsum(sizes)])
        self.num_messages = int(begins[-1]) + 1
        down, up = begins[:-1].reshape(-1, 2).T
        num_out, num_into = np.bincount(source, minlength=count), np.bincount(target, minlength=count)
        share = 1.0 / np.maximum(np.maximum(num_out, num_into), 1)
        heard_later = self._hears(source, up)
        heard = heard_later + self._hears(target, down)
        heard, heard_later = csr_array(heard), csr_array(heard_later)
        sorted_levels = level_of[self.order]
        borders = np.flatnonzero(np.diff(sorted_levels, prepend=-1, append=sorted_levels[-1] + 1 if count else 0))
        self.levels: list[Level] = []
        for number, (a, b) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
            entries = slice(int(self.first[a]), int(self.first[b]))
            lengths = self.lengths[a:b]
            self.levels.append(
                Level(
                    number,
                    np.arange(a, b),
                    entries,
                    costs[entries],
                    self.first[a:b] - self.first[a],
                    lengths,
                    np.repeat(share[a:b], lengths),
                    np.repeat(num_into[a:b], lengths),
                    heard[entries],
                    heard_later[entries],
                )
            )
        for forward in (True, False):
            senders, listeners = (source, target) if forward else (target, source)
            back, ahead = (up, down) if forward else (down, up)
            groups: dict[tuple[int, int, int], list[int]] = {}
            for k, (u, v) in enumerate(zip(senders.tolist(), listeners.tolist(), strict=True)):
                key = (int(sorted_levels[u]), _padded(int(self.lengths[u])), _padded(int(self.lengths[v])))
                groups.setdefault(key, []).append(k)
            for (number, rows, columns), edges in groups.items():
                level = self.levels[number]
                made = np.full((rows, len(edges), columns), forbidden)
                for place, k in enumerate(edges):
                    table = tables[k] if forward else tables[k].T
                    made[: table.shape[0], place, : table.shape[1]] = np.where(np.isfinite(table), table, forbidden)
                at = np.array(edges)
                ends_of = [(senders[at], rows), (listeners[at], columns)]
                sending, hearing = (
                    self._places(self.first[n], self.lengths[n], w, self.num_entries) for n, w in ends_of
                )
                sending = np.ascontiguousarray(sending.T)
                came = self._places(back[at], self.lengths[senders[at]], rows, self.num_messages - 1)
                batch = Batch(
                    made,
                    listeners[at],
                    np.where(sending < self.num_entries, sending - level.entries.start, len(level.costs)),
                    np.ascontiguousarray(came.T),
                    self._places(ahead[at], self.lengths[listeners[at]], columns, self.num_messages - 1),
                    (sending, hearing),
                )
                (level.out if forward else level.into).append(batch)

    def in_order(self, choices: np.ndarray) -> tuple[int, ...]:
        """Choices by the nodes' numbers in the problem."""
        found = np.empty(self.num_nodes, np.int64)
        found[self.order] = choices
        return tuple(found.tolist())

    def by_node(self, entries: np.ndarray) -> tuple[np.ndarray, ...]:
        """Values of all entries, by the nodes' numbers in the problem."""
        found: list[np.ndarray] = [np.zeros(0)] * self.num_nodes
        for place, node in enumerate(self.order.tolist()):
            found[node] = entries[self.first[place] : self.first[place + 1]]
        return tuple(found)

    def _hears(self, nodes: np.ndarray, begins: np.ndarray) -> csr_array:
        """`[entry, message]`: the sum of the messages that begin there, at their nodes."""
        lengths = self.lengths[nodes]
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows, columns = np.repeat(self.first[nodes], lengths) + inside, np.repeat(begins, lengths) + inside
        return csr_array((np.ones(len(rows)), (rows, columns)), shape=(self.num_entries, self.num_messages))

    @staticmethod
    def _places(begins: np.ndarray, lengths: np.ndarray, width: int, pad: int) -> np.ndarray:
        inside = np.arange(width)
        return np.where(inside < lengths[:, None], begins[:, None] + inside, pad)


def _levels(count: int, problem: Problem) -> np.ndarray:
    later: list[list[int]] = [[] for _ in range(count)]
    for u, v in problem.edges:
        later[u].append(v)
    level = [0] * count
    for u in range(count):
        for v in later[u]:
            level[v] = max(level[v], level[u] + 1)
    return np.array(level, dtype=np.int64)


def _padded(length: int) -> int:
    """The next size in 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a half more."""
    size = 1
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > 1 else (size * 4 // 3 if size > 1 else 2)
    return size

"""Sends messages along many edges at once, their cost tables side by side.

In:     cost tables of edges, positions of their ends among all entries and messages (`batches.py`).
Out:    `Batch`, which sends messages, and adds up by how much pairs exceed the best one.
Method: minima over the sender's choices are taken along long rows. Of a large table, equal rows and columns are computed
        once: a message is the same for receivers' choices of equal columns, and of senders' choices of equal rows the one
        that is least before the table is added is least after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.intra_op.elimination import distinct_rows
from autopar.tuning import TUNING


class Shrunk(NamedTuple):
    """A table without equal rows and columns; for each choice of either end, its row or column. None: its own."""

    table: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    @property
    def turned(self) -> Shrunk:
        """The same for messages the other way."""
        return Shrunk(self.table.T, self.columns, self.rows)


def shrink(table: np.ndarray) -> Shrunk:
    """Drop equal rows and columns of a large table."""
    if table.size < TUNING.message_small:
        return Shrunk(table)
    fewer, rows = distinct_rows(table)
    turned, columns = distinct_rows(np.ascontiguousarray(fewer.T))
    at = [None if which is None else np.array(which) for which in (rows, columns)]
    return Shrunk(np.ascontiguousarray(turned.T), *at)


@dataclass(slots=True, eq=False)
class Batch:
    """Edges that send messages from one level, their tables side by side as `[row, column]`, with a row for each of the
    sender's choices and a column for each of the receiver's, or for several that are equal.

    Columns, and the receivers' choices with them, are sorted by the width of the table, so that in a chunk senders' costs are
    repeated equally often. Sums are taken in the order of edges, not of columns.

    Attributes:
        tables: The tables; padded rows are forbidden.
        receivers: Per edge, the receiving node.
        begins: Per edge, the first of its receiver's choices.
        edges: Per receiver's choice, its edge.
        sending: `[choice, edge]`: position of the sender's choice within its level.
        back: `[choice, edge]`: position of the message that came the other way.
        ahead: Per receiver's choice, position of the message to be sent.
        entries: Positions among all entries: of senders' choices, `[choice, edge]`, and of receivers' choices.
        by_column: The edges in the order of their columns.
        in_order: The receivers' choices in the order of the edges.
        firsts: Per edge, its first column.
        chunks: Slices of `by_column` that are computed at once, and of their columns: edges of equal width.
        is_small: Whether the tables are so small that chunks mix widths.
        told: Positions as in `sending` and `back`, of what each row hears: of several choices, one after the other.
        alike: Per row and edge, where its choices begin in `told`; None: each has one.
        row_of: `[choice, edge]`: the row of a sender's choice; None: its own.
        column_of: Per receiver's choice, its column; None: its own.
    """

    tables: np.ndarray
    receivers: np.ndarray
    begins: np.ndarray
    edges: np.ndarray
    sending: np.ndarray
    back: np.ndarray
    ahead: np.ndarray
    entries: tuple[np.ndarray, np.ndarray]
    by_column: np.ndarray
    in_order: np.ndarray
    firsts: np.ndarray
    made: InitVar[Sequence[Shrunk]]
    chunks: list[tuple[slice, slice]] = field(init=False)
    is_small: bool = field(init=False)
    told: tuple[np.ndarray, np.ndarray] = field(init=False)
    alike: np.ndarray | None = field(init=False, default=None)
    row_of: np.ndarray | None = field(init=False, default=None)
    column_of: np.ndarray | None = field(init=False, default=None)

    def __post_init__(self, made: Sequence[Shrunk]) -> None:
        self.told = self.sending, self.back
        if any(one.columns is not None for one in made):
            self._join_columns(made)
        if any(one.rows is not None for one in made):
            self._join_rows(made)
        self.is_small = self.tables.size < TUNING.message_small and self.column_of is None
        self.chunks = self._cut()

    def _cut(self) -> list[tuple[slice, slice]]:
        rows, columns = self.tables.shape
        ends, cuts = [*self.firsts[self.by_column].tolist(), columns], [0]
        for place in range(1, len(ends)):
            is_full = rows * (ends[place] - ends[cuts[-1]]) >= TUNING.message_chunk
            is_last = place == len(ends) - 1
            width = ends[place] - ends[place - 1]
            if is_last or is_full or not (self.is_small or width == ends[place + 1] - ends[place]):
                cuts.append(place)
        return [(slice(a, b), slice(ends[a], ends[b])) for a, b in itertools.pairwise(cuts)]

    def _join_columns(self, made: Sequence[Shrunk]) -> None:
        """Note which column each choice of a receiver has."""
        own = np.arange(len(self.edges)) - self.begins[self.edges]
        for begin, one in zip(self.begins.tolist(), made, strict=True):
            if one.columns is not None:
                own[begin : begin + len(one.columns)] = one.columns
        self.column_of = own + self.firsts[self.edges]

    def _join_rows(self, made: Sequence[Shrunk]) -> None:
        """Note which row each choice of a sender has; rows without one hear what pads hear, and pads have the last row."""
        rows, (choices, count) = len(self.tables), self.sending.shape
        self.row_of = np.full((choices, count), rows - 1)
        keys, found = [], []
        for k, one in enumerate(made):
            own = len(one.table) if one.rows is None else len(one.rows)
            self.row_of[:own, k] = np.arange(own) if one.rows is None else one.rows
            keys += [self.row_of[:own, k] * count + k, np.arange(len(one.table), rows) * count + k]
            found += [np.arange(own) * count + k, np.full(rows - len(one.table), (choices - 1) * count + k)]
        places = np.concatenate(found)[np.argsort(np.concatenate(keys), kind="stable")]
        self.alike = np.searchsorted(np.sort(np.concatenate(keys)), np.arange(rows * count))
        self.told = self.sending.take(places), self.back.take(places)

    def send(self, messages: np.ndarray, part: np.ndarray) -> None:
        """Send per receiver's choice the minimum, over the sender's, of its share less the message back, plus the table.

        Args:
            messages: All messages; changed.
            part: Per entry of the senders' level, the share of its costs that goes to one edge; a last 0 for pads.
        """
        messages[self.ahead] = self._heard(messages, part)

    def send_excess(self, messages: np.ndarray, part: np.ndarray) -> float:
        """Send the same messages, each less its least entry; returns the sum of these. Arguments as in `send`."""
        heard = self._heard(messages, part)
        least = np.empty(len(self.by_column))
        least[self.by_column] = np.minimum.reduceat(heard, self.begins[self.by_column])
        heard -= least.take(self.edges)
        messages[self.ahead] = heard
        return float(np.add.reduce(least))

    def _heard(self, messages: np.ndarray, part: np.ndarray) -> np.ndarray:
        sending, back = self.told
        told = part.take(sending)
        told -= messages.take(back)
        if self.alike is not None:
            told = np.minimum.reduceat(told, self.alike).reshape(len(self.tables), -1)
        found = np.empty(self.tables.shape[1])
        for edges, columns in self.chunks:
            np.minimum.reduce(self._pairs(told, edges, columns), axis=0, out=found[columns])
        return found if self.column_of is None else found.take(self.column_of)

    def _pairs(self, told: np.ndarray, places: slice, columns: slice) -> np.ndarray:
        """Costs of all pairs of rows and columns of some edges."""
        if self.is_small:
            pairs = told.take(self.edges[columns], axis=1)
        else:
            edges = self.by_column[places]
            pairs = np.repeat(told.take(edges, axis=1), (columns.stop - columns.start) // len(edges), axis=1)
        pairs += self.tables[:, columns]
        return pairs

    def _tables_of(self, choices: np.ndarray | slice) -> np.ndarray:
        """The tables of some receivers' choices, `[sender's choice, receiver's choice]`."""
        columns = choices if self.column_of is None else self.column_of[choices]
        if self.row_of is None:
            return np.asarray(self.tables[:, columns])
        if isinstance(columns, slice):
            columns = np.arange(columns.start, columns.stop)
        return np.asarray(self.tables[self.row_of[:, self.edges[choices]], columns])

    def beside(self, choices: np.ndarray) -> np.ndarray:
        """`[sender's choice, edge]`: the table's entries beside the receivers' choices, one per edge."""
        return self._tables_of(self.begins + choices)

    def add_excess(self, excess: np.ndarray, messages: np.ndarray, part: np.ndarray) -> None:
        """Add to each choice, at both ends of each edge, by how much the edge's best pair with it exceeds its best pair.

        `excess`: per entry, and a last one for pads; changed.
        """
        told, heard = part.take(self.sending) - messages.take(self.back), messages.take(self.ahead)
        sent, hears = np.empty(self.sending.shape), np.empty(len(heard))
        ends = [*self.begins[self.by_column].tolist(), len(heard)]
        for places, _ in self.chunks:
            choices = slice(ends[places.start], ends[places.stop])
            pairs = told.take(self.edges[choices], axis=1)
            pairs += self._tables_of(choices)
            pairs -= heard[choices]
            edges = self.by_column[places]
            np.minimum.reduce(pairs, axis=0, out=hears[choices])
            begins = self.begins[edges] - choices.start
            least = np.minimum.reduceat(hears[choices], begins)
            sent[:, edges] = np.minimum.reduceat(pairs, begins, axis=1) - least
            hears[choices] -= np.repeat(least, np.diff(begins, append=choices.stop - choices.start))
        np.add.at(excess, self.entries[0], sent)
        np.add.at(excess, self.entries[1][self.in_order], hears[self.in_order])

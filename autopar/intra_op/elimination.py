"""Shrinks a choice problem by exact reductions, before any solver sees it.

In:     `Problem`, and the nodes that must stay (those in a memory row that may bind).
Out:    a smaller problem, and a way back to choices of all nodes.
Method: a node with one choice is settled, a node with one neighbour is folded into the neighbour's costs, a node with
        two into an edge between them (Scholz and Eckstein, "Register allocation for irregular architectures", LCTES 2002,
        reductions R1 and R2); dominated choices, which another choice beats whatever the neighbours choose, are dropped.
        On training steps, whose graphs are long chains with residual connections, little is left.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopar.intra_op.problem import Problem
from autopar.tuning import TUNING


class _Folded(NamedTuple):
    """A removed node as it was then: the costs of its choices, its tables with neighbours, and the choices left at each."""

    node: int
    neighbours: tuple[int, ...]
    tables: tuple[np.ndarray, ...]
    cost: np.ndarray
    node_alive: np.ndarray
    neighbours_alive: tuple[np.ndarray, ...]

    def best(self, choices: Sequence[int]) -> int:
        """The node's first cheapest choice, given its neighbours' `choices`."""
        total, beside = self.cost, zip(self.neighbours, self.neighbours_alive, self.tables, strict=True)
        for other, alive, table in reversed([*beside]):  # summed in the order of the reduction, for equal rounding
            total = total + table[alive.searchsorted(choices[other])]
        return int(self.node_alive[total.argmin()])


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """A reduced problem.

    Attributes:
        problem: The core, its nodes renumbered.
        kept: Original node of each core node.
        constant: Cost of settled nodes.
    """

    problem: Problem
    kept: tuple[int, ...]
    constant: float
    _alive: tuple[np.ndarray, ...]
    _folded: tuple[_Folded, ...]
    _num_nodes: int

    def alive_of(self, node: int) -> np.ndarray:
        """The original choices left at a node of the core."""
        return self._alive[self.kept.index(node)]

    def narrow(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the core's nodes from those of all original nodes; a dropped choice becomes the next one left."""
        return tuple(
            min(int(alive.searchsorted(choices[node])), len(alive) - 1)
            for node, alive in zip(self.kept, self._alive, strict=True)
        )

    def expand(self, core_choices: tuple[int, ...]) -> tuple[int, ...]:
        """Choices of all original nodes from those of the core."""
        choices = [0] * self._num_nodes
        for node, alive, choice in zip(self.kept, self._alive, core_choices, strict=True):
            choices[node] = int(alive[choice])
        for folded in reversed(self._folded):
            choices[folded.node] = folded.best(choices)
        return tuple(choices)


def eliminate(problem: Problem, keep: Iterable[int] = ()) -> Reduced:
    """Fold away every node of degree two or less, or with one choice, that is not in `keep`.

    Args:
        problem: The problem; not changed.
        keep: Nodes that must stay (memory rows).
    """
    state = _State(problem)
    kept = set(keep)
    queue = [(len(state.edges[n]), n) for n in range(len(problem.costs)) if n not in kept]
    heapq.heapify(queue)
    folded: list[_Folded] = []
    gone: set[int] = set()
    retried: dict[int, int] = {}
    while queue:
        degree, node = heapq.heappop(queue)
        if node in gone or degree != len(state.edges[node]):
            continue
        if (degree > 2 and len(state.costs[node]) > 1) or not state.can_fold(node):
            # A node with too many neighbours may still lose choices.
            if retried.get(node) != degree and state.drop_dominated(node):
                heapq.heappush(queue, (len(state.edges[node]), node))
            retried[node] = degree
            continue
        touched = list(state.edges[node])
        folded.append(state.fold(node))
        gone.add(node)
        for neighbour in touched:
            if neighbour not in kept:
                heapq.heappush(queue, (len(state.edges[neighbour]), neighbour))
    left = [n for n in range(len(problem.costs)) if n not in gone]
    position = {n: k for k, n in enumerate(left)}
    core = Problem([state.costs[n] for n in left])
    for u in left:
        for v, matrix in state.edges[u].items():
            if u < v:
                core.edges[position[u], position[v]] = matrix
    return Reduced(
        core, tuple(left), state.constant, tuple(state.alive[n] for n in left), tuple(folded), len(problem.costs)
    )


class _State:
    """The shrinking problem: cost vectors, and for each node its neighbours with matrices oriented outwards.

    Arrays are never changed, and results are cached by their operands (`_Once`): equal layers are eliminated at the price
    of one.
    """

    def __init__(self, problem: Problem):
        self.once = _Once.of(problem)
        self.costs = [self.once.same(np.asarray(c, dtype=np.float64)) for c in problem.costs]
        numbers = {length: np.arange(length) for length in dict.fromkeys(map(len, self.costs))}
        self.alive = [numbers[len(c)] for c in self.costs]
        self.edges: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.constant = 0.0
        both: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by id, each matrix and its transpose
        for (u, v), matrix in problem.edges.items():
            if id(matrix) not in both:
                first = self.once.same(matrix)
                both[id(matrix)] = first, self.once(np.transpose, first)
            self.edges[u][v], self.edges[v][u] = both[id(matrix)]
        for node, cost in enumerate(self.costs):
            allowed = self.once(_allowed, cost)
            if allowed is not None:
                self.restrict(node, allowed)

    def join(self, u: int, v: int, matrix: np.ndarray) -> None:
        self.edges[u][v], self.edges[v][u] = matrix, self.once(np.transpose, matrix)

    def restrict(self, node: int, which: np.ndarray) -> None:
        self.costs[node], self.alive[node] = (
            self.once(operator.getitem, values, which) for values in (self.costs[node], self.alive[node])
        )
        for other, matrix in self.edges[node].items():
            self.join(node, other, self.once(operator.getitem, matrix, which))

    def drop_dominated(self, node: int) -> bool:
        """Drop choices that another choice beats for every choice of the neighbours; returns whether there were any."""
        cost = self.costs[node]
        compared = sum(len(self.costs[n]) for n in self.edges[node]) * len(cost) ** 2
        if len(cost) == 1 or compared > TUNING.compared_choices:
            return False
        keep = self.once(_undominated, cost, *self.edges[node].values())
        if keep is None:
            return False
        self.restrict(node, keep)
        return True

    def can_fold(self, node: int) -> bool:
        if len(self.costs[node]) == 1:
            return True
        sizes = [len(self.costs[n]) for n in self.edges[node]]
        return len(sizes) < 2 or sizes[0] * sizes[1] * len(self.costs[node]) <= TUNING.fold_elements

    def settle(self, node: int) -> _Folded:
        """Remove a node with one choice, adding its row of each table to the neighbour's costs."""
        self.constant += float(self.costs[node][0])
        for other in sorted(self.edges[node]):
            self.costs[other] = self.once(
                operator.add, self.costs[other], self.once(_first_row, self.edges[node][other])
            )
            del self.edges[other][node]
            allowed = self.once(_allowed, self.costs[other])
            if allowed is not None:
                self.restrict(other, allowed)
        self.edges[node] = {}
        return _Folded(node, (), (), self.costs[node], self.alive[node], ())

    def fold(self, node: int) -> _Folded:
        neighbours = tuple(sorted(self.edges[node]))
        cost = self.costs[node]
        if len(cost) == 1:
            return self.settle(node)
        tables = tuple(self.edges[other][node] for other in neighbours)
        match neighbours:
            case ():
                self.constant += float(cost.min())
            case (u,):
                self.costs[u] = self.once(operator.add, self.costs[u], self.once(_least_of, *tables, cost))
            case (u, v):
                matrix = self.once(_least_between, *tables, cost)
                known = self.edges[u].get(v)
                self.join(u, v, matrix if known is None else self.once(operator.add, known, matrix))
            case _:
                raise AssertionError("only nodes of degree two or less, or with one choice, are folded")
        for other in neighbours:
            del self.edges[other][node]
        self.edges[node] = {}
        return _Folded(node, neighbours, tables, cost, self.alive[node], tuple(self.alive[n] for n in neighbours))


class _Once:
    """Caches functions of arrays by the identity of their operands, and makes equal arrays one object.

    Results stay alive, so that it is only used where many tables are equal; elsewhere it calls through.
    """

    def __init__(self, arrays: dict[Hashable, np.ndarray] | None):
        self._arrays = arrays
        self._known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by id, each array and the first one equal to it

    @staticmethod
    def of(problem: Problem) -> _Once:
        size = sum(matrix.size for matrix in problem.edges.values())
        if len(problem.edges) < TUNING.equal_edges or size > TUNING.fold_elements:
            return _Once(None)
        once = _Once({})
        distinct = {id(once.same(matrix)) for matrix in problem.edges.values()}
        return once if 2 * len(distinct) < len(problem.edges) else _Once(None)

    def same(self, array: np.ndarray) -> np.ndarray:
        """The first array that is equal to this one."""
        if self._arrays is None:
            return array
        seen = self._seen.get(id(array))
        if seen is None:
            first = self._arrays.setdefault((array.dtype, array.shape, array.tobytes()), array)
            seen = self._seen[id(array)] = array, first
        return seen[1]

    def __call__(self, function: Callable[..., Any], *arrays: np.ndarray) -> Any:
        if self._arrays is None:
            return function(*arrays)
        key = (function, *map(id, arrays))
        found = self._known.get(key)
        if found is None:
            # The arrays are kept with the result, so that their ids are not reused.
            found = self._known[key] = arrays, function(*arrays)
        return found[1]


def _first_row(matrix: np.ndarray) -> np.ndarray:
    return matrix[0]


def _allowed(cost: np.ndarray) -> np.ndarray | None:
    """Mask of the choices that are not forbidden; None if all are, or none is."""
    finite = np.isfinite(cost)
    return None if finite.all() or not finite.any() else finite


def _undominated(cost: np.ndarray, *matrices: np.ndarray) -> np.ndarray | None:
    """Mask of the choices that no other choice dominates; None: all.

    A choice that beats another everywhere does so where that one is best, which tells most pairs apart; the others are
    compared for all choices of the neighbours.
    """
    with np.errstate(invalid="ignore"):
        worst = cost[:, None] - cost  # worst[j, i]: how much j may cost more than i, at least
        for matrix in matrices:
            there = matrix.take(matrix.argmin(axis=1), axis=1)
            worst += there - there.diagonal()
        beats = ~(worst > 0)  # what is forbidden on both sides (inf - inf) says nothing here
        np.fill_diagonal(beats, False)
        better, worse = beats.nonzero()
        if not len(better):
            return None
        exact = cost[better] - cost[worse]
        for matrix in matrices:
            exact += _most(matrix.T.take(better, axis=1) - matrix.T.take(worse, axis=1))
    beats[better, worse] = exact <= 0
    keep = np.ones(len(cost), bool)
    # Of choices that beat each other the first stays.
    keep[worse[beats[better, worse] & ~(beats[worse, better] & (worse < better))]] = False
    return None if keep.all() else keep


def _most(excess: np.ndarray) -> np.ndarray:
    """Maxima over the first dim; what is forbidden on both sides (inf - inf) says nothing."""
    most = np.maximum.reduce(excess, axis=0)
    if np.isnan(most).any():
        excess[np.isnan(excess)] = -np.inf
        most = np.maximum.reduce(excess, axis=0)
    return np.asarray(most)


def _least_of(table: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Per row, the minimum of the table plus the costs of its columns."""
    return np.asarray((table + cost[None, :]).min(axis=1))


def _least_between(left: np.ndarray, right: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Per pair (i, j), the minimum over k of `left[i, k] + right[j, k] + cost[k]`.

    One k at a time is several times as fast as one table over all k, whose last dim would be short. Equal rows are computed
    once: strategies that treat this node alike have them. The minimizing k is found on demand, for one pair
    (`_Folded.best`): recording it here would take as long again.
    """
    is_large = len(left) * right.size >= TUNING.equal_rows
    (left, of_left), (right, of_right) = (
        distinct_rows(table) if is_large else (table, None) for table in (left, right)
    )
    right = np.ascontiguousarray((right + cost[None, :]).T)
    least = left[:, :1] + right[0]
    other = np.empty_like(least)
    for k in range(1, left.shape[1]):
        np.add(left[:, k : k + 1], right[k], out=other)
        np.minimum(least, other, out=least)
    least = least if of_left is None else least.take(of_left, axis=0)
    return least if of_right is None else least.take(of_right, axis=1)


def distinct_rows(matrix: np.ndarray) -> tuple[np.ndarray, list[int] | None]:
    """The distinct rows of a matrix, and for each of its rows which one it is; None: there are no equal ones."""
    number: dict[bytes, int] = {}
    which = [number.setdefault(row.tobytes(), len(number)) for row in matrix]
    if len(number) == len(matrix):
        return matrix, None
    return np.array([matrix[which.index(k)] for k in range(len(number))]), which

"""Solves a choice problem exactly by eliminating one node after the other, however many neighbours it has.

In:     `Problem` without memory rows.
Out:    `Solution`, proved optimal; None: its tables would be too large.
Method: nonserial dynamic programming (Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; "bucket elimination" in
        Dechter, Artificial Intelligence 1999): the least cost of a node, for each combination of its neighbours' choices, is
        a table over them, with as many dims as there are neighbours. Training steps are long and narrow: each layer meets
        few values of others. Next goes the node whose elimination connects the fewest new pairs of choices ("least weighted
        fill"). What message passing leaves of a core has a few choices per node and up to 15 dims, of which integer programs
        prove the last per mille in minutes, and this in a second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from autopar.intra_op.problem import Problem, Solution
from autopar.tuning import TUNING

_BLOCK = 256
"""Elements, at least, that tables share in their last dims: NumPy adds short rows slowly."""

Table = tuple[tuple[int, ...], np.ndarray]
"""Nodes, in the order of elimination, and costs by their choices."""


def solve_by_tables(problem: Problem, most: float = TUNING.table_entries) -> Solution | None:
    """The least assignment of a problem, if that takes tables of at most `most` entries in all."""
    order = elimination_order(problem, most)
    if order is None:
        return None
    position = {node: k for k, node in enumerate(order)}
    buckets: list[list[Table]] = [[] for _ in order]  # by position, the tables whose first node stands there
    for (u, v), matrix in problem.edges.items():
        first = min(position[u], position[v])
        buckets[first].append(((u, v), matrix) if position[u] == first else ((v, u), matrix.T))
    for at, node in enumerate(order):
        nodes = tuple(sorted({n for around, _ in buckets[at] for n in around if n != node}, key=position.__getitem__))
        if nodes:
            least = _least(problem.costs[node], buckets[at], nodes, [len(problem.costs[n]) for n in nodes])
            buckets[position[nodes[0]]].append((nodes, least))
    choices = [0] * len(order)
    for at, node in reversed([*enumerate(order)]):
        total = np.asarray(problem.costs[node], np.float64)
        for around, table in buckets[at]:
            total = total + np.moveaxis(table, 0, -1)[tuple([choices[n] for n in around[1:]])]
        choices[node] = int(total.argmin())
    seconds = problem.cost(choices)
    name = f"tables over {len(order)} nodes"
    if not math.isfinite(seconds):
        return Solution((), math.inf, math.inf, "infeasible", name)
    return Solution(tuple(choices), seconds, seconds, "optimal", name)


def elimination_order(problem: Problem, most: float = TUNING.table_entries) -> list[int] | None:
    """The order of least weighted fill; None: the tables would have more than `most` entries in all."""
    bits = [math.log2(len(cost)) for cost in problem.costs]
    around: list[set[int]] = [set() for _ in bits]
    for u, v in problem.edges:
        around[u].add(v)
        around[v].add(u)
    fill = [_fill(node, around, bits) for node in range(len(bits))]
    queue = [(fill[node], node) for node in range(len(bits))]
    heapq.heapify(queue)
    order, entries, gone = list[int](), 0.0, set[int]()
    while queue:
        cost, node = heapq.heappop(queue)
        if node in gone or cost != fill[node]:
            continue
        near = around[node]
        entries += 2.0 ** (bits[node] + sum(bits[other] for other in near))
        if entries > most:
            return None
        order.append(node)
        gone.add(node)
        for other in near:
            around[other] |= near
            around[other] -= {other, node}
        for other in sorted(near.union(*(around[n] for n in near))) if cost else sorted(near):
            changed = _fill(other, around, bits)
            if changed != fill[other]:
                fill[other] = changed
                heapq.heappush(queue, (changed, other))
    return order


def _fill(node: int, around: Sequence[set[int]], bits: Sequence[float]) -> float:
    """The weight of the pairs of a node's neighbours that its elimination would connect."""
    return sum(bits[u] * bits[v] for u, v in combinations(sorted(around[node]), 2) if v not in around[u])


def _least(cost: np.ndarray, tables: Sequence[Table], nodes: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """The least cost of a node, the first of each table, by the choices of `nodes`: `[*sizes]`.

    The last dims are one, of at least `_BLOCK` elements if there are as many.
    """
    at = {node: dim for dim, node in enumerate(nodes)}
    split = len(sizes)
    while split and math.prod(sizes[split:]) < _BLOCK:
        split -= 1
    parts = []
    for around, table in sorted(tables, key=lambda pair: pair[1].size):
        shape = [len(cost)] + [1] * len(sizes)
        for node, size in zip(around[1:], table.shape[1:], strict=True):
            shape[1 + at[node]] = size
        wide = table.reshape(shape)
        if any(size > 1 for size in shape[1 + split :]):
            wide = np.broadcast_to(wide, (*shape[: 1 + split], *sizes[split:]))
        parts.append(wide.reshape(*shape[: 1 + split], -1))
    least = np.full((*sizes[:split], math.prod(sizes[split:])), np.inf)
    for k, own in enumerate(cost):
        total = parts[0][k] + own
        for part in parts[1:]:
            total = total + part[k]
        np.minimum(least, total, out=least)
    return least.reshape(sizes)

"""A mesh of three axes, two at a time: an answer made better where a problem is too large to be solved at once.

In:     a problem, an answer on a mesh some of whose axes are one axis on another mesh of fewer axes.
Out:    `Solution`: no worse than that answer; nothing is proved.
Method: what every decision does on one axis is fixed, and on the others chosen anew, as on a mesh of two axes; then another
        axis is fixed, until none is worth it. Tables are k x k times smaller than those of all choices at once: block
        coordinate descent (Bertsekas, "Nonlinear Programming", sec. 2.7), whose blocks are solved as any problem is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.problem import PROVED, Problem, Solution
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit, time_limit
from autopar.mesh import LogicalMesh, Sharding
from autopar.tuning import TUNING

Behaviours = tuple[tuple[np.ndarray, ...], ...]
"""Of each mesh axis, of each decision of a problem: a number for each choice, equal where it does the same on that axis."""


def joined_axes(fewer: LogicalMesh, more: LogicalMesh) -> Mapping[str, tuple[str, ...]]:
    """Of each axis of a mesh the neighbouring axes of another one that together are as long; {}: there are none."""
    left, found = list(more.axis_sizes.items()), dict[str, tuple[str, ...]]()
    for axis, size in fewer.axis_sizes.items():
        names, product = [], 1
        while left and product < size:
            name, length = left.pop(0)
            names.append(name)
            product *= length
        if product != size:
            return {}
        found[axis] = tuple(names)
    return {} if left else found


def lift(choices: Sequence[int], known: Graph, graph: Graph) -> tuple[int, ...]:
    """The same answer on a mesh whose axes are parts of those of the mesh that it was found on, or as many, of other sizes.

    Args:
        choices: Of each node of `known`.
        known: The program on that mesh.
        graph: The same program on the other.

    Returns:
        A choice for each node of `graph`; of decisions that `known` does not have, to keep the value whole.
    """
    same = {axis: (axis,) for axis in known.mesh.axis_names}
    axes = same if known.mesh.axis_names == graph.mesh.axis_names else joined_axes(known.mesh, graph.mesh)
    at = {name: known.nodes[index] for name, index in _names(known)}
    places: dict[int, dict[Key, int]] = {}  # where each choice is, of equal lists once
    keys: dict[tuple[int, int], Key] = {}  # of choices as they are called here
    found = [node.num_choices - 1 for node in graph.nodes]
    for name, index in _names(graph):
        node, before = graph.nodes[index], at.get(name)
        if before is None:
            continue
        listed = id(node.strategies or node.shardings)
        if listed not in places:
            places[listed] = {key: k for k, key in reversed([*enumerate(_keys(node))])}
        choice = id(before.strategies or before.shardings), choices[before.index]
        if choice not in keys:
            keys[choice] = _key(before, choice[1], axes)
        found[index] = places[listed].get(keys[choice], found[index])
    return tuple(found)


def behaviours(graph: Graph, class_of: Sequence[int]) -> Behaviours:
    """What the choices of each class of nodes do on each axis."""
    first = dict(zip(reversed(class_of), reversed(graph.nodes), strict=True))
    known: dict[tuple[int, str], np.ndarray] = {}
    lying: dict[tuple[Sharding, str], Hashable] = {}

    def lies(sharding: Sharding, axis: str) -> Hashable:
        found = lying.get((sharding, axis))
        if found is None:
            split = tuple([axis in names for names in sharding.dims])
            found = lying[sharding, axis] = split, axis in sharding.partial
        return found

    def does(key: Key, axis: str) -> Hashable:
        shardings, reductions = key
        return tuple([lies(s, axis) for s in shardings]), tuple([axis in names for _, names in reductions])

    def numbers(node: Node, axis: str) -> np.ndarray:
        listed = node.strategies or node.shardings
        if (id(listed), axis) not in known:
            order: dict[Hashable, int] = {}
            known[id(listed), axis] = np.array([order.setdefault(does(k, axis), len(order)) for k in _keys(node)])
        return known[id(listed), axis]

    return tuple(tuple(numbers(first[k], axis) for k in range(len(first))) for axis in graph.mesh.axis_names)


def descend(
    problem: Problem,
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    gap: float = PROVED,
    known: float = np.inf,
    *,
    start: Sequence[int],
    does: Behaviours,
) -> Solution:
    """Fix one axis after the other, and choose the rest anew.

    Args:
        problem: Costs, without rows.
        solver: As of `solve`.
        seconds: As of `solve`.
        gap: As of `solve`, of each block.
        known: Cost of an answer on another mesh: where nothing found is better, its status is `"pruned"`.
        start: Where to begin.
        does: What choices do on each axis.
    """
    limit = time_limit(seconds)
    floor = sum(float(cost.min()) for cost in problem.costs)
    best = Solution(tuple(start), problem.cost(start), floor, "feasible", "two axes at a time")
    fixed = failed = 0
    while failed < len(does) and not limit.is_spent:
        before = best.objective
        block, left = _block(problem, does[fixed], best.choices)
        begin = [int(np.searchsorted(which, choice)) for which, choice in zip(left, best.choices, strict=True)]
        answer = solve(block, solver, limit, max(gap, TUNING.large_gap), start=begin)
        if answer.choices and answer.objective < before:
            choices = tuple(int(which[choice]) for which, choice in zip(left, answer.choices, strict=True))
            best = Solution(choices, answer.objective, floor, "feasible", best.solver)
        # What was just solved gives no more until another axis was fixed.
        failed = 1 if best.objective < before * (1 - TUNING.axis_gain) else failed + 1
        fixed = (fixed + 1) % len(does)
    if not np.isfinite(best.objective):
        return Solution((), np.inf, np.inf, "infeasible", best.solver)
    return best if best.objective < known else dataclasses.replace(best, status="pruned")


def _block(
    problem: Problem, does: Sequence[np.ndarray], choices: Sequence[int]
) -> tuple[Problem, Sequence[np.ndarray]]:
    """The problem of the choices that do on an axis as `choices` do there, and which choices these are, of each node.

    Equal tables of the problem, which are one object, are one in its block too.
    """
    same: dict[tuple[int, int], np.ndarray] = {}
    left: list[np.ndarray] = []
    for numbers, choice in zip(does, choices, strict=True):
        key = id(numbers), int(numbers[choice])
        if key not in same:
            same[key] = np.flatnonzero(numbers == numbers[choice])
        left.append(same[key])
    costs: dict[tuple[int, int], np.ndarray] = {}
    block = Problem()
    for cost, which in zip(problem.costs, left, strict=True):
        few = id(cost), id(which)
        if few not in costs:
            costs[few] = cost[which]
        block.costs.append(costs[few])
    tables: dict[tuple[int, int, int], np.ndarray] = {}
    for (u, v), matrix in problem.edges.items():
        part = id(matrix), id(left[u]), id(left[v])
        if part not in tables:
            tables[part] = matrix[np.ix_(left[u], left[v])]
        block.edges[u, v] = tables[part]
    return block, left


def _names(graph: Graph) -> Iterator[tuple[Hashable, int]]:
    """Each node with a name that it has in every graph of its program."""
    yield from ((("input", k), index) for k, index in enumerate(graph.inputs))
    yield from ((("output", k), index) for k, index in enumerate(graph.outputs))
    yield from ((("op", eqn), index) for eqn, index in graph.op_node.items())
    yield from ((("port", key), index) for key, index in graph.ports.items())
    yield from ((("hub", key), index) for key, index in graph.hubs.items())
    yield from ((("keep", key), keep.node) for key, keep in graph.keeps.items())


Key = tuple[tuple[Sharding, ...], tuple[tuple[str, tuple[str, ...]], ...]]
"""What a choice is: the sharding of each value, and reductions."""


def _keys(node: Node) -> Iterator[Key]:
    return (_told(node, choice) for choice in range(node.num_choices))


def _told(node: Node, choice: int) -> Key:
    if not node.strategies:
        return (node.shardings[choice],), ()
    strategy = node.strategies[choice]
    return (*strategy.operands, *strategy.results), strategy.reductions


def _key(node: Node, choice: int, axes: Mapping[str, tuple[str, ...]]) -> Key:
    """A choice under other names of axes."""

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for axis in names for name in axes[axis])

    shardings, reductions = _told(node, choice)
    as_there = (Sharding(tuple(map(renamed, s.dims)), renamed(s.partial)) for s in shardings)
    return tuple(as_there), tuple((kind, renamed(names)) for kind, names in reductions)

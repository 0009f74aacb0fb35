"""Improves an assignment on a mesh of three axes by solving for two axes at a time, where all three are too many.

In:     a problem, an assignment for it (lifted from a mesh of fewer axes).
Out:    `Solution`, no worse than that assignment; nothing is proved.
Method: block coordinate descent (Bertsekas, "Nonlinear Programming", sec. 2.7): what every node does on one axis is fixed,
        and the rest is solved like any problem, as on a mesh of two axes; then another axis is fixed, until none gains
        enough. Tables of a block are k x k times smaller than those of all choices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.problem import PROVED, Problem, Solution
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.solve import Solve, solve
from autopar.intra_op.time_limit import TimeLimit, time_limit
from autopar.intra_op.tying import of_classes
from autopar.mesh import LogicalMesh, Sharding
from autopar.tuning import TUNING

Behaviours = tuple[tuple[np.ndarray, ...], ...]
"""Per mesh axis, per node of a problem: a number for each choice, equal for choices that do the same on that axis."""


def joined_axes(fewer: LogicalMesh, more: LogicalMesh) -> Mapping[str, tuple[str, ...]]:
    """Each axis of a mesh -> the adjacent axes of another mesh whose product it is; {}: the meshes do not match."""
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
    """Carry an assignment over to a mesh whose axes divide those of its own mesh, or have the same names.

    Args:
        choices: The assignment: a choice for each node of `known`.
        known: The program on the mesh of the assignment.
        graph: The same program on the other mesh.

    Returns:
        A choice for each node of `graph`; the last one, replicated, for nodes without a counterpart.
    """
    same = {axis: (axis,) for axis in known.mesh.axis_names}
    axes = same if known.mesh.axis_names == graph.mesh.axis_names else joined_axes(known.mesh, graph.mesh)
    at = {name: known.nodes[index] for name, index in _names(known)}
    places: dict[int, dict[Key, int]] = {}  # position of each choice, by the id of the list of choices
    keys: dict[tuple[int, int], Key] = {}  # choices under the axis names of `graph`
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
    """Compare what the choices of each class of nodes do on each axis."""
    nodes = of_classes(class_of, graph.nodes)
    known: dict[tuple[int, str], np.ndarray] = {}

    @functools.cache
    def placement(sharding: Sharding, axis: str) -> Hashable:
        return tuple([axis in names for names in sharding.dims]), axis in sharding.partial

    def does(key: Key, axis: str) -> Hashable:
        shardings, reductions = key
        return tuple([placement(s, axis) for s in shardings]), tuple([axis in names for _, names in reductions])

    def numbers(node: Node, axis: str) -> np.ndarray:
        listed = node.strategies or node.shardings
        if (id(listed), axis) not in known:
            order: dict[Hashable, int] = {}
            known[id(listed), axis] = np.array([order.setdefault(does(k, axis), len(order)) for k in _keys(node)])
        return known[id(listed), axis]

    return tuple(tuple(numbers(node, axis) for node in nodes) for axis in graph.mesh.axis_names)


def descend_from(known: Sequence[Sharded], graph: Graph, class_of: Sequence[int]) -> Solve:
    """A solver by axes, which begins with the best of answers from other meshes and those that it found before.

    Once it has found some, another descent wins next to nothing, and none is begun that has to win more.
    """
    starts = [of_classes(class_of, lift(sharded.choices, sharded.graph, graph)) for sharded in known]
    does = behaviours(graph, class_of)

    def by_axes(problem: Problem, *how: Any) -> Solution:
        hoped = TUNING.descent_doubt if len(starts) > len(known) else np.inf
        found = descend(problem, *how, start=min(starts, key=problem.cost), does=does, hoped=hoped)
        if found.choices and found.choices not in starts:
            starts.append(found.choices)
        return found

    return by_axes


def descend(
    problem: Problem,
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    gap: float = PROVED,
    known: float = np.inf,
    *,
    start: Sequence[int],
    does: Behaviours,
    hoped: float = np.inf,
) -> Solution:
    """Fix one axis after the other, and solve for the rest.

    Args:
        problem: Costs, without memory rows.
        solver: As in `solve`.
        seconds: As in `solve`.
        gap: As in `solve`, for each block.
        known: Cost of the incumbent on another mesh: if nothing better is found, the status is `"pruned"`.
        start: The assignment to begin with.
        does: What choices do on each axis.
        hoped: Part of `known` that it may win; if it has to win more, it is not begun.
    """
    limit = time_limit(seconds)
    floor = sum(float(cost.min()) for cost in problem.costs)
    best = Solution(tuple(start), problem.cost(start), floor, "feasible", "two axes at a time")
    fixed = failed = 0
    if np.isfinite(best.objective) and best.objective > (1 + hoped) * known:
        return dataclasses.replace(best, status="pruned")
    while failed < len(does) and not limit.is_spent:
        before = best.objective
        block, left = _block(problem, does[fixed], best.choices)
        begin = [int(np.searchsorted(which, choice)) for which, choice in zip(left, best.choices, strict=True)]
        answer = solve(block, solver, limit, max(gap, TUNING.stage_gap), start=begin)
        if answer.choices and answer.objective < before:
            choices = tuple(int(which[choice]) for which, choice in zip(left, answer.choices, strict=True))
            best = Solution(choices, answer.objective, floor, "feasible", best.solver)
        # A failure per axis in a row is a local optimum.
        failed = 1 if best.objective < before * (1 - TUNING.axis_gain) else failed + 1
        fixed = (fixed + 1) % len(does)
    if not np.isfinite(best.objective):
        return Solution((), np.inf, np.inf, "infeasible", best.solver)
    return best if best.objective < known else dataclasses.replace(best, status="pruned")


def _block(
    problem: Problem, does: Sequence[np.ndarray], choices: Sequence[int]
) -> tuple[Problem, Sequence[np.ndarray]]:
    """The problem restricted to choices that do the same on an axis as `choices`; and per node, which choices remain.

    Tables that are one object in the problem are one object in the block, too.
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
            tables[part] = matrix[left[u][:, None], left[v]]
        block.edges[u, v] = tables[part]
    return block, left


def _names(graph: Graph) -> Iterator[tuple[Hashable, int]]:
    """Each node under a name that is the same in all graphs of its program."""
    yield from ((("input", k), index) for k, index in enumerate(graph.inputs))
    yield from ((("output", k), index) for k, index in enumerate(graph.outputs))
    yield from ((("op", eqn), index) for eqn, index in graph.op_node.items())
    yield from ((("port", key), index) for key, index in graph.ports.items())
    yield from ((("hub", key), index) for key, index in graph.hubs.items())
    yield from ((("keep", key), keep.node) for key, keep in graph.keeps.items())


Key = tuple[tuple[Sharding, ...], tuple[tuple[str, tuple[str, ...]], ...]]
"""Identifies a choice: the sharding of each value, and reductions."""


def _keys(node: Node) -> Iterator[Key]:
    return (_own_key(node, choice) for choice in range(node.num_choices))


def _own_key(node: Node, choice: int) -> Key:
    if not node.strategies:
        return (node.shardings[choice],), ()
    strategy = node.strategies[choice]
    return (*strategy.operands, *strategy.results), strategy.reductions


def _key(node: Node, choice: int, axes: Mapping[str, tuple[str, ...]]) -> Key:
    """A choice under the axis names of another mesh."""

    def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for axis in names for name in axes[axis])

    shardings, reductions = _own_key(node, choice)
    as_renamed = (Sharding(tuple(map(renamed, s.dims)), renamed(s.partial)) for s in shardings)
    return tuple(as_renamed), tuple((kind, renamed(names)) for kind, names in reductions)

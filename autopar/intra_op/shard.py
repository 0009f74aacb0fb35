"""Shard one program on one logical mesh: graph, costs, solve, lower, measure; memory by demand.

In:     flat program, alias rows, logical mesh, device, what is allowed, options.
Out:    `Sharded`: the choices, the sharded program, and what is predicted of it.
Method: the passes of DESIGN section 5, "Sharding", in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, Var
from autopar.cost import collective_seconds
from autopar.errors import InfeasibleError
from autopar.intra_op.budget import BudgetSearch
from autopar.intra_op.costs import OperationSeconds, build_problem, held_values
from autopar.intra_op.floor import Floor, memory_floor
from autopar.intra_op.graph import Graph, build_graph
from autopar.intra_op.lanes import run_lanes
from autopar.intra_op.liveness import Liveness, measure_liveness
from autopar.intra_op.lower import lower
from autopar.intra_op.memory import broken_memory_rows
from autopar.intra_op.problem import PROVED, MemoryRow, Problem, Solution
from autopar.intra_op.restrict import Allowed, Restrict, pin_constraints
from autopar.intra_op.sharded import Body, Collective, collectives_of
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.intra_op.tying import tie_nodes
from autopar.intra_op.within import solve_within
from autopar.mesh import Device, LogicalMesh, Sharding
from autopar.options import Options

_SAME = 0.03
"""Up to this part of it the objective counts as the step time."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A program sharded on one mesh.

    Attributes:
        graph: The decisions.
        choices: The choice of each node.
        class_of: Class of each node in the problem.
        problem: What was solved.
        solution: Its solution, per class.
        allowed: What was forbidden beforehand.
        body: The sharded program.
        liveness: Its memory on one device.
        collectives: All it communicates in one step.
        compute_seconds: Time of its kernels.
        communication_seconds: Time of its collectives.
        exposed_seconds: Of each collective, the seconds that no kernel hides.
    """

    graph: Graph
    choices: tuple[int, ...]
    class_of: tuple[int, ...]
    problem: Problem
    solution: Solution
    allowed: Allowed
    body: Body
    liveness: Liveness
    collectives: tuple[Collective, ...]
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """Predicted time of one step: kernels, and what is exposed of collectives."""
        return self.compute_seconds + sum(self.exposed_seconds)

    def gap_of(self, seconds: float) -> float:
        """The part of these seconds, which a program of these choices takes, by which others might take less, at most.

        Args:
            seconds: Of all kernels and all collectives, one after the other, as choices are priced.
        """
        return max(0.0, 1 - self.solution.bound / seconds) if seconds > 0 else 0.0

    @property
    def gap(self) -> float:
        """The gap of the program as it was lowered, and not of its choices as they were priced alone."""
        return self.gap_of(self.compute_seconds + self.communication_seconds)

    def input_sharding(self, position: int) -> Sharding:
        """How an input lies on the mesh."""
        node = self.graph.inputs[position]
        return self.graph.nodes[node].shardings[self.choices[node]]


class Beaten(Exception):
    """A mesh was given up: no plan on it takes less than `seconds`, and a better one is known elsewhere."""

    def __init__(self, seconds: float):
        super().__init__(f"no plan takes less than {seconds} s")
        self.seconds = seconds


def shard(
    jaxpr: Jaxpr,
    aliases: Mapping[int, int],
    mesh: LogicalMesh,
    device: Device,
    options: Options,
    restrict: Restrict | None = None,
    donated: Sequence[bool] = (),
    batch: Sequence[int] | Mapping[int, frozenset[int]] = (),
    known: Sequence[Restrict] = (),
    beat: float = np.inf,
    gap: float = PROVED,
    elsewhere: AbstractSet[Var] = frozenset(),
    anew: AbstractSet[Var] = frozenset(),
    twice: AbstractSet[int] = frozenset(),
) -> Sharded:
    """Find the cheapest sharding of a program on one mesh.

    Args:
        jaxpr: Flat program without constants.
        aliases: Output index -> index of the input it replaces.
        mesh: Logical mesh.
        device: Rates and memory of one device.
        options: Solver, time limit, memory budget.
        restrict: Forbids choices (pins, data parallelism).
        donated: For each input, whether its memory may be reused.
        batch: Inputs whose leading dim runs over samples; or, by input, the dims that do.
        known: Well-known ways to shard, as restrictions; the best plan under each is compared with the one found, after
            small collectives have been put together.
        beat: Objective of the best plan on another mesh.
        gap: Part of the cost by which the answer may miss the least.
        elsewhere: Values that take no memory on these devices, such as stacks of what passes by one at a time.
        anew: As of `build_graph`.
        twice: As of `build_graph`.

    Raises:
        InfeasibleError: A pin or the memory budget cannot be kept; says which and by how much.
        ConstraintError: A pin does not fit.
        Beaten: Nothing here is better than `beat`.
    """
    graph = build_graph(jaxpr, mesh, aliases, batch, anew, twice)
    allowed = Allowed()
    pin_constraints(jaxpr, graph, allowed)
    if restrict is not None:
        restrict(graph, allowed)
    _check_pins(graph, allowed)
    class_of = tie_nodes(graph, allowed.keys)
    problem = build_problem(graph, device, class_of, allowed.masks)
    budget = options.memory_budget_bytes or device.memory_bytes

    lowered: dict[tuple[int, ...], Body] = {}

    def body_of(choices: tuple[int, ...]) -> Body:
        if choices not in lowered:
            lowered.clear()
            lowered[choices] = lower(jaxpr, graph, choices)
        return lowered[choices]

    def rows_at(choices: Sequence[int]) -> list[MemoryRow]:
        body = body_of(tuple(choices[c] for c in class_of))
        return broken_memory_rows(graph, class_of, choices, body, donated, budget, elsewhere)

    def floor() -> Floor:
        return memory_floor(jaxpr, graph, problem.costs, class_of, donated, elsewhere)

    search = BudgetSearch(budget, mesh, rows_at, floor)

    # One limit for all: where the first takes it all, the others are only looked at.
    limit = TimeLimit(options.solver_seconds)

    def solved(problem: Problem) -> Solution:
        if np.isfinite(budget):
            hopeless = search.is_hopeless
            return solve_within(problem, search.broken_rows, options.solver, limit, 30, beat, gap, hopeless)
        return solve(problem, options.solver, limit, gap, beat)

    def read(problem: Problem, solution: Solution) -> Sharded:
        choices = tuple(solution.choices[c] for c in class_of)
        return read_off(jaxpr, graph, choices, class_of, problem, solution, allowed, device, donated, body_of(choices))

    solution = solved(problem)
    if solution.status == "beaten":
        raise Beaten(solution.bound)
    best = read(problem, solution) if solution.choices else None
    if best is None and (not problem.rows or search.is_hopeless()):
        search.explain(problem)
    # Where putting collectives together changes the cost, the least of the ILP's objective may not be the least step.
    changes = best is None or abs(solution.objective - best.step_seconds) > _SAME * solution.objective
    for other in known if changes else ():
        narrowed = _narrowed(problem, graph, class_of, other)
        answer = solved(narrowed) if narrowed is not None else None
        if answer is not None and answer.choices:
            candidate = read(problem, answer.bounded(solution.bound if best else 0.0))
            if best is None or candidate.step_seconds < best.step_seconds * (1 - 1e-9):
                best = candidate
    if best is None:
        search.explain(problem)
    return best


def _narrowed(problem: Problem, graph: Graph, class_of: Sequence[int], restrict: Restrict) -> Problem | None:
    """The problem under further restrictions; None where they leave a decision without a choice."""
    further = Allowed()
    restrict(graph, further)
    costs = list(problem.costs)
    for index, mask in further.masks.items():
        costs[class_of[index]] = np.where(mask, costs[class_of[index]], np.inf)
    if any(not np.isfinite(cost).any() for cost in costs):
        return None
    return Problem(costs, problem.edges, list(problem.rows))


def read_off(
    jaxpr: Jaxpr,
    graph: Graph,
    choices: Sequence[int],
    class_of: Sequence[int],
    problem: Problem,
    solution: Solution,
    allowed: Allowed,
    device: Device,
    donated: Sequence[bool],
    body: Body | None = None,
) -> Sharded:
    """Lower given choices, unless that has been done, and predict what they cost."""
    body = lower(jaxpr, graph, choices) if body is None else body
    collectives = tuple(collectives_of(body, graph.mesh))
    communication = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, graph.mesh) for c in collectives)
    lanes = run_lanes(body, OperationSeconds(graph, choices, device).of, graph.mesh, device.achieved.overlap)
    liveness = measure_liveness(body, graph.mesh, held_values(graph), donated)
    besides = device.achieved.program_seconds(max(0, liveness.peak_bytes - liveness.argument_bytes))
    return Sharded(
        graph,
        tuple(choices),
        tuple(class_of),
        problem,
        solution,
        allowed,
        body,
        liveness,
        collectives,
        lanes.compute_seconds + besides,
        communication,
        lanes.exposed,
    )


def _check_pins(graph: Graph, allowed: Allowed) -> None:
    for index, mask in allowed.masks.items():
        if not mask.any():
            node = graph.nodes[index]
            reasons = allowed.reasons.get(index, [str(allowed.keys[index])])
            raise InfeasibleError(
                "the pins on one value contradict each other or the method.",
                given="; ".join(reasons),
                wrong=f"no sharding of {node.name} keeps all of them.",
                do="drop one of them, or choose another mesh.",
                constraint=reasons[0],
            )

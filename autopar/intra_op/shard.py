"""Shard one program on one logical mesh: graph, costs, solve, lower, measure; memory by demand.

In:     flat program, alias rows, logical mesh, device, what is allowed, options.
Out:    `Sharded`: the choices, the sharded program, and what is predicted of it.
Method: the passes of DESIGN section 5, "Sharding", in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, Var
from autopar.cost import collective_seconds
from autopar.errors import InfeasibleError
from autopar.intra_op.budget import BudgetSearch
from autopar.intra_op.costs import OperationSeconds, Prices, held_values
from autopar.intra_op.exposure import Exposure, show
from autopar.intra_op.floor import Floor, memory_floor
from autopar.intra_op.graph import Graph, build_graph
from autopar.intra_op.lanes import run_lanes
from autopar.intra_op.liveness import Liveness, fullest_moments, measure_liveness
from autopar.intra_op.lower import lower
from autopar.intra_op.memory import MAX_ROWS, rows_of
from autopar.intra_op.problem import PROVED, MemoryRow, Problem, Solution
from autopar.intra_op.restrict import Allowed, Restrict, pin_constraints
from autopar.intra_op.sharded import Body, Collective, collectives_of
from autopar.intra_op.solve import LARGE_GAP, ROUGH, solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.intra_op.tying import tie_nodes
from autopar.intra_op.within import solve_within
from autopar.mesh import Device, LogicalMesh, Sharding
from autopar.options import Options

TURNS = 3
"""Problems that are solved on a mesh, each with what the answer before showed of what is exposed."""
_SAME = 5e-3
"""Up to this part of the step, it takes as long as was thought."""
_FAR = 0.01
"""A known plan that is thought to take so much longer, at what is exposed in the best one, is not looked at."""


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
        exposure: Which part of each conversion counted in the problem; None: all.
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
    exposure: Exposure | None = None

    @property
    def step_seconds(self) -> float:
        """Predicted time of one step: kernels, and what is exposed of collectives."""
        return self.compute_seconds + sum(self.exposed_seconds)

    def priced_seconds(
        self, body: Body, exposed: Sequence[float], compute_seconds: float, sent_seconds: float
    ) -> float:
        """What a program of these choices costs, counted as the problem counts.

        Args:
            body: The program.
            exposed: Of each of its collectives, the seconds that nothing hides.
            compute_seconds: Of its kernels.
            sent_seconds: Of its collectives.
        """
        if self.exposure is None:
            return compute_seconds + sent_seconds
        return compute_seconds + self.exposure.seconds_of(show(self.graph, body, exposed))

    def gap_of(self, seconds: float) -> float:
        """The part of these priced seconds, which a program of these choices costs, by which others may cost less, at most.

        Never less than the gap of the choices alone: a program that came out cheaper than they were priced proves nothing.
        """
        gap = max(self.solution.gap, 1 - self.solution.bound / seconds) if seconds > 0 else 0.0
        return gap if gap > PROVED else 0.0

    @property
    def gap(self) -> float:
        """The gap of the program as it was lowered, and not of its choices as they were priced alone."""
        taken = self.compute_seconds, self.communication_seconds
        return self.gap_of(self.priced_seconds(self.body, self.exposed_seconds, *taken))

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
    exposure: Exposure | None = None,
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
        known: Well-known ways to shard, as restrictions; the best plan under each is compared with the one found, if it
            may be as fast.
        beat: Objective of the best plan on another mesh, under the same `exposure`.
        gap: Part of the cost by which the answer may miss the least.
        elsewhere: Values that take no memory on these devices, such as stacks of what passes by one at a time.
        anew: As of `build_graph`.
        twice: As of `build_graph`.
        exposure: What is known of it from elsewhere; the problem is then solved again with what its answer shows, and the
            fastest on the clock is taken. None: every collective counts in full, and no more is asked.

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
    prices = Prices(graph, device, class_of, allowed.masks)
    problem = prices.problem(exposure)
    budget = options.memory_budget_bytes or device.memory_bytes

    lowered: dict[tuple[int, ...], Body] = {}

    def body_of(choices: tuple[int, ...]) -> Body:
        if choices not in lowered:
            lowered.clear()
            lowered[choices] = lower(jaxpr, graph, choices)
        return lowered[choices]

    measured: dict[tuple[int, ...], tuple[Liveness, ...]] = {}

    def rows_at(choices: Sequence[int]) -> list[MemoryRow]:
        nodes = tuple(choices[c] for c in class_of)
        if nodes not in measured:
            measured.clear()
            body = body_of(nodes)
            measured[nodes] = fullest_moments(body, mesh, held_values(graph), donated, MAX_ROWS, elsewhere)
        return rows_of(graph, class_of, choices, measured[nodes], budget)

    def floor() -> Floor:
        return memory_floor(jaxpr, graph, problem.costs, class_of, donated, elsewhere)

    search = BudgetSearch(budget, mesh, rows_at, floor)

    # One limit for all: where the first takes it all, the others are only looked at.
    limit = TimeLimit(options.solver_seconds)

    def solved(problem: Problem, beat: float = np.inf) -> Solution:
        if np.isfinite(budget):
            hopeless = search.is_hopeless
            return solve_within(problem, search.broken_rows, options.solver, limit, 30, beat, gap, hopeless)
        return solve(problem, options.solver, limit, gap, beat)

    def read(problem: Problem, solution: Solution, exposure: Exposure | None) -> Sharded:
        choices = tuple(solution.choices[c] for c in class_of)
        body, moments = body_of(choices), () if elsewhere else measured.get(choices, ())
        liveness = moments[0] if moments else None
        return read_off(
            jaxpr, graph, choices, class_of, problem, solution, allowed, device, donated, body, exposure, liveness
        )

    solution = solved(problem, beat)
    if solution.status == "beaten":
        raise Beaten(solution.bound)
    best = read(problem, solution, exposure) if solution.choices else None
    if best is None and (not problem.rows or search.is_hopeless()):
        search.explain(problem)
    last, seen = best, [solution.choices]
    for _ in range(1, TURNS):
        if last is None or not _misjudged(last):
            break
        further = _shown(last)
        problem = prices.problem(further)
        solution = solved(problem)
        if not solution.choices or solution.choices in seen:
            break
        seen.append(solution.choices)
        last = read(problem, solution, further)
        best = min(best or last, last, key=lambda sharded: sharded.step_seconds)
    expected = exposure if last is None or last.exposure is None else _shown(last)
    for other in known:
        narrowed = _narrowed(prices.problem(expected), graph, class_of, other)
        if narrowed is None or (best is not None and not _may_win(narrowed, best, options.solver, limit)):
            continue
        answer = solved(narrowed)
        if answer.choices and answer.choices not in seen:
            seen.append(answer.choices)
            candidate = read(narrowed, answer, expected)
            if best is None or candidate.step_seconds < best.step_seconds * (1 - 1e-9):
                wider = prices.problem(expected)
                answer = answer.bounded(solve(wider, options.solver, limit, max(gap, LARGE_GAP)).bound)
                best = dataclasses.replace(candidate, problem=wider, solution=answer)
    if best is None:
        search.explain(problem)
    return best


def _shown(sharded: Sharded) -> Exposure:
    """What is exposed, after this program was seen."""
    assert sharded.exposure is not None, "it counted in full"
    return sharded.exposure.after(show(sharded.graph, sharded.body, sharded.exposed_seconds))


def _misjudged(sharded: Sharded) -> bool:
    """Whether a program takes longer than was thought, or less long, for more or less is exposed than was thought."""
    if sharded.exposure is None:
        return False
    shown, much = show(sharded.graph, sharded.body, sharded.exposed_seconds), _SAME * sharded.step_seconds
    now, before = sharded.exposure.after(shown), sharded.exposure
    wrong = sum(abs(now.of(one.kind) - before.of(one.kind)) * one.seconds for one in shown if one.kind is not None)
    return wrong > much and abs(sharded.solution.objective - sharded.step_seconds) > much


def _may_win(problem: Problem, best: Sharded, solver: str, limit: TimeLimit) -> bool:
    """Whether an answer of a problem may be faster than the best, as far as prices tell."""
    if abs(best.solution.objective - best.step_seconds) > _FAR * best.step_seconds:
        return True  # as where many small collectives are sent together
    least = (1 + _FAR) * best.step_seconds
    answer = solve(problem, solver, limit, ROUGH, least)
    return bool(answer.choices) and answer.status != "beaten" and answer.objective <= least


def _narrowed(problem: Problem, graph: Graph, class_of: Sequence[int], restrict: Restrict) -> Problem | None:
    """The problem under further restrictions; None where they leave a decision without a choice."""
    further = Allowed()
    restrict(graph, further)
    costs = list(problem.costs)
    for index, mask in further.masks.items():
        costs[class_of[index]] = np.where(mask, costs[class_of[index]], np.inf)
    if any(not np.isfinite(cost).any() for cost in costs):
        return None
    return Problem(costs, problem.edges)


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
    exposure: Exposure | None = None,
    liveness: Liveness | None = None,
) -> Sharded:
    """Lower given choices and measure their memory, unless that has been done, and predict what they cost."""
    body = lower(jaxpr, graph, choices) if body is None else body
    collectives = tuple(collectives_of(body, graph.mesh))
    communication = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, graph.mesh) for c in collectives)
    lanes = run_lanes(body, OperationSeconds(graph, choices, device).of, graph.mesh, device.achieved.overlap)
    liveness = liveness or measure_liveness(body, graph.mesh, held_values(graph), donated)
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
        exposure,
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

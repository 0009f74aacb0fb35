"""Computes what the whole step, or a stage of a pipeline, would cost if one decision were forced.

In:     a plan with its planning problems in memory.
Out:    `Study`, one for each stage; for a decision an `Outcome` per alternative: its seconds, or why it is impossible.
Method: the choice problem is solved again with the decision restricted to one choice, under the same memory budget, which
        the gaps between arrays have to fit, too. A choice that the user or the method forbids is priced with that one
        restriction lifted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.inter_op.stage_plan import StagePlan
from autopar.intra_op.costs import build_problem
from autopar.intra_op.heap import gap_bytes
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import measure_liveness, overwriting
from autopar.intra_op.lower import lower
from autopar.intra_op.memory import broken_memory_rows
from autopar.intra_op.memory_constrained import solve_constrained
from autopar.intra_op.problem import MemoryRow, Problem, Solution
from autopar.intra_op.sharded import Body
from autopar.intra_op.solve import solve
from autopar.intra_op.tying import of_classes
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, seconds_text
from autopar.tuning import TUNING

MAX_ALTERNATIVES = 9
"""The most choices solved for one decision: those that cost least if their neighbours keep their choices."""
MAX_LIFTED = 4
"""The most forbidden choices solved for one decision."""
SECONDS = 10.0
"""The time limit of one solve."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The step if a choice is forced: its predicted seconds; inf if that is impossible, and why."""

    choice: int
    seconds: float
    why_not: str = ""


def studies(plan: Decision) -> list[Study]:
    """The planning problem of each stage."""
    planned = plan.attached.pipeline
    path_of = dict(zip(planned.program.jaxpr.invars, planned.program.in_paths, strict=False))  # constants have none
    found = []
    for number, stage in enumerate(planned.stages):
        arguments = {**stage.program.arguments, **{k: var for k, (var, _) in stage.program.stacks.items()}}
        paths = {k: path_of[var] for k, var in sorted(arguments.items()) if var in path_of}
        found.append(Study(plan, None if plan.is_one_program else number, stage, paths))
    return found


class Study:
    """The planning problem of a plan, or of one stage of it; leaves the plan unchanged.

    Attributes:
        stage: The stage; None: the whole step is one.
        paths: Position of an input of the problem -> path, for inputs that are arguments of the step.
        aliases: Position of an output -> position of the input whose new value it is.
        chosen: The plan's choice for each decision; identical layers are one decision.
        base: Predicted seconds of the step, or of the stage's work in one step, by the costs of the problem.
    """

    def __init__(self, plan: Decision, stage: int | None, planned: StagePlan, paths: Mapping[int, str]):
        program = planned.program
        self.device, self.solver = plan.attached.cluster.device, plan.attached.options.solver
        self.plan, self.stage = plan, stage
        self.sharded = planned.sharded.as_compared(self.device)
        self.paths, self.aliases, self.donated = paths, program.aliases, program.donated
        self.what = "step" if stage is None else "stage"
        self.graph, self.problem, self.class_of = self.sharded.graph, self.sharded.problem, self.sharded.class_of
        self.mesh = self.graph.mesh
        self.chosen = [*of_classes(self.class_of, self.sharded.choices)]
        self.base = self.problem.cost(self.chosen)
        self.held = held_values(self.graph)

    def allowed(self, number: int) -> np.ndarray:
        """A mask of the choices of a decision that were allowed."""
        return np.isfinite(self.problem.costs[number])

    def outcomes(self, number: int) -> list[Outcome]:
        """The plan's choice, then the nearest alternatives, by step time."""
        order = [k for k in self._nearest(self.problem, number) if self.allowed(number)[k] and k != self.chosen[number]]
        found = [self._force(self.problem, number, k) for k in order[: MAX_ALTERNATIVES - 1]]
        found.sort(key=lambda outcome: (outcome.seconds, outcome.choice))
        return [Outcome(self.chosen[number], self.base), *found]

    def lifted_outcomes(self, number: int) -> list[Outcome]:
        """The nearest choices that the user or the method forbids, with the restriction of this decision lifted."""
        masks = {k: mask for k, mask in self.sharded.allowed.masks.items() if self.class_of[k] != number}
        lifted = build_problem(self.graph, self.device, self.class_of, masks, self.sharded.exposure)
        order = [
            k
            for k in self._nearest(lifted, number)
            if np.isfinite(lifted.costs[number][k]) and not self.allowed(number)[k]
        ]
        return [self._force(lifted, number, k) for k in order[:MAX_LIFTED]]

    def _nearest(self, problem: Problem, number: int) -> list[int]:
        costs = problem.costs[number].copy()
        for (u, v), matrix in problem.edges.items():
            if number == u:
                costs = costs + matrix[:, self.chosen[v]]
            elif number == v:
                costs = costs + matrix[self.chosen[u]]
        return sorted(range(len(costs)), key=lambda k: (costs[k], k))

    def _force(self, problem: Problem, number: int, choice: int) -> Outcome:
        costs = list(problem.costs)
        costs[number] = np.where(np.arange(len(costs[number])) == choice, costs[number], np.inf)
        forced = dataclasses.replace(problem, costs=costs, edges=dict(problem.edges), rows=list(problem.rows))
        solution = self.solve_within_budget(forced)
        if solution is not None:
            return Outcome(choice, solution.objective)
        unlimited = solve(Problem(costs, dict(problem.edges)), self.solver, SECONDS)
        if unlimited.status == "infeasible":
            why = "another restriction leaves no way to have it so"
            return Outcome(choice, math.inf, why)
        needed, budget = bytes_text(sum(self._bytes_of(unlimited.choices))), bytes_text(self.plan.budget_bytes)
        return Outcome(choice, math.inf, f"does not fit in {budget}: at its fastest it needs {needed}")

    def solve_within_budget(self, problem: Problem) -> Solution | None:
        """The least answer that fits, gaps included; None: none was found."""
        room = budget = self.plan.budget_bytes
        for _ in range(TUNING.placing_turns):
            if not math.isfinite(budget):
                solution = solve(problem, self.solver, SECONDS)
            else:
                solution = solve_constrained(problem, partial(self._broken_rows, room), self.solver, SECONDS)
            if solution.status == "infeasible":
                break
            alive, gaps = self._bytes_of(solution.choices) if math.isfinite(budget) else (0, 0)
            if alive + gaps <= budget:
                return solution
            room = budget - gaps
        return None

    def _broken_rows(self, budget: float, choices: Sequence[int]) -> list[MemoryRow]:
        return broken_memory_rows(self.graph, self.class_of, choices, self._lowered(choices), self.donated, budget)

    def _bytes_of(self, choices: Sequence[int]) -> tuple[int, int]:
        """The most bytes that are alive at once, and those lost to gaps."""
        body = self._lowered(choices)
        liveness = measure_liveness(body, self.mesh, self.held, self.donated)
        return liveness.peak_bytes, gap_bytes(
            body, self.mesh, self.held, overwriting(body, self.donated).keys(), liveness
        )

    def _lowered(self, choices: Sequence[int]) -> Body:
        return lower(self.graph, [choices[c] for c in self.class_of], self.sharded.body.bucket)

    def forbidden_by(self, number: int) -> str:
        """What restricts this decision: the user's constraints or the method; "": nothing."""
        allowed = self.sharded.allowed
        node = next((k for k in allowed.masks if self.class_of[k] == number), None)
        if node is None:
            return ""
        return "; ".join(dict.fromkeys(allowed.reasons.get(node, ()))) or f"the method, {self.plan.method}"

    def compared(self, outcome: Outcome) -> tuple[str, str]:
        """The time of the step or stage, and the difference to the plan's, as text."""
        if outcome.why_not:
            return "-", outcome.why_not
        more = outcome.seconds - self.base
        if abs(more) <= 1e-6 * self.base:
            return seconds_text(outcome.seconds), "as fast"
        text = f"{'+' if more > 0 else ''}{seconds_text(more)} ({more / self.base:+.1%})"
        return seconds_text(outcome.seconds), text

    def unsolved(self, number: int, shown: int) -> str:
        """A note on how many alternatives the table leaves out."""
        left = int(self.allowed(number).sum()) - shown
        return f"and {left} more, further away" if left > 0 else ""

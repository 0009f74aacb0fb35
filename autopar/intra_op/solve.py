"""Solve a choice problem: eliminate, bound, hand what matters to the ILP, expand.

In:     `Problem`.
Out:    `Solution` for all nodes.
Method: elimination is exact, so the whole is as optimal as the core. Of a core without memory rows, message passing gives
        a lower bound, an assignment, and for each choice how much it costs beyond the bound at least: what exceeds the
        room between the two is in no better assignment and goes, which mostly leaves little, to be eliminated again. What
        is left goes to the ILP, at once where it is small; where it is large, first the best few choices of each node,
        whose answer narrows the room; at last the best assignment is polished (`polish.py`). Nodes in a memory row are
        kept from elimination; such cores go to the ILP, large ones with their promising choices only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.intra_op.elimination import Reduced, eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.polish import polish
from autopar.intra_op.problem import PROVED, Problem, Solution, num_pairs
from autopar.intra_op.searches import SEARCHES, search
from autopar.intra_op.time_limit import TimeLimit, time_limit
from autopar.intra_op.trws import Ascent
from autopar.options import SOLVERS
from autopar.tuning import TUNING


def solve(
    problem: Problem,
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    gap: float = PROVED,
    known: float = np.inf,
    start: Sequence[int] = (),
) -> Solution:
    """Least assignment of `problem`, its memory rows kept.

    Args:
        problem: Costs in seconds, rows in bytes.
        solver: `"highs"` or `"cbc"`; or one of `SEARCHES`, for a core without rows.
        seconds: Time limit of the ILP solver, in all. Where none is left, what message passing has found is taken.
        gap: Relative gap at which the search may stop; where it is more than `PROVED`, message passing alone may do.
        known: Cost of an answer to the same question in another form (another mesh): where a problem is proved to have
            none better, to the gap that is left there anyway, the search ends with the status `"pruned"`.
        start: An assignment that is known already; of problems with rows it is not looked at.
    """
    reduced = _within_rows(problem)
    limit, constant = time_limit(seconds), reduced.constant
    if reduced.problem.rows:
        core = _solve_with_rows(reduced.problem, solver, limit, gap, constant)
    else:
        begun = reduced.narrow(start) if start else ()
        core = _solve_core(reduced.problem, solver, limit, gap, known - constant, constant, begun)
    if core.status == "infeasible":
        return core
    choices = reduced.expand(core.choices)
    objective = problem.cost(choices)
    if objective == float("inf") and core.status != "pruned":
        return Solution((), objective, objective, "infeasible", core.solver)
    whole = Solution(choices, objective, core.bound + constant, core.status, core.solver)
    return whole if core.status == "pruned" else whole.bounded(whole.bound)


def pass_messages(problem: Problem, start: Sequence[int]) -> Solution:
    """A bound of a problem without its rows, however large it is, and the best assignment seen beside `start`: what elimination
    leaves goes to no ILP."""
    reduced = eliminate(Problem(problem.costs, problem.edges))
    bound, choices = reduced.constant + sum(float(costs.min()) for costs in reduced.problem.costs), tuple(start)
    if reduced.problem.edges:
        ascent = Ascent(reduced.problem)
        ascent.offer(reduced.narrow(start))
        bound = reduced.constant + ascent.run(TUNING.message_rounds[0], gap=TUNING.stage_gap).lower
        choices = min(choices, reduced.expand(ascent.best), key=problem.cost)
    seconds = problem.cost(choices)
    return Solution(choices, seconds, seconds, "feasible", "message passing").bounded(bound)


def _within_rows(problem: Problem) -> Reduced:
    """What is left of a problem whose nodes in memory rows stay."""
    reduced = eliminate(problem, {node for row in problem.rows for node in row.nodes})
    position = {node: k for k, node in enumerate(reduced.kept)}
    # Elimination may have dropped forbidden choices of kept nodes: rows follow.
    reduced.problem.rows.extend(row.narrowed(position, reduced.alive_of) for row in problem.rows)
    return reduced


def _solve_core(
    core: Problem, solver: str, limit: TimeLimit, gap: float, known: float, constant: float, start: Sequence[int] = ()
) -> Solution:
    """The least assignment of a core without rows, begun at `start`; gaps are parts of the whole cost, with `constant`."""
    if not core.edges:
        return _solve_whole(core, solver, limit, gap)
    searched = _searched(core, solver) if solver in SEARCHES else None
    if searched is not None and np.isfinite(searched.objective):
        return searched
    return _Core(core, solver, limit, gap, known, constant, start).solve()


class _Core:
    """A core without rows that is solved in stages: rounds of message passing, then the ILP on the choices that these leave.

    Attributes:
        gap: At which the search may stop; larger than asked for where the core is large.
        allowed: The same in seconds, once there are bounds.
        content: What whoever asks leaves open rather than wait for the ILP to prove it.
        proved: What the ILP has proved that nothing costs less than.
        solved_pairs: How large what the ILP has solved was, in all.
    """

    def __init__(
        self,
        core: Problem,
        solver: str,
        limit: TimeLimit,
        gap: float,
        known: float,
        constant: float,
        start: Sequence[int],
    ):
        self.core, self.solver, self.limit, self.known, self.constant = core, solver, limit, known, constant
        self.pairs = num_pairs(core)
        self.gap = gap if self.pairs <= TUNING.large_core else max(gap, TUNING.large_gap)
        self.ascent = Ascent(core)
        if start:
            self.ascent.offer(start)
        self.how, self.proved, self.solved_pairs = "message passing", -np.inf, 0
        self.allowed = self.content = 0.0

    def solve(self) -> Solution:
        """The best assignment found, and what is proved of it."""
        gap, ascent, limit = self.gap, self.ascent, self.limit
        # By size and not by the clock, so that the same problem always has the same answer.
        stages = TUNING.message_rounds[: 3 - (self.pairs > TUNING.large_core) - (self.pairs > 4 * TUNING.large_core)]
        for stage, rounds in enumerate(stages, 1):
            rounds = rounds if gap < TUNING.rough_gap else rounds // 2
            bounds = ascent.run(rounds, gap=gap, enough=self.known * (1 - PROVED))
            if bounds.lower + self.constant >= (self.known + self.constant) * (1 - gap):
                return Solution(bounds.choices, bounds.upper, bounds.lower, "pruned", self.how)
            room, whole = bounds.upper - bounds.lower, abs(bounds.upper + self.constant)
            self.allowed = gap * whole
            # Whoever asks for no more than about a hundredth waits for no proof of the rest by the ILP.
            self.content = TUNING.rough_gap * whole if gap > TUNING.large_gap else self.allowed
            if np.isfinite(bounds.upper) and (room <= self.allowed or gap >= TUNING.rough_gap or limit.is_spent):
                break
            # All that comes wins no more than what the bounds leave open, of which mostly the lower one takes the larger part.
            won = TUNING.hoped * room
            is_last = stage == len(stages) or not limit.repays(won, ascent.seconds(stages[stage]))
            if self.is_solved_among_promising(bounds.lower, won, is_last):
                return Solution(ascent.best, ascent.upper, ascent.upper * (1 - 0.5 * PROVED), "optimal", self.how)
            proved_enough = ascent.upper - self.proved <= TUNING.large_gap * abs(ascent.upper + self.constant)
            if is_last or ascent.upper - bounds.lower <= self.allowed or proved_enough:
                break
        return self.polished() if np.isfinite(ascent.upper) else _solve_whole(self.core, self.solver, limit, gap)

    def is_solved_among_promising(self, lower: float, won: float, is_last: bool) -> bool:
        """Ask the ILP for the best of the promising choices, more of them each time; whether that is the best of all."""
        for part in TUNING.room_parts:
            room = self.ascent.upper - lower
            if room <= self.allowed:
                break
            most = self.limit.steps * won * TUNING.solver_pairs_per_second - self.solved_pairs
            slack = part * room
            if part == TUNING.room_parts[0]:  # what is read from messages may be far from the best, the bound seldom is
                slack = min(slack, TUNING.first_slack * abs(lower + self.constant))
            narrowed = _promising(self.core, self.ascent, slack, part == 1, is_last, most)
            if narrowed is None:
                break
            if part == 1 and room <= self.content and num_pairs(narrowed.problem) > TUNING.early_core:
                break
            answer = self.ask(narrowed)
            if part == 1 and answer.choices:  # no better assignment has any other choice
                self.proved = max(self.proved, answer.bound + narrowed.constant)
            if part == 1 and answer.status == "optimal":
                return True
        return False

    def ask(self, narrowed: Reduced) -> Solution:
        """Have the ILP solve what is left of the core; what it finds is offered to the ascent."""
        self.solved_pairs += num_pairs(narrowed.problem)
        enough = _gap_of_part(narrowed, self.ascent.upper, self.constant, self.gap)
        answer = _solve_whole(narrowed.problem, self.solver, self.limit, enough)
        if answer.choices or not narrowed.kept:
            self.ascent.offer(narrowed.expand(answer.choices))
            self.how = _told(answer.solver, self.core) if narrowed.kept else "message passing and elimination"
        return answer

    def polished(self) -> Solution:
        """The best answer so far, made better near by, if what that can win repays it."""
        ascent = self.ascent
        bound = min(max(ascent.lower, self.proved), ascent.upper)
        found = Solution(ascent.best, ascent.upper, bound, "feasible", self.how)
        room, seconds = found.objective - bound, TUNING.polish_node_seconds * len(self.core.costs)
        is_enough = self.gap >= TUNING.rough_gap or room <= self.content
        if is_enough or not self.limit.repays(TUNING.hoped * room, seconds):
            return found
        masks = [excess <= room * (1 + 1e-9) for excess in ascent.excess]
        for mask, choice in zip(masks, found.choices, strict=True):
            mask[choice] = True
        return polish(_narrowed(self.core, masks), found, self.limit, self.solver, bound + self.allowed)


def _gap_of_part(narrowed: Reduced, upper: float, constant: float, gap: float) -> float:
    """The relative gap at which the ILP may stop on what is left of a core; of the whole cost `large_gap` where that is much:
    the last thousandth takes most of the time, and is less than seconds are known to."""
    if num_pairs(narrowed.problem) <= TUNING.early_core or upper <= narrowed.constant:
        return gap
    return max(gap, max(gap, TUNING.large_gap) * (upper + constant) / (upper - narrowed.constant))


def _promising(core: Problem, ascent: Ascent, room: float, must: bool, is_last: bool, most: float) -> Reduced | None:
    """What is left of a core of the choices that exceed the bound by no more than `room`.

    It is to be small enough for the ILP, `most` pairs at most: where it is not, None is the answer, for more rounds may make
    it so; or if these were the last ones, and it need not (`must`) be all of them, the best few of each node and those around
    the best answer.
    """
    masks = [excess <= room * (1 + 1e-9) for excess in ascent.excess]
    narrowed = eliminate(_narrowed(core, masks))
    large = TUNING.small_core if must else TUNING.small_core // 4
    if num_pairs(narrowed.problem) <= min(most, large if is_last else TUNING.early_core):
        return narrowed
    around = _around(core, ascent.best) if is_last and not must else []
    for count in TUNING.fewer_choices if around else ():
        few = [near | (m & _least(e, count)) for m, e, near in zip(masks, ascent.excess, around, strict=True)]
        narrowed = eliminate(_narrowed(core, few))
        if num_pairs(narrowed.problem) <= min(most, TUNING.small_core // 2):
            return narrowed
    return None


def _solve_with_rows(core: Problem, solver: str, limit: TimeLimit, gap: float, constant: float) -> Solution:
    """The least assignment of a core within its memory rows."""
    pairs = num_pairs(core)
    if pairs <= TUNING.small_core:
        return _solve_whole(core, solver, limit, gap)
    ascent = Ascent(Problem(core.costs, core.edges))
    best: Solution | None = None
    for rounds in TUNING.message_rounds[: 3 - (pairs > TUNING.large_core) - (pairs > 4 * TUNING.large_core)]:
        ascent.run(rounds, gap=gap)
        masks = _masks_with_rows(core, ascent, best)
        answer = _solve_restricted(core, masks, solver, limit, gap)
        if answer.status != "infeasible" and (best is None or answer.objective < best.objective):
            best = answer
        room = gap if pairs <= TUNING.large_core else max(gap, TUNING.large_gap)
        if best is not None and (
            limit.is_spent or best.objective - ascent.lower <= room * abs(best.objective + constant)
        ):
            break
    if best is None:
        return _solve_whole(core, solver, limit, gap)
    found = Solution(
        best.choices, best.objective, min(ascent.lower, best.objective), "feasible", _told(best.solver, core)
    )
    return polish(core, found, limit, _exact(solver))


def _searched(core: Problem, name: str) -> Solution:
    """What a search finds that proves nothing, and how far from the bound of message passing that is."""
    choices = search(core, name, TUNING.search_steps * len(core.costs))
    bounds = Ascent(core).run(TUNING.message_rounds[0])
    return Solution(choices, core.cost(choices), bounds.lower, "feasible", name)


def _told(solver: str, core: Problem) -> str:
    return f"{solver}, the promising ones of {sum(map(len, core.costs))} choices"


def _masks_with_rows(core: Problem, ascent: Ascent, best: Solution | None) -> list[np.ndarray]:
    """The promising choices, those around the best answer, and those that take least memory."""
    count = max(3, min(TUNING.promising_choices, int((TUNING.small_core / max(len(core.edges), 1)) ** 0.5)))
    masks = [_least(excess, count) for excess in ascent.excess]
    near = best.choices if best else ascent.best
    others = zip(_around(core, near), _thrifty(core), strict=True)
    return [mask | around | thrifty for mask, (around, thrifty) in zip(masks, others, strict=True)]


def _solve_whole(core: Problem, solver: str, limit: TimeLimit, gap: float) -> Solution:
    with limit.running() as seconds:
        return solve_ilp(core, _exact(solver), seconds, gap)


def _exact(solver: str) -> str:
    """The solver that proves what it finds and knows memory rows, where other searches do not."""
    return SOLVERS[0] if solver in SEARCHES else solver


def _around(core: Problem, choices: Sequence[int]) -> list[np.ndarray]:
    """The best choices of each node while all others stay at `choices`."""
    costs = [cost.copy() for cost in core.costs]
    for (u, v), matrix in core.edges.items():
        costs[u] += matrix[:, choices[v]]
        costs[v] += matrix[choices[u]]
    masks = [_least(cost, TUNING.promising_choices // 4) for cost in costs]
    for mask, choice in zip(masks, choices, strict=True):
        mask[choice] = True
    return masks


def _thrifty(core: Problem) -> list[np.ndarray]:
    """The choices of each node that take least memory."""
    masks = [np.zeros(len(cost), bool) for cost in core.costs]
    for row in core.rows:
        for node, num_bytes in row.bytes_of.items():
            masks[node] |= _least(np.where(np.isfinite(core.costs[node]), num_bytes, np.inf), TUNING.promising_choices)
    return masks


def _least(values: np.ndarray, count: int) -> np.ndarray:
    mask = np.zeros(len(values), bool)
    mask[np.argsort(values, kind="stable")[:count]] = True
    return mask


def _narrowed(core: Problem, masks: Sequence[np.ndarray]) -> Problem:
    """The problem without the choices that the masks leave out."""
    return Problem([np.where(m, c, np.inf) for m, c in zip(masks, core.costs, strict=True)], core.edges)


def _solve_restricted(
    core: Problem, masks: Sequence[np.ndarray], solver: str, limit: TimeLimit, gap: float
) -> Solution:
    """The least assignment that takes of each node one of the choices that its mask names."""
    narrowed = _narrowed(core, masks)
    narrowed.rows.extend(core.rows)
    reduced = _within_rows(narrowed)
    answer = _solve_whole(reduced.problem, solver, limit, gap)
    if not answer.choices and reduced.kept:
        return answer
    choices = reduced.expand(answer.choices)
    return Solution(choices, core.cost(choices), answer.bound + reduced.constant, answer.status, answer.solver)

"""Solves a choice problem: eliminates, bounds, gives the ILP what is left, and expands the answer.

In:     `Problem`.
Out:    `Solution` for all nodes.
Method: elimination is exact, so the whole is as optimal as the core. For a core without memory rows, message passing gives
        a dual bound, an incumbent, and for each choice an excess: the least that it costs beyond the bound. A choice whose
        excess is larger than the room between bound and incumbent is in no better assignment and is dropped, which mostly
        leaves little, to be eliminated again. The rest goes to the ILP, at once if it is small; if it is large, first the
        best few choices of each node, whose answer narrows the room. In the end the incumbent is polished (`polish.py`).
        Where the tables of all nodes stay small (`wide_elimination.py`), no ILP is needed, and no messages if they are tiny.
        Nodes in memory rows are not eliminated; such cores go to the ILP, large ones with their promising choices only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np

from autopar.intra_op.elimination import Reduced, eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.polish import polish
from autopar.intra_op.problem import PROVED, Neighbours, Problem, Solution, num_pairs
from autopar.intra_op.searches import SEARCHES, search
from autopar.intra_op.time_limit import TimeLimit, time_limit
from autopar.intra_op.trws import Ascent
from autopar.intra_op.wide_elimination import elimination_order, solve_by_tables
from autopar.options import Prover
from autopar.tuning import TUNING

Solve = Callable[..., Solution]
"""Solves a problem without rows; takes the arguments of `solve` up to `known`."""


def solve(
    problem: Problem,
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    gap: float = PROVED,
    known: float = np.inf,
    start: Sequence[int] = (),
    content: bool = False,
) -> Solution:
    """Least assignment of `problem` within its memory rows.

    Args:
        problem: Costs in seconds, rows in bytes.
        solver: `"highs"` or `"cbc"`; or one of `SEARCHES`, for a core without rows.
        seconds: Time limit of the ILP solver, in all; once it is used up, the answer of message passing is taken.
        gap: Relative gap at which the search may stop; if it is more than `PROVED`, message passing alone may suffice.
        known: Cost of an incumbent from elsewhere (another mesh): once it is proved that no assignment is better, to the
            gap, the search ends with the status `"pruned"`.
        start: A known assignment; ignored for problems with rows.
        content: Whether `start` may stay where it is within the gap, though messages might show a better one.
    """
    reduced = _within_rows(problem)
    limit, constant = time_limit(seconds), reduced.constant
    begun = reduced.narrow(start) if start and not reduced.problem.rows else ()
    if reduced.problem.rows:
        core = _solve_with_rows(reduced.problem, solver, limit, gap, constant)
    else:
        core = _solve_core(reduced.problem, solver, limit, gap, known - constant, constant, begun, content)
    if core.status == "infeasible" or (core.status == "pruned" and not core.choices):
        return dataclasses.replace(core, objective=np.inf, bound=core.bound + constant)
    choices, objective = tuple(start), problem.cost(start) if start and core.choices == begun else np.inf
    if not objective <= (core.objective + constant) * (1 + 1e-9):  # else no eliminated node has a better choice
        choices = reduced.expand(core.choices)
        objective = problem.cost(choices)
    if objective == float("inf") and core.status != "pruned":
        return Solution((), objective, objective, "infeasible", core.solver)
    whole = Solution(choices, objective, core.bound + constant, core.status, core.solver)
    return whole if core.status == "pruned" else whole.bounded(whole.bound)


def pass_messages(problem: Problem, start: Sequence[int]) -> Solution:
    """A bound of a problem without its rows, however large, by elimination and message passing alone; and the best of
    `start` and the assignments seen."""
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
    """The problem after elimination of all nodes that are in no memory row."""
    reduced = eliminate(problem, {node for row in problem.rows for node in row.nodes})
    position = {node: k for k, node in enumerate(reduced.kept)}
    # Elimination may have dropped forbidden choices of kept nodes: rows follow.
    reduced.problem.rows.extend(row.narrowed(position, reduced.alive_of) for row in problem.rows)
    return reduced


def _solve_core(
    core: Problem,
    solver: str,
    limit: TimeLimit,
    gap: float,
    known: float,
    constant: float,
    start: Sequence[int] = (),
    content: bool = False,
) -> Solution:
    """The least assignment of a core without rows, from `start`; gaps are relative to the whole cost, with `constant`."""
    if not core.edges:
        return _solve_whole(core, solver, limit, gap)
    searched = _searched(core, solver) if solver in SEARCHES else None
    if searched is not None and np.isfinite(searched.objective):
        return searched
    tiny = solve_by_tables(core, TUNING.tiny_tables) if num_pairs(core) <= TUNING.large_core else None
    if tiny is not None and tiny.choices:
        is_beaten = tiny.objective + constant >= (known + constant) * (1 - gap)
        return dataclasses.replace(tiny, status="pruned") if is_beaten else tiny
    return _Core(core, solver, limit, gap, known, constant, start, content).solve()


class _Core:
    """Solves a core without rows in stages: rounds of message passing, then the ILP on the choices that these leave.

    Attributes:
        gap: The relative gap at which the search stops: as requested, or `large_gap` for a large core.
        whole: The cost of the incumbent, with the constant, which gaps are relative to; 0 before there is one.
        is_rough: Whether message passing alone suffices.
        content: Whether an incumbent within the gap is enough, so that no other is read from the messages.
        proved: Lower bound that the ILP has proved.
        solved_pairs: Pairs that the ILP has solved so far.
        solved: Masks of the choices among which the ILP has found no better assignment than the incumbent.
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
        content: bool,
    ):
        self.core, self.solver, self.limit, self.known, self.constant = core, solver, limit, known, constant
        self.pairs = num_pairs(core)
        self.gap, self.whole = gap if self.pairs <= TUNING.large_core else max(gap, TUNING.large_gap), 0.0
        self.is_rough = self.gap >= TUNING.rough_gap
        self.ascent, self.content = Ascent(core), content
        if start:
            self.ascent.offer(start)
        self.how, self.proved, self.solved_pairs = "message passing", -np.inf, 0
        self.solved: list[Sequence[np.ndarray]] = []

    @property
    def allowed(self) -> float:
        """Seconds between incumbent and bound at which the search is done."""
        return self.gap * self.whole

    @property
    def left_open(self) -> float:
        """Seconds not worth a large ILP: who allows more than `large_gap` does not wait for the last hundredth."""
        return TUNING.rough_gap * self.whole if self.gap > TUNING.large_gap else self.allowed

    def solve(self) -> Solution:
        """The best assignment found, with its bound."""
        ascent, limit = self.ascent, self.limit
        # Depends on size and not on time, so that the same problem always has the same answer.
        stages = TUNING.message_rounds[: 3 - (self.pairs > TUNING.large_core) - (self.pairs > TUNING.huge_core)]
        beaten = (self.known + self.constant) * (1 - self.gap) - self.constant
        for stage, rounds in enumerate(stages, 1):
            rounds = rounds // 2 if self.is_rough else rounds
            ascent.run(rounds, gap=self.gap, enough=max(beaten, self.known * (1 - PROVED)), content=self.content)
            if ascent.lower >= beaten:
                return Solution(ascent.best, ascent.upper, ascent.lower, "pruned", self.how)
            room, self.whole = ascent.upper - ascent.lower, abs(ascent.upper + self.constant)
            if np.isfinite(ascent.upper) and (room <= self.allowed or self.is_rough or limit.is_spent):
                break
            # The incumbent can gain no more than the room; mostly the bound closes the larger part of it.
            won = TUNING.hoped * room
            is_last = stage == len(stages) or not limit.repays(won, ascent.seconds(stages[stage]))
            if self.is_solved_among_promising(won, is_last):
                return Solution(ascent.best, ascent.upper, ascent.upper * (1 - 0.5 * PROVED), "optimal", self.how)
            proved_enough = ascent.upper - self.proved <= TUNING.large_gap * abs(ascent.upper + self.constant)
            if is_last or ascent.upper - ascent.lower <= self.allowed or proved_enough:
                break
        if np.isfinite(ascent.upper):
            return self.polished()
        return _solve_whole(self.core, self.solver, limit, self.gap)

    def is_solved_among_promising(self, won: float, is_last: bool) -> bool:
        """Solve the ILP over the promising choices, more of them each time; returns whether the incumbent is optimal."""
        lower = self.ascent.lower
        for part in TUNING.room_parts:
            room = self.ascent.upper - lower
            if room <= self.allowed or (self.limit.is_spent and np.isfinite(self.ascent.upper)):
                break
            worth, loose = self.limit.worth(won), room / self.whole if np.isfinite(room) else 0.0
            most = worth * TUNING.solver_pairs_per_second / (1 + TUNING.loose_gap * loose) - self.solved_pairs
            tables = TUNING.table_entries * min(1.0, worth)  # a second of work at most
            slack = part * room
            if part == TUNING.room_parts[0]:  # the incumbent of messages may be far from optimal, the bound seldom is
                slack = min(slack, TUNING.first_slack * abs(lower + self.constant))
            promising = _promising(self.core, self.ascent, slack, part == 1, is_last, most, tables)
            if promising is None:
                break
            masks, narrowed = promising
            if any(_holds(solved, masks) for solved in self.solved):  # more rounds seldom leave others than fewer did
                if part == 1:
                    return True
                continue
            if part < 1 and num_pairs(narrowed.problem) > TUNING.nearly_whole * self.pairs:
                continue  # with all choices it takes little longer
            is_large = num_pairs(narrowed.problem) > TUNING.early_core
            if part == 1 and room <= self.left_open and is_large and not _is_narrow(narrowed.problem, tables):
                break
            answer = self.ask(narrowed)
            self.solved += [masks] * (answer.status == "optimal")
            if part == 1 and answer.choices:  # no better assignment has a dropped choice
                self.proved = max(self.proved, answer.bound + narrowed.constant)
            if part == 1 and answer.status == "optimal":
                return True
        return False

    def ask(self, narrowed: Reduced) -> Solution:
        """Solve what is left of the core by the ILP, and offer its answer to the ascent."""
        self.solved_pairs += num_pairs(narrowed.problem)
        enough = _gap_of_part(narrowed, self.ascent.upper, self.constant, self.gap)
        begin = narrowed.narrow(self.ascent.best) if self.ascent.best else ()
        answer = _solve_whole(narrowed.problem, self.solver, self.limit, enough, begin)
        if answer.choices or not narrowed.kept:
            self.ascent.offer(narrowed.expand(answer.choices))
            self.how = _described(answer.solver, self.core) if narrowed.kept else "message passing and elimination"
        return answer

    def polished(self) -> Solution:
        """The incumbent, improved by large-neighbourhood search if the possible gain repays it."""
        ascent = self.ascent
        bound = min(max(ascent.lower, self.proved), ascent.upper)
        found = Solution(ascent.best, ascent.upper, bound, "feasible", self.how)
        room, seconds = found.objective - bound, TUNING.polish_node_seconds * len(self.core.costs)
        is_enough = self.is_rough or room <= self.left_open
        if is_enough or not self.limit.repays(TUNING.hoped * room, seconds):
            return found
        masks = [excess <= room * (1 + 1e-9) for excess in ascent.excess]
        for mask, choice in zip(masks, found.choices, strict=True):
            mask[choice] = True
        return polish(_narrowed(self.core, masks), found, self.limit, self.solver, bound + self.allowed)


def _gap_of_part(narrowed: Reduced, upper: float, constant: float, gap: float) -> float:
    """The relative gap at which the ILP may stop on what is left of a core; if that is large, `large_gap` of the whole cost:
    the last thousandth takes most of the time, and costs are less exact than that."""
    if num_pairs(narrowed.problem) <= TUNING.early_core or upper <= narrowed.constant:
        return gap
    return max(gap, max(gap, TUNING.large_gap) * (upper + constant) / (upper - narrowed.constant))


def _promising(
    core: Problem, ascent: Ascent, room: float, must: bool, is_last: bool, most: float, tables: float
) -> tuple[Sequence[np.ndarray], Reduced] | None:
    """Reduce a core to the choices whose excess is at most `room`, if that is small enough for the ILP; with their masks.

    At most `most` pairs, or `tables` entries. If there are more: None, since more rounds may narrow them; but after the last
    rounds (`is_last`), unless all choices are needed (`must`), only the best few of each node and those around the incumbent
    are kept.
    """
    masks = [excess <= room * (1 + 1e-9) for excess in ascent.excess]
    narrowed = eliminate(_narrowed(core, masks))
    large = TUNING.small_core if must else TUNING.small_core // 4
    if num_pairs(narrowed.problem) <= min(most, large if is_last else TUNING.early_core):
        return masks, narrowed
    if _is_narrow(narrowed.problem, tables):
        return masks, narrowed
    around = _around(core, ascent.best) if is_last and not must else []
    for count in TUNING.fewer_choices if around else ():
        few = [near | (m & _least(e, count)) for m, e, near in zip(masks, ascent.excess, around, strict=True)]
        narrowed = eliminate(_narrowed(core, few))
        if num_pairs(narrowed.problem) <= min(most, TUNING.small_core // 2):
            return few, narrowed
    return None


def _is_narrow(problem: Problem, most: float) -> bool:
    """Whether a problem is solved by tables of at most `most` entries in all."""
    return num_pairs(problem) <= TUNING.large_core and elimination_order(problem, most) is not None


def _holds(masks: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Whether all choices of the other masks are among these."""
    return not any((other & ~mask).any() for mask, other in zip(masks, others, strict=True))


def _solve_with_rows(core: Problem, solver: str, limit: TimeLimit, gap: float, constant: float) -> Solution:
    """The least assignment of a core within its memory rows."""
    pairs = num_pairs(core)
    if pairs <= TUNING.small_core:
        return _solve_whole(core, solver, limit, gap)
    ascent = Ascent(Problem(core.costs, core.edges))
    best: Solution | None = None
    for rounds in TUNING.message_rounds[: 3 - (pairs > TUNING.large_core) - (pairs > TUNING.huge_core)]:
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
        best.choices, best.objective, min(ascent.lower, best.objective), "feasible", _described(best.solver, core)
    )
    return polish(core, found, limit, _exact(solver))


def _searched(core: Problem, name: str) -> Solution:
    """The answer of a heuristic search, with the bound of message passing."""
    choices = search(core, name, TUNING.search_steps * len(core.costs))
    bounds = Ascent(core).run(TUNING.message_rounds[0])
    return Solution(choices, core.cost(choices), bounds.lower, "feasible", name)


def _described(solver: str, core: Problem) -> str:
    return f"{solver}, the promising ones of {sum(map(len, core.costs))} choices"


def _masks_with_rows(core: Problem, ascent: Ascent, best: Solution | None) -> list[np.ndarray]:
    """Masks of the promising choices, those around the best answer, and those that take least memory."""
    count = max(3, min(TUNING.promising_choices, int((TUNING.small_core / max(len(core.edges), 1)) ** 0.5)))
    masks = [_least(excess, count) for excess in ascent.excess]
    near = best.choices if best else ascent.best
    others = zip(_around(core, near), _thrifty(core), strict=True)
    return [mask | around | thrifty for mask, (around, thrifty) in zip(masks, others, strict=True)]


def _solve_whole(core: Problem, solver: str, limit: TimeLimit, gap: float, start: Sequence[int] = ()) -> Solution:
    by_tables = None if core.rows or num_pairs(core) > TUNING.large_core else solve_by_tables(core)
    if by_tables is not None:
        return by_tables
    with limit.running() as seconds:
        return solve_ilp(core, _exact(solver), seconds, gap, start)


def _exact(solver: str) -> str:
    """An exact solver that handles memory rows: `solver`, or the default one if that is a heuristic search."""
    return get_args(Prover)[0] if solver in SEARCHES else solver


def _around(core: Problem, choices: Sequence[int]) -> list[np.ndarray]:
    """Masks of the best few choices of each node, with all others at `choices`."""
    of = Neighbours(core)
    masks = [_least(of.beside(node, choices), TUNING.promising_choices // 4) for node in range(len(core.costs))]
    for mask, choice in zip(masks, choices, strict=True):
        mask[choice] = True
    return masks


def _thrifty(core: Problem) -> list[np.ndarray]:
    """Masks of the choices of each node that take least memory."""
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
    """The problem with all choices outside of the masks forbidden."""
    return Problem([np.where(m, c, np.inf) for m, c in zip(masks, core.costs, strict=True)], core.edges)


def _solve_restricted(
    core: Problem, masks: Sequence[np.ndarray], solver: str, limit: TimeLimit, gap: float
) -> Solution:
    """The least assignment within the masks and the rows."""
    narrowed = _narrowed(core, masks)
    narrowed.rows.extend(core.rows)
    reduced = _within_rows(narrowed)
    answer = _solve_whole(reduced.problem, solver, limit, gap)
    if not answer.choices and reduced.kept:
        return answer
    choices = reduced.expand(answer.choices)
    return Solution(choices, core.cost(choices), answer.bound + reduced.constant, answer.status, answer.solver)

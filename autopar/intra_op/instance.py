"""One program on one mesh: its problems under each exposure, solved within the memory budget, lowered and read off.

In:     a setting (`setting.py`): graph, restrictions, classes of nodes, prices; options.
Out:    `Instance`, by whose problems `shard.py` goes from one exposure to the next.
Method: problems, solutions and lowered programs are cached; all solves share one time limit, and what they learn of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.intra_op.buckets import smaller_bucket
from autopar.intra_op.budget import BudgetSearch
from autopar.intra_op.exposure import Exposure
from autopar.intra_op.floor import Floor, memory_floor
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import ONE_PROGRAM, Liveness, Waiting, fullest_moments
from autopar.intra_op.lower import lower
from autopar.intra_op.memory import rows_of
from autopar.intra_op.memory_constrained import Learnt, solve_constrained
from autopar.intra_op.problem import MemoryRow, Problem, Solution
from autopar.intra_op.read_off import Sharded, gaps_in, read_off
from autopar.intra_op.setting import Setting
from autopar.intra_op.sharded import BUCKET_BYTES, Body
from autopar.intra_op.solve import Solve, solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.options import Options
from autopar.tuning import TUNING


class Instance:
    """One program on one mesh: its prices, the limits of the search, and caches of what was solved and lowered.

    Attributes:
        class_of: Class of each node in the problems.
        prices: Seconds of all choices.
        budget_search: What is known of its memory.
        bucket: The most bytes that are sent as one message.
    """

    def __init__(
        self,
        setting: Setting,
        options: Options,
        donated: Sequence[bool],
        waiting: Waiting,
        gap: float,
        solve_one: Solve,
    ):
        """`solve_one`: solves one problem without rows."""
        self.graph, self.allowed, self.device = setting.graph, setting.allowed, setting.device
        self.donated, self.waiting, self.gap, self.solver = donated, waiting, gap, options.solver
        self.class_of, self.prices = setting.class_of, setting.priced
        # Shared by all problems: if the first one uses it up, the others get almost none.
        self.limit = TimeLimit(options.solver_seconds, options.repaying_steps, options.ends)
        budget = options.budget_bytes(self.device.memory_bytes)
        self.budget_search = BudgetSearch(budget, self.graph.mesh, self._prover(), self.limit)
        self.bucket = BUCKET_BYTES
        # Caches of one entry: a body is as large as the program.
        self._lowered: dict[tuple[int, ...], Body] = {}
        self._moments: dict[tuple[int, ...], tuple[Liveness, ...]] = {}
        self._solve_one = solve_one
        self._learnt = Learnt()
        self._solved: dict[tuple[float, ...], tuple[Problem, Solution]] = {}

    def solve_under(self, exposure: Exposure | None, beat: float = np.inf) -> tuple[Problem, Solution]:
        """The problem under an exposure, and its solution; cached."""
        parts = self.prices.parts(exposure)
        if parts not in self._solved:
            problem = self.prices.problem(exposure)
            solution = self.solve(problem, beat)
            if not solution.choices or solution.status == "pruned":
                return problem, solution
            self._solved[parts] = problem, solution
        return self._solved[parts]

    def bound_under(self, exposure: Exposure | None, problem: Problem) -> float:
        """A lower bound of the program's problem under an exposure."""
        solved = self._solved.get(self.prices.parts(exposure))
        if solved is not None:
            return solved[1].bound
        return solve(problem, self.solver, self.limit, max(self.gap, TUNING.large_gap)).bound

    def solve_freely(self, problem: Problem, beat: float = np.inf) -> Solution:
        """Solve a problem of this program whatever memory it takes."""
        return self._solve_one(problem, self.solver, self.limit, self.gap, beat)

    def solve(
        self,
        problem: Problem,
        beat: float = np.inf,
        num_planes: int = TUNING.cutting_planes,
        free: Solution | None = None,
    ) -> Solution:
        """Solve a problem of this program within the memory budget; `free`: its answer whatever memory it takes, if known."""
        search, free = self.budget_search, free or self.solve_freely(problem, beat)
        if not np.isfinite(search.budget):
            return free
        how = (
            self.solver,
            self.limit,
            beat,
            self.gap,
            search.is_hopeless,
            self._may_send_less,
            self._solve_one,
            self._learnt,
        )
        return solve_constrained(problem, self._broken_rows, *how, num_planes, free=free)

    def solve_within(self, budget: float, exposure: Exposure, beat: float) -> tuple[Problem, Solution]:
        """The problem under an exposure, and its solution within fewer bytes than there are."""
        kept = self.budget_search, self._learnt, self._moments
        self.budget_search = BudgetSearch(budget, self.graph.mesh, lambda: kept[0].floor, self.limit)
        self._learnt, self._moments = Learnt(), {}
        problem = self.prices.problem(exposure)
        try:
            solution = self.solve(problem, beat, TUNING.less_planes)
        finally:
            self.budget_search, self._learnt, self._moments = kept
        problem.rows.clear()  # they hold of the fewer bytes
        return problem, solution

    def read_off(self, problem: Problem, solution: Solution, exposure: Exposure | None) -> Sharded:
        """Lower the choices of a solution, and predict time and memory."""
        choices = self.nodes(solution.choices)
        moments = self._moments.get(choices, ()) if self.waiting == ONE_PROGRAM else ()
        return read_off(
            self.graph,
            choices,
            self.class_of,
            problem,
            solution,
            self.allowed,
            self.device,
            self.donated,
            self._body_of(choices),
            exposure,
            moments[0] if moments else None,
        )

    def nodes(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of nodes from those of classes."""
        return tuple(choices[c] for c in self.class_of)

    def gaps_of(self, choices: Sequence[int]) -> int:
        """Bytes that are lost to gaps between arrays, given choices of classes."""
        return gaps_in(self.graph, self._body_of(self.nodes(choices)), self.donated)

    def _body_of(self, choices: tuple[int, ...]) -> Body:
        if choices not in self._lowered:
            self._lowered = {choices: lower(self.graph, choices, self.bucket)}
        return self._lowered[choices]

    def send_less(self, to_fit: bool) -> bool:
        """Make messages smaller from here on if they are part of why nothing fits, or, unless it is `to_fit`, more would."""
        smaller = self._smaller_bucket(to_fit)
        if smaller is not None:
            self.bucket, self._lowered, self._moments = smaller, {}, {}
        return smaller is not None

    def _may_send_less(self) -> bool:
        """Whether smaller messages may make something fit."""
        return self._smaller_bucket() is not None

    def _smaller_bucket(self, to_fit: bool = True) -> int | None:
        """The most bytes to send as one message, if messages are part of why nothing fits, or of the fullest moment."""
        search = self.budget_search
        last = () if search.is_hopeless() else next(iter(self._moments.values()), ())
        excess = search.least.num_bytes - search.budget if to_fit and np.isfinite(search.least.num_bytes) else 0.0
        return smaller_bucket(last[0], self.graph.mesh, excess) if last else None

    def _broken_rows(self, choices: Sequence[int]) -> list[MemoryRow]:
        """The memory rows that an assignment violates; the search notes it."""
        nodes, graph = self.nodes(choices), self.graph
        if nodes not in self._moments:
            how = held_values(graph), self.donated, TUNING.memory_rows, self.waiting
            found = fullest_moments(self._body_of(nodes), graph.mesh, *how, over=self.budget_search.budget)
            self._moments = {nodes: found}
        rows = rows_of(graph, self.class_of, choices, self._moments[nodes], self.budget_search.budget)
        self.budget_search.note(choices, rows)
        return rows

    def _prover(self) -> Callable[[], Floor]:
        """The proof of a lower bound on memory; it does not hold this instance, which holds it."""
        graph, prices, rest = self.graph, self.prices, (self.class_of, self.donated, self.waiting.elsewhere)
        return lambda: memory_floor(graph, prices.problem().costs, *rest)

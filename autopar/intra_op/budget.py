"""Records what a search within a memory budget learns, and explains its failure.

In:     assignments and the memory rows that they violate, a function that proves a lower bound on memory.
Out:    `BudgetSearch`, which `memory_constrained.py` queries; an error with the proved bound, or with the least peak found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Never

import numpy as np

from autopar.errors import InfeasibleError, NoPlanFoundError
from autopar.intra_op.floor import Floor
from autopar.intra_op.problem import MemoryRow, Problem
from autopar.intra_op.time_limit import TimeLimit
from autopar.mesh import LogicalMesh


class BudgetSearch:
    """What is known of a program's memory while a sharding within the budget is searched.

    Attributes:
        budget: The budget, bytes per device.
        mesh: The mesh.
        limit: The time limit of the search.
        least: The least peak of the assignments that did not fit, and its moment.
    """

    def __init__(
        self,
        budget: float,
        mesh: LogicalMesh,
        prove: Callable[[], Floor],
        limit: TimeLimit,
    ):
        self.budget, self.mesh, self.limit = budget, mesh, limit
        self.least = Floor(np.inf, "")
        self._smallest: Sequence[int] = ()
        self._prove = prove

    def note(self, choices: Sequence[int], rows: Sequence[MemoryRow]) -> None:
        """Update `least` by an assignment and the memory rows that it violates."""
        fullest = max((Floor(row.used(choices), row.label) for row in rows), key=lambda at: at.num_bytes, default=None)
        if fullest is not None and fullest.num_bytes < self.least.num_bytes:
            self.least, self._smallest = fullest, choices

    @functools.cached_property
    def floor(self) -> Floor:
        """Proved lower bound on the memory of every sharding."""
        return self._prove()

    def is_hopeless(self) -> bool:
        """Whether it is proved that no sharding fits."""
        return self.floor.num_bytes > self.budget

    def explain(self, problem: Problem, gaps_of: Callable[[Sequence[int]], int]) -> Never:
        """Raise an error that says why there is no sharding; `gaps_of` an assignment: bytes lost to gaps between arrays.

        Raises:
            InfeasibleError: It is proved that none fits.
            NoPlanFoundError: None was found, or none in time.
        """
        in_time, longer = (" in time", "raise planning_seconds=; or ") if self.limit.is_over else ("", "")
        if not problem.rows and in_time:
            raise NoPlanFoundError(
                "no sharding that keeps all pins was found in time.",
                given=f"the constraints, on {self.mesh}",
                wrong="planning was to end before the solver had an answer.",
                do=f"{longer}drop one of the constraints.",
            )
        if not problem.rows:
            raise InfeasibleError(
                "no sharding keeps all pins.",
                given=f"the constraints, on {self.mesh}",
                wrong="they contradict each other.",
                do="drop one of them.",
                constraint="pins",
            )
        budget, floor, least = self.budget, self.floor, self.least
        given = f"memory_budget_bytes={budget:.0f} on each device of {self.mesh}"
        do = "raise the budget, use more devices, wrap layers in jax.checkpoint, or use a smaller batch."
        if floor.num_bytes > budget:
            raise InfeasibleError(
                "no sharding fits the memory budget.",
                given=given,
                wrong=f"during {floor.label}, at least {floor.num_bytes:.0f} bytes are alive on a device, "
                f"{floor.num_bytes - budget:.0f} more than there are.",
                do=do,
                budget_bytes=int(budget),
                needed_bytes=math.ceil(floor.num_bytes),
            )
        enough = math.ceil(least.num_bytes) + gaps_of(self._smallest)
        raise NoPlanFoundError(
            f"no sharding was found{in_time} that fits the memory budget.",
            given=given,
            wrong=f"the smallest that was found has {least.num_bytes:.0f} bytes alive on a device during {least.label}, "
            f"{least.num_bytes - budget:.0f} more than there are; proved is only that {floor.num_bytes:.0f} are needed.",
            do=f"{longer}memory_budget_bytes={enough} will do; or {do}",
            budget_bytes=int(budget),
            needed_bytes=enough,
        )

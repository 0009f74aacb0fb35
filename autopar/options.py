"""What the user may ask of the planner, gathered once and handed down.

In:     keyword arguments of the methods (`ShardParallel(memory_budget_bytes=...)`, ...).
Out:    `Options`, frozen; passes read it and nothing else (no environment, no globals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autopar.errors import AutoparError, SolverError

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

Solver = Literal["highs", "cbc"]
SOLVERS: tuple[Solver, ...] = ("highs", "cbc")
MicrobatchSemantics = Literal["exact", "per_microbatch"]
SEMANTICS: tuple[MicrobatchSemantics, ...] = ("exact", "per_microbatch")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of planning.

    Attributes:
        solver: Which solver PuLP calls, `"highs"` or `"cbc"`.
        solver_seconds: Time limit of one solve; the best answer found by then is used, and its gap is in the plan.
        memory_budget_bytes: Bytes that one device may use; None: the device's own memory.
        constraints: Pins, `{path glob: PartitionSpec}`, over the paths of the step's arguments.
        microbatch_semantics: `"exact"`: microbatches compute what the whole batch does, or are refused;
            `"per_microbatch"`: where samples wait for a sum over the batch (batch statistics), each takes its own.
    """

    solver: Solver = "highs"
    solver_seconds: float = 60.0
    memory_budget_bytes: int | None = None
    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict, hash=False)
    microbatch_semantics: MicrobatchSemantics = "exact"

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise SolverError(
                "unknown solver.",
                given=f"solver={self.solver!r}",
                wrong=f"autopar knows {', '.join(map(repr, SOLVERS))}.",
                do=f"leave it out for {SOLVERS[0]!r}, or name one of them.",
                solver=self.solver,
            )
        if self.microbatch_semantics not in SEMANTICS:
            raise AutoparError(
                "unknown semantics of microbatches.",
                given=f"microbatch_semantics={self.microbatch_semantics!r}",
                wrong=f"autopar knows {', '.join(map(repr, SEMANTICS))}.",
                do="leave it out for 'exact'.",
            )
        _check_positive("solver_seconds", self.solver_seconds)
        if self.memory_budget_bytes is not None:
            _check_positive("memory_budget_bytes", self.memory_budget_bytes)
        if self.constraints is None:
            object.__setattr__(self, "constraints", {})


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise AutoparError(
            f"`{name}` must be positive.",
            given=f"{name}={value!r}",
            wrong="nothing fits in it.",
            do="pass more than 0.",
        )

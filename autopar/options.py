"""The user's options for the planner.

In:     keyword arguments of the methods (`ShardParallel(memory_budget_bytes=...)`, ...).
Out:    `Options`, frozen; passes read it and nothing else (no environment, no globals).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from autopar.errors import AutoparError, ConstraintError, PipelineError, SolverError, check_choice, check_number

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

Prover = Literal["highs", "cbc"]
"""Solvers that prove what they find."""
Searcher = Literal["random", "greedy", "beam", "bfs", "halving", "mcmc", "mcts"]
"""Searches that prove nothing, for comparison."""
Solver = Prover | Searcher
MicrobatchSemantics = Literal["exact", "per_microbatch"]
RecomputeLevel = Literal["cheap", "all"] | float
Recompute = Literal["auto"] | RecomputeLevel | tuple[RecomputeLevel, ...]
Goal = Literal["step", "calls"]
Memory = Literal["predicted", "compiler"]
Offload = Literal["auto", "never"]
_LEVELS = {"cheap": 0.0, "all": math.inf}


def repays(steps: float, won_seconds: float, planning_seconds: float) -> bool:
    """Whether planning time (estimated from sizes, never measured) is repaid by what each of `steps` steps may win."""
    return steps == math.inf or planning_seconds <= steps * won_seconds


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of every method.

    Attributes:
        memory_budget_bytes: Bytes one device may use; None: the device's own memory.
        constraints: Pins `{path glob: PartitionSpec}` over argument paths such as `"state/params/*/kernel"`.
        solver: The integer program solver, `"highs"` or `"cbc"`; or a search without proof, for comparison:
            `"random"`, `"greedy"`, `"beam"`, `"bfs"`, `"halving"`, `"mcmc"` or `"mcts"`.
        solver_seconds: Time limit of the solver on one mesh, or on one stage on its mesh; the best answer found by then
            is used, and its gap is in the plan.
        planning_seconds: Time limit of planning as a whole: then the best plan so far is taken. A first plan is finished all
            the same, as soon as one is found, except within memory, where an error then says what was found. None: no limit.
        microbatch_semantics: `"exact"`: microbatches that would compute something else are refused;
            `"per_microbatch"`: where samples need a sum over the batch (batch statistics), each microbatch uses its own.
        memory: `"predicted"`: the plan fits by the planner's own estimate; `"compiler"`: by XLA's, which compiles it for
            these devices, or for described ones (`autopar[verify]`). Planning is repeated until both agree.
        offload: `"auto"`: where memory binds and it is faster by 1 % or more, activations are kept in the hosts' memory from
            the forward to the backward pass; where nothing else fits, the optimizer's state too, between updates, and
            parameters if that is not enough; `"never"`: nothing is.
    """

    memory_budget_bytes: float | None = None
    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict, hash=False)
    solver: Solver = "highs"
    solver_seconds: float = 60.0
    planning_seconds: float | None = None
    microbatch_semantics: MicrobatchSemantics = "exact"
    memory: Memory = "predicted"
    offload: Offload = "auto"


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The planner's options: a method's settings, and those that the method implies.

    Attributes:
        recompute: What the backward pass of a pipeline stage recomputes instead of keeping residuals. `"auto"`: cheap
            operations, and as much more as makes a stage fit; `"cheap"`: never more; `"all"`: everything; a number: at most
            so many operations for each byte saved; a tuple of these: one per stage.
        goal: What to minimize: `"step"`, the seconds of one step; `"calls"`, the seconds between calls that do not wait for
            each other's results.
        repaying_steps: Steps of training within which planning time must be repaid by faster steps.
        ends: When planning is to end, by `time.monotonic()`.
    """

    recompute: Recompute = "auto"
    goal: Goal = "step"
    repaying_steps: float = math.inf
    ends: float = math.inf

    def __post_init__(self) -> None:
        solvers = get_args(Prover) + get_args(Searcher)
        check_choice("", "solver", self.solver, solvers, kind=SolverError, solver=self.solver)
        for name, known in (("microbatch_semantics", MicrobatchSemantics), ("memory", Memory), ("offload", Offload)):
            check_choice("", name, getattr(self, name), get_args(known))
        _check_recompute(self.recompute)
        check_number("", "solver_seconds", self.solver_seconds)
        if self.planning_seconds is not None:
            check_number("", "planning_seconds", self.planning_seconds)
            object.__setattr__(self, "solver_seconds", min(self.solver_seconds, self.planning_seconds))
        if self.memory_budget_bytes is not None:
            do = "pass bytes, such as 80e9, or leave it out for all of the memory."
            check_number("", "memory_budget_bytes", self.memory_budget_bytes, do=do)
        if not isinstance(self.constraints, Mapping | None):
            raise ConstraintError(
                "constraints are a mapping.",
                given=f"constraints={self.constraints!r}",
                wrong=f"it is of type {type(self.constraints).__name__}.",
                do='pass {path glob: PartitionSpec}, such as {"state/params/*/kernel": P(None, "x")}.',
                path="",
                spec=self.constraints,
            )
        object.__setattr__(self, "constraints", dict(self.constraints or {}))

    def budget_bytes(self, memory_bytes: float) -> float:
        """Bytes that one device with `memory_bytes` of memory may use."""
        return self.memory_budget_bytes or memory_bytes

    def repays(self, won_seconds: float, planning_seconds: float) -> bool:
        """As the function `repays`, within `repaying_steps`."""
        return repays(self.repaying_steps, won_seconds, planning_seconds)

    @property
    def is_over(self) -> bool:
        """Whether planning is to end."""
        return time.monotonic() >= self.ends

    def recompute_levels(self, num_stages: int) -> tuple[float, ...] | None:
        """For each stage, the operations that may be recomputed for each byte saved; None: the planner decides.

        Raises `PipelineError`: the user gave levels for another number of stages.
        """
        if self.recompute == "auto":
            return None
        given = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,) * num_stages
        if len(given) != num_stages:
            raise PipelineError(
                "recomputation is given for another number of stages.",
                given=f"recompute={self.recompute!r} for {num_stages} stages",
                wrong=f"it is of length {len(given)}.",
                do="give one level for each stage, or one for all.",
                num_stages=num_stages,
            )
        return tuple(_LEVELS[level] if isinstance(level, str) else float(level) for level in given)


def _check_recompute(recompute: object) -> None:
    levels = recompute if isinstance(recompute, tuple) else () if recompute == "auto" else (recompute,)
    for level in levels:
        is_number = isinstance(level, int | float) and not isinstance(level, bool) and level >= 0
        if not (is_number or (isinstance(level, str) and level in _LEVELS)):
            raise AutoparError(
                "unknown level of recomputation.",
                given=f"recompute={recompute!r}",
                wrong=f"{level!r} is no level.",
                do="pass 'auto', 'cheap', 'all', a number of operations per byte, or a tuple of these for the stages.",
            )

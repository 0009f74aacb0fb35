"""Types of a stage's program: its joint program, its tasks, and their operands and results.

In:     (types only; made by `stage_program.py` and `stage_tasks.py`.)
Out:    `StageProgram`, `Task`, `Slot`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var
from autopar.inter_op.update_rounds import UpdateRound
from autopar.ir.dims import Dims
from autopar.ir.split.microbatches.accumulate import AccumulatingScan
from autopar.ir.split.placement import Placement

SlotKind = Literal["argument", "value", "const", "piece", "number", "loop", "sum", "rows"]
"""Explained at `Slot`."""
IN_PLACE: tuple[SlotKind, ...] = ("sum", "rows")
"""Updated in place by each task that contributes to them."""
RESIDENT: tuple[SlotKind, ...] = ("argument", "const", "piece", *IN_PLACE)
"""In memory throughout the step."""
PER_MICROBATCH: tuple[SlotKind, ...] = ("loop", "number")
"""Distinct for each microbatch."""
SENT: tuple[SlotKind, ...] = ("loop", "value")
"""May be sent between stages."""
TaskKind = Literal["step", "init", "F", "M", "B", "W", "U"]
StepKind = Literal["F", "B", "W"]
"""Run for each microbatch: forward; backward, or the half of it that other stages wait for; weight gradients."""
TASKS: dict[TaskKind, str] = {
    "step": "step",
    "init": "what precedes the microbatches",
    "F": "forward",
    "M": "between two passes of all microbatches",
    "B": "backward",
    "W": "backward, the weights' half",
    "U": "update",
}
"""Kinds of tasks, in words. `"M"` and `"U"` may have several rounds."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One operand or result of a task: the value it stands for.

    Once the stage has a mesh, a slot becomes a `stage_plan.Placed`, which has a sharding. Each instance of it in a
    schedule, on a mesh for a microbatch, is a `streams.Buffer`.

    Attributes:
        kind: `"argument"`: of the step; `"value"`: made before the loop or by the update; `"const"`: read by every
            microbatch, prepared once per step; `"piece"`: the microbatch's slice of a batch argument; `"number"`: the
            index of the microbatch; `"loop"`: made once per microbatch; `"sum"`: summed over the microbatches; `"rows"`:
            stacked over them.
        key: The variable that identifies the value in all tasks.
        var: The variable in the task's own program; None for sums and rows that begin empty.
        placement: For sums and rows: how the microbatches' contributions are combined.
    """

    kind: SlotKind
    key: Var
    var: Any
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A part of a stage's program that is run as a unit: what it computes, independent of the mesh.

    On a mesh, a task becomes a `stage_plan.TaskPlan`; what workers compile and run is a `partition.task.DeviceProgram`.

    Attributes:
        kind: What the task does.
        name: Name of its program: "stage0/F"; the step's own name, if it is the whole step.
        stage: The stage it belongs to.
        round: The round of its pass or of its update.
        after_pass: For tasks between passes: the pass of the loop after which it runs.
        jaxpr: Its program, over variables of the joint program.
        inputs: One slot per invar.
        outputs: One slot per outvar; then sums and rows that begin empty.
        gates: As in `Backward`, for this task.
    """

    kind: TaskKind
    name: str
    stage: int
    round: int
    jaxpr: Jaxpr
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    gates: Mapping[JaxprEqn, tuple[Var, ...]] = field(default_factory=dict)
    after_pass: int = -1

    @property
    def is_in_loop(self) -> bool:
        """Whether it is run once per microbatch, and not once per step."""
        return self.kind in ("F", "B", "W")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StageProgram:
    """Everything one stage does, independent of the mesh; on a mesh it becomes a `stage_plan.StagePlan`.

    Attributes:
        stage: Index of the stage.
        count: Number of microbatches.
        jaxpr: The joint program.
        scan: Its loop over the microbatches; empty if the stage has no part of the loop.
        sent: Values of the loop that other stages read, in order.
        arguments: Invars that are arguments of the step, by position.
        stacks: Invars that are batch arguments in pieces: position -> (argument, variable in the loop).
        received: Invars that stack what other stages send per microbatch: position -> variable in the loop.
        aliases: Output position -> position of the argument whose new value it is.
        donated: Per input, whether a result takes its memory.
        outputs: Output position -> position among the step's results, for those outputs that are results.
        batch: Input position -> its dims that run over samples.
        rounds: Equations between passes and of the update.
        tasks: The tasks, in order of a step.
        anew: Values that the tasks of both passes receive, or recompute, for themselves.
        twice: Equations that both passes run.
        joins: Values made between passes and read by the loop: invar through which the loop reads it -> the value.
        kept: Residuals: values of the loop kept for the backward pass.
    """

    stage: int
    count: int
    jaxpr: Jaxpr
    scan: AccumulatingScan = AccumulatingScan()
    sent: tuple[Var, ...] = ()
    arguments: Mapping[int, Var]
    stacks: Mapping[int, tuple[Var, Var]] = field(default_factory=dict)
    received: Mapping[int, Var] = field(default_factory=dict)
    aliases: Mapping[int, int]
    donated: tuple[bool, ...]
    outputs: Mapping[int, int]
    batch: Mapping[int, Dims]
    rounds: tuple[UpdateRound, ...] = ()
    tasks: tuple[Task, ...] = ()
    anew: frozenset[Var] = frozenset()
    twice: frozenset[JaxprEqn] = frozenset()
    joins: Mapping[Var, Var] = field(default_factory=dict)
    kept: frozenset[Var] = frozenset()

    @property
    def stacked(self) -> tuple[Var, ...]:
        """What the scan stacks, in the order of its outputs: results in rows, then values sent."""
        return (*(each.result.var for each in self.scan.joined if each.before is None), *self.sent)

    @property
    def results(self) -> list[Atom]:
        """Results of the step that this stage makes."""
        return self.jaxpr.outvars[: len(self.outputs)]

    @property
    def leaving(self) -> list[Atom]:
        """Values of the update that other stages read."""
        return self.jaxpr.outvars[len(self.outputs) : len(self.jaxpr.outvars) - len(self.sent)]

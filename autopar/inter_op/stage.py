"""What one stage does in a step: its joint program, and the tasks that are run of it.

In:     (types only; `stage_program.py` and `stage_tasks.py` make them, `fused.py` those of a step that is one program.)
Out:    `StageProgram`, `Task`, `Slot`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var
from autopar.inter_op.update import UpdateRound
from autopar.ir.split.microbatches.accumulate import AccumulatingScan
from autopar.ir.split.placement import Placement

Dims = frozenset[int]

SlotKind = Literal["argument", "value", "const", "piece", "number", "loop", "sum", "rows"]
"""As `Slot` says."""
IN_PLACE: tuple[SlotKind, ...] = ("sum", "rows")
"""What each task that makes a part of it writes over what was there."""
RESIDENT: tuple[SlotKind, ...] = ("argument", "const", "piece", *IN_PLACE)
"""What is there all through the step."""
PER_MICROBATCH: tuple[SlotKind, ...] = ("loop", "number")
"""Of which each microbatch has its own."""
SENT: tuple[SlotKind, ...] = ("loop", "value")
"""What stages make for each other."""
TaskKind = Literal["step", "init", "F", "M", "B", "W", "U"]
"""The whole step at once; or what comes before the loop, forward, a round of what comes between two passes of all
microbatches, backward, weight gradients, a round of the update."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One operand or result of a task: which value it is.

    How it lies is known once its stage has a mesh: then it is a `stage_plan.Placed`. A schedule says where and for which
    microbatch it is there: each time it is a `streams.Buffer`.

    Attributes:
        kind: `"argument"`: of the step; `"value"`: made before the loop or by the update; `"const"`: what every
            microbatch reads, prepared once per step; `"piece"`: the microbatch's part of a batch argument; `"number"`:
            that of the microbatch; `"loop"`: made once per microbatch; `"sum"`: added up over the microbatches;
            `"rows"`: stacked over them.
        key: The variable that names it to all tasks.
        var: The variable in the task's own program; of what begins empty, None.
        placement: Of sums and rows: how the microbatches' parts make the whole.
    """

    kind: SlotKind
    key: Var
    var: Any
    placement: Placement | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A part of a stage's program that is run at once: what it computes, whatever mesh it is on.

    One stage is sharded on many meshes, and its tasks stay the same; what they are there is a `stage_plan.TaskPlan`, and what
    is compiled of that, of which workers know nothing else, a `partition.task.DeviceProgram`.

    Attributes:
        kind: What it does.
        name: As its program is called: "stage0/F"; the step's own name, if it is the step.
        stage: Its stage.
        round: Of a pass, an update, or what comes between: which.
        behind: Of what comes between: the pass of the loop behind which it runs.
        jaxpr: Over variables of the joint program.
        inputs: What its invars are.
        outputs: What its outvars are.
        gates: As of `Backward`.
    """

    kind: TaskKind
    name: str
    stage: int
    round: int
    jaxpr: Jaxpr
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    gates: Mapping[JaxprEqn, tuple[Var, ...]] = field(default_factory=dict)
    behind: int = -1

    @property
    def is_in_loop(self) -> bool:
        """Whether it is run once for each microbatch, and not once for all."""
        return self.kind in ("F", "B", "W")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StageProgram:
    """Everything one stage does, whatever mesh it is on: it is sharded on many, and on each a `stage_plan.StagePlan`.

    Attributes:
        stage: Its number.
        count: Number of microbatches.
        jaxpr: The joint program.
        scan: Its loop; empty if no microbatch passes here.
        sent: Values of the loop that other stages read, in order.
        arguments: Invars that are arguments of the step, by position.
        stacks: Invars that are batch arguments in pieces: position -> (argument, variable in the loop).
        received: Invars that hold what other stages send per microbatch: position -> variable in the loop.
        aliases: Output position -> position of the argument whose new value it is.
        donated: For each input, whether a result takes its memory.
        outputs: Output position -> position among the step's results, for those that are.
        batch: Dims of inputs that run over samples.
        rounds: What comes between passes, and the update.
        tasks: In order of a step.
        anew: Values that the tasks of both passes have, or make, for themselves.
        twice: Equations that both passes run.
        joins: What the loop reads as if it were an argument, and what comes between the passes makes: the latter's variable.
        kept: Values of the loop that wait for the backward pass.
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
        """What the scan stacks, in the order of its outputs: results in rows, then what is sent."""
        return (*(each.result.var for each in self.scan.joined if each.before is None), *self.sent)

    @property
    def results(self) -> list[Atom]:
        """Results of the step that are found here."""
        return self.jaxpr.outvars[: len(self.outputs)]

    @property
    def leaving(self) -> list[Atom]:
        """Values of the update that other stages read."""
        return self.jaxpr.outvars[len(self.outputs) : len(self.jaxpr.outvars) - len(self.sent)]

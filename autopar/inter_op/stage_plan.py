"""Plans one stage on one logical mesh: shards its joint program, lowers its tasks, and prices them.

In:     `StageProgram`, a logical mesh, the device.
Out:    `StagePlan`: for each task its sharded body, the array types of its operands and results, seconds, bytes and
        collectives.
Method: the joint program is sharded as a whole (`intra_op/shard.py`); each task is then lowered from the same choices.
        A value passes between tasks in the sharding chosen for its keep (`intra_op/graph.py`), or, if it has none, in that
        of the task that makes it; a loop constant in the sharding that the loop reads. Values that the tasks of both
        passes receive or recompute anyway have no keep, so that the solver prices what the tasks do.

Here collectives count in full, also those that overlap with kernels; on one mesh the solver follows the clock instead
(`intra_op/exposure.py`). A stage's own clock is not the step's: its loop runs once for each of m microbatches, and delays
a step of s stages m + s - 1 times, while work before and after it partly hides where the pipeline fills and drains.
Stages chosen by their own clocks were each faster, but steps took 0.96 to 1.03 times the seconds: too little gain for
solving each stage twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar._jax import Literal, Var, on_host
from autopar.cost import collective_seconds
from autopar.inter_op.stage import RESIDENT, Slot, StageProgram, Task, TaskKind
from autopar.inter_op.stage_tasks import read_as_given
from autopar.intra_op.batch import batch_factors
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.graph import Graph, Tables, stacked
from autopar.intra_op.heap import gap_bytes
from autopar.intra_op.held import held_values
from autopar.intra_op.lanes import run_lanes
from autopar.intra_op.liveness import Waiting, fullest_moments, measure_liveness
from autopar.intra_op.lower import lower_task
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.restrict import Allowed, Restrict
from autopar.intra_op.shard import shard
from autopar.intra_op.sharded import Body, Collective, Compute, Copy, Region, calls_host, collectives_of
from autopar.ir.region import Role, trip_count
from autopar.ir.split.microbatches.accumulate import accumulator_type
from autopar.ir.split.placement import Split
from autopar.mesh import ArrayType, Device, LogicalMesh, Sharding
from autopar.options import Options
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True, eq=False)
class Placed(Slot):
    """An operand or result of a task on its mesh: the slot and its array.

    Attributes:
        type: Type and sharding of the array; for pieces and rows with a leading dim of microbatches.
        num_bytes: Bytes of the array in the memory of one device.
        host_bytes: Bytes of one device's shard in host memory.
    """

    type: ArrayType = field(kw_only=True)
    num_bytes: int = field(kw_only=True)
    host_bytes: int = field(kw_only=True)


def placed(slot: Slot, sharding: Sharding, shape: Sequence[int], dtype: Any, mesh: LogicalMesh) -> Placed:
    """Give a slot its array type on a mesh."""
    kind = ArrayType(tuple(shape), np.dtype(dtype), sharding, mesh, on_host(slot.key.aval))
    num_bytes, host_bytes = (0, kind.local_bytes) if kind.on_host else (kind.local_bytes, 0)
    own = slot.kind, slot.key, slot.var, slot.placement
    return Placed(*own, type=kind, num_bytes=num_bytes, host_bytes=host_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class TaskPlan:
    """A task on its mesh.

    Attributes:
        task: The task.
        body: The program of each device.
        inputs: Its operands, in order.
        outputs: Its results, in order; for `init` first those of the body, then sums and rows that begin empty.
        seconds: Predicted seconds of one run: kernels and exposed collectives.
        communication_seconds: Seconds of its collectives, hidden or exposed.
        exposed_seconds: For each of `collectives`, the seconds that no kernel hides.
        batchless_seconds: The part of `seconds` in operations without a batch dim, which smaller microbatches do not
            shorten.
        working_bytes: Peak bytes alive on one device during a run, without operands and results that overwrite them.
        collectives: The collectives of one run.
    """

    task: Task
    body: Body
    inputs: tuple[Placed, ...]
    outputs: tuple[Placed, ...]
    seconds: float
    communication_seconds: float
    exposed_seconds: tuple[float, ...]
    batchless_seconds: float
    working_bytes: int
    collectives: tuple[Collective, ...]

    @property
    def written_rows(self) -> tuple[Placed, ...]:
        """Rows that the task writes in place: their stacks are further operands, after `inputs`."""
        return () if self.task.kind == "init" else tuple(b for b in self.outputs if b.kind == "rows")

    @property
    def needs_number(self) -> bool:
        """Whether the index of the microbatch is an extra last operand: it is needed, and no equation reads it."""
        counts = any(b.kind == "piece" for b in self.inputs) or bool(self.written_rows)
        counts = counts or (self.task.is_in_loop and calls_host(self.body))  # exceptions name their microbatch
        return counts and not any(b.kind == "number" for b in self.inputs)


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """A stage on its mesh.

    Attributes:
        program: The stage's program.
        sharded: The sharded joint program.
        tasks: The planned tasks, in order of a step.
        unchanged: Arguments that its loop reads in place, without a copy: positions as in `read_as_given`.
        borrowed: Whether `sharded` and the bodies of the tasks are those of an equal stage (`equal_stages.py`): good
            enough for the simulator, but to be lowered before they are run.
    """

    program: StageProgram
    sharded: Sharded
    tasks: tuple[TaskPlan, ...]
    unchanged: frozenset[int] = frozenset()
    borrowed: bool = False

    @property
    def mesh(self) -> LogicalMesh:
        """The stage's logical mesh."""
        return self.sharded.mesh

    @property
    def gap(self) -> float:
        """The optimality gap, with the tasks priced as they were lowered rather than the joint program as a whole."""
        seconds = 0.0
        for t in self.tasks:
            kernels = t.seconds - sum(t.exposed_seconds)
            priced = self.sharded.priced_seconds(t.body, t.exposed_seconds, kernels, t.communication_seconds)
            seconds += priced * (self.program.count if t.task.is_in_loop else 1)
        return self.sharded.gap_of(seconds)

    def task(self, kind: TaskKind, number: int = 0) -> TaskPlan | None:
        """The task of a kind and round; None: the stage has none."""
        return next((t for t in self.tasks if t.task.kind == kind and t.task.round == number), None)


def stage_graph(
    program: StageProgram, mesh: LogicalMesh, like: Graph | None = None, tables: Tables | None = None
) -> Graph:
    """The decision graph of a stage's joint program on a mesh; arguments as in `build_graph`."""
    about = program.aliases, dict(program.batch), program.anew, program.twice
    return build_graph(program.jaxpr, mesh, *about, like, tables)


def plan_stage(
    program: StageProgram,
    graph: Graph,
    device: Device,
    options: Options,
    restrict: Restrict | None = None,
    all_again: bool = False,
    gap: float = TUNING.stage_gap,
    in_flight: int = 1,
) -> StagePlan:
    """Shard one stage.

    Args:
        graph: The stage's decision graph on its mesh.
        options: Solver, time limit, memory budget.
        restrict: Forbids choices.
        gap: Relative optimality gap at which the solver may stop.
        all_again: Whether results of the forward pass do not count as memory, since they may be recomputed.
        in_flight: Microbatches in flight at once, each of which holds its residuals.

    Raises:
        InfeasibleError: A pin or the memory budget cannot be kept.
    """

    def all_restrictions(graph: Graph, allowed: Allowed) -> None:
        _keep_stacks_whole(program, graph, allowed)
        if restrict is not None:
            restrict(graph, allowed)

    waiting = _waiting(program, all_again, in_flight)
    sharded = shard(graph, device, options, all_restrictions, program.donated, gap=gap, waiting=waiting)
    return lower_stage(program, device, sharded)


def _waiting(program: StageProgram, all_again: bool, in_flight: int) -> Waiting:
    """The microbatches of each stacked value in memory: one of those sent or received, `in_flight` of residuals."""
    passing = {program.jaxpr.invars[k] for k in program.received}.union(program.scan.sent)
    if all_again:
        forward = [eqn for task in program.tasks if task.kind == "F" for eqn in task.jaxpr.eqns]
        passing.update(var for eqn in forward for var in eqn.outvars)
    return Waiting(passing, in_flight, program.kept)


def peak_bytes_here(stage: StagePlan, all_again: bool = False, in_flight: int = 1) -> int:
    """Peak bytes of a stage's joint program, as its memory budget counts them; arguments as in `plan_stage`."""
    sharded, program = stage.sharded, stage.program
    held, waiting = held_values(sharded.graph), _waiting(program, all_again, in_flight)
    return fullest_moments(sharded.body, stage.mesh, held, program.donated, 1, waiting)[0].peak_bytes


def resting_bytes(stage: StagePlan, in_flight: int) -> int:
    """Bytes that a stage holds while none of its tasks runs: resident values, and residuals of microbatches in flight."""
    slots = {(b.kind, b.key): b for task in stage.tasks for b in (*task.inputs, *task.outputs)}
    always = sum(b.num_bytes for b in slots.values() if b.kind in RESIDENT)
    kept = sum(b.num_bytes for b in slots.values() if b.kind == "loop" and b.key in stage.program.kept)
    return always + in_flight * kept


def lower_stage(program: StageProgram, device: Device, sharded: Sharded) -> StagePlan:
    """Lower the tasks of a stage under the choices of `sharded`."""
    lowering = _Lowering(program, device, sharded)
    unchanged = lowering.unchanged(program.tasks[0])
    tasks = tuple(map(lowering.task, read_as_given(program.tasks, unchanged)))
    return StagePlan(program, sharded, tasks, unchanged)


def _keep_stacks_whole(program: StageProgram, graph: Graph, allowed: Allowed) -> None:
    """Forbid partial sums for values that the scan stacks."""
    for k in range(len(program.stacked)):
        node = graph.nodes[graph.ports[program.scan.eqn, "ys", k]]
        if any(s.partial for s in node.shardings):
            allowed.only(node, [not s.partial for s in node.shardings], "leaves the microbatch")


class _Lowering:
    def __init__(self, program: StageProgram, device: Device, sharded: Sharded):
        self.program, self.mesh, self.sharded = program, sharded.mesh, sharded
        self.graph, self.choices = sharded.graph, sharded.choices
        self.stored = held_values(self.graph)
        self.argument_at = {var: k for k, var in program.arguments.items()}
        scan = program.scan
        self.const_at = {inner: k for k, inner in enumerate(scan.consts)}
        self.xs_at = {inner: 1 + k for k, inner in enumerate(scan.stacked)}
        self.carry_at = {each.result.var: k for k, each in enumerate(scan.joined) if each.before is not None}
        self.ys_at = {var: k for k, var in enumerate(program.stacked)}
        outvars = program.jaxpr.outvars
        self.output_at = {a: k for k, a in reversed(list(enumerate(outvars))) if not isinstance(a, Literal)}
        self.input_at = {var: k for k, var in enumerate(program.jaxpr.invars)}
        self.made_by = {var: t.kind for t in program.tasks for eqn in t.jaxpr.eqns for var in eqn.outvars}
        self.operations = OperationSeconds(self.graph, self.choices, device)
        self.device, self.achieved = device, device.achieved

    def chosen(self, node: int) -> Sharding:
        return self.graph.nodes[node].shardings[self.choices[node]]

    def port(self, role: Role, k: int) -> Sharding:
        return self.chosen(self.graph.ports[self.program.scan.eqn, role, k])

    def produced(self, var: Var) -> Sharding:
        made = self.graph.produced[var]
        return made.shardings[self.choices[made.node]]

    def sharding(self, slot: Slot) -> Sharding:
        """The sharding of a value between tasks."""
        match slot.kind:
            case "number":
                return Sharding(())
            case "argument":
                return self.chosen(self.graph.inputs[self.argument_at[slot.key]])
            case "const":
                return self.port("const", self.const_at[slot.key])
            case "piece":
                return self.port("xs", self.xs_at[slot.key])
            case "sum":
                return self.port("carry", self.carry_at[slot.key])
            case "rows":
                return self.port("ys", self.ys_at[slot.key])
            case "loop":
                if slot.var in self.xs_at:
                    return self.port("xs", self.xs_at[slot.var])
                if slot.var in self.ys_at:
                    return self.port("ys", self.ys_at[slot.var])
                return self.waiting(slot.var)
        if slot.key in self.output_at:
            return self.chosen(self.graph.outputs[self.output_at[slot.key]])
        if slot.key in self.input_at:
            return self.chosen(self.graph.inputs[self.input_at[slot.key]])
        hub = self.graph.hubs.get((slot.key, "u")) if self.produced(slot.key).partial else None
        return self.produced(slot.key) if hub is None else self.chosen(hub)  # a sum that rounds share is sent once

    def waiting(self, var: Var) -> Sharding:
        """The sharding in which a value of the loop waits for later tasks: its keep's, or else its maker's."""
        keep = self.graph.keeps.get((var, "b"))
        if keep is not None:
            return self.chosen(keep.node)
        used = self.graph.used.get((var, "b" if self.made_by.get(var) == "B" else "f"))
        return used.shardings[self.choices[used.node]] if used is not None else self.produced(var)

    def placed(self, slot: Slot) -> Placed:
        shape, dtype = tuple(slot.key.aval.shape), slot.key.aval.dtype
        if slot.kind == "sum" and slot.placement is not None:
            dtype = accumulator_type(slot.key.aval, slot.placement).dtype
        if isinstance(slot.placement, Split):
            shape = tuple(n // self.program.count if d == slot.placement.dim else n for d, n in enumerate(shape))
        leading = (self.program.count,) if slot.kind in ("piece", "rows") else ()
        return placed(slot, self.sharding(slot), (*leading, *shape), dtype, self.mesh)

    def unchanged(self, first: Task) -> frozenset[int]:
        """Results of the first task that are arguments, in the sharding these are given in."""
        return frozenset(at for at, slot in enumerate(first.outputs) if self._is_as_given(slot))

    def _is_as_given(self, slot: Slot) -> bool:
        if slot.kind != "const" or slot.var not in self.argument_at:
            return False
        return self.placed(slot).type == self.placed(Slot("argument", slot.var, slot.var)).type

    def task(self, task: Task) -> TaskPlan:
        inputs, outputs = tuple(map(self.placed, task.inputs)), tuple(map(self.placed, task.outputs))
        entering = [self.entering(b) for b in inputs]
        body_outputs = outputs[: len(task.jaxpr.outvars)]
        leaving = [self.entering(b) for b in body_outputs]
        how = task.gates, self.sharded.body.bucket
        body = lower_task(task.jaxpr, self.graph, self.choices, entering, leaving, *how)
        collectives = tuple(collectives_of(body, self.mesh))
        communication = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, self.mesh) for c in collectives)
        in_place = self.in_place(task, inputs, body_outputs)
        liveness = measure_liveness(body, self.mesh, self.stored, in_place=in_place)
        lanes = run_lanes(body, self.operations.of, self.mesh, self.device)
        own_bytes = max(0, liveness.peak_bytes - liveness.argument_bytes)
        made = sum(b.num_bytes for b in outputs)  # these reuse operands' memory, or are allocations of their own
        return TaskPlan(
            task,
            body,
            inputs,
            outputs,
            lanes.seconds + self.achieved.program_seconds(max(0, own_bytes - made), len(inputs) + len(outputs)),
            communication,
            lanes.exposed,
            self.batchless(body),
            own_bytes + gap_bytes(body, self.mesh, self.stored, in_place, liveness),
            collectives,
        )

    def in_place(self, task: Task, inputs: Sequence[Placed], outputs: Sequence[Placed]) -> frozenset[Copy]:
        """Results that reuse the memory of an operand: a sum that of the sum before, new state that of the old."""
        names = self.program.arguments
        results = [(self.program.jaxpr.outvars[k], names[at]) for k, at in self.program.aliases.items()]
        of_old = {atom: var for atom, var in results if isinstance(atom, Var)}
        kept = {var for at, var in names.items() if self.program.donated and not self.program.donated[at]}
        there = [(b.kind, b.key, b.type) for b in inputs]
        found = []
        for value, atom in zip(outputs, task.jaxpr.outvars, strict=True):
            old = ("sum", value.key) if value.kind == "sum" else ("argument", of_old.get(value.key))
            if isinstance(atom, Var) and old[1] not in kept and (*old, value.type) in there:
                found.append((atom, self.entering(value)))
        return frozenset(found)

    def entering(self, value: Placed) -> Sharding:
        """The sharding of a value's variable within the task's program."""
        if value.kind == "rows" and value.var is not None and value.var in self.graph.produced:
            ndim = len(value.var.aval.shape)
            if ndim == len(value.type.sharding.dims) + 1:  # an update reads the whole stack
                return stacked(value.type.sharding)
        return value.type.sharding

    def batchless(self, body: Body) -> float:
        """Seconds of operations without a batch dim."""
        total = 0.0
        for instruction in body.instructions:
            match instruction:
                case Compute(eqn, rule):
                    if not batch_factors(eqn, rule, self.graph.batch):
                        total += self.operations.of(eqn)
                case Region(eqn, _, _, bodies):
                    trips = trip_count(eqn)
                    total += trips * sum(map(self.batchless, bodies))
        return total

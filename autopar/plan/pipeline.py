"""Planning a pipeline: from a traced step, a number of stages and a schedule to stages, streams and a prediction.

In:     `Program`, its roles, the cluster, what is fixed (borders, submeshes, logical meshes, microbatches, schedule).
Out:    `PipelinePlan`: everything that `Plan` reads off and the runtime carries out.
Method: phases, segments, tasks, one program per stage, each sharded on its own logical mesh (equal stages once), streams,
        checker, simulator.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar._jax import Jaxpr, Var
from autopar.cost.transfer import transfer_seconds
from autopar.errors import InfeasibleError, PipelineError
from autopar.inter_op.chain import Chain, make_chain
from autopar.inter_op.stage_plan import StagePlan, lower_stage, plan_stage
from autopar.inter_op.stage_program import StageProgram, stage_program
from autopar.inter_op.tasks import Tasks, make_tasks
from autopar.intra_op.batch import BatchDims, follow_batch
from autopar.intra_op.costs import build_problem
from autopar.intra_op.graph import Graph, build_graph
from autopar.intra_op.problem import Solution
from autopar.intra_op.restrict import Allowed, Restrict
from autopar.intra_op.shard import Sharded, read_off
from autopar.ir.canonical import canonical_key
from autopar.ir.microbatch import Microbatches, split_microbatches
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.state import Roles
from autopar.ir.structure import body_jaxprs, is_structured
from autopar.ir.trace import Program
from autopar.ir.unstack import Unstacked, layer_count, unstack, whole_stacks
from autopar.ir.whole_batch import whole_batch
from autopar.mesh import Cluster, Link, LogicalMesh, Sharding
from autopar.options import Options
from autopar.plan.check import Contract, check_streams
from autopar.plan.emit import Streams, emit_instructions
from autopar.plan.instructions import Run, Send
from autopar.plan.schedules import Schedule, Step, num_chunks, splits_backward
from autopar.plan.schedules.schedule import clocks
from autopar.plan.simulate import Simulation, simulate
from autopar.plan.timeline import Event, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A step in phases, ready to be cut into stages.

    Attributes:
        program: The step; its scans over layers taken apart.
        roles: Its roles.
        stacks: What became of the stacked arguments and results of the user's step.
        split: Its phases.
        chain: The segments of its loop.
        batch: Dims of the loop's values that run over samples.
    """

    program: Program
    roles: Roles
    stacks: Unstacked
    split: Microbatches
    chain: Chain
    batch: BatchDims


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePlan:
    """A pipeline that is planned.

    Attributes:
        cut: What was cut.
        borders: First segment of each stage.
        tasks: The step cut into stages.
        stages: Each on its mesh.
        first_device: Of each stage.
        schedule: In which order they work.
        streams: What each mesh does.
        simulation: On the clock.
    """

    cut: Cut
    borders: tuple[int, ...]
    tasks: Tasks
    stages: tuple[StagePlan, ...]
    first_device: tuple[int, ...]
    schedule: Schedule
    streams: Streams
    simulation: Simulation

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return self.simulation.seconds


@dataclass(slots=True)
class Solved:
    """Stages that have been sharded, so that equal ones are solved once: key -> the stage that was."""

    known: dict[Hashable, StagePlan] = field(default_factory=dict)


def in_parts(program: Program, roles: Roles, num_stages: int) -> tuple[Program, Roles, Unstacked]:
    """The step with its scans over layers taken apart, if it has any: into as many parts as stages where that divides.

    Args:
        program: The step.
        roles: Its roles.
        num_stages: How many stages it is to be cut into.
    """
    length = layer_count(program.jaxpr)
    count = _part_count(length, num_stages)
    if count < 2:
        return program, roles, whole_stacks(program.jaxpr)
    stacks = unstack(program.jaxpr, length, count, roles.aliases)
    if not any(len(stacks.inputs[k]) > 1 for k in roles.state):
        return program, roles, whole_stacks(program.jaxpr)  # a scan over time, or over chunks: its weights are shared
    size = length // count
    paths = [
        f"{program.in_paths[k]}[{number * size}:{(number + 1) * size}]" if len(parts) > 1 else program.in_paths[k]
        for k, parts in enumerate(stacks.inputs[: program.num_args])
        for number, _ in enumerate(parts)
    ]
    out_paths = [
        f"{program.out_paths[k]}[{number * size}:{(number + 1) * size}]" if len(parts) > 1 else program.out_paths[k]
        for k, parts in enumerate(stacks.outputs)
        for number, _ in enumerate(parts)
    ]
    parted = dataclasses.replace(
        program,
        jaxpr=stacks.jaxpr,
        in_paths=tuple(paths),
        out_paths=tuple(out_paths),
        in_avals=tuple(var.aval for var in stacks.jaxpr.invars[: len(paths)]),
        out_avals=tuple(a.aval for a in stacks.jaxpr.outvars),
        num_args=len(paths),
    )
    aliases = {
        out: into
        for k, old in roles.aliases.items()
        for out, into in zip(stacks.outputs[k], stacks.inputs[old], strict=True)
    }
    parted_roles = Roles(
        aliases,
        tuple(sorted(aliases.values())),
        tuple(at for k in roles.batch for at in stacks.inputs[k]),
        tuple(roles.donated[k] for k, parts in enumerate(stacks.inputs) for _ in parts),
        roles.state_arguments,
    )
    return parted, parted_roles, stacks


def _part_count(length: int, num_stages: int) -> int:
    """Parts of a scan of `length` layers: one per stage, or the fewest more that divide it."""
    if length == 0 or num_stages == 1:
        return 1
    return next((n for n in range(num_stages, length + 1) if length % n == 0), length)


def cut_step(program: Program, roles: Roles, num_stages: int, num_microbatches: int, semantics: str = "exact") -> Cut:
    """Take a step apart: its scans over layers, its phases, its segments.

    Args:
        program: The step.
        roles: Its roles.
        num_stages: How many stages it is to be cut into.
        num_microbatches: How many microbatches.
        semantics: `"exact"` or `"per_microbatch"`.

    Raises:
        BatchError: The batch does not divide.
        MicrobatchError: Microbatches would compute something else.
    """
    program, roles, stacks = in_parts(program, roles, num_stages)
    names = ", ".join(dict.fromkeys(program.in_paths[k].split("/")[0] for k in roles.batch))
    if num_microbatches > 1:
        own = semantics == "per_microbatch"
        split = split_microbatches(program.jaxpr, num_microbatches, roles.batch, own, names, apart=True)
    else:
        split = whole_batch(program.jaxpr, roles.batch)
    first = 1 + len(split.invariants)
    chain = make_chain(split.loop, split.loop.invars[1:first])
    pieces = {first + k: frozenset({0}) for k in range(len(split.pieces))}
    batch = follow_batch(split.loop, _rules(split.loop, {}), pieces)
    return Cut(program, roles, stacks, split, chain, batch)


def _rules(jaxpr: Jaxpr, found: dict[int, ShardingRule]) -> dict[int, ShardingRule]:
    for eqn in jaxpr.eqns:
        if is_structured(eqn):
            for body in body_jaxprs(eqn):
                _rules(body, found)
        else:
            found[id(eqn)] = rule_for(eqn)
    return found


def check_stage_count(cut: Cut, num_stages: int) -> None:
    """There must be as many places to cut.

    Raises:
        PipelineError: The program has fewer segments than stages are wanted.
    """
    if num_stages > cut.chain.num_segments:
        raise PipelineError(
            "the step cannot be cut into so many stages.",
            given=f"num_stages={num_stages}",
            wrong=f"its forward pass has {cut.chain.num_segments} operations that a stage could begin with.",
            do="use fewer stages.",
            num_stages=num_stages,
        )


def plan_pipeline(
    cut: Cut,
    borders: Sequence[int],
    meshes: Sequence[Sequence[LogicalMesh]],
    cluster: Cluster,
    schedule: Schedule,
    options: Options,
    solved: Solved,
    restrict: Callable[[StageProgram, LogicalMesh], Restrict | None] = lambda program, mesh: None,
) -> PipelinePlan:
    """Plan a pipeline whose borders and submeshes are given.

    Args:
        cut: The step in phases.
        borders: First segment of each stage.
        meshes: Per stage, the logical meshes to try; the cheapest is taken.
        cluster: The machine; stages take its devices in order.
        schedule: In which order stages work.
        options: Solver, time limit, memory budget.
        solved: Stages solved before; extended.
        restrict: Forbids choices of a stage on a mesh.

    Raises:
        InfeasibleError: A stage does not fit; says which and by how much.
    """
    tasks = make_tasks(cut.program.jaxpr, cut.split, cut.chain, borders, splits_backward(schedule))
    stages: list[StagePlan] = []
    same = _SameStacks(cut)
    for number, candidates in enumerate(meshes):
        program = stage_program(tasks, number, cut.roles.aliases, cut.batch.dims)
        made = best_stage(program, candidates, cluster, options, solved, restrict)
        pins = same.pins(program, made)
        if pins:
            pinned = _pinned(pins, restrict(program, made.mesh))
            made = solve_stage(program, made.mesh, cluster, options, solved, pinned, tuple(pins.items()))
        same.add(program, made)
        stages.append(made)
    return assemble(cut, tuple(borders), tasks, stages, cluster, schedule, options)


class _SameStacks:
    """The parts of one stack shall lie alike on their stages: then they are one array to the user."""

    def __init__(self, cut: Cut):
        arguments = cut.program.jaxpr.invars
        self.stack_of = {
            arguments[at]: k for k, parts in enumerate(cut.stacks.inputs) if len(parts) > 1 for at in parts
        }
        self.chosen: dict[int, tuple[LogicalMesh, Sharding]] = {}

    def pins(self, program: StageProgram, stage: StagePlan) -> dict[int, Sharding]:
        """Of a stage with an argument that lies otherwise than the parts before it: position -> how those lie."""
        known = {
            at: self.chosen[self.stack_of[var]]
            for at, var in program.arguments.items()
            if self.stack_of.get(var, -1) in self.chosen
        }
        same_mesh = all(mesh == stage.mesh for mesh, _ in known.values())
        differs = any(sharding != _lies(stage, at) for at, (_, sharding) in known.items())
        return {at: sharding for at, (_, sharding) in known.items()} if same_mesh and differs else {}

    def add(self, program: StageProgram, stage: StagePlan) -> None:
        """Remember how the parts of a stage lie."""
        for at, var in program.arguments.items():
            if var in self.stack_of and at in program.aliases.values():
                self.chosen.setdefault(self.stack_of[var], (stage.mesh, _lies(stage, at)))


def _lies(stage: StagePlan, argument: int) -> Sharding:
    graph = stage.sharded.graph
    node = graph.inputs[argument]
    return graph.nodes[node].shardings[stage.sharded.choices[node]]


def _pinned(pins: Mapping[int, Sharding], further: Restrict | None) -> Restrict:
    def restrict(graph: Graph, allowed: Allowed) -> None:
        for at, sharding in pins.items():
            node = graph.nodes[graph.inputs[at]]
            allowed.only(node, [s == sharding for s in node.shardings], ("as its stack", sharding))
        if further is not None:
            further(graph, allowed)

    return restrict


def best_stage(
    program: StageProgram,
    candidates: Sequence[LogicalMesh],
    cluster: Cluster,
    options: Options,
    solved: Solved,
    restrict: Callable[[StageProgram, LogicalMesh], Restrict | None] = lambda program, mesh: None,
) -> StagePlan:
    """A stage on the logical mesh on which it is fastest.

    Raises:
        InfeasibleError: It fits on none.
    """
    found: list[StagePlan] = []
    failure: InfeasibleError | None = None
    for mesh in candidates:
        try:
            found.append(solve_stage(program, mesh, cluster, options, solved, restrict(program, mesh)))
        except InfeasibleError as error:
            failure = error
    if not found:
        assert failure is not None, "a stage has at least one mesh to try"
        raise failure
    return min(found, key=lambda s: (stage_seconds(s), len(s.mesh.shape)))


def solve_stage(
    program: StageProgram,
    mesh: LogicalMesh,
    cluster: Cluster,
    options: Options,
    solved: Solved,
    restrict: Restrict | None = None,
    pins: Hashable = (),
) -> StagePlan:
    """Shard a stage, or take over the choices of an equal one; `pins` tells restrictions apart."""
    key = (
        canonical_key(program.jaxpr),
        tuple(sorted(program.aliases.items())),
        tuple(sorted((k, tuple(sorted(d))) for k, d in program.batch.items())),
        len(program.stacked),
        mesh,
        restrict is None,
        pins,
    )
    if key in solved.known:
        return take_over(program, solved.known[key], cluster)
    made = plan_stage(program, mesh, cluster.device, options, restrict)
    solved.known[key] = made
    return made


def take_over(program: StageProgram, like: StagePlan, cluster: Cluster) -> StagePlan:
    """An equal stage under the same choices; nothing is solved."""
    if like.program is program:
        return like
    old = like.sharded
    sharded = read_choices(program, like.mesh, cluster, old.choices, old)
    return lower_stage(program, like.mesh, cluster.device, sharded)


def read_choices(
    program: StageProgram, mesh: LogicalMesh, cluster: Cluster, choices: Sequence[int], like: Sharded
) -> Sharded:
    """A stage's joint program under given choices."""
    graph = build_graph(program.jaxpr, mesh, program.aliases, dict(program.batch))
    assert len(graph.nodes) == len(choices), "the stages are not equal"
    problem = build_problem(graph, cluster.device, like.class_of, like.allowed.masks)
    donated = [k in program.aliases.values() for k in range(len(program.jaxpr.invars))]
    return read_off(
        program.jaxpr, graph, choices, like.class_of, problem, like.solution, like.allowed, cluster.device, donated
    )


def given_choices(
    program: StageProgram, mesh: LogicalMesh, cluster: Cluster, choices: Sequence[int], cost: Any
) -> Sharded:
    """A stage's joint program under choices from elsewhere, of which nothing more is known.

    Raises:
        AssertionError: They are not choices of this program.
    """
    graph = build_graph(program.jaxpr, mesh, program.aliases, dict(program.batch))
    fitting = len(graph.nodes) == len(choices) and all(
        k < node.num_choices for k, node in zip(choices, graph.nodes, strict=True)
    )
    assert fitting, f"{len(choices)} choices for {len(graph.nodes)} decisions, or one out of range"
    class_of = list(range(len(graph.nodes)))
    problem = build_problem(graph, cluster.device, class_of)
    seconds = problem.cost(choices)
    solution = Solution(tuple(choices), seconds, seconds * (1 - cost.optimality_gap), cost.solver_status, "file")
    donated = [k in program.aliases.values() for k in range(len(program.jaxpr.invars))]
    return read_off(program.jaxpr, graph, choices, class_of, problem, solution, Allowed(), cluster.device, donated)


def stage_seconds(stage: StagePlan) -> float:
    """Time of all runs of a stage in one step."""
    return sum(t.seconds * (stage.program.count if t.task.kind in ("F", "B", "W") else 1) for t in stage.tasks)


def assemble(
    cut: Cut,
    borders: tuple[int, ...],
    tasks: Tasks,
    stages: Sequence[StagePlan],
    cluster: Cluster,
    schedule: Schedule,
    options: Options,
    check_budget: bool = True,
) -> PipelinePlan:
    """Streams, checked and simulated, of stages that are planned.

    Raises:
        InfeasibleError: The microbatches in flight do not fit.
    """
    order = schedule.order(len(stages) // num_chunks(schedule), cut.split.count)
    state = [cut.program.jaxpr.invars[k] for k in cut.roles.state]
    check_order(order, schedule, tasks, len(stages))
    streams = emit_instructions(tasks, stages, order, state)
    check_streams(streams.instructions, contract_of(streams, cut.split.count))
    num_meshes, first_device, at = len(order), [], 0
    for stage in stages[:num_meshes]:
        first_device.append(at)
        at += stage.mesh.num_devices
    first_device = [first_device[number % num_meshes] for number in range(len(stages))]
    donated = {v for v, d in zip(cut.program.jaxpr.invars, cut.roles.donated, strict=True) if d}
    simulation = simulate_streams(streams, stages, first_device, cluster, donated)
    budget = options.memory_budget_bytes or cluster.device.memory_bytes
    for mesh, peak in simulation.peak_bytes.items():
        if check_budget and peak > budget:
            raise InfeasibleError(
                "a stage does not fit the memory budget.",
                given=f"stage {mesh} of {len(stages)} on {stages[mesh].mesh}, schedule {schedule.name!r}, "
                f"{cut.split.count} microbatches, {budget:.0f} bytes on each device",
                wrong=f"{peak} bytes are alive on a device at once.",
                do="use more stages or devices, more microbatches, or the schedule '1f1b'.",
                budget_bytes=int(budget),
                needed_bytes=int(peak),
            )
    return PipelinePlan(cut, borders, tasks, tuple(stages), tuple(first_device), schedule, streams, simulation)


def check_order(order: Sequence[Sequence[Step]], schedule: Schedule, tasks: Tasks, num_stages: int) -> None:
    """A schedule must do every step of every stage once, in an order in which no stage waits for ever.

    Raises:
        PipelineError: It does not; names the first step that is missing, done twice, or waited for in a circle.
    """
    num_meshes, count = len(order), tasks.split.count
    wanted = {
        (kind, k, stage)
        for stage in range(num_stages)
        for kind, eqns in (("F", tasks.forward), ("B", tasks.backward), ("W", tasks.weight))
        if eqns[stage]
        for k in range(count)
    }
    done: set[tuple[str, int, int]] = set()
    wrong = ""
    for mesh, steps in enumerate(order):
        for step in steps:
            key = (step.kind, step.microbatch, step.chunk * num_meshes + mesh)
            if key in done:
                wrong = wrong or f"mesh {mesh} does {step} twice."
            if not 0 <= step.microbatch < count:
                wrong = wrong or f"mesh {mesh} does {step}, and there are {count} microbatches."
            done.add(key)
    missing = sorted(wanted - done)
    if missing:
        kind, k, stage = missing[0]
        wrong = wrong or f"stage {stage} never does {kind}{k}, microbatch {k} {_MEANING[kind]}."
    if num_meshes * num_chunks(schedule) != num_stages:
        wrong = f"its order is for {num_meshes} meshes, there are {num_stages // num_chunks(schedule)}."
    if not wrong:
        try:
            clocks(order)
        except ValueError as error:
            wrong = str(error)
    if wrong:
        raise PipelineError(
            "the schedule does not carry out the step.",
            given=f"schedule {schedule.name!r}, {num_stages} stages, {count} microbatches",
            wrong=wrong,
            do='use "1f1b" (a step without gradients: "inference"), or mend order(num_stages, num_microbatches).',
            num_stages=num_stages,
        )


_MEANING = {"F": "forward", "B": "backward", "W": "backward, the weights' half"}


def contract_of(streams: Streams, num_microbatches: int) -> Contract:
    """What the streams must keep, told from the programs and not from the streams."""
    number = next(iter(streams.numbers.values()), None)
    number_key = streams.buffers[number].key if number is not None else None

    def operands(name: str) -> list[tuple[str, object]]:
        plan = streams.programs[name]
        found = [(b.slot.kind, b.slot.key) for b in (*plan.inputs, *plan.written_rows)]
        return found + [("number", number_key)] * plan.needs_number

    given: dict[int, list[int]] = {mesh: [] for mesh in streams.instructions}
    for at in (*streams.arguments.values(), *streams.pieces.values(), *streams.numbers.values()):
        given[streams.buffers[at].mesh].append(at)
    runs = [
        (name, k)
        for name, plan in streams.programs.items()
        for k in range(num_microbatches if plan.task.kind in ("F", "B", "W") else 1)
    ]
    return Contract(
        given,
        [at for at in streams.results if at is not None],
        {name: operands(name) for name in streams.programs},
        {name: [(b.slot.kind, b.slot.key) for b in plan.outputs] for name, plan in streams.programs.items()},
        [(b.kind, b.key, b.microbatch) for b in streams.buffers],
        [b.mesh for b in streams.buffers],
        runs,
    )


def simulate_streams(
    streams: Streams,
    stages: Sequence[StagePlan],
    first_device: Sequence[int],
    cluster: Cluster,
    donated: set[Var],
) -> Simulation:
    """The streams on the clock of the cost model."""
    overwritten = overwritten_buffers(streams, donated)

    def message_seconds(mesh: int, send: Send) -> float:
        link = link_between(first_device, stages, mesh, send.peer, cluster)
        total = sum(math.prod(streams.buffers[b].shape) * streams.buffers[b].dtype.itemsize for b in send.buffers)
        return transfer_seconds(total, stages[mesh].mesh.num_devices, stages[send.peer].mesh.num_devices, link)

    held: dict[int, list[int]] = {mesh: [] for mesh in streams.instructions}
    for at in (*streams.arguments.values(), *streams.pieces.values()):
        held[streams.buffers[at].mesh].append(at)
    return simulate(
        streams.instructions,
        lambda run: streams.programs[run.program].seconds,
        message_seconds,
        [b.num_bytes for b in streams.buffers],
        lambda run: streams.programs[run.program].working_bytes,
        held,
        lambda run: overwritten.get((run.program, run.microbatch), ()),
    )


def measured(streams: Streams, stages: Sequence[StagePlan], seconds: Mapping[tuple[int, int], float]) -> Timeline:
    """The streams on the clock of measured times.

    Args:
        streams: What the meshes do.
        stages: Each on its mesh.
        seconds: Of each instruction, by (mesh, position), run alone.
    """
    of_run = {
        (i.program, i.microbatch): seconds[mesh, at]
        for mesh, stream in streams.instructions.items()
        for at, i in enumerate(stream)
        if isinstance(i, Run)
    }
    of_message = {
        i.message: seconds[mesh, at]
        for mesh, stream in streams.instructions.items()
        for at, i in enumerate(stream)
        if isinstance(i, Send)
    }
    simulation = simulate(
        streams.instructions,
        lambda run: of_run[run.program, run.microbatch],
        lambda mesh, send: of_message[send.message],
        [b.num_bytes for b in streams.buffers],
        lambda run: streams.programs[run.program].working_bytes,
    )
    return timeline_of(streams, simulation)


def overwritten_buffers(streams: Streams, donated: set[Var]) -> dict[tuple[str, int], list[int]]:
    """Operands of each run whose memory its results take: sums, rows, and in the update the state it replaces."""
    found: dict[tuple[str, int], list[int]] = {}
    results = {at for at in streams.results if at is not None}
    for stream in streams.instructions.values():
        last: dict[int, Run] = {}
        for instruction in stream:
            if isinstance(instruction, Run):
                last.update((at, instruction) for at in instruction.inputs)
        for instruction in stream:
            if not isinstance(instruction, Run):
                continue
            kind = streams.programs[instruction.program].task.kind
            made = [streams.buffers[at] for at in instruction.outputs]
            sizes = [b.num_bytes for b in made]
            gone = []
            for at in instruction.inputs:
                buffer = streams.buffers[at]
                in_place = buffer.kind in ("sum", "rows") and any(
                    b.kind == buffer.kind and b.key is buffer.key for b in made
                )
                replaced = (
                    kind == "U"
                    and buffer.kind == "argument"
                    and buffer.key in donated
                    and at not in results
                    and last[at] is instruction
                    and buffer.num_bytes in sizes
                )
                if in_place or replaced:
                    gone.append(at)
                    if replaced:
                        sizes.remove(buffer.num_bytes)
            found[instruction.program, instruction.microbatch] = gone
    return found


def link_between(
    first_device: Sequence[int], stages: Sequence[StagePlan], source: int, target: int, cluster: Cluster
) -> Link:
    """The link over which two stages' meshes are connected."""

    def hosts(stage: int) -> set[int]:
        first = first_device[stage]
        return {d // cluster.devices_per_host for d in range(first, first + stages[stage].mesh.num_devices)}

    same = hosts(source) == hosts(target) and len(hosts(source)) == 1
    return cluster.intra if same else cluster.inter


def timeline_of(streams: Streams, simulation: Simulation) -> Timeline:
    """The simulated step as a timeline."""
    events = []
    for interval in simulation.intervals:
        match interval.instruction:
            case Run(program, stage, microbatch):
                kind = streams.programs[program].task.kind
                if kind == "init":
                    kind = "U"
                events.append(Event(program, kind, stage, microbatch, interval.mesh, interval.start, interval.end))
            case Send(buffers, peer):
                microbatch = max(streams.buffers[buffers[0]].microbatch, 0) if buffers else 0
                events.append(
                    Event(
                        f"to mesh {peer}",
                        "transfer",
                        interval.mesh,
                        microbatch,
                        interval.mesh,
                        interval.start,
                        interval.end,
                    )
                )
    return Timeline(tuple(events))

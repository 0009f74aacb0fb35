"""Simulates a pipeline with the seconds of the cost model, or with measured ones, and checks the order of a schedule.

In:     streams, stages, the cluster.
Out:    `Simulation`, `Timeline`; `check_order` refuses a schedule before streams are emitted.
Method: `simulate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from autopar.cost.collectives import collective_seconds, transfer_seconds
from autopar.errors import PipelineError
from autopar.grouping import grouped
from autopar.inter_op.stage import TASKS, StepKind, TaskKind
from autopar.inter_op.stage_plan import StagePlan
from autopar.inter_op.tasks import Tasks
from autopar.intra_op.liveness import host_peak_bytes
from autopar.mesh import ArrayType, Cluster, Device
from autopar.streams.instructions import Instruction, Recv, Run, Send, Streams
from autopar.streams.schedules import Schedule, Step, num_chunks
from autopar.streams.schedules.schedule import clocks
from autopar.streams.simulate import Simulation, simulate
from autopar.streams.timeline import Event, EventKind, Timeline
from autopar.streams.transfers import crossing


def check_order(order: Sequence[Sequence[Step]], schedule: Schedule, tasks: Tasks, num_stages: int) -> None:
    """Check that a schedule does every step of every stage once, in an order without deadlock.

    Raises `PipelineError`: it does not; names the first step that is missing or done twice, or the steps that deadlock.
    """
    num_meshes, count = len(order), tasks.split.count
    wanted = {
        (kind, number, k, stage)
        for stage in range(num_stages)
        for number, each in enumerate(tasks.rounds[stage])
        for kind, eqns in each.by_kind.items()
        if eqns
        for k in range(count)
    }
    done: set[tuple[StepKind, int, int, int]] = set()
    wrong = ""
    for mesh, steps in enumerate(order):
        for step in steps:
            key = (step.kind, step.round, step.microbatch, step.chunk * num_meshes + mesh)
            if key in done:
                wrong = wrong or f"mesh {mesh} does {step} twice."
            if not 0 <= step.microbatch < count:
                wrong = wrong or f"mesh {mesh} does {step}, and there are {count} microbatches."
            done.add(key)
    missing = sorted(wanted - done)
    if missing:
        kind, _, k, stage = missing[0]
        wrong = wrong or f"stage {stage} never does {kind}{k}, microbatch {k} {TASKS[kind]}."
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


def simulate_streams(
    streams: Streams,
    stages: Sequence[StagePlan],
    first_device: Sequence[int],
    cluster: Cluster,
    watched: bool = False,
    working_bytes: Mapping[str, int] | None = None,
    buffer_bytes: Sequence[int] | None = None,
) -> Simulation:
    """Simulate the streams with the seconds of the cost model.

    `watched`: as in `simulate`. `working_bytes`: of each program; None: as predicted. `buffer_bytes`: of each buffer, in
    another memory than the devices'; None: device bytes.
    """
    works_with = working_bytes or {name: plan.working_bytes for name, plan in streams.programs.items()}

    def message_seconds(mesh: int, send: Send) -> float:
        link = cluster.link_at(level_between(first_device, stages, mesh, send.peer, cluster))
        total = sum(streams.buffers[b].value.type.num_bytes for b in send.buffers)
        sent = transfer_seconds(total, stages[mesh].mesh.num_devices, stages[send.peer].mesh.num_devices, link)
        pairs = zip(send.buffers, received[send.message], strict=True) if shares else ()
        return sent + sum(local_seconds(kinds[a], kinds[b], cluster.device) for a, b in pairs)

    shares, kinds = cluster.device.achieved.host_cores > 0, [b.value.type.array for b in streams.buffers]
    received = {i.message: i.buffers for own in streams.instructions.values() for i in own if isinstance(i, Recv)}
    resident: dict[int, list[int]] = {mesh: [] for mesh in streams.instructions}
    for _, at in streams.arguments:
        resident[streams.buffers[at].mesh].append(at)
    return simulate(
        streams.instructions,
        lambda run: streams.programs[run.program].seconds,
        message_seconds,
        buffer_bytes or [b.value.num_bytes for b in streams.buffers],
        lambda run: works_with[run.program],
        resident,
        lambda run: [run.inputs[k] for k in streams.overwritten[run.program]],
        watched,
        sharing(stages, first_device, cluster),
    )


def local_seconds(source: ArrayType, target: ArrayType, device: Device) -> float:
    """Seconds of what an array's transfer between meshes starts on devices that share their host's cores.

    That are copies into new memory; where tiles are cut and joined, the programs that do both; and a gather inside the target.
    """
    way = crossing(source, target)
    program = device.achieved.program_seconds(target.local_bytes, num_arrays=2)
    seconds = device.achieved.crossing_seconds(target.local_bytes) + (2 * program if way.is_cut else 0.0)
    split, wanted = ([axis for dim in sharding.dims for axis in dim] for sharding in (way.middle, target.sharding))
    axes = tuple(axis for axis in split if axis not in wanted)
    if axes:
        seconds += program + collective_seconds("all-gather", target.local_bytes, axes, target.mesh)
    return seconds


def most_host_bytes(
    streams: Streams, stages: Sequence[StagePlan], first_device: Sequence[int], cluster: Cluster
) -> int:
    """Peak bytes that one device has in its host's memory."""
    buffers = [b.value.host_bytes for b in streams.buffers]
    inside = {t.task.name: host_peak_bytes(t.body, stage.mesh) for stage in stages for t in stage.tasks}
    if not any(buffers):
        return max(inside.values())
    walked = simulate_streams(streams, stages, first_device, cluster, working_bytes=inside, buffer_bytes=buffers)
    return max(walked.peak_bytes.values())


def sharing(
    stages: Sequence[StagePlan], first_device: Sequence[int], cluster: Cluster
) -> Callable[[Collection[int]], Mapping[int, float]] | None:
    """A function from the meshes that run at once to the speed of each, if devices share their host's cores; else None.

    Meshes of one process have its cores in turns: XLA's CPU client starts no program of several devices before the last one
    has ended.
    """
    reached = cluster.device.achieved
    if not reached.host_cores:
        return None
    per_host, is_one_process = cluster.devices_per_host, cluster.machine is None

    def speeds(running: Collection[int]) -> dict[int, float]:
        busy = grouped(
            (first_device[mesh] // per_host, min(per_host, stages[mesh].mesh.num_devices)) for mesh in running
        )
        speed = {
            # One process runs the programs of all its meshes in turns.
            host: reached.sharing_speed(max(counts), per_host) / len(counts)
            if is_one_process
            else reached.sharing_speed(sum(counts), per_host)
            for host, counts in busy.items()
        }
        return {mesh: speed[first_device[mesh] // per_host] for mesh in running}

    return speeds


def measured(streams: Streams, seconds: Mapping[tuple[int, int], float]) -> Timeline:
    """Simulate the streams with measured seconds: of each instruction run alone, by (mesh, position)."""
    taken = {
        i: seconds[mesh, at]
        for mesh, stream in streams.instructions.items()
        for at, i in enumerate(stream)
        if isinstance(i, Run | Send)
    }
    simulation = simulate(
        streams.instructions,
        lambda run: taken[run],
        lambda mesh, send: taken[send],
        [b.value.num_bytes for b in streams.buffers],
        lambda run: streams.programs[run.program].working_bytes,
    )
    return timeline_of(streams, simulation)


def recorded(
    streams: Streams, runs: Mapping[tuple[int, int], tuple[float, float]], messages: Mapping[int, tuple[float, float]]
) -> Timeline:
    """The timeline of a step as it was recorded, on one clock for all meshes, whatever its zero.

    `runs`: start and end of each program, by (mesh, position in its stream); `messages`: when each was sent and had arrived.
    """
    first = min((begin for begin, _ in (*runs.values(), *messages.values())), default=0.0)
    events = []
    for mesh, stream in streams.instructions.items():
        for at, instruction in enumerate(stream):
            span = runs.get((mesh, at))
            if isinstance(instruction, Send):
                span = messages.get(instruction.message)
            if span is not None:
                events += _events(streams, mesh, instruction, span[0] - first, span[1] - first)
    return Timeline(tuple(sorted(events, key=lambda event: event.start)))


def level_between(
    first_device: Sequence[int], stages: Sequence[StagePlan], source: int, target: int, cluster: Cluster
) -> int:
    """The level of the machine that connects the meshes of two stages."""
    firsts = [first_device[stage] for stage in (source, target)]
    lasts = [first_device[stage] + stages[stage].mesh.num_devices - 1 for stage in (source, target)]
    return cluster.level_between(min(firsts), max(lasts))


def timeline_of(streams: Streams, simulation: Simulation) -> Timeline:
    """The simulated step as a timeline."""
    events: list[Event] = []
    for interval in simulation.intervals:
        events += _events(streams, interval.mesh, interval.instruction, interval.start, interval.end)
    return Timeline(tuple(events))


def _events(streams: Streams, mesh: int, instruction: Instruction, start: float, end: float) -> list[Event]:
    """The event of an instruction; none for one that takes no time."""
    match instruction:
        case Run(program, stage, microbatch):
            kind = kind_of(streams, stage, streams.programs[program].task.kind)
            # A program that is the whole step is not drawn.
            return [] if kind is None else [Event(program, kind, stage, microbatch, mesh, start, end)]
        case Send(buffers, peer):
            first = streams.buffers[buffers[0]] if buffers else None
            stage, microbatch = (first.stage, max(first.microbatch, 0)) if first else (mesh, 0)
            return [Event(f"to mesh {peer}", "transfer", stage, microbatch, mesh, start, end)]
    return []


def kind_of(streams: Streams, stage: int, kind: TaskKind) -> EventKind | None:
    """The kind under which a task is drawn; None: it is the whole step.

    W is drawn as B at a stage that has no B: the weights' gradients are then its whole backward pass.
    """
    if kind == "step":
        return None
    return "B" if kind == "W" and f"stage{stage}/B" not in streams.programs else kind

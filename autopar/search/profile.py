"""Profiles a plan's time and memory, from the sharded program or the simulated pipeline.

In:     a planned step.
Out:    `Profile`.
Method: on one mesh, seconds by phase are sums over operations, and memory is a curve over the program's operations, since
        XLA chooses the order in time; a pipeline is simulated once more, with its memory recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar._jax import JaxprEqn, Var
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.sharded import Body, Compute, Instruction, Region, computed
from autopar.ir.gradient import holds_backward, is_backward
from autopar.ir.program import Program
from autopar.mesh import Cluster, Device
from autopar.plan.profile import Crossing, CrossingKind, Memory, Profile, Work
from autopar.plan.words import type_text
from autopar.streams.assemble import StepPlan
from autopar.streams.clock import kind_of, simulate_streams
from autopar.streams.instructions import Recv, Send, Streams
from autopar.streams.simulate import Watch
from autopar.streams.timeline import EventKind

MAX_POINTS = 400
"""Longer curves are thinned to the maximum of neighbouring points."""
MAX_PARTS = 8
"""Number of parts that a peak is broken down into."""


def profile_of(planned: StepPlan, cluster: Cluster) -> Profile:
    """The profile of a step: along the program if it is one program, else over simulated time."""
    tasks = [task for stage in planned.stages for task in stage.tasks]
    if tasks[0].task.kind == "step":
        return _of_program(planned, cluster.device)
    return _of_stages(planned, cluster)


def _of_program(planned: StepPlan, device: Device) -> Profile:
    (stage,) = planned.stages
    sharded = stage.sharded
    phases = _phases(sharded.body)
    seconds: dict[EventKind, float] = {"F": 0.0, "B": 0.0, "U": 0.0}
    seconds_of = OperationSeconds(sharded.graph, sharded.choices, device).of
    for eqn, times in computed(sharded.body):
        seconds[phases[eqn]] += times * seconds_of(eqn)
    # The step counts only the longest branch of conditions: scale to its total.
    scale = sharded.compute_seconds / (sum(seconds.values()) or 1.0)
    alive = sharded.liveness
    gaps = sharded.peak_bytes - alive.peak_bytes  # for the whole run, as in a task of a stage
    curve = _thinned([(float(k), size + gaps) for k, size in enumerate(alive.curve)])
    return Profile(
        tuple(Work(0, kind, float(time * scale)) for kind, time in seconds.items() if time),
        (Memory(0, "operations", curve, _parts_of_program(planned.program, sharded, phases)),),
    )


def _phases(body: Body) -> dict[JaxprEqn, EventKind]:
    """The phase of each equation; whatever follows the backward pass is the update."""
    behind = [k for k, i in enumerate(body.instructions) if isinstance(i, Compute | Region) and holds_backward(i.eqn)]
    end = behind[-1] + 1 if behind else len(body.instructions)
    return dict([*_phases_in(body.instructions[:end], "F"), *_phases_in(body.instructions[end:], "U")])


def _phases_in(instructions: Sequence[Instruction], phase: EventKind) -> Iterator[tuple[JaxprEqn, EventKind]]:
    """The phase of each equation, also in bodies; a backward pass may lie in the forward pass."""
    for i in instructions:
        if isinstance(i, Compute | Region):
            own: EventKind = "B" if phase == "F" and is_backward(i.eqn) else phase
            yield i.eqn, own
            for inner in i.bodies if isinstance(i, Region) else ():
                yield from _phases_in(inner.instructions, own)


def _parts_of_program(
    program: Program, sharded: Sharded, phases: Mapping[JaxprEqn, EventKind]
) -> tuple[tuple[str, int], ...]:
    maker: dict[Var, str] = {}
    for k, (var, _) in enumerate(sharded.body.inputs):
        maker[var] = argument_group(program.in_paths[k]) if k < program.num_args else "constants"
    names = {"F": "kept for the backward pass", "B": "gradients", "U": "the update"}
    for i in sharded.body.instructions:
        if isinstance(i, Compute | Region):
            for var, _ in i.makes:
                maker.setdefault(var, names[phases[i.eqn]])
    totals: dict[str, int] = {}
    for alive in sharded.liveness.alive:
        name = maker.get(alive.copy[0], "inside a loop")
        totals[name] = totals.get(name, 0) + alive.num_bytes
    totals["gaps between arrays"] = sharded.peak_bytes - sharded.liveness.peak_bytes
    return _largest_parts(totals, sharded.peak_bytes)


def argument_group(path: str) -> str:
    """The group that an argument counts to: the first two parts of its path."""
    return "/".join(path.split("[")[0].split("/")[:2])


def _largest_parts(totals: Mapping[str, int], peak: int) -> tuple[tuple[str, int], ...]:
    """The largest parts of a peak, and the rest as one part."""
    order = sorted(((name, size) for name, size in totals.items() if size), key=lambda part: -part[1])
    kept = order[: MAX_PARTS - 1] if len(order) > MAX_PARTS else order
    rest = peak - sum(size for _, size in kept)
    return tuple(kept) + ((("other values", rest),) if rest > 0 else ())


def _thinned(points: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """At most `MAX_POINTS` points, the peak among them; repeated levels are dropped."""
    step = -(-len(points) // MAX_POINTS) if points else 1
    found: list[tuple[float, int]] = []
    for first in range(0, len(points), step):
        group = points[first : first + step]
        level = max(size for _, size in group)
        if not found or found[-1][1] != level or first + step >= len(points):
            found.append((group[0][0], level))
    return tuple(found)


def _of_stages(planned: StepPlan, cluster: Cluster) -> Profile:
    program, streams = planned.program, planned.streams
    simulation = simulate_streams(streams, planned.stages, planned.first_device, cluster, watched=True)
    position = {var: k for k, var in enumerate(program.jaxpr.invars)}

    def name_of(buffer: int) -> str:
        at = streams.buffers[buffer].value
        k = position.get(at.key)
        if at.kind in ("argument", "piece") and k is not None:
            return argument_group(program.in_paths[k]) if k < program.num_args else "constants"
        return _KINDS.get(at.kind, "other values")

    memory = []
    for mesh, watch in simulation.watch.items():
        totals: dict[str, int] = {"inside the task that runs": watch.working_bytes}
        for buffer in watch.fullest:
            totals[name_of(buffer)] = totals.get(name_of(buffer), 0) + streams.buffers[buffer].value.num_bytes
        parts = _largest_parts(totals, simulation.peak_bytes[mesh])
        memory.append(Memory(mesh, "seconds", _thinned(_levels(watch)), parts))
    return Profile(tuple(_work(planned)), tuple(memory), tuple(_crossings(streams)))


_KINDS = {
    "loop": "activations of microbatches",
    "sum": "gradients, added up",
    "rows": "results of microbatches",
    "const": "made once per step",
    "value": "the update",
}
"""Kind of buffer -> description."""


def _levels(watch: Watch) -> list[tuple[float, int]]:
    """Bytes over time: those of buffers, or while a program runs, its peak if that is higher."""
    changes = sorted([(time, 0, size) for time, size in watch.levels])
    changes += [(start, 1, size) for start, _, size in watch.runs] + [(end, -1, size) for _, end, size in watch.runs]
    found: list[tuple[float, int]] = []
    base, running = 0, 0
    for time, what, size in sorted(changes, key=lambda change: (change[0], change[1])):
        base, running = (size, running) if what == 0 else (base, size if what == 1 else 0)
        level = max(base, running)
        if found and found[-1][0] == time:
            found[-1] = time, level
        else:
            found.append((time, level))
    return found


def _work(planned: StepPlan) -> Iterable[Work]:
    for number, stage in enumerate(planned.stages):
        totals: dict[EventKind, float] = {}
        for task in stage.tasks:
            kind = kind_of(planned.streams, number, task.task.kind)
            assert kind is not None, "a step that is one program has no stages to tell apart"
            totals[kind] = totals.get(kind, 0.0) + planned.times(task) * (task.seconds - sum(task.exposed_seconds))
        yield from (Work(number, kind, float(seconds)) for kind, seconds in totals.items() if seconds > 0)


def _crossings(streams: Streams) -> Iterable[Crossing]:
    target = {
        i.message: streams.buffers[i.buffers[0]].stage
        for stream in streams.instructions.values()
        for i in stream
        if isinstance(i, Recv) and i.buffers
    }
    found: dict[tuple[int, int, CrossingKind], list[Any]] = {}
    for stream in streams.instructions.values():
        for i in stream:
            if not (isinstance(i, Send) and i.buffers and i.message in target):
                continue
            sent = [streams.buffers[b] for b in i.buffers]
            source, to = sent[0].stage, target[i.message]
            kind: CrossingKind = "update" if sent[0].microbatch < 0 else "forward" if source < to else "backward"
            largest = max(sent, key=lambda b: b.value.type.num_bytes)
            entry = found.setdefault((source, to, kind), [0, 0, largest])
            entry[0] += sum(b.value.type.num_bytes for b in sent)
            entry[1] += 1
            entry[2] = max(entry[2], largest, key=lambda b: b.value.type.num_bytes)
    for (source, to, kind), (num_bytes, messages, largest) in sorted(found.items(), key=lambda item: item[0]):
        text = type_text(largest.value.type.shape, str(largest.value.type.dtype))
        yield Crossing(source, to, kind, num_bytes, messages, text)

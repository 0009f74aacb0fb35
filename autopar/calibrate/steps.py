"""Measures a step, for comparison with its prediction.

In:     the plan, the function that runs it, the flat arguments.
Out:    a `MeasuredStep`.
Method: whole steps are timed on copies of donated arguments, so that the user's state is advanced by one step only. For one
        program, collectives are then timed in isolation on the same devices, and the rest of the step is attributed to
        kernels, a lower bound where collectives overlap with kernels. For a pipeline, every program and message of another
        step is timed in isolation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar.calibrate.cases import collective
from autopar.calibrate.timing import turn_times
from autopar.cost import collective_seconds
from autopar.cost.steps import CollectiveKind
from autopar.mesh import Cluster
from autopar.plan.decision import Decision
from autopar.report.measured import Lane, MeasuredStep
from autopar.runtime.placing import copied
from autopar.streams.timeline import Event, Timeline

COLLECTIVES = 12
"""Number of sizes of collectives that are timed in isolation, the longest ones; others are scaled by the same ratio."""
COLLECTIVE_SECONDS = 5.0
"""Time limit for each of them."""


def whole_steps(run: Callable[[list[Any]], Any], leaves: Sequence[Any], donated: Sequence[bool], steps: int) -> float:
    """Median seconds of `steps` steps, each on copies of donated arguments, after one warm-up step."""
    taken = []
    for _ in range(steps + 1):
        own = [copied(leaf) if d else leaf for leaf, d in zip(leaves, donated, strict=True)]
        jax.block_until_ready(own)
        started = time.perf_counter()
        jax.block_until_ready(run(own))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def one_program(plan: Decision, devices: Sequence[jax.Device], step_seconds: float, steps: int) -> MeasuredStep:
    """The measured lanes of a step that is one program."""
    cost, mesh = plan.cost, plan.mesh
    predicted: dict[tuple[CollectiveKind, tuple[str, ...], int], tuple[float, int]] = {}
    for c in cost.collectives:
        key = c.kind, c.axes, c.bytes
        seconds, times = predicted.get(key, (0.0, 0))
        seconds += c.times * collective_seconds(c.kind, c.bytes, c.axes, mesh)
        predicted[key] = seconds, times + c.times
    largest = sorted(predicted, key=lambda key: -predicted[key][0])[:COLLECTIVES]
    alone = {}
    for kind, axes, num_bytes in largest:
        groups = _groups(devices, mesh.shape, [mesh.axis_names.index(axis) for axis in axes])
        case = collective(kind, num_bytes, math.prod(mesh.size_of(axis) for axis in axes))
        found = turn_times(case, groups, time.monotonic() + COLLECTIVE_SECONDS)
        if found is not None:
            alone[kind, axes, num_bytes] = found[0] * predicted[kind, axes, num_bytes][1]
    told = sum(predicted[key][0] for key in alone)
    scale = sum(alone.values()) / told if told else 1.0
    lanes: dict[str, tuple[int, float, float]] = {}
    for key, (seconds, times) in predicted.items():
        name = f"{key[0]} over {','.join(key[1])}"
        before = lanes.get(name, (0, 0.0, 0.0))
        lanes[name] = before[0] + times, before[1] + seconds, before[2] + alone.get(key, seconds * scale)
    sending = sum(measured for _, _, measured in lanes.values())
    found_lanes = [
        Lane("step", 1, cost.step_seconds, step_seconds),
        Lane("kernels", 1, cost.compute_seconds, max(0.0, step_seconds - sending)),
        *(Lane(name, times, p, m) for name, (times, p, m) in lanes.items()),
    ]
    note = (
        "Collectives were timed by themselves; kernels are the step less these: at least that, where some are hidden."
    )
    rest = len(predicted) - len(alone)
    if rest:
        note += f" Of {len(predicted)} sizes, {rest} were not timed, and are taken to differ as the others do."
    return MeasuredStep((), plan.name, step_seconds, steps, tuple(found_lanes), note if predicted else "")


def _groups(devices: Sequence[jax.Device], shape: tuple[int, ...], axes: Sequence[int]) -> list[jax.Device]:
    """The devices in an order in which those of a group are adjacent."""
    others = [axis for axis in range(len(shape)) if axis not in axes]
    return list(np.array(devices, dtype=object).reshape(shape).transpose([*others, *axes]).flat)


def pipeline(
    plan: Decision, cluster: Cluster, timeline: Timeline, step_seconds: float | None, steps: int
) -> MeasuredStep:
    """The measured lanes of a pipeline, from the measured timeline of its programs and messages.

    `step_seconds`: median of `steps` whole steps, if the timeline is of programs in isolation; None: it is that of a real
    step, in which meshes run concurrently.
    """
    is_alone = step_seconds is not None
    predicted, measured = _sums(plan.events.events), _sums(timeline.events)
    if is_alone:
        predicted.update(_tasks_alone(plan, cluster))
    lanes = [
        Lane(name, times, predicted.get(name, (times, 0.0))[1], seconds) for name, (times, seconds) in measured.items()
    ]
    seconds = timeline.seconds if step_seconds is None else step_seconds
    whole = [Lane("step", 1, plan.cost.step_seconds, seconds)]
    if is_alone:
        whole.append(Lane("the schedule, with the times below", 1, plan.cost.step_seconds, timeline.seconds))
        note = "Programs and messages were timed by themselves, nothing at the same time."
    else:
        note = "Every program and message as it was in one step, by the clocks of the hosts; each is waited for."
    return MeasuredStep(timeline.events, plan.name, seconds, steps, (*whole, *lanes), note)


def _sums(events: Sequence[Event]) -> dict[str, tuple[int, float]]:
    """Program, or messages of a mesh -> (times, seconds)."""
    found: dict[str, tuple[int, float]] = {}
    for event in sorted(events, key=lambda e: (e.kind == "transfer", e.stage, e.name)):
        name = f"mesh {event.mesh} {event.name}" if event.kind == "transfer" else event.name
        times, seconds = found.get(name, (0, 0.0))
        found[name] = times + 1, seconds + event.end - event.start
    return found


def _tasks_alone(plan: Decision, cluster: Cluster) -> dict[str, tuple[int, float]]:
    """Program -> (times, predicted seconds while all other meshes are idle)."""
    found = {}
    count = plan.num_microbatches
    for stage in plan.attached.pipeline.stages:
        busy = min(stage.mesh.num_devices, cluster.devices_per_host)
        speed = cluster.device.achieved.sharing_speed(busy, cluster.devices_per_host)
        for task in stage.tasks:
            times = count if task.task.is_in_loop else 1
            found[task.task.name] = times, times * task.seconds / speed
    return found

"""Measures a step, for comparison with its prediction.

In:     the plan, the function that runs it, the flat arguments.
Out:    a `MeasuredStep`.
Method: whole steps are timed one after another, beginning with copies of donated arguments, so that the user's state is
        advanced by one step only. For one program, collectives are then timed in isolation on the same devices, and the
        rest of the step is attributed to kernels, a lower bound where collectives overlap with kernels. For a pipeline,
        every program and message of another step is timed in isolation.
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
from autopar.grouping import summed
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster
from autopar.plan.decision import Decision
from autopar.report.measured import Lane, MeasuredStep
from autopar.runtime.placing import copied
from autopar.streams.timeline import Event, Timeline

COLLECTIVES = 12
"""Number of sizes of collectives that are timed in isolation, the longest ones; others are scaled by the same ratio."""
COLLECTIVE_SECONDS = 5.0
"""Time limit for each of them."""


def whole_steps(run: Callable[[list[Any]], Any], leaves: Sequence[Any], roles: Roles, steps: int) -> float:
    """Seconds of a step in training: the mean of `steps` steps, each on what the last returned, after two that do not count.

    Where a donated argument has no new value among the results: the median of steps on copies of the donated arguments.
    """
    donated = [k for k, is_donated in enumerate(roles.donated[: len(leaves)]) if is_donated]

    def own() -> list[Any]:
        made = list(leaves)
        for k in donated:
            made[k] = copied(leaves[k])
        return jax.block_until_ready(made)

    if not set(donated) <= set(roles.aliases.values()):
        return statistics.median([_seconds(run, own()) for _ in range(steps + 1)][1:])
    given, started = own(), 0.0
    for number in range(steps + 2):
        if number == 2:
            jax.block_until_ready(given)
            started = time.perf_counter()
        results = jax.tree.leaves(run(given))
        for result, argument in roles.aliases.items():
            given[argument] = results[result]
    jax.block_until_ready(results)
    return (time.perf_counter() - started) / steps


def _seconds(run: Callable[[list[Any]], Any], given: list[Any]) -> float:
    """Seconds of one step."""
    started = time.perf_counter()
    jax.block_until_ready(run(given))
    return time.perf_counter() - started


def one_program(plan: Decision, devices: Sequence[jax.Device], step_seconds: float, steps: int) -> MeasuredStep:
    """The measured lanes of a step that is one program."""
    cost, mesh = plan.cost, plan.mesh
    predicted = summed(
        ((c.kind, c.axes, c.bytes), (c.times * collective_seconds(c.kind, c.bytes, c.axes, mesh), c.times))
        for c in cost.collectives
    )
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
    lanes = summed(
        (f"{key[0]} over {','.join(key[1])}", (times, seconds, alone.get(key, seconds * scale)))
        for key, (seconds, times) in predicted.items()
    )
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

    `step_seconds`: that of `steps` whole steps, if the timeline is of programs in isolation; None: it is that of a real
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
    order = sorted(events, key=lambda e: (e.kind == "transfer", e.stage, e.name))
    return summed((f"mesh {e.mesh} {e.name}" if e.kind == "transfer" else e.name, (1, e.end - e.start)) for e in order)


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

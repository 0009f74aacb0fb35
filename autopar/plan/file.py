"""Plans as files: JSON that is read back, compared, and put under version control.

In:     a plan and a path.
Out:    a file with one entry per line; or the plan again, its shardings by path until it is compiled for its program.
Method: everything is checked when it is read, so that damage is a `PlanFileError` that names the entry, never a
        surprise later. Written beside the target and renamed, so that a reader never sees half a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.entry import LARGEST, DamageError, Entry, read_json
from autopar.errors import AutoparError, PlanFileError
from autopar.intra_op.sharded import Collective
from autopar.mesh import Link, LogicalMesh, Sharding
from autopar.options import SEMANTICS
from autopar.plan.decision import Cost, Decision, Recomputed, Stage, Submesh, Value
from autopar.plan.figures import Figures
from autopar.plan.profile import Crossing, Memory, Profile, Work
from autopar.plan.words import ARGUMENT_ROLES
from autopar.streams.assemble import ONE_PROGRAM
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send
from autopar.streams.timeline import KINDS, Event, Timeline

FORMAT = "autopar plan"
VERSION = 6
"""Raised with every change that an older reader cannot take, or that gives choices another meaning."""
_ROLES = (*ARGUMENT_ROLES, "result", "activation")


def save_decision(plan: Decision, path: str | Path) -> None:
    """Write a plan as JSON.

    Raises:
        PlanFileError: The file cannot be written.
    """
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(_dumps(_record(plan)))
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanFileError(
            "the plan cannot be saved.",
            given=str(path),
            wrong=f"{error.strerror or error}.",
            do="name a file in a directory that exists and may be written to.",
            path=str(path),
        ) from error


def load_decision(path: str | Path) -> Decision:
    """Read a plan that `save_decision` wrote.

    Raises:
        PlanFileError: The file is missing, damaged, or of another version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(
            path, f"{error.strerror}." if isinstance(error, OSError) and error.strerror else "it is not text."
        ) from error
    try:
        record = read_json(text)
    except DamageError as error:
        raise _error(path, str(error)) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _error(path, f'it is JSON, but no plan: "format" is not "{FORMAT}".')
    if record.get("version") != VERSION:
        raise _error(path, f"it is of version {record.get('version')!r}; this autopar reads version {VERSION}.")
    try:
        return _plan(Entry(record, ""))
    except DamageError as error:
        raise _error(path, str(error)) from error


def _error(path: str | Path, wrong: str) -> PlanFileError:
    return PlanFileError(
        "the file cannot be read as a plan.",
        given=str(path),
        wrong=wrong,
        do="plan again, step.plan(...).save(path), with the autopar that is to read it.",
        path=str(path),
    )


def _record(plan: Decision) -> dict[str, Any]:
    cost = plan.cost
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": plan.name,
        "method": plan.method,
        "machine": plan.machine,
        "budget_bytes": _number(plan.budget_bytes),
        "fingerprints": dict(plan.fingerprints),
        "num_microbatches": plan.num_microbatches,
        "microbatch_semantics": plan.microbatch_semantics,
        "schedule": plan.schedule,
        "parts": plan.parts,
        "stages": [
            {
                "num_devices": s.submesh.num_devices,
                "first_device": s.submesh.first,
                "shape": s.logical_mesh.shape,
                "axis_names": s.logical_mesh.axis_names,
                "links": [_link_record(link) for link in s.logical_mesh.links],
                "layers": s.layers,
                "choices": s.choices,
                "operations": s.operations,
                "recomputed": {
                    "level": _number(s.recomputed.level),
                    "operations": s.recomputed.operations,
                    "seconds": s.recomputed.seconds,
                    "kept_bytes": s.recomputed.kept_bytes,
                    "saved_bytes": s.recomputed.saved_bytes,
                },
            }
            for s in plan.stages
        ],
        "streams": [
            {"mesh": mesh, **_instruction_record(instruction)}
            for mesh, stream in plan.streams.items()
            for instruction in stream
        ],
        "events": [
            {
                "name": e.name,
                "kind": e.kind,
                "stage": e.stage,
                "microbatch": e.microbatch,
                "mesh": e.mesh,
                "start": e.start,
                "end": e.end,
            }
            for e in plan.events.events
        ],
        "work": [{"stage": w.stage, "kind": w.kind, "seconds": w.seconds} for w in plan.profile.work],
        "memory": [{"mesh": m.mesh, "unit": m.unit, "curve": m.curve, "peak": m.peak} for m in plan.profile.memory],
        "crossings": [
            {
                "source": c.source,
                "target": c.target,
                "kind": c.kind,
                "bytes": c.bytes,
                "messages": c.messages,
                "largest": c.largest,
            }
            for c in plan.profile.crossings
        ],
        "alternatives": [list(pair) for pair in plan.alternatives],
        "cost": {
            "step_seconds": cost.step_seconds,
            "compute_seconds": cost.compute_seconds,
            "communication_seconds": cost.communication_seconds,
            "bubble_seconds": cost.bubble_seconds,
            "peak_bytes": list(cost.peak_bytes),
            "argument_bytes": cost.argument_bytes,
            "optimality_gap": _number(cost.optimality_gap),
            "solver_status": cost.solver_status,
            "planning_seconds": cost.planning_seconds,
            "exposed_seconds": list(cost.exposed_seconds),
            "figures": dataclasses.asdict(cost.figures),
        },
        "collectives": [
            {
                "kind": c.kind,
                "axes": c.axes,
                "bytes": c.bytes,
                "times": c.times,
                "operation": c.operation,
                "stage": c.stage,
            }
            for c in cost.collectives
        ],
        "values": [
            {
                "name": v.name,
                "role": v.role,
                "shape": v.shape,
                "dtype": v.dtype,
                "dims": v.sharding.dims,
                "partial": v.sharding.partial,
                "stage": v.stage,
            }
            for v in plan.values
        ],
    }


def _instruction_record(instruction: Instruction) -> dict[str, Any]:
    match instruction:
        case Run(program, stage, microbatch, inputs, outputs):
            return {
                "do": "run",
                "program": program,
                "stage": stage,
                "microbatch": microbatch,
                "inputs": inputs,
                "outputs": outputs,
            }
        case Send(buffers, peer, message):
            return {"do": "send", "buffers": buffers, "peer": peer, "message": message}
        case Recv(buffers, peer, message):
            return {"do": "receive", "buffers": buffers, "peer": peer, "message": message}
        case Free(buffers):
            return {"do": "free", "buffers": buffers}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"  # JSON has no infinity


def _dumps(record: dict[str, Any]) -> str:
    """JSON with one entry per line, so that two files can be compared."""
    lines = []
    for key, value in record.items():
        text = json.dumps(value, default=int)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(item, default=int) for item in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plan(entry: Entry) -> Decision:
    stages = entry["stages"].items(_stage)
    if not stages:
        raise entry["stages"].wrong("a list of stages")
    count, schedule = entry["num_microbatches"].count(1), entry["schedule"].text()
    if schedule == ONE_PROGRAM and len(stages) > 1:
        raise entry["schedule"].wrong(f"the schedule of {len(stages)} stages")
    bounds = _Bounds(len(stages), count)
    values = entry["values"].items(lambda e: _value(e, _mesh_of(e, stages)))
    streams: dict[int, list[Instruction]] = {}
    for index, instruction in entry["streams"].items(lambda e: (bounds.mesh(e["mesh"]), _instruction(e, bounds))):
        streams.setdefault(index, []).append(instruction)
    fingerprints = entry["fingerprints"]
    return Decision(
        name=entry["name"].text(),
        method=entry["method"].text(),
        stages=stages,
        num_microbatches=count,
        microbatch_semantics=entry["microbatch_semantics"].one_of(SEMANTICS),
        schedule=schedule,
        parts=entry["parts"].count(1),
        shardings={v.name: v.sharding.partition_spec() for v in values if v.role in ARGUMENT_ROLES},
        cost=_cost(
            entry["cost"], entry["collectives"].items(lambda e: _collective(e, _mesh_of(e, stages))), len(stages)
        ),
        values=values,
        streams={index: tuple(stream) for index, stream in streams.items()},
        events=Timeline(entry["events"].items(lambda e: _event(e, bounds))),
        profile=_profile(entry, bounds),
        alternatives=entry["alternatives"].items(_pair),
        fingerprints={key: fingerprints[key].text() for key in ("program", "cluster", "jax")},
        machine=entry["machine"].text(),
        budget_bytes=entry["budget_bytes"].number(or_infinite=True),
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Numbers of a plan that others may not exceed."""

    num_stages: int
    num_microbatches: int

    def stage(self, entry: Entry) -> int:
        return entry.below(self.num_stages, "the number of a stage")

    mesh = stage
    """There are as many meshes as stages, or fewer."""

    def microbatch(self, entry: Entry) -> int:
        return entry.below(self.num_microbatches, "the number of a microbatch")


def _mesh_of(entry: Entry, stages: tuple[Stage, ...]) -> LogicalMesh:
    return stages[entry["stage"].below(len(stages), "the number of a stage")].logical_mesh


def _instruction(entry: Entry, bounds: _Bounds) -> Instruction:
    def counts(key: str) -> tuple[int, ...]:
        return entry[key].items(Entry.count)

    match entry["do"].one_of(("run", "send", "receive", "free")):
        case "run":
            return Run(
                entry["program"].text(),
                bounds.stage(entry["stage"]),
                bounds.microbatch(entry["microbatch"]),
                counts("inputs"),
                counts("outputs"),
            )
        case "send":
            return Send(counts("buffers"), bounds.mesh(entry["peer"]), entry["message"].count())
        case "receive":
            return Recv(counts("buffers"), bounds.mesh(entry["peer"]), entry["message"].count())
        case _:
            return Free(counts("buffers"))


def _event(entry: Entry, bounds: _Bounds) -> Event:
    start, end = entry["start"].number(), entry["end"].number()
    if end < start:
        raise entry["end"].wrong("a time after its start")
    return Event(
        entry["name"].text(),
        entry["kind"].one_of(KINDS),
        bounds.stage(entry["stage"]),
        bounds.microbatch(entry["microbatch"]),
        bounds.mesh(entry["mesh"]),
        start,
        end,
    )


def _profile(entry: Entry, bounds: _Bounds) -> Profile:
    return Profile(
        entry["work"].items(lambda e: Work(bounds.stage(e["stage"]), e["kind"].one_of(KINDS), e["seconds"].number())),
        entry["memory"].items(lambda e: _memory(e, bounds)),
        entry["crossings"].items(
            lambda e: Crossing(
                bounds.stage(e["source"]),
                bounds.stage(e["target"]),
                e["kind"].one_of(("forward", "backward", "update")),
                e["bytes"].count(),
                e["messages"].count(1),
                e["largest"].text(),
            )
        ),
    )


def _memory(entry: Entry, bounds: _Bounds) -> Memory:
    curve = entry["curve"].items(lambda e: e.pair(Entry.number, Entry.count))
    if any(later < earlier for (earlier, _), (later, _) in itertools.pairwise(curve)):
        raise entry["curve"].wrong("a curve")
    return Memory(
        bounds.mesh(entry["mesh"]),
        entry["unit"].one_of(("seconds", "operations")),
        curve,
        entry["peak"].items(lambda e: e.pair(Entry.text, Entry.count)),
    )


def _pair(entry: Entry) -> tuple[str, str]:
    return entry.pair(Entry.text, Entry.text)


def _link_record(link: Link) -> list[Any]:
    rates = _number(link.bytes_per_second), _number(link.switch_bytes_per_second)
    return [link.latency_seconds, *rates, int(link.has_short_messages) + 2 * int(link.shared_memory)]


def _stage(entry: Entry) -> Stage:
    shape = entry["shape"].items(Entry.count)
    names = entry["axis_names"].items(Entry.text, len(shape))
    try:
        links = entry["links"].items(_link, len(shape))
        mesh = LogicalMesh(shape, names, links)
    except AutoparError as error:
        raise entry.wrong(f"a mesh: {error.wrong or error.summary}") from error
    if mesh.num_devices != entry["num_devices"].count(1):
        raise entry["shape"].wrong("the shape of a mesh of num_devices devices")
    layers = entry["layers"].items(Entry.count)
    if not layers:
        raise entry["layers"].wrong("a list of layers")
    first, last = entry["operations"].items(Entry.text, 2)
    return Stage(
        Submesh(mesh.num_devices, entry["first_device"].count()),
        mesh,
        layers,
        entry["choices"].items(Entry.count),
        (first, last),
        _recomputed(entry["recomputed"]),
    )


def _link(entry: Entry) -> Link:
    if not isinstance(entry.value, list) or len(entry.value) != 4:
        raise entry.wrong("a list of 4")
    latency, rate, switch, way = (Entry(value, f"{entry.where}[{k}]") for k, value in enumerate(entry.value))
    rates = rate.number(or_infinite=True), switch.number(or_infinite=True)
    way.below(4, "0 to 3: 1 where there are short messages, 2 more where memory is shared")
    return Link(latency.number(), *rates, bool(way.value & 1), shared_memory=bool(way.value & 2))


def _recomputed(entry: Entry) -> Recomputed:
    return Recomputed(
        entry["level"].number(or_infinite=True),
        entry["operations"].count(),
        entry["seconds"].number(),
        entry["kept_bytes"].count(),
        entry["saved_bytes"].count(),
    )


def _value(entry: Entry, mesh: LogicalMesh) -> Value:
    shape = entry["shape"].items(Entry.count)
    if math.prod(shape) > LARGEST:
        raise entry["shape"].wrong("the shape of an array")
    dtype = _dtype(entry["dtype"])
    sharding = Sharding(entry["dims"].items(lambda e: _axes(e, mesh), len(shape)), _axes(entry["partial"], mesh))
    used = [axis for axes in (*sharding.dims, sharding.partial) for axis in axes]
    if len(set(used)) < len(used) or not sharding.is_valid(shape, mesh):
        raise entry["dims"].wrong(f"a way to split {list(shape)} over the mesh")
    return Value(entry["name"].text(), entry["role"].one_of(_ROLES), shape, dtype, sharding, entry["stage"].count())


def _dtype(entry: Entry) -> str:
    """The name of an element type, as JAX writes it."""
    name = entry.text()
    try:
        is_one = str(jax.numpy.dtype(name)) == name and jax.numpy.dtype(name).itemsize > 0
    except (TypeError, ValueError, SyntaxError):
        is_one = False
    if not is_one:
        raise entry.wrong("an element type")
    return name


def _axes(entry: Entry, mesh: LogicalMesh) -> tuple[str, ...]:
    return entry.items(lambda e: e.one_of(mesh.axis_names))


def _collective(entry: Entry, mesh: LogicalMesh) -> Collective:
    kind = entry["kind"].one_of(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"))
    return Collective(
        kind,
        _axes(entry["axes"], mesh),
        entry["bytes"].count(),
        entry["times"].count(),
        entry["operation"].text(),
        entry["stage"].count(),
    )


def _cost(entry: Entry, collectives: tuple[Collective, ...], num_stages: int) -> Cost:
    peak_bytes = entry["peak_bytes"].items(Entry.count)
    if len(peak_bytes) != num_stages:
        raise entry["peak_bytes"].wrong("a list of bytes per stage")
    return Cost(
        step_seconds=entry["step_seconds"].number(),
        compute_seconds=entry["compute_seconds"].number(),
        communication_seconds=entry["communication_seconds"].number(),
        bubble_seconds=entry["bubble_seconds"].number(),
        peak_bytes=peak_bytes,
        argument_bytes=entry["argument_bytes"].count(),
        collectives=collectives,
        optimality_gap=entry["optimality_gap"].number(or_infinite=True),
        solver_status=entry["solver_status"].text(),
        planning_seconds=entry["planning_seconds"].number(),
        exposed_seconds=entry["exposed_seconds"].items(Entry.number, len(collectives)),
        figures=_figures(entry["figures"]),
    )


def _figures(entry: Entry) -> Figures:
    def stated(name: str) -> float | None:
        return None if entry[name].value is None else entry[name].number()

    return Figures(
        entry["model_seconds"].number(),
        entry["hardware_seconds"].number(),
        entry["amount"].count(),
        entry["unit"].text(),
        entry["link_bytes"].items(_level),
        stated("watts"),
        stated("price_per_hour"),
    )


def _level(entry: Entry) -> tuple[str, int]:
    name, num_bytes = entry.items(lambda part: part, 2)
    return name.text(), num_bytes.count()

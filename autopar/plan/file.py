"""Plans as files: JSON that is read back, compared, and put under version control.

In:     a plan and a path.
Out:    a file with one entry per line; or the plan again, its shardings by path until it is compiled for its program.
Method: everything is checked when it is read, so that damage is a `PlanFileError` that names the entry, never a
        surprise later. Written beside the target and renamed, so that a reader never sees half a plan.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from autopar.errors import AutoparError, PlanFileError
from autopar.intra_op.sharded import Collective
from autopar.mesh import Link, LogicalMesh, Sharding
from autopar.plan.decision import Cost, Decision, Recomputed, Stage, Submesh, Value
from autopar.plan.words import ARGUMENT_ROLES
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send
from autopar.streams.timeline import Event, Timeline

FORMAT = "autopar plan"
VERSION = 5
"""Raised with every change that an older reader cannot take, or that gives choices another meaning."""
_ROLES = (*ARGUMENT_ROLES, "result", "activation")
_T = TypeVar("_T")


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
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"it is not whole JSON: {error}.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _error(path, f'it is JSON, but no plan: "format" is not "{FORMAT}".')
    if record.get("version") != VERSION:
        raise _error(path, f"it is of version {record.get('version')!r}; this autopar reads version {VERSION}.")
    try:
        return _plan(_Entry(record, ""))
    except _DamageError as error:
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
        "choices": list(plan.choices),
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


class _DamageError(Exception):
    """An entry of the file is not what it should be."""


class _Entry:
    """A part of the file and where it stands; reading it checks its type."""

    def __init__(self, value: Any, where: str):
        self.value, self.where = value, where

    def __getitem__(self, key: str) -> _Entry:
        where = f"{self.where}.{key}" if self.where else key
        if not isinstance(self.value, dict):
            raise _DamageError(f'"{self.where}" is {_short(self.value)}, not an object.')
        if key not in self.value:
            raise _DamageError(f'"{where}" is missing.')
        return _Entry(self.value[key], where)

    def wrong(self, wanted: str) -> _DamageError:
        return _DamageError(f'"{self.where}" is {_short(self.value)}, not {wanted}.')

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("text")
        return self.value

    def count(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < 0:
            raise self.wrong("a whole number of 0 or more")
        return self.value

    def number(self) -> float:
        if self.value == "inf":
            return math.inf
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not self.value >= 0:
            raise self.wrong("a number of 0 or more")
        return self.value

    def one_of(self, known: tuple[str, ...]) -> str:
        if self.value not in known:
            raise self.wrong(f"one of {', '.join(known)}")
        return self.value

    def items(self, read: Callable[[_Entry], _T], length: int | None = None) -> tuple[_T, ...]:
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            raise self.wrong("a list" if length is None else f"a list of {length}")
        return tuple([read(_Entry(value, f"{self.where}[{k}]")) for k, value in enumerate(self.value)])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plan(entry: _Entry) -> Decision:
    stages = entry["stages"].items(_stage)
    if not stages:
        raise entry["stages"].wrong("a list of stages")
    values = entry["values"].items(lambda e: _value(e, _mesh_of(e, stages)))
    streams: dict[int, list[Instruction]] = {}
    for index, instruction in entry["streams"].items(lambda e: (e["mesh"].count(), _instruction(e))):
        streams.setdefault(index, []).append(instruction)
    fingerprints = entry["fingerprints"]
    if not isinstance(fingerprints.value, dict):
        raise fingerprints.wrong("an object")
    return Decision(
        name=entry["name"].text(),
        method=entry["method"].text(),
        stages=stages,
        num_microbatches=entry["num_microbatches"].count(),
        microbatch_semantics=entry["microbatch_semantics"].text(),
        schedule=entry["schedule"].text(),
        parts=entry["parts"].count(),
        shardings={v.name: v.sharding.partition_spec() for v in values if v.role in ARGUMENT_ROLES},
        cost=_cost(entry["cost"], entry["collectives"].items(lambda e: _collective(e, _mesh_of(e, stages)))),
        values=values,
        streams={index: tuple(stream) for index, stream in streams.items()},
        events=Timeline(entry["events"].items(_event)),
        alternatives=entry["alternatives"].items(_pair),
        choices=entry["choices"].items(_Entry.count),
        fingerprints={key: fingerprints[key].text() for key in fingerprints.value},
        machine=entry["machine"].text(),
        budget_bytes=entry["budget_bytes"].number(),
    )


def _mesh_of(entry: _Entry, stages: tuple[Stage, ...]) -> LogicalMesh:
    stage = entry["stage"].count()
    if stage >= len(stages):
        raise entry["stage"].wrong("the number of a stage")
    return stages[stage].logical_mesh


def _instruction(entry: _Entry) -> Instruction:
    def counts(key: str) -> tuple[int, ...]:
        return entry[key].items(_Entry.count)

    match entry["do"].one_of(("run", "send", "receive", "free")):
        case "run":
            return Run(
                entry["program"].text(),
                entry["stage"].count(),
                entry["microbatch"].count(),
                counts("inputs"),
                counts("outputs"),
            )
        case "send":
            return Send(counts("buffers"), entry["peer"].count(), entry["message"].count())
        case "receive":
            return Recv(counts("buffers"), entry["peer"].count(), entry["message"].count())
        case _:
            return Free(counts("buffers"))


def _event(entry: _Entry) -> Event:
    return Event(
        entry["name"].text(),
        entry["kind"].text(),
        entry["stage"].count(),
        entry["microbatch"].count(),
        entry["mesh"].count(),
        entry["start"].number(),
        entry["end"].number(),
    )


def _pair(entry: _Entry) -> tuple[str, str]:
    first, second = entry.items(_Entry.text, 2)
    return first, second


def _link_record(link: Link) -> list[Any]:
    rates = _number(link.bytes_per_second), _number(link.switch_bytes_per_second)
    return [link.latency_seconds, *rates, int(link.has_short_messages)]


def _link(entry: _Entry) -> Link:
    latency, rate, switch, has_short_messages = entry.items(_Entry.number, 4)
    return Link(latency, rate, switch, bool(has_short_messages))


def _stage(entry: _Entry) -> Stage:
    shape = entry["shape"].items(_Entry.count)
    names = entry["axis_names"].items(_Entry.text, len(shape))
    links = entry["links"].items(_link, len(shape))
    try:
        mesh = LogicalMesh(shape, names, links)
    except AutoparError as error:
        raise entry.wrong(f"a mesh: {error.wrong or error.summary}") from error
    if (
        not shape
        or math.prod(shape) != entry["num_devices"].count()
        or len(set(names)) < len(names)
        or not math.prod(shape)
    ):
        raise entry["shape"].wrong("the shape of a mesh of num_devices devices")
    first, last = entry["operations"].items(_Entry.text, 2)
    return Stage(
        Submesh(mesh.num_devices, entry["first_device"].count()),
        mesh,
        entry["layers"].items(_Entry.count),
        entry["choices"].items(_Entry.count),
        (first, last),
        _recomputed(entry["recomputed"]),
    )


def _recomputed(entry: _Entry) -> Recomputed:
    return Recomputed(
        entry["level"].number(),
        entry["operations"].count(),
        entry["seconds"].number(),
        entry["kept_bytes"].count(),
        entry["saved_bytes"].count(),
    )


def _value(entry: _Entry, mesh: LogicalMesh) -> Value:
    shape = entry["shape"].items(_Entry.count)
    dtype = entry["dtype"].text()
    try:
        np.dtype(jax.numpy.dtype(dtype))
    except TypeError as error:
        raise entry["dtype"].wrong("an element type") from error
    sharding = Sharding(entry["dims"].items(lambda e: _axes(e, mesh), len(shape)), _axes(entry["partial"], mesh))
    used = [axis for axes in (*sharding.dims, sharding.partial) for axis in axes]
    if len(set(used)) < len(used) or not sharding.is_valid(shape, mesh):
        raise entry["dims"].wrong(f"a way to split {list(shape)} over the mesh")
    return Value(entry["name"].text(), entry["role"].one_of(_ROLES), shape, dtype, sharding, entry["stage"].count())


def _axes(entry: _Entry, mesh: LogicalMesh) -> tuple[str, ...]:
    return entry.items(lambda e: e.one_of(mesh.axis_names))


def _collective(entry: _Entry, mesh: LogicalMesh) -> Collective:
    kind = entry["kind"].one_of(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"))
    return Collective(
        kind,
        _axes(entry["axes"], mesh),
        entry["bytes"].count(),
        entry["times"].count(),
        entry["operation"].text(),
        entry["stage"].count(),
    )


def _cost(entry: _Entry, collectives: tuple[Collective, ...]) -> Cost:
    peak_bytes = entry["peak_bytes"].items(_Entry.count)
    if not peak_bytes:
        raise entry["peak_bytes"].wrong("a list of bytes per stage")
    return Cost(
        step_seconds=entry["step_seconds"].number(),
        compute_seconds=entry["compute_seconds"].number(),
        communication_seconds=entry["communication_seconds"].number(),
        bubble_seconds=entry["bubble_seconds"].number(),
        peak_bytes=peak_bytes,
        argument_bytes=entry["argument_bytes"].count(),
        collectives=collectives,
        optimality_gap=entry["optimality_gap"].number(),
        solver_status=entry["solver_status"].text(),
        planning_seconds=entry["planning_seconds"].number(),
    )

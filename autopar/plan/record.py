"""Converts a plan to a record for JSON, and a record that may be damaged back to a plan.

In:     a `Decision`; or an `Entry` (`entry.py`) of its record, read from a file.
Out:    dicts, lists, text and numbers, or JSON text with one entry per line; a `Decision`, its shardings by path, or a
        `DamageError` that names the bad entry.
Method: what is written of a part of a plan stands beside what is read; every entry is checked.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax

from autopar.entry import LARGEST, Entry, plain, reader_of
from autopar.errors import AutoparError
from autopar.grouping import grouped
from autopar.intra_op.sharded import BUCKET_BYTES, Collective
from autopar.mesh import Link, LogicalMesh, Sharding
from autopar.options import MicrobatchSemantics
from autopar.plan.decision import Cost, Decision, Recomputed, Search, Stage, Submesh, Value
from autopar.plan.profile import Crossing, Memory, Profile, Work
from autopar.plan.words import ARGUMENT_ROLES, VALUE_ROLES
from autopar.streams.assemble import ONE_PROGRAM
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send
from autopar.streams.timeline import Event, Timeline

FORMAT = "autopar plan"
VERSION = 8
"""Incremented with every change that an older reader cannot read, or that changes the meaning of choices."""

INSTRUCTIONS: dict[type[Instruction], str] = {Run: "run", Send: "send", Recv: "receive", Free: "free"}
"""The name of each kind of instruction in the file."""


def record_of(plan: Decision) -> dict[str, Any]:
    """The record of a plan, without its `origin`."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **_fields(plan, "name method machine"),
        **_fields(
            plan,
            "budget_bytes fingerprints num_microbatches microbatch_semantics schedule parts padded offloaded "
            "offloaded_activations",
        ),
        "stages": [_stage_record(stage) for stage in plan.stages],
        "streams": [
            {"mesh": mesh, "do": INSTRUCTIONS[type(instruction)], **plain(instruction)}
            for mesh, stream in plan.streams.items()
            for instruction in stream
        ],
        **_fields(plan.events, "events"),
        **_fields(plan.profile, "work memory crossings"),
        **_fields(plan, "alternatives"),
        "cost": _fields(
            plan.cost,
            "step_seconds compute_seconds communication_seconds bubble_seconds peak_bytes argument_bytes host_bytes "
            "optimality_gap solver_status planning_seconds exposed_seconds figures",
        ),
        **_fields(plan.cost, "collectives"),
        "values": [
            {
                **_fields(v, "name role shape dtype"),
                **_fields(v.sharding, "dims partial"),
                **_fields(v, "stage on_host"),
            }
            for v in plan.values
        ],
    }


def _fields(thing: Any, names: str) -> dict[str, Any]:
    """The attributes of an object with these names, separated by spaces."""
    return {name: plain(getattr(thing, name)) for name in names.split()}


def _stage_record(stage: Stage) -> dict[str, Any]:
    return {
        "num_devices": stage.submesh.num_devices,
        "first_device": stage.submesh.first,
        **_fields(stage.logical_mesh, "shape axis_names"),
        "links": [_link_record(link) for link in stage.logical_mesh.links],
        **_fields(stage, "layers choices operations recomputed bucket_bytes"),
    }


def record_text(plan: Decision) -> str:
    """A plan as JSON with one entry per line, so that files can be compared by `diff`."""
    lines = []
    for key, value in record_of(plan).items():
        text = json.dumps(value, default=int)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(item, default=int) for item in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _link_record(link: Link) -> list[Any]:
    rates = link.latency_seconds, link.bytes_per_second, link.switch_bytes_per_second
    way = int(link.has_short_messages) + 2 * int(link.shared_memory)
    in_host = (link.in_host,) if link.in_host[0] > 1 else ()
    return plain([*rates, way, link.torus, *in_host] if link.torus or in_host else [*rates, way])


def read_plan(entry: Entry) -> Decision:
    """The plan in a record. Raises `DamageError`: an entry is missing or malformed."""
    stages = entry["stages"].items(_stage)
    if not stages:
        raise entry["stages"].wrong("a list of stages")
    count, schedule = entry["num_microbatches"].count(1), entry["schedule"].text()
    if schedule == ONE_PROGRAM and len(stages) > 1:
        raise entry["schedule"].wrong(f"the schedule of {len(stages)} stages")
    bounds = _Bounds(len(stages), count)
    values = entry["values"].items(lambda e: _value(e, _mesh_of(e, stages)))
    instructions = _instructions(bounds)
    streams = grouped(entry["streams"].items(lambda e: (bounds.mesh(e["mesh"]), instructions(e))))
    fingerprints = entry["fingerprints"]
    return Decision(
        name=entry["name"].text(),
        method=entry["method"].text(),
        stages=stages,
        num_microbatches=count,
        microbatch_semantics=entry["microbatch_semantics"].one_of(get_args(MicrobatchSemantics)),
        schedule=schedule,
        parts=entry["parts"].count(1),
        padded=entry["padded"].items(_longer),
        offloaded=entry["offloaded"].items(Entry.text) if "offloaded" in entry.value else (),
        offloaded_activations=entry["offloaded_activations"].count(0) if "offloaded_activations" in entry.value else 0,
        shardings={v.name: v.sharding.partition_spec() for v in values if v.role in ARGUMENT_ROLES},
        cost=_cost(entry, stages),
        values=values,
        streams={index: tuple(stream) for index, stream in streams.items()},
        events=_events(entry["events"], bounds),
        profile=_profile(entry, bounds),
        alternatives=entry["alternatives"].items(lambda e: e.pair(Entry.text, Entry.text)),
        fingerprints={key: fingerprints[key].text() for key in ("program", "cluster", "jax")},
        machine=entry["machine"].text(),
        budget_bytes=entry["budget_bytes"].number(or_infinite=True),
    )


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Upper bounds of the stage and microbatch numbers in a plan."""

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


def _instructions(bounds: _Bounds) -> Callable[[Entry], Instruction]:
    known: dict[str, Callable[[Entry], Instruction]] = {
        INSTRUCTIONS[Run]: reader_of(Run, stage=bounds.stage, microbatch=bounds.microbatch),
        INSTRUCTIONS[Send]: reader_of(Send, peer=bounds.mesh),
        INSTRUCTIONS[Recv]: reader_of(Recv, peer=bounds.mesh),
        INSTRUCTIONS[Free]: reader_of(Free),
    }
    return lambda entry: known[entry["do"].one_of(tuple(known))](entry)


def _events(entry: Entry, bounds: _Bounds) -> Timeline:
    def event(entry: Entry) -> Event:
        found = read(entry)
        if found.end < found.start:
            raise entry["end"].wrong("a time after its start")
        return found

    read = reader_of(Event, stage=bounds.stage, microbatch=bounds.microbatch, mesh=bounds.mesh)
    return Timeline(entry.items(event))


def _profile(entry: Entry, bounds: _Bounds) -> Profile:
    work = reader_of(Work, stage=bounds.stage)
    memory = reader_of(Memory, mesh=bounds.mesh, curve=_curve)
    crossing = reader_of(Crossing, source=bounds.stage, target=bounds.stage, messages=lambda e: e.count(1))
    return Profile(entry["work"].items(work), entry["memory"].items(memory), entry["crossings"].items(crossing))


def _curve(entry: Entry) -> tuple[tuple[float, int], ...]:
    curve = entry.items(lambda e: e.pair(Entry.number, Entry.count))
    if any(later < earlier for (earlier, _), (later, _) in itertools.pairwise(curve)):
        raise entry.wrong("a curve")
    return curve


def _longer(entry: Entry) -> tuple[int, int]:
    length, longer = entry.pair(Entry.count, Entry.count)
    if not 1 < length < longer < 2 * length:
        raise entry.wrong("a length and one that is longer, by less than as much again")
    return length, longer


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
        entry["bucket_bytes"].count(1) if "bucket_bytes" in entry.value else BUCKET_BYTES,
    )


def _link(entry: Entry) -> Link:
    if not isinstance(entry.value, list) or len(entry.value) not in (4, 5, 6):
        raise entry.wrong("a list of 4, of 5 on a torus, or of 6 through several devices of each host")
    latency, rate, switch, way, *rest = (Entry(value, f"{entry.where}[{k}]") for k, value in enumerate(entry.value))
    rates = _rate(rate), _rate(switch)
    way.below(4, "0 to 3: 1 where there are short messages, 2 more where memory is shared")
    torus = rest[0].items(lambda part: part.pair(lambda size: size.count(1), Entry.number)) if rest else ()
    in_host = rest[1].pair(lambda several: several.count(2), _rate) if rest[1:] else (1, math.inf)
    has_short_messages, shared_memory = bool(way.value & 1), bool(way.value & 2)
    return Link(latency.number(), *rates, has_short_messages, shared_memory=shared_memory, torus=torus, in_host=in_host)


def _rate(entry: Entry) -> float:
    return entry.number(or_infinite=True)


_recomputed = reader_of(Recomputed, infinite=("level",))


def _value(entry: Entry, mesh: LogicalMesh) -> Value:
    shape = entry["shape"].items(Entry.count)
    if math.prod(shape) > LARGEST:
        raise entry["shape"].wrong("the shape of an array")
    sharding = Sharding(entry["dims"].items(lambda e: _axes(e, mesh), len(shape)), _axes(entry["partial"], mesh))
    used = [axis for axes in (*sharding.dims, sharding.partial) for axis in axes]
    if len(set(used)) < len(used) or not sharding.is_valid(shape, mesh):
        raise entry["dims"].wrong(f"a way to split {list(shape)} over the mesh")
    later = ("on_host",)  # absent from older files
    known, role = {"shape": shape, "sharding": sharding}, partial(Entry.one_of, known=VALUE_ROLES)
    return reader_of(Value, known=known, later=later, role=role, dtype=_dtype)(entry)


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


def _cost(entry: Entry, stages: tuple[Stage, ...]) -> Cost:
    def collective(entry: Entry) -> Collective:
        mesh = _mesh_of(entry, stages)
        return reader_of(Collective, axes=lambda e: _axes(e, mesh))(entry)

    collectives = entry["collectives"].items(collective)
    read = reader_of(
        Cost,
        known={"collectives": collectives, "search": Search()},
        later=("host_bytes",),  # absent from older files
        infinite=("optimality_gap",),
        peak_bytes=lambda e: e.items(Entry.count, len(stages)),
        exposed_seconds=lambda e: e.items(Entry.number, len(collectives)),
    )
    return read(entry["cost"])

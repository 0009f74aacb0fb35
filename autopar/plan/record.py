"""A plan as a record that JSON can hold.

In:     a `Decision`.
Out:    dicts, lists, text and numbers; as text with one entry per line.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from autopar.entry import number_or_inf
from autopar.mesh import Link
from autopar.plan.decision import Cost, Decision, Stage
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send

FORMAT = "autopar plan"
VERSION = 7
"""Raised with every change that an older reader cannot take, or that gives choices another meaning."""

INSTRUCTIONS: dict[type[Instruction], str] = {Run: "run", Send: "send", Recv: "receive", Free: "free"}
"""What each kind of instruction is called in the file."""


def record_of(plan: Decision) -> dict[str, Any]:
    """All of a plan but the planning problem."""
    profile = plan.profile
    return {
        "format": FORMAT,
        "version": VERSION,
        **_fields(plan, "name method machine"),
        "budget_bytes": number_or_inf(plan.budget_bytes),
        "fingerprints": dict(plan.fingerprints),
        **_fields(plan, "num_microbatches microbatch_semantics schedule parts"),
        "padded": [list(pair) for pair in plan.padded],
        "offloaded": list(plan.offloaded),
        "stages": [_stage_record(stage) for stage in plan.stages],
        "streams": [
            {"mesh": mesh, "do": INSTRUCTIONS[type(instruction)], **_fields(instruction)}
            for mesh, stream in plan.streams.items()
            for instruction in stream
        ],
        "events": [_fields(event) for event in plan.events.events],
        "work": [_fields(work) for work in profile.work],
        "memory": [_fields(memory) for memory in profile.memory],
        "crossings": [_fields(crossing) for crossing in profile.crossings],
        "alternatives": [list(pair) for pair in plan.alternatives],
        "cost": _cost_record(plan.cost),
        "collectives": [_fields(c) for c in plan.cost.collectives],
        "values": [
            {
                **_fields(v, "name role shape dtype"),
                **_fields(v.sharding, "dims partial"),
                **_fields(v, "stage on_host"),
            }
            for v in plan.values
        ],
    }


def _fields(thing: Any, names: str = "") -> dict[str, Any]:
    """All fields of a dataclass, or some of an object's attributes, as they are."""
    chosen = names.split() or [field.name for field in dataclasses.fields(thing)]
    return {name: getattr(thing, name) for name in chosen}


def _stage_record(stage: Stage) -> dict[str, Any]:
    again = stage.recomputed
    return {
        "num_devices": stage.submesh.num_devices,
        "first_device": stage.submesh.first,
        **_fields(stage.logical_mesh, "shape axis_names"),
        "links": [_link_record(link) for link in stage.logical_mesh.links],
        **_fields(stage, "layers choices operations"),
        "recomputed": {**_fields(again), "level": number_or_inf(again.level)},
    }


def _cost_record(cost: Cost) -> dict[str, Any]:
    return {
        **_fields(
            cost,
            "step_seconds compute_seconds communication_seconds bubble_seconds peak_bytes argument_bytes host_bytes",
        ),
        "optimality_gap": number_or_inf(cost.optimality_gap),
        **_fields(cost, "solver_status planning_seconds exposed_seconds"),
        "figures": _fields(cost.figures),
    }


def dumps(record: dict[str, Any]) -> str:
    """JSON with one entry per line, so that two files can be compared."""
    lines = []
    for key, value in record.items():
        text = json.dumps(value, default=int)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(item, default=int) for item in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _link_record(link: Link) -> list[Any]:
    rates = number_or_inf(link.bytes_per_second), number_or_inf(link.switch_bytes_per_second)
    found = [link.latency_seconds, *rates, int(link.has_short_messages) + 2 * int(link.shared_memory)]
    return [*found, [list(part) for part in link.torus]] if link.torus else found

"""Converts a plan to a record for JSON.

In:     a `Decision`.
Out:    dicts, lists, text and numbers; or JSON text with one entry per line.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.entry import plain
from autopar.mesh import Link
from autopar.plan.decision import Decision, Stage
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send

FORMAT = "autopar plan"
VERSION = 7
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

"""A plan as a record that JSON can hold.

In:     a `Decision`.
Out:    dicts, lists, text and numbers; as text with one entry per line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from autopar.mesh import Link
from autopar.plan.decision import Decision
from autopar.streams.instructions import Free, Instruction, Recv, Run, Send

FORMAT = "autopar plan"
VERSION = 7
"""Raised with every change that an older reader cannot take, or that gives choices another meaning."""


def record_of(plan: Decision) -> dict[str, Any]:
    """All of a plan but the planning problem."""
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
        "padded": [list(pair) for pair in plan.padded],
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
    rates = _number(link.bytes_per_second), _number(link.switch_bytes_per_second)
    return [link.latency_seconds, *rates, int(link.has_short_messages) + 2 * int(link.shared_memory)]

"""Checks that a plan was made for this program and this cluster, and that it is consistent; says what is wrong if not.

In:     the program and the cluster as they are now; a plan read from a file, which somebody may have edited.
Out:    fingerprints of what a plan depends on, equal in every process; nothing, or `StalePlanError`, whose `changed` has one
        line per difference; one line for each total in a plan that does not equal the sum of its parts.
Method: fingerprints decide; the argument types and the machine's text that the plan holds tell what changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator

import jax

from autopar.cost import collective_seconds
from autopar.errors import StalePlanError, listed
from autopar.ir.printer import print_jaxpr
from autopar.ir.program import Program
from autopar.mesh import Cluster
from autopar.plan.decision import Decision
from autopar.plan.words import ARGUMENT_ROLES, differences, machine_text, type_text

MAX_LINES = 8


def check_fresh(program: Program, cluster: Cluster, plan: Decision) -> None:
    """Check that the plan was made for this program and this cluster. Raises `StalePlanError`: it was not."""
    changed: list[str] = []
    elsewhere = ""
    if plan.fingerprints.get("cluster") != cluster_fingerprint(cluster):
        changed.append(_cluster_change(plan, cluster))
        elsewhere = " Only to look at this one, name its machine: cluster=Cluster.of(...), or --cluster in a shell."
    if plan.fingerprints.get("program") != program_fingerprint(program):
        lines = list(_argument_changes(program, plan))
        if lines:
            changed += listed(lines, MAX_LINES, "\n").splitlines()
        else:
            changed.append(_code_change(plan))
    if changed:
        raise StalePlanError(
            "the plan is stale.",
            given=f"a plan of `{plan.name}`, made by {plan.method} for {plan.machine or plan.mesh}",
            wrong="\n".join(changed),
            do="plan again, step.plan(...), and save that." + elsewhere,
            changed=tuple(changed),
        )


def _cluster_change(plan: Decision, cluster: Cluster) -> str:
    now = machine_text(cluster)
    if now != plan.machine:
        return f"cluster: planned for {plan.machine}; this is {now}"
    return f"cluster: {now} as before, but its links or rates are stated otherwise"


def _argument_changes(program: Program, plan: Decision) -> Iterator[str]:
    was = {v.name: type_text(v.shape, v.dtype) for v in plan.values if v.role in ("state", "batch", "argument")}
    leaves = zip(program.in_paths, program.jaxpr.invars[: program.num_args], strict=True)
    now = {path: type_text(tuple(var.aval.shape), str(var.aval.dtype)) for path, var in leaves}
    for path, before, here in differences(was, now):
        if here is None:
            yield f"{path}: {before} in the plan, no argument now"
        else:
            yield f"{path}: {here}, not in the plan" if before is None else f"{path}: {before} in the plan, {here} now"


def _code_change(plan: Decision) -> str:
    version = plan.fingerprints.get("jax", jax.__version__)
    if version != jax.__version__:
        return f"program: planned with JAX {version}, this is JAX {jax.__version__}, whose operations differ"
    return f"program: `{plan.name}` has the same arguments, but computes something else: its code or a setting changed"


def program_fingerprint(program: Program) -> str:
    """Digest of the program's equations, types and argument names."""
    text = "\n".join((print_jaxpr(program.jaxpr), *program.in_paths, str(program.static)))
    return _digest(re.sub(r"0x[0-9a-f]+", "0x", text))


def cluster_fingerprint(cluster: Cluster) -> str:
    """Digest of the machine's description, whichever real devices it is."""
    return _digest(_described(cluster))


def _described(cluster: Cluster) -> str:
    """Text of all fields that distinguish one cluster from another."""
    told = [(part.name, getattr(cluster, part.name)) for part in dataclasses.fields(cluster) if part.compare]
    return ", ".join(
        f"{name}=({'; '.join(map(_described, value))})" if name == "groups" else f"{name}={value!r}"
        for name, value in told
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprints(program: Program, cluster: Cluster) -> dict[str, str]:
    """The fingerprints of the program and the cluster, and the version of JAX."""
    return {"program": program_fingerprint(program), "cluster": cluster_fingerprint(cluster), "jax": jax.__version__}


def contradictions(plan: Decision) -> list[str]:
    """One line for each total in a plan that does not equal the sum of its parts."""
    return list(_of_program(plan) if plan.is_one_program else _of_pipeline(plan))


def _of_pipeline(plan: Decision) -> Iterator[str]:
    cost, parts = plan.cost, plan.cost.compute_seconds + plan.cost.bubble_seconds
    yield from _unequal("events take", plan.events.seconds, cost.step_seconds)
    if parts > cost.step_seconds * (1 + 1e-6):
        yield f"its parts take {parts:.6g} s; it says {cost.step_seconds:.6g} s."


def _of_program(plan: Decision) -> Iterator[str]:
    cost, own = plan.cost, [v for v in plan.values if v.role in ARGUMENT_ROLES and not v.on_host]
    arguments = sum(v.sharding.local_bytes(v.shape, v.dtype, plan.mesh) for v in own)
    communication = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, plan.mesh) for c in cost.collectives)
    if arguments != cost.argument_bytes:
        yield f"its arguments take {arguments} bytes on a device; it says {cost.argument_bytes}."
    yield from _unequal("collectives take", communication, cost.communication_seconds)
    yield from _unequal("parts add up to", cost.compute_seconds + sum(cost.exposed_seconds), cost.step_seconds)
    if max(cost.peak_bytes) > plan.budget_bytes:
        yield f"its peak of {max(cost.peak_bytes)} bytes is over its budget of {plan.budget_bytes:.0f}."


def _unequal(what: str, found: float, told: float) -> Iterator[str]:
    if not math.isclose(found, told, rel_tol=1e-6, abs_tol=1e-12):
        yield f"its {what} {found:.6g} s; it says {told:.6g} s."

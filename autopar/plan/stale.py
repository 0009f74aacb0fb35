"""Whether a plan still fits the step and the machine it is to run on, and if not, what changed.

In:     the program as it is now, the cluster, a plan read from a file.
Out:    nothing, or `StalePlanError`, whose `changed` has one line per difference.
Method: fingerprints decide; the arguments' types and the machine in words, kept in the plan, tell what it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from autopar.errors import StalePlanError, listed
from autopar.ir.program import Program
from autopar.mesh import Cluster
from autopar.plan.decision import Decision
from autopar.plan.fingerprint import cluster_fingerprint, program_fingerprint
from autopar.plan.words import differences, machine_text, type_text

MAX_LINES = 8


def check_fresh(program: Program, cluster: Cluster, plan: Decision) -> None:
    """The plan must have been made for this program and this cluster.

    Raises:
        StalePlanError: It was not.
    """
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

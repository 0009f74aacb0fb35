"""Whether a plan agrees with itself: what it says of its parts adds up to what it says of the whole.

In:     a `Decision`, as from a file that somebody may have edited.
Out:    a line for each sum that does not add up.
"""

from __future__ import annotations

import math

from autopar.cost import collective_seconds
from autopar.plan.decision import Decision
from autopar.plan.words import ARGUMENT_ROLES, local_bytes


def contradictions(plan: Decision) -> list[str]:
    """Sums in a plan that do not add up."""
    cost = plan.cost
    if plan.is_one_program:
        return _of_program(plan)
    problems = []
    seconds, parts = plan.events.seconds, cost.compute_seconds + cost.bubble_seconds
    if not math.isclose(seconds, cost.step_seconds, rel_tol=1e-6, abs_tol=1e-12):
        problems.append(f"its events take {seconds:.6g} s; it says {cost.step_seconds:.6g} s.")
    if parts > cost.step_seconds * (1 + 1e-6):
        problems.append(f"its parts take {parts:.6g} s; it says {cost.step_seconds:.6g} s.")
    return problems


def _of_program(plan: Decision) -> list[str]:
    cost = plan.cost
    arguments = sum(
        local_bytes(v.shape, v.dtype, v.sharding, plan.mesh)
        for v in plan.values
        if v.role in ARGUMENT_ROLES and not v.on_host
    )
    communication = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, plan.mesh) for c in cost.collectives)
    step = cost.compute_seconds + sum(cost.exposed_seconds)
    problems = []
    if arguments != cost.argument_bytes:
        problems.append(f"its arguments take {arguments} bytes on a device; it says {cost.argument_bytes}.")
    if not math.isclose(communication, cost.communication_seconds, rel_tol=1e-6, abs_tol=1e-12):
        problems.append(
            f"its collectives take {communication:.6g} s on its mesh; it says {cost.communication_seconds:.6g} s."
        )
    if not math.isclose(step, cost.step_seconds, rel_tol=1e-6, abs_tol=1e-12):
        problems.append(f"its parts add up to {step:.6g} s; it says {cost.step_seconds:.6g} s.")
    if max(cost.peak_bytes) > plan.budget_bytes:
        problems.append(f"its peak of {max(cost.peak_bytes)} bytes is over its budget of {plan.budget_bytes:.0f}.")
    return problems

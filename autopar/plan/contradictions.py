"""Whether a plan agrees with itself: what it says of its parts adds up to what it says of the whole.

In:     a `Decision`, as from a file that somebody may have edited.
Out:    a line for each sum that does not add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.cost import collective_seconds
from autopar.plan.decision import Decision
from autopar.plan.words import ARGUMENT_ROLES, local_bytes


def contradictions(plan: Decision) -> list[str]:
    """Sums in a plan that do not add up."""
    return list(_of_program(plan) if plan.is_one_program else _of_pipeline(plan))


def _of_pipeline(plan: Decision) -> Iterator[str]:
    cost, parts = plan.cost, plan.cost.compute_seconds + plan.cost.bubble_seconds
    yield from _unequal("events take", plan.events.seconds, cost.step_seconds)
    if parts > cost.step_seconds * (1 + 1e-6):
        yield f"its parts take {parts:.6g} s; it says {cost.step_seconds:.6g} s."


def _of_program(plan: Decision) -> Iterator[str]:
    cost, own = plan.cost, [v for v in plan.values if v.role in ARGUMENT_ROLES and not v.on_host]
    arguments = sum(local_bytes(v.shape, v.dtype, v.sharding, plan.mesh) for v in own)
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

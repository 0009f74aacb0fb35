"""Plans until a plan fits by the compiler's count, lowering the budget by what the compiler takes beyond predictions.

In:     a planner of the step under a method; the method, with the user's budget.
Out:    the first plan whose programs fit that budget by XLA's buffers.
Method: a plan that is too large takes `surplus` bytes more than predicted. The next one is planned for the budget less
        these, which the last plan's prediction exceeds, so that no plan is repeated. The plan shows the user's budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from autopar.errors import InfeasibleError, NoPlanFoundError
from autopar.plan.words import bytes_text
from autopar.report.plan import Plan
from autopar.search.methods import Method, method_text
from autopar.tuning import TUNING
from autopar.verify.findings import Verification
from autopar.verify.verify import verify_plan


def plan_that_fits(make: Callable[[Method], Plan], method: Method) -> Plan:
    """Plan until the plan fits by the compiler for the cluster's devices.

    Args:
        make: Plans the step under a method; the plan is in memory.
        method: The user's method.

    Raises:
        NoPlanFoundError: No plan was found that fits by the compiler's count.
        AutoparError: The compiler for the devices is not installed.
    """
    plan = make(method)
    budget, least = plan.budget_bytes, math.inf
    if not math.isfinite(budget):
        return plan
    for _ in range(TUNING.fitting_turns):
        found = verify_plan(plan)
        peak, surplus = max(found.compiled_bytes), _surplus_bytes(found, budget)
        if surplus is None:
            return dataclasses.replace(plan, method=method_text(method), budget_bytes=budget)
        least = min(least, peak)
        try:
            plan = make(dataclasses.replace(method, memory_budget_bytes=max(1, math.floor(budget - surplus))))
        except InfeasibleError as error:
            raise _refusal(found, budget, least, f"and {error.wrong.removesuffix('.')}") from error
    raise _refusal(found, budget, least, f"and none of {TUNING.fitting_turns} plans fits")


def _surplus_bytes(found: Verification, budget: float) -> float | None:
    """Bytes by which the compiler exceeds the prediction, the most over all meshes over budget; None: all fit."""
    sides = zip(found.predicted_bytes, found.compiled_bytes, strict=True)
    return max((compiled - predicted for predicted, compiled in sides if compiled > budget), default=None)


def _refusal(found: Verification, budget: float, least: float, why: str) -> NoPlanFoundError:
    return NoPlanFoundError(
        "no plan was found that fits by the compiler's count.",
        given=f'memory="compiler" and {bytes_text(budget)} on each device',
        wrong=f"by XLA's count for {found.target} the smallest takes {bytes_text(least)}, {why}.",
        do=f"allow memory_budget_bytes={math.ceil(least)}, or use more devices, microbatches or recomputation.",
        budget_bytes=int(budget),
        needed_bytes=math.ceil(least),
    )

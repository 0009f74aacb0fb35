"""Sinks operations on sums alone behind the loop over microbatches.

In:     a step and its phases (`phases.py`).
Out:    the phases, with such operations after the loop, where each is done once, on the joint sums.
"""

from __future__ import annotations

from autopar._jax import Jaxpr, Var
from autopar.ir.dataflow import inputs_of
from autopar.ir.region import is_region
from autopar.ir.split.placement import REPLICATED, SUM
from autopar.ir.split.solution import LoopSolution
from autopar.ir.work import num_bytes


def sink(jaxpr: Jaxpr, solution: LoopSolution, apart: bool) -> None:
    """Sink equations on sums alone behind the loop, unless their results are smaller than the sums.

    `apart`: additions of sums are sunk in any case, though more accumulators are kept.
    """
    needed: dict[Var, bool] = {}
    for eqn in reversed(jaxpr.eqns):
        if solution.phase[eqn] == "loop" and not is_region(eqn) and not eqn.effects:
            sums = [a for a in inputs_of(eqn) if solution.of(a) == SUM]
            only_sums = sums and all(solution.of(a) in (SUM, REPLICATED) for a in eqn.invars)
            is_join = apart and eqn.primitive.name in ("add", "add_any")
            smaller = is_join or sum(map(num_bytes, dict.fromkeys(sums))) <= sum(map(num_bytes, eqn.outvars))
            if only_sums and smaller and not any(needed.get(var) for var in eqn.outvars):
                solution.phase[eqn] = "after"
                for var in eqn.outvars:
                    solution.placement_of.pop(var, None)
        if solution.phase[eqn] == "loop":
            needed.update(dict.fromkeys(inputs_of(eqn), True))

"""Finds the sums over the batch of which a microbatch takes its own value, once it takes its own for one of them.

In:     a program, the placements found so far (`phases.py`), and a value that samples wait for.
Out:    the sums over samples that it is made of, as often as they are computed.
Method: backwards through what is linear in sums; a sum that `remat` computes again in the backward pass is that of the
        forward pass, found by equal equations on equal operands.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar._jax import Jaxpr, Var
from autopar.ir.dataflow import ancestors, makers, variables
from autopar.ir.region import kind_of
from autopar.ir.signature import ValueNumbers
from autopar.ir.split.placement import SUM
from autopar.ir.split.solution import Solution


def sums_behind(jaxpr: Jaxpr, solution: Solution, var: Var) -> list[Var]:
    """The sums over samples that a value is linear in, or the value itself; and those that are computed alike.

    `solution`: of its equations, up to the one that waits for the value.
    `var`: the value, a sum or an extreme of all samples; of a body, or of the step itself.
    """
    made_by = makers(jaxpr.eqns)

    def terms(value: Var) -> list[Var] | None:
        """What it is linear in; None: it is such a sum itself."""
        eqn = made_by.get(value)
        if eqn is not None and kind_of(eqn) == "barrier":
            return variables([eqn.invars[eqn.outvars.index(value)]])
        strategy = None if eqn is None else solution.strategy_of.get(eqn)
        if eqn is None or strategy is None or strategy.factor is not None:
            return None
        pairs = zip(eqn.invars, strategy.operands, strict=True)
        return variables(a for a, want in pairs if want == SUM and solution.of(a) == SUM)

    behind = ancestors([var], lambda value: terms(value) or ())
    return _with_twins(jaxpr, [value for value in behind if terms(value) is None])


def _with_twins(jaxpr: Jaxpr, wanted: Sequence[Var]) -> list[Var]:
    """The wanted values, and all that are equal to one of them."""
    numbers = ValueNumbers()
    for eqn in jaxpr.eqns:
        numbers.visit(eqn)
    meant = set(map(numbers.of, wanted))
    made = [var for var in makers(jaxpr.eqns) if var not in wanted and numbers.of(var) in meant]
    return [*wanted, *made]

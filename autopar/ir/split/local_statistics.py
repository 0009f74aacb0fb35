"""What else is a microbatch's own where one sum over the batch is: the loss that is returned is the one that is differentiated.

In:     a program, the placements found so far (`phases.py`), and a value that samples wait for.
Out:    the sums over samples that it is made of, as often as they are computed.
Method: backwards through what is linear in sums; a sum that `remat` computes again in the backward pass is that of the
        forward pass, found by equal equations on equal operands.
"""

from __future__ import annotations

from autopar._jax import Jaxpr, Var
from autopar.ir.dataflow import variables
from autopar.ir.region import kind_of
from autopar.ir.split.placement import SUM
from autopar.ir.split.solution import Solution
from autopar.ir.value_numbers import ValueNumbers


def sums_behind(jaxpr: Jaxpr, solution: Solution, var: Var) -> list[Var]:
    """The sums over samples that a value is linear in, or the value itself; and those that are computed alike.

    Args:
        jaxpr: The step.
        solution: Of its equations, up to the one that waits for the value.
        var: The value, a sum or an extreme of all samples; of a body, or of the step itself.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    roots: dict[Var, None] = {}
    waiting = [var]
    while waiting:
        var = waiting.pop()
        eqn = made_by.get(var)
        strategy = solution.strategy_of.get(eqn)
        if eqn is not None and kind_of(eqn) == "barrier":
            waiting.append(eqn.invars[eqn.outvars.index(var)])
        elif eqn is not None and strategy is not None and strategy.factor is None:
            pairs = zip(eqn.invars, strategy.operands, strict=True)
            waiting += variables(a for a, want in pairs if want == SUM and solution.of(a) == SUM)
        else:
            roots[var] = None
    return _with_twins(jaxpr, roots)


def _with_twins(jaxpr: Jaxpr, wanted: dict[Var, None]) -> list[Var]:
    """The wanted values, and all that are equal to one of them."""
    numbers = ValueNumbers()
    for eqn in jaxpr.eqns:
        numbers.visit(eqn)
    meant = set(map(numbers.of, wanted))
    made = [var for eqn in jaxpr.eqns for var in eqn.outvars if var not in wanted and numbers.of(var) in meant]
    return [*wanted, *made]

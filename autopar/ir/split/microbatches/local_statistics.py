"""Finds the sums over the batch that must become local together with a value that samples wait for.

In:     a program, the placements found so far (`phases.py`), and that value.
Out:    the sums over samples on which it depends linearly, and every copy of them.
Method: backwards through linear equations; the copy that `remat` recomputes in the backward pass is found by value numbering.
        In a backward pass, the gradient of a local statistic is told from that of a joint loss by its shape.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from functools import cached_property

from autopar._jax import Jaxpr, Var
from autopar.grouping import grouped
from autopar.ir.dataflow import ancestors, makers, variables
from autopar.ir.gradient import made_by_backward
from autopar.ir.signature import ValueNumbers
from autopar.ir.split.placement import SUM
from autopar.ir.split.solution import Solution


class SampleSums:
    """The sums over samples of one program; value numbers are computed once."""

    def __init__(self, jaxpr: Jaxpr):
        self._jaxpr, self._made_by = jaxpr, makers(jaxpr.eqns)

    def terms_of(self, solution: Solution, var: Var) -> list[Var]:
        """The sums in which a value is linear, or the value itself; and all values equal to one of them.

        `solution`: covers the equations up to the one that waits for the value.
        `var`: a partial result, of a body or of the step itself.
        """

        def terms(value: Var) -> list[Var] | None:
            """The partial sums in which it is linear; None: it is such a sum itself."""
            eqn = self._made_by.get(value)
            strategy = None if eqn is None else solution.strategy_of.get(eqn)
            if eqn is None or strategy is None or strategy.factor is not None:
                return None
            pairs = zip(eqn.invars, strategy.operands, strict=True)
            return variables(a for a, want in pairs if want == SUM and solution.of(a) == SUM)

        found = ancestors([var], lambda value: terms(value) or ())
        return self._with_twins([value for value in found if terms(value) is None])

    def of_local(self, sums: Sequence[Var], own: Sequence[Var], pairs: Collection[int]) -> tuple[list[Var], list[Var]]:
        """Of sums that a backward pass waits for, those that may be local; and those of them that may be of pairs, too.

        The gradient of a local statistic has its shape. Any other sum that only a backward pass waits for belongs to a loss
        over pairs of samples, which is joint: it is of its gradient and has a row for each sample, or how many pairs count.

        Args:
            own: The sums that are local so far.
            pairs: How many samples the forward pass reads at once: their numbers, in values of different sizes.
        """
        if not pairs:
            return list(sums), []
        shapes = {_without_ones(var) for var in own}
        late = made_by_backward(self._jaxpr)
        alike = [var for var in sums if var in late and _without_ones(var) in shapes]
        unclear = [var for var in alike if any(size in pairs for size in var.aval.shape)]
        return [var for var in sums if var in alike or var in own], unclear

    def _with_twins(self, wanted: Sequence[Var]) -> list[Var]:
        """The wanted values, then all values equal to one of them, in program order."""
        numbers, alike = self._numbered
        twins = [pair for name in dict.fromkeys(map(numbers.of, wanted)) for pair in alike.get(name, ())]
        return [*wanted, *(var for _, var in sorted(twins, key=lambda pair: pair[0]) if var not in wanted)]

    @cached_property
    def _numbered(self) -> tuple[ValueNumbers, dict[Hashable, list[tuple[int, Var]]]]:
        """Value numbers, and the values that have each number, with their positions."""
        numbers = ValueNumbers()
        for eqn in self._jaxpr.eqns:
            numbers.visit(eqn)
        return numbers, grouped((numbers.of(var), (place, var)) for place, var in enumerate(self._made_by))


def _without_ones(var: Var) -> tuple[int, ...]:
    return tuple(size for size in var.aval.shape if size != 1)

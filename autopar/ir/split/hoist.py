"""Hoisting: moves cheap work on the whole batch in front of the loop over microbatches.

In:     equations that fit no strategy, with the placements of their operands so far.
Out:    the solution, changed: a mask's denominator is summed up front and read whole; samples that are shuffled, rolled,
        mixed or split in halves are put in their new order up front, and each microbatch reads its part of that order.
Method: the equations behind an operand, back to the step's inputs, against the work of the whole step. Any equal parts of
        a value along a dim will do for the loop, whichever samples they once were, as long as all that is made of them
        is split at the same places; so a new order of samples is split like the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import inputs_of, makers, read_by
from autopar.ir.split.placement import REPLICATED, Partial, Split
from autopar.ir.split.solution import LoopSolution
from autopar.ir.split.solver import Cause
from autopar.tuning import TUNING


class Hoist:
    """Moves equations of one step before its loop.

    Attributes:
        gathered: The first equation that all samples were brought together for; None: there was none.
    """

    def __init__(self, jaxpr: Jaxpr, solution: LoopSolution, cost: Sequence[float], late: Mapping[Var, Cause]):
        """`cost` is the work of each equation; `late` fills with what is made after the loop."""
        self.solution, self.late, self.maker = solution, late, makers(jaxpr.eqns)
        self.cost = dict(zip(jaxpr.eqns, cost, strict=True))
        self.limit = TUNING.hoisted_work * sum(cost)
        self.gathered: Cause | None = None
        self._rearranged: dict[Var, int] = {}

    def take_whole(self, eqn: JaxprEqn, may_take_own: Callable[[Var], bool]) -> bool:
        """Compute operands up front, of the whole batch, if that is cheap; whether any was.

        Args:
            may_take_own: Whether a microbatch may take its own value for a sum over all samples. Where it may, such a sum is
                taken whole only if parameters have no part in it, as in a mask's denominator, and single samples never are.
        """
        with_own = [var for var in inputs_of(eqn) if may_take_own(var)]
        for kind in (Partial, Split):
            # What reads all samples does so in every turn, or of all of them at once.
            own = self.cost[eqn] if kind is Split else 0.0
            cones = {var: self._cone([var], own) for var in inputs_of(eqn) if isinstance(self.solution.of(var), kind)}
            cheap = {var: cone for var, cone in cones.items() if cone is not None}
            if any(var not in cheap or self._reads_parameters(cheap[var]) for var in with_own):
                return False
            for var, cone in cheap.items():
                if kind is Split:
                    self.gathered = self.gathered or Cause(eqn, var)
                self.solution.early.update(dict.fromkeys(cone))
                self.solution.read_as[var] = REPLICATED
            if cheap:
                return True
        return False

    def take_up_front(self, values: Iterable[Var]) -> bool:
        """Compute values up front, of the whole batch, beside what each microbatch does, if that is cheap; whether it was."""
        cone = self._cone(var for var in values if self.solution.of(var) != REPLICATED)
        self.solution.early.update(dict.fromkeys(cone or ()))
        return cone is not None

    def _reads_parameters(self, cone: Iterable[JaxprEqn]) -> bool:
        """Whether arrays of numbers that are no samples have a part in what these equations make."""
        inputs = (a for a in read_by(cone) if a not in self.maker)
        numbers = (a for a in inputs if a.aval.ndim and jnp.issubdtype(a.aval.dtype, jnp.floating))
        return any(self.solution.made_as(a) == REPLICATED for a in numbers)

    def rearrange(self, eqn: JaxprEqn, all_split: bool = False) -> bool:
        """Do an equation up front that has nothing but samples of, and split its results anew; whether that is cheap.

        `all_split`: only if every result can be split.
        """
        solution = self.solution
        samples = {var: p for var in inputs_of(eqn) if (p := solution.of(var)) != REPLICATED}
        dims = [p.dim for p in samples.values() if isinstance(p, Split)]
        if not dims or len(dims) < len(samples) or eqn.effects:
            return False
        if all_split and not all(self._divides(var, dims[0]) for var in eqn.outvars):
            return False
        cone = self._cone(samples, self.cost[eqn])
        if cone is None:
            return False
        self.gathered = self.gathered or Cause(eqn, next(iter(samples)))
        solution.early.update(dict.fromkeys(cone))
        solution.strategy_of.pop(eqn, None)
        solution.phase[eqn] = "before"
        self._split_anew(eqn.outvars, dims[0])
        return True

    def follow(self, eqn: JaxprEqn) -> None:
        """An equation before the loop makes samples if it is made of them."""
        dims = [self._rearranged[var] for var in inputs_of(eqn) if var in self._rearranged]
        if dims:
            self._split_anew(eqn.outvars, dims[0])

    def _split_anew(self, made: Sequence[Var], dim: int) -> None:
        for var in made:
            self._rearranged[var] = dim
            if self._divides(var, dim):
                self.solution.placement_of[var] = Split(dim)

    def _divides(self, var: Var, dim: int) -> bool:
        shape = var.aval.shape
        return dim < len(shape) and shape[dim] > 0 and shape[dim] % self.solution.count == 0

    def _cone(self, wanted: Iterable[Var], cost: float = 0.0) -> list[JaxprEqn] | None:
        """Equations that make values from the step's inputs; None: they and `cost` are too much work."""
        found: dict[JaxprEqn, None] = {}
        waiting = list(wanted)
        while waiting and cost <= self.limit:
            eqn = self.maker.get(waiting.pop())
            if eqn is None or eqn in found:
                continue
            found[eqn] = None
            if self.solution.phase[eqn] != "before" and eqn not in self.solution.early:
                cost += self.cost[eqn]
            waiting += inputs_of(eqn)
            if any(a in self.late for a in inputs_of(eqn)):
                return None
        return [*found] if cost <= self.limit else None

"""Hoisting: moves cheap work on the whole batch in front of the loop over microbatches.

In:     equations that fit no strategy, with the placements of their operands so far.
Out:    the solution, changed: a mask's denominator is summed up front and read whole; samples that are shuffled, rolled,
        mixed or split in halves are put in their new order up front, and each microbatch reads its part of that order.
Method: the equations behind an operand, back to the step's inputs, against the work of the whole step. Any equal parts of
        a value along a dim will do for the loop, whichever samples they once were, as long as all that is made of them
        is split at the same places; so a new order of samples is split like the old one.
"""

from __future__ import annotations

import math
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
        self.eqns = jaxpr.eqns
        self.cost = dict(zip(jaxpr.eqns, cost, strict=True))
        self.limit = TUNING.hoisted_work * sum(cost)
        self.gathered: Cause | None = None
        self._rearranged: dict[Var, int] = {}
        self._longest: dict[Var, float] = {}
        self._looked_at = 0

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
                self._do_early(cone)
                self.solution.read_as[var] = REPLICATED
            if cheap:
                return True
        return False

    def take_up_front(self, values: Iterable[Var]) -> bool:
        """Compute values up front, of the whole batch, beside what each microbatch does, if that is cheap; whether it was."""
        cone = self._cone(var for var in values if self.solution.of(var) != REPLICATED)
        self._do_early(cone or ())
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
        self._do_early(cone)
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

    def look_again(self) -> None:
        """Forget what values take at least: other equations come first, or behind the loop, than when it was found."""
        self._longest, self._looked_at = {}, 0

    def _do_early(self, cone: Iterable[JaxprEqn]) -> None:
        self.solution.early.update(dict.fromkeys(cone))
        self.look_again()

    def _least_work(self, var: Var) -> float:
        """What a value takes at least, to make it up front: the work on the longest way to it; inf: it comes after the loop."""
        while self._looked_at < len(self.eqns) and var in self.maker and var not in self._longest:
            eqn = self.eqns[self._looked_at]
            is_done = self.solution.phase[eqn] == "before" or eqn in self.solution.early
            is_late = any(a in self.late for a in inputs_of(eqn))
            before = max((self._longest.get(a, 0.0) for a in inputs_of(eqn)), default=0.0)
            work = math.inf if is_late else before + (0.0 if is_done else self.cost[eqn])
            self._longest.update(dict.fromkeys(eqn.outvars, work))
            self._looked_at += 1
        return self._longest.get(var, 0.0)

    def _cone(self, wanted: Iterable[Var], cost: float = 0.0) -> list[JaxprEqn] | None:
        """Equations that make values from the step's inputs; None: they and `cost` are too much work."""
        found: dict[JaxprEqn, None] = {}
        waiting = list(wanted)
        # Nearly all of a deep model's gradients are, which need not be walked through to see it.
        if any(cost + self._least_work(var) > self.limit * (1 + 1e-9) for var in waiting):
            return None
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

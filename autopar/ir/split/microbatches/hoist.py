"""Hoisting: moves cheap work on the whole batch in front of the loop over microbatches.

In:     equations that fit no strategy, with the placements of their operands so far.
Out:    the solution, changed: a mask's denominator is summed before the loop and read whole; samples that are shuffled,
        rolled, mixed or split in halves are reordered before the loop, and each microbatch reads its part of the new order.
Method: an operand is hoisted with all equations that it depends on, if their work is little of the step's. The loop works on
        any equal parts of a dim, whichever samples these are, as long as everything computed from them is split at the
        same places; so the new order of samples is split like the old one.
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


class Hoist:
    """Hoists equations of one step out of its loop.

    Attributes:
        limit: The most work that is cheap.
        gathered: The first equation for which samples were hoisted; None: there was none.
    """

    def __init__(self, jaxpr: Jaxpr, solution: LoopSolution, cost: Sequence[float], late: Mapping[Var, Cause]):
        """`cost`: the work of each equation. `late`: values that are made after the loop; the caller adds to it."""
        self.solution, self.late, self.maker = solution, late, makers(jaxpr.eqns)
        self.eqns, self.reads = jaxpr.eqns, [inputs_of(eqn) for eqn in jaxpr.eqns]
        self.position = {eqn: k for k, eqn in enumerate(jaxpr.eqns)}
        self.cost = dict(zip(jaxpr.eqns, cost, strict=True))
        self.limit = 0.0
        self.gathered: Cause | None = None
        self._rearranged: dict[Var, int] = {}
        self._longest: dict[Var, float] = {}
        self._looked_at = 0

    def take_whole(self, eqn: JaxprEqn, may_take_own: Callable[[Var], bool]) -> bool:
        """Hoist partial or split operands of an equation, if that is cheap; whether any was.

        Args:
            may_take_own: Whether a microbatch may use its own value for a joint sum. Such a sum is hoisted only if it
                depends on no parameters (a mask's denominator), and split operands beside it never are.
        """
        with_own = [var for var in inputs_of(eqn) if may_take_own(var)]
        for kind in (Partial, Split):
            # A reader of whole samples does its work in every turn, or once on all of them.
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
        """Compute values also before the loop, on the whole batch, if that is cheap; whether it was."""
        cone = self._cone(var for var in values if self.solution.of(var) != REPLICATED)
        self._do_early(cone or ())
        return cone is not None

    def _reads_parameters(self, cone: Iterable[JaxprEqn]) -> bool:
        """Whether equations depend on floating-point arrays that are no samples."""
        inputs = (a for a in read_by(cone) if a not in self.maker)
        numbers = (a for a in inputs if a.aval.ndim and jnp.issubdtype(a.aval.dtype, jnp.floating))
        return any(self.solution.made_as(a) == REPLICATED for a in numbers)

    def rearrange(self, eqn: JaxprEqn, all_split: bool = False) -> bool:
        """Hoist an equation whose operands are samples or whole, and split its results anew; whether that is cheap.

        `all_split`: only if every result can be split.
        """
        solution = self.solution
        samples = {var: p for var in inputs_of(eqn) if (p := solution.of(var)) != REPLICATED}
        dims = [p.dim for p in samples.values() if isinstance(p, Split)]
        if not dims or len(dims) < len(samples) or eqn.effects:
            return False
        if all_split and not all(self._divides(var, dims[0]) for var in eqn.outvars):
            return False
        cone = self._cone(inputs_of(eqn), self.cost[eqn])  # those that are whole, too: they may be joins of the loop
        if cone is None:
            return False
        self.gathered = self.gathered or Cause(eqn, next(iter(samples)))
        self._do_early(cone)
        solution.strategy_of.pop(eqn, None)
        solution.phase[eqn] = "before"
        self._split_anew(eqn.outvars, dims[0])
        return True

    def follow(self, eqn: JaxprEqn) -> None:
        """Split the results of an equation before the loop whose operands are reordered samples."""
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
        """Drop the lower bounds of work: phases have changed."""
        self._longest, self._looked_at = {}, 0

    def _do_early(self, cone: Sequence[JaxprEqn]) -> None:
        """Do equations early; lower bounds of work hold up to the first of them that was not."""
        early = self.solution.early
        first = min((self.position[eqn] for eqn in cone if eqn not in early), default=self._looked_at)
        early.update(dict.fromkeys(cone))
        for eqn in self.eqns[first : self._looked_at]:
            for var in eqn.outvars:
                self._longest.pop(var, None)
        self._looked_at = min(self._looked_at, first)

    def _least_work(self, var: Var) -> float:
        """Lower bound of the work of hoisting a value: the longest path to it; inf: it depends on what the loop makes."""
        while self._looked_at < len(self.eqns) and var in self.maker and var not in self._longest:
            eqn, read = self.eqns[self._looked_at], self.reads[self._looked_at]
            is_done = self.solution.phase[eqn] == "before" or eqn in self.solution.early
            is_late = any(a in self.late for a in read)
            before = max((self._longest.get(a, 0.0) for a in read), default=0.0)
            work = math.inf if is_late else before + (0.0 if is_done else self.cost[eqn])
            self._longest.update(dict.fromkeys(eqn.outvars, work))
            self._looked_at += 1
        return self._longest.get(var, 0.0)

    def _cone(self, wanted: Iterable[Var], cost: float = 0.0) -> list[JaxprEqn] | None:
        """Equations that compute values from the step's inputs; None: with `cost` they are too much work, or need the loop."""
        found: dict[JaxprEqn, None] = {}
        waiting = list(wanted)
        # True of nearly all gradients of a deep model: no need to walk through them.
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

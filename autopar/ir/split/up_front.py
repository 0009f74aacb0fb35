"""What is done of the whole batch before the loop over microbatches, because it is cheap and no part of it would do.

In:     equations that fit no way to be done in pieces, with the shares of their operands so far.
Out:    `Shares`, changed: a mask's denominator is summed up front and read whole; samples that are shuffled, rolled,
        mixed or split in halves are put in their new order up front, and each microbatch reads its part of that order.
Method: the equations behind an operand, back to the step's inputs, against the work of the whole step. Any equal parts of
        a value along a dim will do for the loop, whichever samples they once were, as long as all that is made of them
        is cut at the same places; so a new order of samples is cut like the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.split.pieces import Cut, Extreme, Share, Sum, Whole
from autopar.ir.split.refusal import Cause
from autopar.ir.split.shares import Shares
from autopar.ir.structure import inputs_of

CHEAP = 0.02
"""What is needed of the whole batch is computed up front if it takes at most this part of the step's work."""


class UpFront:
    """Moves equations of one step before its loop.

    Attributes:
        gathered: The first equation that all samples were brought together for; None: there was none.
    """

    def __init__(self, jaxpr: Jaxpr, shares: Shares, cost: Sequence[float], late: Mapping[Var, Any]):
        """`cost` is the work of each equation; `late` fills with what is made after the loop."""
        self.eqns, self.shares, self.cost, self.late = jaxpr.eqns, shares, cost, late
        self.number = {id(eqn): k for k, eqn in enumerate(jaxpr.eqns)}
        self.origin = {var: k for k, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self.limit = CHEAP * sum(cost)
        self.gathered: Cause | None = None
        self._rearranged: dict[Var, int] = {}

    def take_whole(self, eqn: JaxprEqn) -> bool:
        """Compute operands up front, of the whole batch, if that is cheap; whether any was."""
        kinds: tuple[type[Share], ...]
        for kinds in ((Sum, Extreme), (Cut,)):
            cones = {var: self._cone([var]) for var in inputs_of(eqn) if isinstance(self.shares.share(var), kinds)}
            cheap = {var: cone for var, cone in cones.items() if cone is not None}
            for var, cone in cheap.items():
                if kinds == (Cut,):
                    self.gathered = self.gathered or Cause(eqn, var)
                self.shares.early.update(dict.fromkeys(cone))
                self.shares.taken_whole[var] = None
            if cheap:
                return True
        return False

    def rearrange(self, eqn: JaxprEqn, all_cut: bool = False) -> bool:
        """Do an equation up front that has nothing but samples of, and cut its results anew; whether that is cheap.

        Args:
            eqn: The equation.
            all_cut: Only if every result can be cut.
        """
        shares = self.shares
        cut = {var: share for var in inputs_of(eqn) if not isinstance(share := shares.share(var), Whole)}
        if not cut or any(not isinstance(share, Cut) for share in cut.values()) or eqn.effects:
            return False
        dim = next(share.dim for share in cut.values() if isinstance(share, Cut))
        if all_cut and not all(self._divides(var, dim) for var in eqn.outvars):
            return False
        cone = self._cone(cut, self.cost[self.number[id(eqn)]])
        if cone is None:
            return False
        self.gathered = self.gathered or Cause(eqn, next(iter(cut)))
        shares.early.update(dict.fromkeys(cone))
        shares.way_of.pop(id(eqn), None)
        shares.phase[id(eqn)] = "before"
        self._cut_anew(eqn.outvars, dim)
        return True

    def follow(self, eqn: JaxprEqn) -> None:
        """An equation before the loop makes samples if it is made of them."""
        dims = [self._rearranged[var] for var in inputs_of(eqn) if var in self._rearranged]
        if dims:
            self._cut_anew(eqn.outvars, dims[0])

    def _cut_anew(self, made: Sequence[Var], dim: int) -> None:
        for var in made:
            self._rearranged[var] = dim
            if self._divides(var, dim):
                self.shares.made[var] = Cut(dim)

    def _divides(self, var: Var, dim: int) -> bool:
        shape = var.aval.shape
        return dim < len(shape) and shape[dim] > 0 and shape[dim] % self.shares.count == 0

    def _cone(self, wanted: Iterable[Var], cost: float = 0.0) -> list[int] | None:
        """Equations, by identity, that make values from the step's inputs; None: they and `cost` are too much work."""
        found: dict[int, None] = {}
        total, waiting = cost, list(wanted)
        while waiting:
            at = self.origin.get(waiting.pop())
            if at is None or at in found:
                continue
            eqn = self.eqns[at]
            found[at] = None
            if self.shares.phase[id(eqn)] != "before" and id(eqn) not in self.shares.early:
                total += self.cost[at]
            if total > self.limit or any(not isinstance(a, Literal) and a in self.late for a in eqn.invars):
                return None
            waiting += inputs_of(eqn)
        if total > self.limit:
            return None
        return [id(self.eqns[at]) for at in sorted(found)]

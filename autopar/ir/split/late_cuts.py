"""What turns out to be read only in parts is made in parts, and what is done on sums alone is done once.

In:     a program whose shares have been followed forwards (`share_analysis.py`).
Out:    `Shares`, changed: masks and random bits are made of one microbatch's samples; what joins or scales sums over all
        microbatches runs after the loop.
Method: one pass backwards each, from readers to makers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.split.borders import border_shares, operand_shares
from autopar.ir.split.pieces import WHOLE, Cut, Own, Same, Share, Sum, Whole
from autopar.ir.split.shares import Shares, Ways
from autopar.ir.structure import body_jaxprs, inputs_of, is_structured, scan_parts, variables
from autopar.ir.work import num_bytes

_Uses = dict[Any, dict[Share, None]]
"""For each value the shares in which it is read."""


def cut_late(jaxpr: Jaxpr, shares: Shares, ways: Ways) -> None:
    """What is whole and only read in parts (a mask, random bits) is made in parts, from its own operands' parts.

    Args:
        jaxpr: The step.
        shares: Changed.
        ways: Of its equations.
    """
    uses: _Uses = {atom: {WHOLE: None} for atom in variables(jaxpr.outvars) if atom not in shares.made}
    _LateCuts(shares, ways).body(jaxpr, uses, top=True)


class _LateCuts:
    def __init__(self, shares: Shares, ways: Ways):
        self.shares, self.ways = shares, ways

    def body(self, jaxpr: Jaxpr, uses: _Uses, top: bool) -> None:
        for eqn in reversed(jaxpr.eqns):
            if top and self.shares.phase[id(eqn)] == "after":
                wants: Sequence[Share] = [WHOLE] * len(eqn.invars)
            elif is_structured(eqn):
                wants = self.inside(eqn, uses, top)
            else:
                wants = self.wanted_by(eqn, uses, top)
            early = top and id(eqn) in self.shares.early
            for atom, want in zip(eqn.invars, wants, strict=True):
                if not isinstance(atom, Literal):
                    uses.setdefault(atom, {})[want] = None
                    if early:
                        uses[atom][WHOLE] = None

    def wanted_by(self, eqn: JaxprEqn, uses: _Uses, top: bool) -> Sequence[Share]:
        shares = self.shares
        if id(eqn) in shares.way_of:
            return shares.way_of[id(eqn)].operands
        own = any(isinstance(shares.made.get(var, WHOLE), Own) for var in eqn.outvars)
        wanted = [uses.get(var, {}) for var in eqn.outvars]
        cut = [next(iter(w)) if len(w) == 1 else None for w in wanted]
        in_parts = any(wanted) and all(isinstance(c, Cut) for c, w in zip(cut, wanted, strict=True) if w)
        if in_parts and not own and not eqn.effects:
            for way in self.ways.of(eqn, [*(None for _ in eqn.invars), *cut]):
                fits = all(not w or c == made for c, w, made in zip(cut, wanted, way.results, strict=True))
                cuts_only = not any(isinstance(want, Sum) for want in way.operands)
                if fits and cuts_only and way.factor is not None:
                    shares.way_of[id(eqn)] = way
                    shares.made.update(zip(eqn.outvars, way.results, strict=True))
                    if top:
                        shares.phase[id(eqn)] = "loop"
                    return way.operands
        return [WHOLE] * len(eqn.invars)

    def inside(self, eqn: JaxprEqn, uses: _Uses, top: bool) -> list[Share]:
        """The same in the bodies of an equation of the loop; what it wants of its operands."""
        if top and self.shares.phase[id(eqn)] == "before":
            return [WHOLE] * len(eqn.invars)
        made, name = self.shares.made, eqn.primitive.name
        if id(eqn) in self.shares.own_trips:
            return operand_shares(eqn, made, self.shares.own_trips[id(eqn)])
        if name in ("scan", "optimization_barrier"):
            first = len(scan_parts(eqn).carries) if name == "scan" else 0
            lowest = 1 if name == "scan" else 0
            for var in eqn.outvars[first:]:
                self.cut_whole(var, uses, lowest)
        for body, outside in zip(body_jaxprs(eqn), border_shares(eqn, made), strict=True):
            inner: _Uses = {}
            for atom, want in zip(body.outvars, outside, strict=True):
                if not isinstance(atom, Literal):
                    inner.setdefault(atom, {})[want] = None
            self.body(body, inner, top=False)
            if name == "scan":
                parts = scan_parts(eqn)
                for _, var in (*parts.consts, *parts.xs):
                    self.cut_whole(var, inner)
        return operand_shares(eqn, made)

    def cut_whole(self, var: Var, uses: _Uses, lowest: int = 0) -> None:
        """A value that passes a border whole, and of which each piece reads its part, passes in parts."""
        wants = list(uses.get(var, ()))
        if isinstance(self.shares.share(var), Whole | Same) and len(wants) == 1:
            match wants[0]:
                case Cut(dim=dim) if dim >= lowest:
                    self.shares.made[var] = wants[0]


def sink(jaxpr: Jaxpr, shares: Shares, apart: bool) -> None:
    """What is done on sums alone, and does not make them smaller, is done once, after the loop.

    Args:
        jaxpr: The step.
        shares: Changed.
        apart: Sums are added up one by one and joined after the loop, though that keeps more of them.
    """
    needed: dict[Var, bool] = {}
    for eqn in reversed(jaxpr.eqns):
        phase = shares.phase[id(eqn)]
        if phase == "loop" and not is_structured(eqn) and not eqn.effects:
            sums = [a for a in eqn.invars if isinstance(shares.share(a), Sum) and not isinstance(a, Literal)]
            rest = [a for a in eqn.invars if not isinstance(shares.share(a), Sum)]
            only_sums = sums and all(isinstance(shares.share(a), Whole) for a in rest)
            is_join = apart and eqn.primitive.name in ("add", "add_any")
            smaller = is_join or sum(map(num_bytes, dict.fromkeys(sums))) <= sum(map(num_bytes, eqn.outvars))
            if only_sums and smaller and not any(needed.get(var) for var in eqn.outvars):
                shares.phase[id(eqn)] = phase = "after"
                for var in eqn.outvars:
                    shares.made.pop(var, None)
        if phase == "loop":
            needed.update(dict.fromkeys(inputs_of(eqn), True))

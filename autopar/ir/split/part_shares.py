"""Which values of a program are in parts, when the scans over its layers are taken apart.

In:     a flat program, the length of its scans over layers, the number of parts.
Out:    `PartShares`: of each value the share that a part has, how each equation is done on parts, and the inputs and outputs
        that become parts.
Method: forwards from what scans stack: the dim of layers is followed through the rules' ways (`pieces.py`). Then backwards:
        what is whole, and only read in parts, is made in parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.split.borders import operand_shares
from autopar.ir.split.loops_in_parts import follow_loop
from autopar.ir.split.part_rows import part_padded, part_read
from autopar.ir.split.pieces import SUM, WHOLE, Cut, Share, Sum, Way, Whole, piece_aval, piece_program, ways
from autopar.ir.split.share_analysis import feeds_backward
from autopar.ir.structure import is_structured, scan_parts, trip_count, variables
from autopar.ir.work import Work

WORTH = 0.2
"""Scans of one length are taken apart if they do at least this part of the forward and backward passes' work."""


class PartShares:
    """The shares of one program's values, and its borders; arguments as of `unstack`."""

    def __init__(
        self, jaxpr: Jaxpr, length: int, count: int, aliases: Mapping[int, int], lying: Mapping[int, int] | None
    ):
        self.jaxpr, self.length, self.count, self.aliases = jaxpr, length, count, aliases
        self.lying = dict(lying or {})
        self.made: dict[Var, Share] = {jaxpr.invars[k]: Cut(dim) for k, dim in self.lying.items()}
        self.way_of: dict[int, Way] = {}
        self.part_of: dict[int, int] = {}
        self.loops: set[int] = set()
        self.rules: dict[object, tuple[ShardingRule, list[Way]]] = {}
        self.programs: dict[object, Jaxpr] = {}
        costs, whole = work_of_passes(jaxpr)
        self.cut_scans = {
            id(eqn)
            for eqn, cost in zip(jaxpr.eqns, costs, strict=True)
            if is_over_stacks(eqn) and trip_count(eqn) == length and cost >= WORTH / 4 * whole
        }

    def find_borders(self) -> tuple[dict[int, int], dict[int, int]]:
        """Decide what is in parts; the inputs and outputs that are, and along which dim."""
        for eqn in self.jaxpr.eqns:
            self.share(eqn)
        return self.split_borders(self.cut_late())

    # Which values are in parts.

    def ways(self, eqn: JaxprEqn) -> tuple[ShardingRule, list[Way]]:
        signature = equation_signature(eqn)
        if signature not in self.rules:
            rule = rule_for(eqn)
            self.rules[signature] = rule, ways(rule, self.count)
        return self.rules[signature]

    def of(self, atom: Any) -> Share:
        return WHOLE if isinstance(atom, Literal) else self.made.get(atom, WHOLE)

    def share(self, eqn: JaxprEqn) -> None:
        if eqn.primitive.name == "scan" and trip_count(eqn) == self.length:
            parts = scan_parts(eqn)
            if id(eqn) in self.cut_scans or any(self.of(outer) == Cut(0) for outer, _ in parts.xs):
                self.cut_scans.add(id(eqn))
                self.made.update((result, Cut(0)) for _, result in parts.ys)
                return
        if eqn.primitive.name == "optimization_barrier":
            self.made.update(
                (var, self.of(a)) for a, var in zip(eqn.invars, eqn.outvars, strict=True) if isinstance(self.of(a), Cut)
            )
            return
        if is_structured(eqn):
            if follow_loop(eqn, self):
                self.loops.add(id(eqn))
            return
        if not any(isinstance(self.of(a), Cut) for a in eqn.invars) or eqn.effects:
            return
        way = self.best_way(eqn)
        if way is not None:
            self.way_of[id(eqn)] = way
            self.made.update(
                (var, share) for var, share in zip(eqn.outvars, way.results, strict=True) if isinstance(share, Cut)
            )

    def best_way(self, eqn: JaxprEqn, apart: bool = False) -> Way | None:
        """How to do an equation on parts; `apart`: so that each part has its own results."""
        shares = [self.of(a) for a in eqn.invars]
        best: tuple[int, Way] | None = None
        for way in self.ways(eqn)[1]:
            if way.factor is None or (apart and not (_all_cut(way.results) and SUM not in way.operands)):
                continue
            costs = [_conversion(a, have, want) for a, have, want in zip(eqn.invars, shares, way.operands, strict=True)]
            if all(c is not None for c in costs):
                total = sum(c or 0 for c in costs)
                if best is None or total < best[0]:
                    best = total, way
        return best[1] if best is not None else None

    def program_of(self, eqn: JaxprEqn) -> Jaxpr:
        """What an equation does on one part."""
        way = self.way_of[id(eqn)]
        key = equation_signature(eqn), way
        if key not in self.programs:
            avals = {
                k: piece_aval(a.aval, want, self.count)
                for k, (a, want) in enumerate(zip(eqn.invars, way.operands, strict=True))
            }
            self.programs[key] = piece_program(eqn, self.ways(eqn)[0], way, self.count, avals)
        return self.programs[key]

    def wants(self, eqn: JaxprEqn) -> Sequence[Share]:
        """The share of each operand that an equation reads."""
        if id(eqn) in self.way_of:
            return self.way_of[id(eqn)].operands
        if id(eqn) in self.cut_scans:
            parts = scan_parts(eqn)
            return [WHOLE] * (len(parts.consts) + len(parts.carries)) + [Cut(0)] * len(parts.xs)
        if eqn.primitive.name == "optimization_barrier":
            return [self.of(var) for var in eqn.outvars]
        if id(eqn) in self.loops:
            return operand_shares(eqn, self.made)
        if id(eqn) in self.part_of and eqn.primitive.name == "slice":
            return [Cut(0)]
        return [WHOLE] * len(eqn.invars)

    def cut_late(self) -> dict[Var, dict[Share, None]]:
        """What is whole, and only read in parts, is made in parts: a stack that is converted before it is scanned.

        Returns:
            For each value, the shares in which it is read.
        """
        uses: dict[Var, dict[Share, None]] = {}
        results = set(variables(self.jaxpr.outvars))
        slices: list[tuple[JaxprEqn, int]] = []
        for eqn in reversed(self.jaxpr.eqns):  # all readers of what it makes have been asked by then
            part = part_read(eqn, self.length, self.count)
            if part is not None and id(eqn) not in self.way_of:
                slices.append((eqn, part))  # as the others read it
                continue
            if not is_structured(eqn) and id(eqn) not in self.way_of and not eqn.effects:
                wanted = [uses.get(var, {}) for var in eqn.outvars]
                cut = [next(iter(w)) if len(w) == 1 else None for w in wanted]
                in_parts = any(wanted) and all(isinstance(c, Cut) for c, w in zip(cut, wanted, strict=True) if w)
                if in_parts and not any(var in results for var in eqn.outvars):
                    for way in self.ways(eqn)[1]:
                        fits = all(not w or c == m for c, w, m in zip(cut, wanted, way.results, strict=True))
                        if fits and way.factor is not None and SUM not in way.operands:
                            self.way_of[id(eqn)] = way
                            self.made.update(zip(eqn.outvars, way.results, strict=True))
                            break
                    part = part_padded(eqn, self.length, self.count)
                    if part is not None and id(eqn) not in self.way_of and cut == [Cut(0)]:
                        self.part_of[id(eqn)] = part
                        self.made[eqn.outvars[0]] = Cut(0)
            for atom, want in zip(eqn.invars, self.wants(eqn), strict=True):
                if not isinstance(atom, Literal):
                    uses.setdefault(atom, {})[want] = None
        for eqn, part in slices:
            atom = eqn.invars[0]
            if self.of(atom) == Cut(0) or list(uses.get(atom, ())) == [Cut(0)]:
                self.part_of[id(eqn)] = part
            uses.setdefault(atom, {})[self.wants(eqn)[0]] = None
        return uses

    def split_borders(self, uses: Mapping[Var, Mapping[Share, None]]) -> tuple[dict[int, int], dict[int, int]]:
        """Inputs and outputs that become parts, and along which dim."""
        invars, outvars = self.jaxpr.invars, self.jaxpr.outvars
        position = {var: k for k, var in enumerate(invars)}
        replaced_by = {into: out for out, into in self.aliases.items()}
        split_in: dict[int, int] = {}
        split_out: dict[int, int] = {}
        for k, var in enumerate(invars):
            wants = uses.get(var, {})
            dim = self.lying.get(k, _only_dim(wants))
            if not wants or dim is None:
                continue
            out = replaced_by.get(k)
            if out is None:
                if not any(a is var for a in outvars):
                    split_in[k] = dim
            else:
                atom = outvars[out]
                if not isinstance(atom, Literal) and (self.of(atom) == Cut(dim) or position.get(atom) == k):
                    split_in[k] = split_out[out] = dim
        # An input that also leaves as another output stays whole.
        for k in sorted(split_in):
            if any(a is invars[k] and out not in split_out for out, a in enumerate(outvars)):
                del split_in[k]
                split_out.pop(replaced_by.get(k, -1), None)
        return split_in, split_out


def _only_dim(wants: Mapping[Share, None]) -> int | None:
    """The dim that all readers read in parts; None: there is no such."""
    match list(wants):
        case [Cut(dim, 1)]:
            return dim
        case _:
            return None


def _all_cut(shares: Sequence[Share]) -> bool:
    return all(isinstance(share, Cut) for share in shares)


def _conversion(atom: Any, have: Share, want: Share) -> int | None:
    if have == want:
        return 0
    if isinstance(have, Whole) and isinstance(want, Cut):
        return 1
    if isinstance(have, Whole) and isinstance(want, Sum):
        return 0 if isinstance(atom, Literal) and atom.val == 0 else None
    return None


def work_of_passes(jaxpr: Jaxpr) -> tuple[list[float], float]:
    """The work of each equation, and of all forward and backward passes; where there is no backward pass, of all."""
    costs = Work().of_equations(jaxpr.eqns)
    of_passes = sum(cost for cost, matters in zip(costs, feeds_backward(jaxpr), strict=True) if matters)
    return costs, of_passes or sum(costs)


def is_over_stacks(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and trip_count(eqn) > 1 and bool(scan_parts(eqn).xs)

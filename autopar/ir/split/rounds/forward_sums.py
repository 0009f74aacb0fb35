"""Rewrites a step so that its forward pass alone computes sums over samples, outside of its loops over layers.

In:     a flat program, and which of its values are sums (maxima, minima) over samples.
Out:    the same function. A sum that `remat` recomputes is replaced by that of the forward pass; equations of a forward scan
        that depend on such sums alone, and on which no later trip depends, move behind the scan and work on stacks of them.
Method: value numbering. In the same trip, a backward scan's operand equals the forward scan's where both read the same
        stack, or one reads what the other has stacked. The load-balancing loss of experts needs both rewrites: it is
        computed in every layer, within `remat`, within a scan over layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, eval_jaxpr, make_jaxpr, new_var
from autopar.ir.build import Equations
from autopar.ir.dataflow import inputs_of, known_as, makers, needed, read_by, reading, variables
from autopar.ir.gradient import is_backward, is_recomputed
from autopar.ir.region import Binding, Region, is_region, kind_of, region_of, rows_in, rows_out
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.signature import ValueNumbers
from autopar.ir.split.carries import passed_on, sum_carries

IsSum = Callable[[Var], bool]


def with_forward_sums(jaxpr: Jaxpr, is_sum: IsSum) -> Jaxpr:
    """The program in which only forward passes compute sums, outside of loops over layers; itself, if they do already."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        is_forward = kind_of(eqn) == "scan" and not is_backward(eqn)
        eqns += _ends_behind(region_of(eqn), is_sum) if is_forward else [eqn]
    return with_equations(jaxpr, _Twins(is_sum).replaced(eqns))


# Equations of scans that depend on sums alone.


def _ends_behind(scan: Region, is_sum: IsSum) -> list[JaxprEqn]:
    """A forward scan without the equations that depend on sums alone, and behind it these equations, on all trips at once."""
    (body,) = scan.bodies
    added = {b.value: b for b, kind in zip(scan.carries, sum_carries(scan), strict=True) if kind}
    entering = {b.var for b in (*scan.consts, *scan.xs)}
    carried = {b.var for b in scan.carries}
    to_trips = set(needed(body.eqns, [a for a in variables(b.value for b in scan.carries) if a not in added]))
    begins = {b.var: b for b in added.values()}  # the accumulators as they enter, under each of their names
    so_far = set(begins)  # incomplete sums, and all that depends on them
    moved: dict[JaxprEqn, None] = {}
    made: dict[Var, None] = {}
    for eqn in body.eqns:
        begins.update((var, begins[a]) for a, var in passed_on(eqn) if isinstance(a, Var) and a in begins)
        total = added.get(eqn.outvars[0]) if eqn.outvars else None
        read = [a for a in inputs_of(eqn) if total is None or begins.get(a) is not total]
        operands = [a for a in read if a not in entering]
        of_sums = bool(operands) and all(a in made or (is_sum(a) and a not in carried | so_far) for a in operands)
        if of_sums and eqn not in to_trips and not eqn.effects and not is_region(eqn):
            moved[eqn] = None
            made.update(dict.fromkeys(eqn.outvars))
        elif any(a in so_far for a in read):
            so_far.update(eqn.outvars)
    behind = [b for b in (*scan.carries, *scan.ys) if isinstance(b.value, Var) and b.value in made]
    gone = {var for var, b in begins.items() if b in behind}
    stays = [eqn for eqn in body.eqns if eqn not in moved and (eqn.effects or not gone.issuperset(eqn.outvars))]
    if not moved or any(a in made or a in gone for eqn in stays for a in inputs_of(eqn)):
        return [scan.eqn]
    stack_of: dict[Var, Atom] = {b.var: b.operand for b in scan.xs if b.operand is not None}
    stack_of |= {b.value: b.result for b in scan.ys if isinstance(b.value, Var) and b.result and b.value not in made}
    new: list[Binding] = []
    for var in read_by(moved):
        if var not in made and var not in stack_of and var not in entering and is_sum(var):
            stack_of[var] = scan.new_stack(var)
            new.append(rows_out(var, stack_of[var]))
    kept = [b for b in scan.bindings if b not in behind]
    outside = _behind(scan, list(moved), stack_of, begins, behind)
    return [scan.rebuild([*kept, *new], [stays]), *outside]


def _behind(
    scan: Region,
    moved: Sequence[JaxprEqn],
    stack_of: Mapping[Var, Atom],
    begins: Collection[Var],
    behind: Sequence[Binding],
) -> Equations:
    """The moved equations on all trips at once, and the results of the scan that depend on them (`behind`)."""
    consts = {b.var: b.operand for b in scan.consts}
    added: dict[Var, Atom] = {}  # the terms of sums over trips, which are added up at the end
    for eqn in moved:
        others = [atom for atom in eqn.invars if isinstance(atom, Literal) or atom not in begins]
        if len(others) < len(eqn.invars):
            added[eqn.outvars[0]] = others[0]
    inside = [reading(eqn, added) for eqn in moved if eqn.outvars[0] not in added]
    leaving, made = [known_as(b.value, added) for b in behind], makers(inside)
    read = [var for var in read_by(inside, leaving) if var not in made]
    of_a_trip = functools.partial(eval_jaxpr, make_jaxpr(read, leaving, inside), ())

    def of_all(*arrays: jax.Array) -> list[jax.Array]:
        stacks, first = arrays[: len(read)], iter(arrays[len(read) :])
        dims = [None if var in consts else 0 for var in read]
        rows = jax.vmap(of_a_trip, dims, axis_size=scan.trips)(*stacks)
        return [
            x if b.role == "ys" else next(first) + x.sum(0, dtype=x.dtype) for b, x in zip(behind, rows, strict=True)
        ]

    operands = [consts.get(var) or stack_of[var] for var in read]
    sums = [b.operand for b in behind if b.role == "carry"]
    eqns, source = Equations(), moved[0].source_info
    results = eqns.call(of_all, [*operands, *sums], source)  # type: ignore[list-item]
    for result, b in zip(results, behind, strict=True):
        if b.result is not None:
            eqns.name(b.result, result, source)
    return eqns


# Sums that are recomputed.


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of a forward scan: the position of its equation, and the value numbers of the body."""

    place: int
    scan: Region
    numbers: ValueNumbers


class _Twins:
    """Replaces sums that `remat` recomputes by those of the forward pass."""

    def __init__(self, is_sum: IsSum):
        self.is_sum = is_sum
        self.numbers = ValueNumbers()
        self.replaced_by: dict[Var, Var] = {}
        self.bodies: list[_Body] = []
        self.wanted: dict[int, dict[Var, Var]] = {}

    def replaced(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """The equations, in which readers of a recomputed sum read the first one."""
        found = []
        for place, eqn in enumerate(eqns):
            eqn = reading(eqn, self.replaced_by)
            if kind_of(eqn) == "scan":
                eqn = self.scan(place, region_of(eqn))
            else:
                self.replaced_by.update(self.visit(eqn, self.numbers, eqn))
            found.append(eqn)
        for place, stacks in self.wanted.items():
            scan = region_of(found[place])
            ys = [rows_out(var, stack) for var, stack in stacks.items()]
            found[place] = scan.rebuild([*scan.bindings, *ys], [scan.bodies[0].eqns])
        return found

    def visit(self, eqn: JaxprEqn, numbers: ValueNumbers, at: JaxprEqn) -> dict[Var, Var]:
        """Number the results of an equation; returns recomputed sums -> the first ones. It stands in, or is, `at`."""
        first = numbers.visit(eqn)
        if first is None or not (is_recomputed(eqn) or is_backward(at)) or is_backward(first) or is_recomputed(first):
            return {}
        return {var: old for var, old in zip(eqn.outvars, first.outvars, strict=True) if self.is_sum(old)}

    def scan(self, place: int, scan: Region) -> JaxprEqn:
        (body,) = scan.bodies
        if not is_backward(scan.eqn):
            own = _Body(place, scan, ValueNumbers(self.names_of_consts(scan), numbers=self.numbers.numbers))
            for eqn in body.eqns:
                own.numbers.visit(eqn)
            self.bodies.append(own)
            return scan.eqn
        more: list[Binding] = []
        swapped: dict[Var, Var] = {}
        for other in self.bodies:
            if other.scan.trips != scan.trips:
                continue
            rows = _names_of_rows(other, scan)
            names = self.names_of_consts(scan) | rows
            numbers = ValueNumbers(names, dict(other.numbers.known), self.numbers.numbers)
            here = makers(body.eqns)
            for eqn in body.eqns if rows else ():
                for var, old in self.visit(eqn, numbers, scan.eqn).items():
                    if old in here or var in swapped:  # computed twice in this body; found in another scan already
                        continue
                    stacks = self.wanted.setdefault(other.place, {})
                    stacks.setdefault(old, scan.new_stack(old))
                    swapped[var] = new_var(var.aval)
                    more.append(rows_in(stacks[old], swapped[var]))
        if not more:
            return scan.eqn
        leaving = scan.rebound(outputs=[[known_as(atom, swapped) for atom in body.outvars]])
        return scan.rebuild([*leaving, *more], [[reading(eqn, swapped) for eqn in body.eqns]])

    def names_of_consts(self, scan: Region) -> dict[Var, Hashable]:
        return {b.var: self.numbers.of(b.operand) for b in scan.consts if b.operand is not None}


def _names_of_rows(first: _Body, second: Region) -> dict[Var, Hashable]:
    """The value numbers of rows that enter a scan's body and equal a value of an earlier scan's body in the same trip."""
    made: dict[Atom | None, Atom] = {b.result: b.value for b in first.scan.ys}
    entered = {b.operand: b.var for b in first.scan.xs if isinstance(b.operand, Var)}
    name: dict[Var, Hashable] = {}
    for b in second.xs:
        same = (entered.get(b.operand) or made.get(b.operand)) if isinstance(b.operand, Var) else None
        if isinstance(same, Var):
            name[b.var] = first.numbers.of(same)
    return name

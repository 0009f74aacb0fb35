"""The writer: what one shard of a program does, as equations.

In:     a `Solution`, and the number of the shard: a variable (counted by the loop over microbatches) or a literal (a part of
        an unrolled scan).
Out:    equations on shards of values.
Method: each operand is converted, once, to the placement that the equation's strategy needs; loops and branches are rebuilt
        with bodies from the same writer. A subclass says where values come from that no shard makes (`outside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import cast

from jax import lax

from autopar._jax import (
    Atom,
    Aval,
    Jaxpr,
    JaxprEqn,
    Literal,
    SourceInfo,
    Var,
    copies_to_or_from_host,
    make_jaxpr,
    new_var,
    replace_eqn,
)
from autopar.ir.build import Equations
from autopar.ir.region import Binding, Region, is_region, kind_of, region_of
from autopar.ir.rules import rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.split.placement import OWN, REPLICATED, SUM, Partial, Placement, Replicated, Split, local_aval
from autopar.ir.split.solution import Solution
from autopar.ir.split.strategy import conversion_program, shard_of, shard_program


class Programs:
    """The programs of shards for equations under their strategies, cached by signature."""

    def __init__(self, solution: Solution):
        self.solution = solution
        self.known: dict[object, Jaxpr] = {}

    def of(self, eqn: JaxprEqn, size: int) -> Jaxpr:
        """The program (first unit, local operands) -> local results of a shard of `size` units."""
        strategy = self.solution.strategy_of[eqn]
        key = equation_signature(eqn), strategy, size
        if key not in self.known:
            self.known[key] = shard_program(eqn, rule_for(eqn), strategy, self.solution.axis.units, size)
        return self.known[key]


class ShardWriter:
    """Writes one body, as one shard does it.

    Attributes:
        number: The first unit of the shard, int32.
        size: Its number of units.
        values: The atom that holds each value in each placement.
        eqns: The equations written so far.
        rows: The row of each stack that holds the results of a single trip.
    """

    def __init__(self, programs: Programs, number: Atom, size: int = 1, eqns: Equations | None = None):
        self.programs, self.solution, self.number, self.size = programs, programs.solution, number, size
        self.values: dict[tuple[Var, Placement], Atom] = {}
        self.eqns = Equations() if eqns is None else eqns
        self.rows: dict[Atom, Atom] = {}

    # Values.

    def value(self, atom: Atom, want: Placement, source: SourceInfo | None = None) -> Atom:
        """The atom that holds a value in a placement."""
        if isinstance(atom, Literal):
            return self.converted(atom, atom, want, source)
        key = atom, REPLICATED if isinstance(want, Replicated) else want
        if key not in self.values:
            self.values[key] = self.made(*key, source)
        return self.values[key]

    def made(self, var: Var, want: Placement, source: SourceInfo | None) -> Atom:
        """Convert a value to a placement other than the one in which it was made."""
        if self.solution.read_as.get(var) == OWN:
            if isinstance(want, Replicated):
                return self.own_value(var, source)
            return self.converted(var, self.value(var, REPLICATED, source), want, source)
        if (var, REPLICATED) in self.values:
            return self.converted(var, self.values[var, REPLICATED], want, source)
        return self.outside(var, want, source)

    def own_value(self, var: Var, source: SourceInfo | None) -> Atom:
        """The joint value as if all shards were like this one."""
        placement = self.solution.made_as(var)
        part = self.values[var, placement]
        if isinstance(placement, Partial) and placement != SUM:
            return part
        return self.of_shard(part, OWN, source)

    def local(self, aval: Aval, placement: Placement) -> Var:
        """A new variable for the shard's part of a value."""
        return new_var(local_aval(aval, placement, self.solution.axis.units, self.size))

    def outside(self, var: Var, want: Placement, source: SourceInfo | None) -> Atom:
        """A value that is made outside of what is written; bodies have none."""
        raise AssertionError(f"{var} is {self.solution.made_as(var)}, and wanted {want}")

    def converted(self, atom: Atom, local: Atom, want: Placement, source: SourceInfo | None) -> Atom:
        """Convert a whole value, held by `local`, to `want`."""
        match want:
            case Split() if isinstance(self.number, Literal):
                place = int(self.number.val), self.solution.axis.units, self.size
                return self.eqns.call_one(lambda whole: shard_of(whole, want, *place), [local], source)
            case Partial() if isinstance(atom, Literal) and atom.val == 0:
                return local
            case Split() | Partial():
                return self.of_shard(local, want, source)
            case Replicated():
                return local

    def of_shard(self, atom: Atom, want: Placement, source: SourceInfo | None) -> Atom:
        """The shard's part, or its term, of a value."""
        program = conversion_program(tuple(atom.aval.shape), atom.aval.dtype, want, self.solution.count)
        return self.eqns.inline(program, [self.number, atom], source)[0]

    def define(self, var: Var, placement: Placement, atom: Atom) -> None:
        """Say which atom holds a value."""
        self.values[var, REPLICATED if isinstance(placement, Replicated) else placement] = atom

    # Equations.

    def equation(self, eqn: JaxprEqn) -> None:
        """Write one equation."""
        if is_region(eqn):
            self.region(region_of(eqn))
            return
        solution, source = self.solution, eqn.source_info
        strategy = solution.strategy_of.get(eqn)
        wants = strategy.operands if strategy is not None else (REPLICATED,) * len(eqn.invars)
        made = strategy.results if strategy is not None else [solution.made_as(var) for var in eqn.outvars]
        operands = [self.value(a, want, source) for a, want in zip(eqn.invars, wants, strict=True)]
        # These compute nothing, but the planner reads them; a copy to the host has a memory space in its types.
        constrains = eqn.primitive.name == "sharding_constraint" or copies_to_or_from_host(eqn)
        if strategy is None or strategy.factor is None or constrains:
            pairs = zip(eqn.outvars, made, strict=True)
            results: Sequence[Atom] = [self.local(var.aval, p) if constrains else new_var(var.aval) for var, p in pairs]
            self.eqns.append(replace_eqn(eqn, invars=operands, outvars=cast(list[Var], results)))
        else:
            results = self.eqns.inline(self.programs.of(eqn, self.size), [self.number, *operands], source)
        for var, placement, atom in zip(eqn.outvars, made, results, strict=True):
            self.define(var, placement, atom)

    def region(self, region: Region) -> None:
        """Write a loop, a branch or a barrier."""
        solution, eqn = self.solution, region.eqn
        crossing = solution.crossing(region)
        pairs = zip(eqn.invars, region.of_operands([outside for _, outside in crossing]), strict=True)
        operands = [self.value(a, want, eqn.source_info) for a, want in pairs]
        if eqn in solution.own_trips:
            results = self.trips(region, operands)
        else:
            results = [
                self.local(var.aval, outside)
                for var, outside in zip(eqn.outvars, region.of_results([o for _, o in crossing]), strict=True)
            ]
            inside = [placement for placement, _ in crossing]
            bodies = [self.body(region, k, inside) for k in range(len(region.bodies))]
            bindings = region.rebound(operands, [b.invars for _, b in bodies], [b.outvars for _, b in bodies], results)
            if isinstance(self.number, Var) and bodies:
                numbers = tuple(cast(Var, number) for number, _ in bodies)
                bindings = [Binding("const", self.number, numbers, (None,) * len(bodies)), *bindings]
            self.eqns.append(region.rebuild(bindings, [b.eqns for _, b in bodies]))
        for var, (_, placement), atom in zip(eqn.outvars, region.of_results(crossing), results, strict=True):
            self.define(var, placement, atom)

    def body(self, region: Region, k: int, inside: Sequence[Placement]) -> tuple[Atom, Jaxpr]:
        """Write body `k`; returns the number of the shard in it (a variable enters it) and the body."""
        body = region.bodies[k]
        number = new_var(self.number.aval) if isinstance(self.number, Var) else self.number
        writer = ShardWriter(self.programs, number, self.size)
        inputs = []
        for var, placement in zip(body.invars, region.entering(k, inside), strict=True):
            inputs.append(self.local(var.aval, placement))
            writer.define(var, placement, inputs[-1])
        for eqn in body.eqns:
            writer.equation(eqn)
        outputs = [writer.value(a, want) for a, want in zip(body.outvars, region.leaving(k, inside), strict=True)]
        return number, make_jaxpr(inputs, outputs, writer.eqns)

    # A scan whose trips are split among shards.

    def trips(self, scan: Region, operands: Sequence[Atom]) -> list[Atom]:
        """Write the shard's trips of a scan; a single trip is inlined, so that a stage border can lie in it."""
        trips = scan.trips // self.solution.axis.units * self.size
        return self.single_trip(scan, operands) if trips == 1 else self.shorter_scan(scan, operands, trips)

    def single_trip(self, scan: Region, operands: Sequence[Atom]) -> list[Atom]:
        source, first = scan.eqn.source_info, len(operands) - len(scan.xs)
        rows = [
            self.rows.get(x) or self.eqns.call_one(lambda x: lax.squeeze(x, (0,)), [x], source)
            for x in operands[first:]
        ]
        made = self.eqns.substitute(scan.bodies[0], [*operands[:first], *rows])
        for k in range(len(scan.carries), len(made)):
            row = made[k]
            made[k] = self.eqns.call_one(lambda y: lax.expand_dims(y, (0,)), [row], source)
            self.rows[made[k]] = row
        return made

    def shorter_scan(self, scan: Region, operands: Sequence[Atom], trips: int) -> list[Atom]:
        (body,) = scan.bodies
        eqns, inputs = Equations(), [new_var(var.aval) for var in body.invars]
        outputs = eqns.substitute(body, inputs)
        stacks = [local_aval(b.result.aval, Split(0), scan.trips, trips) for b in scan.ys]  # type: ignore[union-attr]
        results = [new_var(aval) for aval in (*(b.var.aval for b in scan.carries), *stacks)]
        bindings = scan.rebound(operands, [inputs], [outputs], results)
        self.eqns.append(scan.rebuild(bindings, [eqns], length=trips, unroll=min(scan.eqn.params["unroll"], trips)))
        return list(results)


def barrier_apart(eqn: JaxprEqn, solution: Solution) -> list[JaxprEqn]:
    """The equation; a barrier over both replicated values and shards becomes two, one for each."""
    whole = [kind_of(eqn) == "barrier" and solution.made_as(var) == REPLICATED for var in eqn.outvars]
    if all(whole) or not any(whole):
        return [eqn]
    return [
        replace_eqn(eqn, invars=list(compress(eqn.invars, which)), outvars=list(compress(eqn.outvars, which)))
        for which in (whole, [not is_whole for is_whole in whole])
    ]

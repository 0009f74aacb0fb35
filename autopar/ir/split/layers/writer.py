"""Writes the program over parts of stacks.

In:     a flat program, and which of its values are in parts (`placements.py`).
Out:    equations that make the parts of each value, or it whole; parts are joined, and whole values split, where needed.
Method: each equation once per part (`../writer.py`), with the number of the part as a literal; a scan over layers as one scan
        per part in sequence, or inlined where a part is one layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, JaxprEqn, Literal, SourceInfo, Var, make_jaxpr, new_var, shaped
from autopar.ir.build import Equations
from autopar.ir.dataflow import inputs_of
from autopar.ir.region import Region, kind_of, region_of
from autopar.ir.split.layers.placements import LayerPlacements
from autopar.ir.split.layers.rows import part_of_padded, slice_of_part
from autopar.ir.split.placement import REPLICATED, Partial, Placement, Replicated, Split, units_of_shard
from autopar.ir.split.strategy import join_shards, joined
from autopar.ir.split.writer import Programs, ShardWriter, barrier_apart


class LayerWriter:
    """Writes the program over parts; holds each value in parts, whole, or both."""

    def __init__(self, layers: LayerPlacements):
        self.layers, self.solution = layers, layers.solution
        self.eqns = Equations()
        self.whole: dict[Var, Atom] = {}
        programs = Programs(self.solution)
        rows: dict[Atom, Atom] = {}
        self.parts = [_Part(self, programs, k, rows) for k in range(layers.count)]

    def input(self, var: Var, dim: int | None) -> list[Var]:
        """New variables for an input: its parts along a dim, or with None the whole."""
        if dim is None:
            self.whole[var] = made = new_var(var.aval)
            return [made]
        parts = [part.local(var.aval, Split(dim)) for part in self.parts]
        self.define(var, Split(dim), parts)
        return parts

    def define(self, var: Var, placement: Placement, atoms: Sequence[Atom]) -> None:
        """Record the atoms that hold the parts of a value."""
        for part, atom in zip(self.parts, atoms, strict=True):
            part.define(var, placement, atom)

    def value(self, atom: Atom, source: SourceInfo | None = None) -> Atom:
        """The atom that holds a whole value; its parts are joined once."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self.whole:
            placements = [placement for var, placement in self.parts[0].values if var is atom]
            parts = [part.values[atom, placements[0]] for part in self.parts]
            self.whole[atom] = self.joined(placements[0], parts, source)
        return self.whole[atom]

    def joined(self, placement: Placement, parts: Sequence[Atom], source: SourceInfo | None) -> Atom:
        """Join the parts of a value."""
        match placement:
            case Replicated():
                return parts[0]
            case Split():
                return self.eqns.call_one(lambda *xs: join_shards(xs, placement), parts, source)
            case Partial():
                so_far = parts[0]
                for part in parts[1:]:
                    so_far = self.eqns.call_one(lambda a, b: joined(placement, a, b, 1), [so_far, part], source)
                return so_far

    def in_parts(self, atom: Atom, want: Placement, source: SourceInfo | None = None) -> list[Atom]:
        """The atoms that hold the parts of a value."""
        return [part.value(atom, want, source) for part in self.parts]

    # Equations.

    def equation(self, eqn: JaxprEqn) -> None:
        """Write one equation: once per part, or once."""
        layers = self.layers
        if eqn in layers.chains:
            self.chain(region_of(eqn))
        elif eqn in layers.part_of:
            self.single_part(eqn, layers.part_of[eqn])
        elif kind_of(eqn) == "barrier":
            for each in barrier_apart(eqn, self.solution):
                is_split = any(self.solution.made_as(var) != REPLICATED for var in each.outvars)
                self.each_part(each) if is_split else self.plain(each)
        elif eqn in self.solution.strategy_of or eqn in layers.regions:
            self.each_part(eqn)
        else:
            self.plain(eqn)

    def each_part(self, eqn: JaxprEqn) -> None:
        """Write an equation once per part."""
        for part in self.parts:
            part.equation(eqn)

    def plain(self, eqn: JaxprEqn) -> None:
        """Write an equation on whole values; bodies of loops get new variables."""
        outer = list(dict.fromkeys(inputs_of(eqn)))
        alone = make_jaxpr(outer, list(eqn.outvars), [eqn])
        results = self.eqns.substitute(alone, [self.value(a, eqn.source_info) for a in outer])
        self.whole.update(zip(eqn.outvars, results, strict=True))

    def single_part(self, eqn: JaxprEqn, part: int) -> None:
        """Write a slice that reads one part, or a pad whose operand lies in one part."""
        var, source, count = eqn.outvars[0], eqn.source_info, self.layers.count
        if eqn.primitive.name == "slice":
            rows = self.parts[part].value(eqn.invars[0], Split(0), source)
            self.whole[var] = self.eqns.call_one(slice_of_part(eqn, part, count), [rows], source)
            return
        operands = [self.value(a, source) for a in eqn.invars]
        made = [self.eqns.call_one(part_of_padded(eqn, part, k, count), operands, source) for k in range(count)]
        self.define(var, Split(0), made)

    def chain(self, scan: Region) -> None:
        """Write a scan over layers: the trips of each part, with carries from part to part in the order of the trips."""
        source, count = scan.eqn.source_info, self.layers.count
        consts = [self.value(b.operand, source) for b in scan.consts]
        carries = [self.value(b.operand, source) for b in scan.carries]
        xs = [self.in_parts(b.operand, Split(0), source) for b in scan.xs]
        for k in reversed(range(count)) if scan.eqn.params["reverse"] else range(count):
            operands = [*consts, *carries, *(x[k] for x in xs)]
            made = self.parts[k].trips(scan, operands)
            carries = made[: len(carries)]
            for b, stack in zip(scan.ys, made[len(carries) :], strict=True):
                self.parts[k].define(b.result, Split(0), stack)
        self.whole.update(zip((b.result for b in scan.carries), carries, strict=True))


class _Part(ShardWriter):
    """Writes one part; it reads whole values from the program of all parts."""

    def __init__(self, program: LayerWriter, programs: Programs, number: int, rows: dict[Atom, Atom]):
        axis, kind = programs.solution.axis, shaped(jax.ShapeDtypeStruct((), jnp.int32))
        units = units_of_shard(number, axis.count, axis.units)
        super().__init__(programs, Literal(np.int32(units.first), kind), units.size, program.eqns)
        self.program, self.rows = weakref.proxy(program), rows  # cycles are not freed while planning

    def outside(self, var: Var, want: Placement, source: SourceInfo | None) -> Atom:
        """Convert a value that is whole, or split otherwise."""
        return self.converted(var, self.program.value(var, source), want, source)

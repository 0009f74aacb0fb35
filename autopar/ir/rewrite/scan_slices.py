"""Turns `layers[i]`, read in trip i of a loop, into a scanned stack (`xs`), and its gradient into stacked results (`ys`).

In:     a flat program.
Out:    the same program. A `scan` of n trips that reads row i of a constant stack of n rows in trip i scans over the stack;
        so does one that reads its rows in blocks, as gradients are accumulated over `batch[i * size : (i + 1) * size]`.
        A carry to whose row i trip i adds something, as the gradient of such a stack, becomes a stack of the addends.
Method: the trip's number is a row of a scanned `iota`, or a carry from 0 in steps of 1. A stack of such numbers is an
        `iota` too; the backward pass reads and writes by it. Where a block begins is evaluated for every trip.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, new_var
from autopar.ir.build import Equations
from autopar.ir.dataflow import known_as, makers, reading, times_read
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Binding, Region, in_bodies, is_region, kind_of, region_of, rows_in, rows_out
from autopar.ir.rewrite.dead_code import remove_dead_code


def scan_slices(jaxpr: Jaxpr) -> Jaxpr:
    """Turn reads and sums by trip number into scanned and stacked rows."""
    if not any(is_region(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    return remove_dead_code(_body(jaxpr, KnownValues(jaxpr)))


def _body(jaxpr: Jaxpr, known: KnownValues) -> Jaxpr:
    same: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = in_bodies(reading(eqn, same), lambda body: _body(body, known))
        if kind_of(eqn) == "scan":
            scan = _Scan(region_of(eqn), known)
            eqns += scan.rewritten()
            same |= scan.passed
        else:
            eqns.append(eqn)
    return make_jaxpr(jaxpr.invars, [known_as(a, same) for a in jaxpr.outvars], eqns)


class _Run(NamedTuple):
    """Consecutive rows of a stack: so many, the same for each trip, from `first` on."""

    first: int
    per_trip: int


@dataclass
class _Scan:
    """One scan.

    Attributes:
        scan: The original.
        known: Tells which values count trips, and which are zeros.
        rows: For each run of rows of a constant of the body that is read block by block, the variable of the block.
        passed: For each result that is no longer the scan's, the value that replaces it outside.
    """

    scan: Region
    known: KnownValues
    rows: dict[tuple[Var, _Run], Var] = field(default_factory=dict)
    passed: dict[Var, Atom] = field(default_factory=dict)

    def rewritten(self) -> list[JaxprEqn]:
        """The new scan, and after it the additions of stacks to the initial values of the carries they replace."""
        body = self.with_rows(self.scan.bodies[0])
        return self.write(body, self.sums_of_rows(body))

    def with_rows(self, body: Jaxpr) -> Jaxpr:
        """The body with each slice by trip number replaced by a row variable."""
        stacks = {b.var: b.var for b in self.scan.consts}
        wide: dict[Var, Var] = {}
        same: dict[Var, Atom] = {}
        eqns = Equations()
        for eqn in body.eqns:
            eqn = reading(eqn, same)
            match eqn.primitive.name, eqn.invars, eqn.outvars:
                case "optimization_barrier", operands, results:
                    stacks |= {var: stacks[a] for a, var in zip(operands, results, strict=True) if _is_in(a, stacks)}
                case "dynamic_slice", [of, index, *_], [var] if _is_in(of, stacks) and (
                    run := self.run(of, index, eqn.params["slice_sizes"])
                ):
                    shape = var.aval.shape if run.per_trip > 1 else var.aval.shape[1:]
                    row = self.rows.setdefault((stacks[of], run), new_var(var.aval.update(shape=shape)))
                    same[var] = row
                    if run.per_trip == 1:
                        same[var] = eqns.call_one(lambda x: x[None], [row], eqn.source_info)
                        wide[same[var]] = row
                    continue
                case "squeeze" | "reshape", [of], [var] if _is_in(of, wide) and var.aval.shape == wide[of].aval.shape:
                    same[var] = wide[of]
                    continue
            eqns.append(eqn)
        return make_jaxpr(body.invars, [known_as(a, same) for a in body.outvars], eqns)

    def run(self, stack: Atom, index: Atom, taken: Sequence[int]) -> _Run | None:
        """The rows of which each trip reads the next block, by a slice at `index` of the sizes `taken`; None: it is not so."""
        if self.is_row(stack, index, taken):
            return _Run(0, 1)
        (length, *rest), (per_trip, *whole) = stack.aval.shape, taken
        if per_trip == 1 or rest != whole:
            return None
        starts = self.known.in_trips(index, self.scan)
        if starts is None or starts.shape != (self.scan.trips,):
            return None
        first = int(starts[0])
        in_turn = np.array_equal(starts, first + per_trip * np.arange(self.scan.trips))
        return _Run(first, per_trip) if in_turn and 0 <= first <= length - per_trip * self.scan.trips else None

    def is_row(self, stack: Atom, index: Atom, taken: Sequence[int]) -> bool:
        """Whether a slice of a stack at `index`, of the sizes `taken`, is the row of this trip."""
        length, *rest = stack.aval.shape
        return length == self.scan.trips and list(taken) == [1, *rest] and self.known.is_trip(index, self.scan)

    def are_zeros(self, atom: Atom) -> bool:
        """Whether all elements of a value are known to be 0."""
        return self.known.uniform_value(atom) == 0

    def sums_of_rows(self, body: Jaxpr) -> dict[int, Atom]:
        """For each carry whose only use is an addition to this trip's row, by number: the addend."""
        made_by, reads = makers(body.eqns), times_read(body.eqns, body.outvars)
        found: dict[int, Atom] = {}
        for k, (b, result) in enumerate(zip(self.scan.carries, body.outvars, strict=False)):
            inside = b.var
            adding = made_by.get(result) if isinstance(result, Var) else None
            if adding is None or adding.primitive.name not in ("add", "add_any") or inside not in adding.invars:
                continue
            added = adding.invars[1 - adding.invars.index(inside)]
            write = made_by.get(added) if isinstance(added, Var) else None
            if write is None or write.primitive.name != "dynamic_update_slice" or not self.are_zeros(write.invars[0]):
                continue
            alone = reads[inside] == reads[added] == reads[result] == 1
            if alone and self.is_row(inside, write.invars[2], write.invars[1].aval.shape):
                found[k] = write.invars[1]
        return found

    def write(self, body: Jaxpr, sums: Mapping[int, Atom]) -> list[JaxprEqn]:
        """The scan over rows, with `sums` as stacked results instead of carries."""
        scan, source, eqns = self.scan, self.scan.eqn.source_info, Equations(body.eqns)
        bindings: list[Binding] = list(scan.consts)
        before, after = Equations(), Equations()
        results = iter(body.outvars)
        for k, b in enumerate(scan.carries):
            b = replace(b, outputs=(next(results),))
            if k not in sums:
                bindings.append(b)
                continue
            row = eqns.call_one(lambda x: x[0], [sums[k]], source)
            stack = b.result
            if not self.are_zeros(b.operand):
                stack = new_var(b.var.aval)
                self.passed[b.result] = after.call_one(lax.add, [b.operand, stack], source)
            bindings.append(rows_out(row, stack))
        bindings += scan.xs
        stack_of: dict[Var, Atom] = {}
        for (stack, run), row in self.rows.items():
            outer = next(b.operand for b in scan.consts if b.var is stack)
            stack_of[row] = before.call_one(partial(_blocks, run, scan.trips), [outer], source)
        for b, result in zip(scan.ys, results, strict=True):
            if _is_in(result, stack_of):
                self.passed[b.result] = stack_of[result]
            else:
                bindings.append(replace(b, outputs=(result,)))
        bindings += [rows_in(outer, row) for row, outer in stack_of.items()]
        return [*before, scan.rebuild(bindings, [eqns]), *after]


def _blocks(run: _Run, trips: int, stack: jax.Array) -> jax.Array:
    """The rows of a run, each trip's in one row, if they are several."""
    if run.per_trip == 1:
        return stack
    rows = lax.slice_in_dim(stack, run.first, run.first + trips * run.per_trip)
    return rows.reshape(trips, run.per_trip, *stack.shape[1:])


def _is_in(atom: Atom | None, found: Container[Var]) -> bool:
    return isinstance(atom, Var) and atom in found

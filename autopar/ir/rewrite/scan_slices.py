"""Layers that a loop reads by number are layers that it scans over: `fori_loop(0, n, lambda i, x: f(layers[i], x), x)`.

In:     a flat program.
Out:    the same program, in which a `scan` over n trips that reads row i of a stack of n rows in trip i has the stack
        among what it is scanned over; and a sum to whose row i trip i adds something, as the gradient of such a stack is,
        is a stack of what the trips make.
Method: what counts the trips is an `iota` that is scanned, or a carry from 0 in steps of 1; a stack of such numbers is an
        `iota` again, by which the backward pass reads and writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, make_jaxpr, new_var
from autopar.ir.build import Equations
from autopar.ir.dataflow import known_as, reading, variables
from autopar.ir.region import Binding, Region, in_bodies, is_region, region_of, rows_in, rows_out
from autopar.ir.rewrite.dead_code import remove_dead_code


def scan_slices(jaxpr: Jaxpr) -> Jaxpr:
    """Scan over what loops read and write by the number of the trip."""
    if not any(is_region(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    return remove_dead_code(_body(jaxpr))


def _body(jaxpr: Jaxpr) -> Jaxpr:
    same: dict[Var, Atom] = {}
    numbers: set[Var] = set()
    zeros: set[Var] = set()
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = reading(eqn, same)
        match eqn.primitive.name:
            case "iota" if eqn.outvars[0].aval.ndim == 1 and _holds(eqn.outvars[0], eqn.outvars[0].aval.size):
                numbers.add(eqn.outvars[0])
            case "broadcast_in_dim" if _is_number(eqn.invars[0], 0):
                zeros.add(eqn.outvars[0])
            case "scan":
                scan = _Scan(region_of(eqn), numbers, zeros)
                eqns += scan.rewritten()
                same |= scan.passed
                numbers |= scan.stacked_numbers
                continue
        eqns.append(in_bodies(eqn, _body))
    return make_jaxpr(jaxpr.invars, [known_as(a, same) for a in jaxpr.outvars], eqns)


def _is_number(atom: Atom | None, number: int) -> bool:
    return isinstance(atom, Literal) and bool(atom.val == number)


@dataclass
class _Scan:
    """One scan.

    Attributes:
        scan: As it was.
        numbers: Values outside that count.
        zeros: Values outside that are zeros.
        counts: Values of the body that are the number of the trip.
        rows: For each constant that is read row by row, the variable of the row.
        passed: Results that are stacks of such rows, and the constants.
        stacked_numbers: Results that are stacks of the numbers of the trips.
    """

    scan: Region
    numbers: set[Var]
    zeros: set[Var]
    counts: set[Var] = field(default_factory=set)
    rows: dict[Var, Var] = field(default_factory=dict)
    passed: dict[Var, Atom] = field(default_factory=dict)
    stacked_numbers: set[Var] = field(default_factory=set)

    def rewritten(self) -> list[JaxprEqn]:
        """The scan, and behind it what adds its stacks to what its sums began with."""
        body = _body(self.scan.bodies[0])
        self.find_counts(body)
        body = self.with_rows(body)
        return self.write(body, self.sums_of_rows(body))

    def find_counts(self, body: Jaxpr) -> None:
        made_by = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        self.counts.update(b.var for b in self.scan.xs if _is_in(b.outer, self.numbers))
        for b, result in zip(self.scan.carries, body.outvars, strict=False):
            step = made_by.get(result) if isinstance(result, Var) else None
            from_zero = _is_number(b.outer, 0) and _holds(b.var, self.scan.trips)
            if from_zero and step is not None and not self.scan.eqn.params["reverse"]:
                if step.primitive.name == "add" and step.invars[0] is b.var and _is_number(step.invars[1], 1):
                    self.counts.add(b.var)
        negative: set[Var] = set()
        for eqn in body.eqns:
            match eqn.primitive.name, eqn.invars:
                case "convert_element_type", [of] if _is_in(of, self.counts):
                    if _holds(eqn.outvars[0], self.scan.trips):
                        self.counts.add(eqn.outvars[0])
                case "lt", [of, bound] if _is_in(of, self.counts) and _is_number(bound, 0):
                    negative.add(eqn.outvars[0])
                case "optimization_barrier", operands:
                    pairs = zip(operands, eqn.outvars, strict=True)
                    self.counts.update(var for of, var in pairs if _is_in(of, self.counts))
                case "select_n", [which, of, _] if _is_in(which, negative) and _is_in(of, self.counts):
                    self.counts.add(eqn.outvars[0])

    def with_rows(self, body: Jaxpr) -> Jaxpr:
        """The body, with variables for the rows that it reads by number."""
        stacks = {b.var: b.var for b in self.scan.consts}
        wide: dict[Var, Var] = {}
        same: dict[Var, Atom] = {}
        eqns = Equations()
        for eqn in body.eqns:
            eqn = reading(eqn, same)
            match eqn.primitive.name, eqn.invars, eqn.outvars:
                case "optimization_barrier", operands, results:
                    stacks |= {var: stacks[a] for a, var in zip(operands, results, strict=True) if _is_in(a, stacks)}
                case "dynamic_slice", [of, index, *_], [var] if _is_in(of, stacks) and self.is_row(
                    of, index, eqn.params["slice_sizes"]
                ):
                    row = self.rows.setdefault(stacks[of], new_var(of.aval.update(shape=of.aval.shape[1:])))
                    same[var] = eqns.call_one(lambda x: x[None], [row], eqn.source_info)
                    wide[same[var]] = row
                    continue
                case "squeeze" | "reshape", [of], [var] if _is_in(of, wide) and var.aval.shape == wide[of].aval.shape:
                    same[var] = wide[of]
                    continue
            eqns.append(eqn)
        return make_jaxpr(body.invars, [known_as(a, same) for a in body.outvars], eqns)

    def is_row(self, stack: Atom, index: Atom, taken: Sequence[int]) -> bool:
        """Whether so much of a stack, from this index on, is the row of the trip."""
        length, *rest = stack.aval.shape
        return length == self.scan.trips and list(taken) == [1, *rest] and _is_in(index, self.counts)

    def sums_of_rows(self, body: Jaxpr) -> dict[int, Atom]:
        """For each carry to whose row of the trip something is added and nothing else is done, what that is."""
        made_by = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        times_read = Counter(a for eqn in body.eqns for a in variables(eqn.invars)) + Counter(variables(body.outvars))
        zeros = {b.var for b in self.scan.consts if _is_in(b.outer, self.zeros)}
        zeros |= {
            eqn.outvars[0]
            for eqn in body.eqns
            if eqn.primitive.name == "broadcast_in_dim" and _is_number(eqn.invars[0], 0)
        }
        found: dict[int, Atom] = {}
        for k, (b, result) in enumerate(zip(self.scan.carries, body.outvars, strict=False)):
            inside = b.var
            adding = made_by.get(result) if isinstance(result, Var) else None
            if adding is None or adding.primitive.name not in ("add", "add_any") or inside not in adding.invars:
                continue
            added = adding.invars[1 - adding.invars.index(inside)]
            write = made_by.get(added) if isinstance(added, Var) else None
            if write is None or write.primitive.name != "dynamic_update_slice" or not _is_in(write.invars[0], zeros):
                continue
            alone = times_read[inside] == times_read[added] == times_read[result] == 1
            if alone and self.is_row(inside, write.invars[2], write.invars[1].aval.shape):
                found[k] = write.invars[1]
        return found

    def write(self, body: Jaxpr, sums: Mapping[int, Atom]) -> list[JaxprEqn]:
        scan, source, eqns = self.scan, self.scan.eqn.source_info, Equations(body.eqns)
        bindings: list[Binding] = list(scan.consts)
        after = Equations()
        results = iter(body.outvars)
        for k, b in enumerate(scan.carries):
            b = replace(b, inside=(next(results),))
            if k not in sums:
                bindings.append(b)
                continue
            row = eqns.call_one(lambda x: x[0], [sums[k]], source)
            stack = b.result
            if not _is_in(b.outer, self.zeros):
                stack = new_var(b.var.aval)
                self.passed[b.result] = after.call_one(lax.add, [b.outer, stack], source)
            bindings.append(rows_out(row, stack))
        bindings += scan.xs
        stack_of = {row: next(b.outer for b in scan.consts if b.var is stack) for stack, row in self.rows.items()}
        for b, result in zip(scan.ys, results, strict=True):
            if _is_in(result, self.counts):
                self.stacked_numbers.add(b.result)
            if _is_in(result, stack_of):
                self.passed[b.result] = stack_of[result]
            else:
                bindings.append(replace(b, inside=(result,)))
        bindings += [rows_in(outer, row) for row, outer in stack_of.items()]
        return [scan.rebuild(bindings, [eqns]), *after]


def _holds(var: Var, number: int) -> bool:
    """Whether a value is an integer that can be as large as that."""
    return jnp.issubdtype(var.aval.dtype, jnp.integer) and number <= jnp.iinfo(var.aval.dtype).max


def _is_in(atom: Atom | None, found: Container[Var]) -> bool:
    return isinstance(atom, Var) and atom in found

"""Puts a trip of a loop that adds up gradients back into the loop, where it is written out before or behind it.

In:     a flat program.
Out:    the same function. A loop that begins with the gradients of a first part of the batch, as in
        `fori_loop(1, n, add_gradients, gradients(first))`, or to whose sums those of a last part are added, makes that trip
        itself: it has one more, and begins with zeros. The sums are added in the same order.
Method: the body is written out for the trip before the first, or behind the last: numbers that count are continued, and so are
        rows of stacks. It is then compared with what stands in the program, operation by operation, back from the sums; a
        carry that goes on by itself, such as a random key, is whatever stands in its place (`unification.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import Atom, DropVar, Function, Jaxpr, JaxprEqn, Literal, Var, make_jaxpr, new_var, resized
from autopar.ir.build import Equations
from autopar.ir.dataflow import makers, needed, read_by, readers_of, variables
from autopar.ir.gradient import holds_backward
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Binding, Region, kind_of, region_of
from autopar.ir.rewrite.carried import Body
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rewrite.unification import Piece, piece_of, unified
from autopar.ir.split.rounds.steps import holds_steps, is_loop_of_steps
from autopar.ir.trace.fold import literal_of


def roll_in_peeled_trips(jaxpr: Jaxpr) -> Jaxpr:
    """Put first and last trips back into loops that add up gradients; over the same inputs and results."""
    while (rolled := _rolled_in(jaxpr)) is not None:
        jaxpr = rolled
    return jaxpr


def _rolled_in(jaxpr: Jaxpr) -> Jaxpr | None:
    """The program with one trip put back; None: there is none."""
    loops = [eqn for eqn in jaxpr.eqns if _adds_gradients(eqn)]
    if not loops:
        return None
    facts = makers(jaxpr.eqns), readers_of(jaxpr.eqns), KnownValues(jaxpr)
    tried = (_Peeled(jaxpr, region_of(eqn), behind, *facts) for eqn in loops for behind in (False, True))
    return next((rolled for peeled in tried if (rolled := peeled.rolled_in()) is not None), None)


def _adds_gradients(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan, from first row to last, that takes gradients, each at what it begins with."""
    if kind_of(eqn) != "scan" or eqn.effects or eqn.params["reverse"]:
        return False
    return holds_steps(eqn) and not is_loop_of_steps(eqn)


class _Longer(NamedTuple):
    """A stack with the row of one trip more: that row, a number or a piece of an array, and how the stack is made."""

    row: Literal | Piece
    function: Function
    operands: list[Atom]


class _Sum(NamedTuple):
    """A sum: what the body adds to it, what stands beside the loop for this, and the sum of all trips, this one too."""

    addend: Atom
    beside: Atom
    total: Var | None


@dataclass(frozen=True, slots=True)
class _Peeled:
    """A trip that may stand beside a loop.

    Attributes:
        jaxpr: The program.
        scan: The loop.
        behind: Whether it is the trip behind the loop's last; False: the one before its first.
        made_by: The program's equations, by result.
        readers: The equations that read each value.
        known: What is known of its values.
    """

    jaxpr: Jaxpr
    scan: Region
    behind: bool
    made_by: Mapping[Var, JaxprEqn]
    readers: Mapping[Var, Sequence[JaxprEqn]]
    known: KnownValues

    def rolled_in(self) -> Jaxpr | None:
        """The program without the trip, and with a loop that makes it; None: it does not stand there."""
        counts = {b: number for b in self.scan.carries if (number := self.next_number(b)) is not None}
        stacks = {b: stack for b in self.scan.xs if (stack := self.longer(b)) is not None}
        sums = self.sums(counts)
        if not sums or len(stacks) < len(self.scan.xs):
            return None
        others = {b: self.before(b) for b in self.scan.carries if b not in counts and b not in sums}
        rows = {b: stack.row if isinstance(stack.row, Literal) else new_var(b.var.aval) for b, stack in stacks.items()}

        eqns, known = Equations(), {**counts, **others, **rows}
        addends = self.written(eqns, known, [each.addend for each in sums.values()])
        pairs = list(zip(addends, (each.beside for each in sums.values()), strict=True))
        if not self.behind:
            after = self.written(eqns, known, [b.value for b in others])
            pairs += zip(after, (b.operand for b in others), strict=True)
        pieces = {rows[b]: stack.row for b, stack in stacks.items() if isinstance(stack.row, Piece)}
        stands_for = unified(pairs, {**self.made_by, **makers(eqns)}, others.values(), pieces)
        if stands_for is None:
            return None
        begins = {} if self.behind else {**counts, **{b: stands_for.get(var, b.operand) for b, var in others.items()}}
        return self.program(stacks, sums, begins, others, stands_for.values())

    def before(self, carry: Binding) -> Var:
        """A carry before this trip: behind the loop its result; before it whatever stands there."""
        is_result = self.behind and carry.result is not None and not isinstance(carry.result, DropVar)
        return carry.result if is_result else new_var(carry.var.aval)

    def written(self, eqns: Equations, known: Mapping[Binding, Atom], wanted: Sequence[Atom]) -> list[Atom]:
        """Append the equations of this trip; the wanted values. `known`: stacks' rows, and carries before the trip."""
        (body,) = self.scan.bodies
        entering = {b: b.operand for b in self.scan.consts} | dict(known)
        inputs = [entering.get(b, b.var) for b in self.scan.bindings if b.variables]
        return eqns.substitute(make_jaxpr(body.invars, wanted, body.eqns), inputs)

    # What the loop reads in one trip more.

    def next_number(self, carry: Binding) -> Literal | None:
        """What a carry that counts is in this trip; None: it does not count."""
        step = self.known.maker.get(carry.value) if isinstance(carry.value, Var) else None
        if step is None or step.primitive.name != "add" or step.invars[0] is not carry.var:
            return None
        first, by = carry.operand, step.invars[1]
        if not (isinstance(first, Literal) and isinstance(by, Literal)):
            return None
        return _integer(first.val + by.val * (self.scan.trips if self.behind else -1), carry.var)

    def longer(self, stack: Binding) -> _Longer | None:
        """A stack with the row of this trip; None: it is not known."""
        assert stack.operand is not None, "a stack is an operand"
        numbers = self.known.numbers(stack.operand) if stack.operand.aval.ndim == 1 else None
        if numbers is not None:
            return self.longer_count(numbers, stack.var)
        rows = piece_of(stack.operand, self.made_by)
        per_row, across = rows.size // rows.shape[0], math.prod(rows.of.aval.shape[1:])
        begin = rows.first - (0 if self.behind else per_row)
        end = begin + per_row + rows.size
        if begin < 0 or end > math.prod(rows.of.aval.shape) or not across or begin % across or end % across:
            return None

        def stacked(x: jax.Array) -> jax.Array:
            return lax.slice_in_dim(x, begin // across, end // across).reshape(rows.shape[0] + 1, *rows.shape[1:])

        return _Longer(Piece(rows.of, end - per_row if self.behind else begin, rows.shape[1:]), stacked, [rows.of])

    def longer_count(self, numbers: np.ndarray, row: Var) -> _Longer | None:
        """As `longer`, of a stack of numbers that count."""
        steps = set(np.diff(numbers).tolist())
        if len(steps) != 1:
            return None
        (step,), kind = steps, row.aval.dtype
        ends = numbers[0] - step, numbers[-1] + step
        first = numbers[0] if self.behind else ends[0]
        number = _integer(ends[self.behind], row)
        if number is None:
            return None
        return _Longer(number, lambda: lax.iota(kind, len(numbers) + 1) * kind.type(step) + kind.type(first), [])

    # The sums.

    def sums(self, counts: Collection[Binding]) -> dict[Binding, _Sum]:
        """The sums of the loop; none if nothing stands beside it for one of them."""
        body, found = Body(self.scan), dict[Binding, _Sum]()
        for b in self.scan.carries:
            addend = None if b in counts else body.addend(b.var, b.value)
            if addend is None:
                continue
            beside = self.added_to(b.result) if self.behind else (b.operand, b.result)
            if beside is None:
                return {}
            found[b] = _Sum(addend, *beside)
        return found

    def added_to(self, total: Var) -> tuple[Atom, Var] | None:
        """What is added to a result of the loop, and the sum, if nothing else reads it."""
        readers = self.readers.get(total, ())
        if len(readers) != 1 or total in self.jaxpr.outvars or readers[0].primitive.name not in ("add", "add_any"):
            return None
        a, b = readers[0].invars
        return None if a is b else (b if a is total else a, readers[0].outvars[0])

    # The program.

    def program(
        self,
        stacks: Mapping[Binding, _Longer],
        sums: Mapping[Binding, _Sum],
        begins: Mapping[Binding, Atom],
        others: Collection[Binding],
        peeled: Collection[Atom],
    ) -> Jaxpr | None:
        """The program with the longer loop; None: what the trip made is read elsewhere, too.

        `begins`: what carries begin with, but for sums. `peeled`: the values of the trip beside the loop.
        """
        scan, source, before, behind = self.scan, self.scan.eqn.source_info, Equations(), Equations()
        bindings = list(scan.consts)
        for b in scan.carries:
            if b in sums:
                zeros = partial(jnp.zeros, b.var.aval.shape, b.var.aval.dtype)
                operand = b.operand if self.behind else before.call_one(zeros, [], source)
                bindings.append(replace(b, operand=operand, result=sums[b].total))
            else:
                result = new_var(b.var.aval) if self.behind else b.result
                bindings.append(replace(b, operand=begins.get(b, b.operand), result=result))
        bindings += [replace(b, operand=before.call_one(s.function, s.operands, source)) for b, s in stacks.items()]
        for b in scan.ys:
            assert b.result is not None, "a stack is a result"
            longer = new_var(resized(b.result.aval, (scan.trips + 1, *b.result.aval.shape[1:])))
            own = slice(0, scan.trips) if self.behind else slice(1, None)
            behind.define(b.result, lambda x, own=own: x[own], [longer], source)
            bindings.append(replace(b, result=longer))
        (body,) = scan.bodies
        loop = [*before, scan.rebuild(bindings, [body.eqns], length=scan.trips + 1), *behind]
        dropped = {scan.eqn, *(self.made_by[each.total] for each in sums.values() if self.behind)}
        eqns = [e for eqn in self.jaxpr.eqns for e in (loop if eqn is scan.eqn else [eqn]) if e not in dropped]
        alive = needed(eqns, variables(self.jaxpr.outvars))
        left = {var for eqn in alive for var in eqn.outvars if holds_backward(eqn)}.intersection(variables(peeled))
        gone = {b.result for b in scan.carries if self.behind}
        if left or gone.intersection(read_by(alive, self.jaxpr.outvars)):
            return None
        return remove_dead_code(make_jaxpr(self.jaxpr.invars, self.jaxpr.outvars, eqns))


def _integer(number: float, like: Var) -> Literal | None:
    """A number as a literal of the type of a scalar; None: it is not such a number."""
    kind = like.aval.dtype
    if like.aval.shape or not jnp.issubdtype(kind, jnp.integer):
        return None
    limits = jnp.iinfo(kind)
    return literal_of(np.asarray(number), like.aval) if limits.min <= number <= limits.max else None

"""Takes a loop that adds up gradients apart, where it has as many trips as there are microbatches: each trip is one of them.

In:     a flat program, the number of microbatches.
Out:    the same function. A scan of so many trips that takes gradients in its body and carries only sums becomes its body over
        the rows of all trips at once; what the trips add is summed behind it.
Method: `jax.vmap`. A microbatch then holds one trip, whose forward and backward pass stand in the program, where stages may
        begin between any two layers and scans over layers may be cut; a loop around them would be one piece. Conditions and
        loops that end by themselves stay in their loop: for all trips at once they would be other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, eval_jaxpr, make_jaxpr
from autopar.ir.build import Equations, flat_function
from autopar.ir.dataflow import known_as, makers, reading, times_read, variables
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Region, equations_within, kind_of, region_of, trip_count
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.rounds.steps import holds_steps, is_loop_of_steps


def own_microbatches(jaxpr: Jaxpr) -> int:
    """The trips of a step's loop that adds up gradients, its own microbatches; 0: it has none."""
    loops = [eqn for eqn in jaxpr.eqns if trip_count(eqn) > 1 and _adds_gradients(eqn, trip_count(eqn))]
    known = KnownValues(jaxpr) if loops else None
    return next((trip_count(eqn) for eqn in loops if known and _sums(region_of(eqn), known) is not None), 0)


def trips_at_once(jaxpr: Jaxpr, count: int) -> Jaxpr:
    """Replace the loops of `count` trips that add up gradients; over the same inputs and results."""
    if not any(_adds_gradients(eqn, count) for eqn in jaxpr.eqns):
        return jaxpr
    known, eqns, same = KnownValues(jaxpr), Equations(), dict[Var, Atom]()
    for eqn in jaxpr.eqns:
        eqn = reading(eqn, same)
        sums = _sums(region_of(eqn), known) if _adds_gradients(eqn, count) else None
        results = None if sums is None else _at_once(eqns, region_of(eqn), sums)
        if results is None:
            eqns.append(eqn)
        else:
            same.update(zip(eqn.outvars, results, strict=True))
    return remove_dead_code(make_jaxpr(jaxpr.invars, [known_as(a, same) for a in jaxpr.outvars], eqns))


def _adds_gradients(eqn: JaxprEqn, count: int) -> bool:
    """Whether an equation is a scan of so many trips that takes gradients, each at what the loop begins with."""
    if trip_count(eqn) != count or kind_of(eqn) != "scan" or eqn.effects:
        return False
    if not holds_steps(eqn) or is_loop_of_steps(eqn):
        return False
    return all(kind_of(inner) not in ("cond", "while") for inner, _ in equations_within(region_of(eqn).bodies[0]))


@dataclass(frozen=True, slots=True)
class _Sum:
    """A carry that only grows: by `addend` in each trip; or, if that is known, by `step` from `first` on."""

    addend: Atom | None
    first: float = 0
    step: float = 0


def _sums(scan: Region, known: KnownValues) -> list[_Sum] | None:
    """The carries of a scan; None: one of them is no sum, or is read on its way."""
    body = _Body(scan.bodies[0])
    found: list[_Sum] = []
    for b in scan.carries:
        numbers = known.in_trips(b.var, scan)
        if numbers is not None and numbers.shape == (scan.trips,):
            found.append(_Sum(None, numbers[0].item(), (numbers[1] - numbers[0]).item()))
        elif b.value is b.var:
            found.append(_Sum(None))
        elif (addend := body.addend(b.var, b.value)) is not None:
            found.append(_Sum(addend))
        else:
            return None
    return found


class _Body:
    """Tells what a trip adds to a carry."""

    def __init__(self, body: Jaxpr):
        self.made_by = makers(body.eqns)
        self.times_read = times_read(body.eqns, body.outvars)

    def addend(self, before: Var, after: Atom) -> Atom | None:
        """What `after` is `before` plus, if nothing else reads either; else None."""
        total = self.plain(after)
        adding = self.made_by.get(total) if isinstance(total, Var) else None
        if adding is None or adding.primitive.name not in ("add", "add_any"):
            return None
        operands = [self.plain(a) for a in adding.invars]
        alone = all(self.times_read[var] == 1 for var in variables([before, total, after]))
        return adding.invars[1 - operands.index(before)] if alone and before in operands else None

    def plain(self, atom: Atom) -> Atom:
        """A value before conversions to its own dtype (a carry that began as a Python number has such), if it is read once."""
        while isinstance(atom, Var) and self.times_read[atom] == 1 and atom in self.made_by:
            eqn = self.made_by[atom]
            if eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype != atom.aval.dtype:
                break
            atom = eqn.invars[0]
        return atom


def _at_once(eqns: Equations, scan: Region, sums: Sequence[_Sum]) -> list[Atom] | None:
    """Append the body over all trips' rows; the loop's results. None: the body holds a function without `jax.vmap`."""
    operands = [b.operand for b in scan.bindings if b.operand is not None]
    try:
        flat = flat_function(partial(_all_trips, scan, sums), *(a.aval for a in operands))
    except NotImplementedError:
        return None
    return eqns.substitute(flat, operands)


def _all_trips(scan: Region, sums: Sequence[_Sum], *operands: jax.Array) -> list[jax.Array]:
    """The function of a loop's operands that gives its results."""
    (body,), carried = scan.bodies, len(sums)
    begin = len(scan.consts)
    consts, carries, stacks = operands[:begin], operands[begin : begin + carried], operands[begin + carried :]
    added = [total.addend for total in sums if total.addend is not None]
    alone = make_jaxpr(body.invars, [*added, *body.outvars[carried:]], body.eqns)
    counts = [
        total.first + total.step * jnp.arange(scan.trips, dtype=carry.dtype) if total.step else None
        for total, carry in zip(sums, carries, strict=True)
    ]

    def trip(rows: Sequence[jax.Array], numbers: Sequence[jax.Array | None]) -> list[jax.Array]:
        given = [carry if number is None else number for carry, number in zip(carries, numbers, strict=True)]
        return eval_jaxpr(alone, (), *consts, *given, *rows)

    made = jax.vmap(trip, axis_size=scan.trips)(list(stacks), counts)
    terms = iter(made)
    totals = [
        carry + total.step * scan.trips if total.addend is None else carry + next(terms).sum(0, dtype=carry.dtype)
        for total, carry in zip(sums, carries, strict=True)
    ]
    return [*totals, *terms]

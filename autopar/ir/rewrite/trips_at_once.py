"""Takes a loop that adds up gradients apart, where it has as many trips as there are microbatches: each trip is one of them.

In:     a flat program, the number of microbatches.
Out:    the same function. A scan of so many trips that takes gradients in its body and adds them up becomes its body over the
        rows of all trips at once; what the trips add is summed behind it.
Method: `jax.vmap`. A microbatch then holds one trip, whose forward and backward pass stand in the program, where stages may
        begin between any two layers and scans over layers may be cut; a loop around them would be one piece. What goes on
        from trip to trip by itself, as a random key that each trip splits, is made by a loop before; what no gradient waits
        for, as a largest loss or running statistics, by a loop behind. Conditions and loops that end by themselves stay in
        their loop: for all trips at once they would be other programs. Small conditions on the trip's number, such as whether
        it is the first, become choices (`choices.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, eval_jaxpr, make_jaxpr
from autopar.ir.build import Equations, flat_function
from autopar.ir.dataflow import (
    known_as,
    needed,
    read_by,
    reading,
    variables,
)
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Binding, Region, equations_within, kind_of, region_of, trip_count
from autopar.ir.rewrite.carried import Ahead, Behind, Carry, Count, Sum, WeightedSum, carries_of, done_behind
from autopar.ir.rewrite.choices import with_choices
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.rounds.steps import holds_steps, is_loop_of_steps

_Values = dict[Var, jax.Array]


def own_microbatches(jaxpr: Jaxpr) -> int:
    """The trips of a step's loop that adds up gradients, its own microbatches; 0: it has none."""
    loops = [eqn for eqn in jaxpr.eqns if trip_count(eqn) > 1 and _takes_gradients(eqn)]
    known = KnownValues(jaxpr) if loops else None
    return next((trip_count(eqn) for eqn in loops if known and _sums_of(eqn, known) is not None), 0)


def trips_at_once(jaxpr: Jaxpr, count: int) -> Jaxpr:
    """Replace the loops of `count` trips that add up gradients; over the same inputs and results."""
    if not any(trip_count(eqn) == count and _takes_gradients(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    known, eqns, same = KnownValues(jaxpr), Equations(), dict[Var, Atom]()
    for eqn in jaxpr.eqns:
        eqn = reading(eqn, same)
        found = _sums_of(eqn, known) if trip_count(eqn) == count and _takes_gradients(eqn) else None
        results = None if found is None else _at_once(eqns, *found)
        if results is None:
            eqns.append(eqn)
        else:
            same.update(zip(eqn.outvars, results, strict=True))
    return remove_dead_code(make_jaxpr(jaxpr.invars, [known_as(a, same) for a in jaxpr.outvars], eqns))


def _takes_gradients(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan that takes gradients, each at what the loop begins with."""
    return kind_of(eqn) == "scan" and not eqn.effects and holds_steps(eqn) and not is_loop_of_steps(eqn)


def _sums_of(eqn: JaxprEqn, known: KnownValues) -> tuple[Region, list[Carry]] | None:
    """A scan and what its carries are, if its body can be written for all trips at once; else None."""
    scan = region_of(with_choices(eqn, known))
    if any(kind_of(inner) in ("cond", "while") for inner, _ in equations_within(scan.bodies[0])):
        return None
    carries = carries_of(scan, known)
    return None if carries is None else (scan, carries)


def _at_once(eqns: Equations, scan: Region, carries: Sequence[Carry]) -> list[Atom] | None:
    """Append the body over all trips' rows; the loop's results. None: the body holds a function without `jax.vmap`."""
    operands = [b.operand for b in scan.bindings if b.operand is not None]
    try:
        flat = flat_function(partial(_all_trips, scan, carries), *(a.aval for a in operands))
    except NotImplementedError:
        return None
    return eqns.substitute(flat, operands)


def _all_trips(scan: Region, carries: Sequence[Carry], *operands: jax.Array) -> list[jax.Array]:
    """The function of a loop's operands that gives its results."""
    eqns, found = scan.bodies[0].eqns, dict(zip(scan.carries, carries, strict=True))
    known: _Values = dict(zip((b.var for b in scan.bindings if b.operand is not None), operands, strict=True))
    ends = {b.var: known[b.var] for b in scan.carries}
    rows = {b.var: known.pop(b.var) for b in scan.xs}
    for b, carry in found.items():
        if isinstance(carry, Count) and carry.step:
            ends[b.var] = known.pop(b.var) + carry.step * scan.trips
            rows[b.var] = carry.first + carry.step * jnp.arange(scan.trips, dtype=b.var.aval.dtype)
    known |= {b.var: jnp.zeros_like(ends[b.var]) for b, carry in found.items() if isinstance(carry, WeightedSum)}
    ahead, behind = ([b for b, carry in found.items() if isinstance(carry, kind)] for kind in (Ahead, Behind))
    late = done_behind(scan, behind)

    ended, before = _loop(scan, eqns, ahead, [b.var for b in ahead], known, rows)
    ends |= ended
    rows |= zip((b.var for b in ahead), before, strict=True)

    kept = [var for var in late.read if var not in known and var not in rows]
    stacks = [b for b in scan.ys if b not in late.stacks]
    addends = {b.var: carry.addend for b, carry in found.items() if isinstance(carry, Sum)}
    weighted = {b: carry for b, carry in found.items() if isinstance(carry, WeightedSum)}
    made = iter(
        _vmapped(
            scan, [*addends.values(), *(b.value for b in weighted), *kept, *(b.value for b in stacks)], known, rows
        )
    )
    ends |= {var: ends[var] + next(made).sum(0, dtype=ends[var].dtype) for var in addends}
    ends |= {b.var: _weighted(carry, ends[b.var], next(made)) for b, carry in weighted.items()}
    rows |= {var: next(made) for var in kept}
    stacked = {b: next(made) for b in stacks}

    ended, later = _loop(scan, late.eqns, behind, [b.value for b in late.stacks], known, rows)
    ends |= ended
    stacked |= zip(late.stacks, later, strict=True)
    return [*(ends[b.var] for b in scan.carries), *(stacked[b] for b in scan.ys)]


def _weighted(carry: WeightedSum, begun: jax.Array, made: jax.Array) -> jax.Array:
    """A weighted sum of what the loop begins with and of what its trips made."""
    if any(weight != 1 for weight in carry.weights):
        kind = jnp.promote_types(made.dtype, jnp.float32)
        weights = lax.concatenate([lax.full((1,), weight, kind) for weight in carry.weights], 0)
        made = made * lax.broadcast_in_dim(weights, made.shape, (0,))
    total = made.sum(0).astype(begun.dtype)
    return total + begun * jnp.asarray(carry.begin, begun.dtype) if carry.begin else total


def _vmapped(scan: Region, wanted: Sequence[Atom], known: _Values, rows: _Values) -> list[jax.Array]:
    """The wanted values of all trips."""
    part = _part(scan.bodies[0].eqns, wanted, {**known, **rows})
    over = [var for var in part.invars if var in rows]

    def trip(*row: jax.Array) -> list[jax.Array]:
        return _values(part, {**known, **dict(zip(over, row, strict=True))})

    return jax.vmap(trip, axis_size=scan.trips)(*(rows[var] for var in over))


def _loop(
    scan: Region,
    eqns: Sequence[JaxprEqn],
    carries: Sequence[Binding],
    wanted: Sequence[Atom],
    known: _Values,
    rows: _Values,
) -> tuple[_Values, list[jax.Array]]:
    """Go through the trips with some carries alone: what these end with, and stacks of the wanted values."""
    if not carries:
        return {}, []
    names = [b.var for b in carries]
    part = _part(eqns, [*(b.value for b in carries), *wanted], {**known, **rows})
    over = [var for var in part.invars if var in rows]

    def trip(values: list[jax.Array], row: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        made = _values(part, {**known, **dict(zip(over, row, strict=True)), **dict(zip(names, values, strict=True))})
        return made[: len(names)], made[len(names) :]

    begun, stacks = [known[var] for var in names], [rows[var] for var in over]
    ended, made = lax.scan(trip, begun, stacks, scan.trips, reverse=scan.eqn.params["reverse"])
    return dict(zip(names, ended, strict=True)), made


def _part(eqns: Sequence[JaxprEqn], wanted: Sequence[Atom], given: Collection[Var]) -> Jaxpr:
    """The program of the wanted values of a body, over those given that it reads."""
    taken = needed(eqns, variables(wanted), effects=False, given=given)
    return make_jaxpr([var for var in read_by(taken, wanted) if var in given], wanted, taken)


def _values(part: Jaxpr, known: _Values) -> list[jax.Array]:
    return eval_jaxpr(part, (), *(known[var] for var in part.invars))

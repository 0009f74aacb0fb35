"""Unrolls loops of training steps.

In:     a flat program, and the most trips to unroll.
Out:    the same function. A scan whose trips take gradients at parameters that earlier trips have updated is unrolled, with
        such scans in its body (epochs of minibatches). A scan that accumulates gradients stays: its trips are the user's
        own microbatches.
Method: each trip reads its rows of the scanned stacks, and the carries of the trip before; rows that trips make are stacked
        after the last one. Pipeline stages then run their microbatches once per trip (`split/rounds/stage_phases.py`).
        Loops with more trips, or an unknown number of them, stay.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, Var, make_jaxpr
from autopar.ir.build import Equations
from autopar.ir.dataflow import known_as, reading
from autopar.ir.region import Region, Role, region_of, trip_count
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.rounds.steps import is_loop_of_steps


def unroll_steps(jaxpr: Jaxpr, most: int) -> Jaxpr:
    """Unroll the loops of training steps, if they have `most` trips or fewer in all; otherwise the program itself."""
    turns = _num_trips(jaxpr)
    return _unrolled(jaxpr) if 0 < turns <= most else jaxpr


def _num_trips(jaxpr: Jaxpr) -> int:
    """Trips of all loops of training steps; those of an inner loop count once per trip of the outer."""
    return sum(
        trip_count(eqn) * max(1, _num_trips(region_of(eqn).bodies[0])) for eqn in jaxpr.eqns if is_loop_of_steps(eqn)
    )


def _unrolled(jaxpr: Jaxpr) -> Jaxpr:
    eqns = Equations()
    made: dict[Var, Atom] = {}
    for eqn in jaxpr.eqns:
        eqn = reading(eqn, made)
        if is_loop_of_steps(eqn):
            made.update(zip(eqn.outvars, _append_trips(eqns, region_of(eqn)), strict=True))
        else:
            eqns.append(eqn)
    return remove_dead_code(make_jaxpr(jaxpr.invars, [known_as(a, made) for a in jaxpr.outvars], eqns))


def _append_trips(eqns: Equations, scan: Region) -> list[Atom]:
    """Append the trips of a scan; its results."""
    (body,), source = scan.bodies, scan.eqn.source_info
    body = _unrolled(body)
    consts, carried, stacks = (_outer(scan, role) for role in ("const", "carry", "xs"))
    rows: list[list[Atom]] = []
    order = range(scan.trips)
    for turn in reversed(order) if scan.eqn.params["reverse"] else order:
        row = partial(lax.index_in_dim, index=turn, keepdims=False)
        read = [eqns.call_one(row, [stack], source) for stack in stacks]
        made = eqns.substitute(body, [*consts, *carried, *read])
        carried = made[: len(carried)]
        rows.append(made[len(carried) :])
    if scan.eqn.params["reverse"]:
        rows.reverse()
    stacked = (eqns.call_one(lambda *rows: jnp.stack(rows), of_turns, source) for of_turns in zip(*rows, strict=True))
    return [*carried, *stacked]


def _outer(scan: Region, role: Role) -> list[Atom]:
    return [b.operand for b in scan.of_role(role) if b.operand is not None]

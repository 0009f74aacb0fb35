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

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, replace_eqn
from autopar.ir.build import Equations
from autopar.ir.dataflow import descendants, inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.region import Region, Role, bodies_of, equations_within, region_of, trip_count
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.rounds.turns import holds_steps


def unroll_steps(jaxpr: Jaxpr, most: int) -> Jaxpr:
    """Unroll the loops of training steps, if they have `most` trips or fewer in all; otherwise the program itself."""
    turns = _num_trips(jaxpr)
    return _unrolled(jaxpr) if 0 < turns <= most else jaxpr


def _num_trips(jaxpr: Jaxpr) -> int:
    """Trips of all loops of training steps; those of an inner loop count once per trip of the outer."""
    return sum(
        trip_count(eqn) * max(1, _num_trips(region_of(eqn).bodies[0])) for eqn in jaxpr.eqns if _is_loop_of_steps(eqn)
    )


def _is_loop_of_steps(eqn: JaxprEqn) -> bool:
    is_scan = eqn.primitive.name == "scan" and not eqn.effects
    return is_scan and holds_steps(eqn) and _goes_on_with_gradients(region_of(eqn))


def _goes_on_with_gradients(scan: Region) -> bool:
    """Whether a trip takes gradients that depend on those of earlier trips; with a mere sum of gradients it does not."""
    (body,), carried = scan.bodies, list(scan.of_role("carry"))
    moved: dict[Var, None] = {}
    while True:  # a carry may depend on gradients through another carry
        behind = descendants(body.eqns, _takes_gradients, moved)
        more = [b.inner[0] for b in carried if b.inside[0] in behind]
        if len(more) == len(moved):
            break
        moved = dict.fromkeys(filter(None, more))
    led = descendants(body.eqns, given=moved)
    return any(_takes_gradients(eqn) and any(a in led for a in inputs_of(eqn)) for eqn in body.eqns)


def _takes_gradients(eqn: JaxprEqn) -> bool:
    return is_backward(eqn) or any(is_backward(inner) for body in bodies_of(eqn) for inner, _ in equations_within(body))


def _unrolled(jaxpr: Jaxpr) -> Jaxpr:
    eqns = Equations()
    made: dict[Var, Atom] = {}

    def now(atoms: Sequence[Atom]) -> list[Atom]:
        return [made.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

    for eqn in jaxpr.eqns:
        eqn = replace_eqn(eqn, invars=now(eqn.invars))
        if _is_loop_of_steps(eqn):
            made.update(zip(eqn.outvars, _append_trips(eqns, region_of(eqn)), strict=True))
        else:
            eqns.append(eqn)
    return remove_dead_code(make_jaxpr(jaxpr.invars, now(jaxpr.outvars), eqns))


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
    return [b.outer for b in scan.of_role(role) if b.outer is not None]

"""Loops of training steps, written out: each turn stands in the program by itself.

In:     a flat program, and how many turns are written out at most.
Out:    the same function. A scan whose turns take gradients and go on with what these have moved is its turns, one after the
        other, and so are such scans in its turns (epochs of minibatches). One that adds up gradients stays: its turns are
        microbatches of the user's.
Method: a turn reads its rows of what the scan goes over, and what the turn before carries; rows that turns make are stacked
        behind the last one. Stages then go through their microbatches once for each turn (`split/stage_phases.py`). Loops
        whose turns are more than that, or are not known, stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, replace_eqn
from autopar.ir.build import Equations
from autopar.ir.dataflow import descendants, inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.region import Region, Role, bodies_of, equations_within, region_of, trip_count
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.split.rounds.turns import holds_steps


def write_out_steps(jaxpr: Jaxpr, most: int) -> Jaxpr:
    """The program with its loops of training steps written out, if all of them are `most` turns or fewer; or itself."""
    turns = _num_turns(jaxpr)
    return _written_out(jaxpr) if 0 < turns <= most else jaxpr


def _num_turns(jaxpr: Jaxpr) -> int:
    """Of all loops of training steps, those of their turns counted each time."""
    return sum(
        trip_count(eqn) * max(1, _num_turns(region_of(eqn).bodies[0])) for eqn in jaxpr.eqns if _is_loop_of_steps(eqn)
    )


def _is_loop_of_steps(eqn: JaxprEqn) -> bool:
    is_scan = eqn.primitive.name == "scan" and not eqn.effects
    return is_scan and holds_steps(eqn) and _goes_on_with_gradients(region_of(eqn))


def _goes_on_with_gradients(scan: Region) -> bool:
    """Whether a turn takes gradients where those of turns before have led: a sum of gradients leads to none."""
    (body,), carried = scan.bodies, list(scan.of_role("carry"))
    moved: dict[Var, None] = {}
    while True:  # what is carried may move another that is carried
        behind = descendants(body.eqns, _takes_gradients, moved)
        more = [b.inner[0] for b in carried if b.inside[0] in behind]
        if len(more) == len(moved):
            break
        moved = dict.fromkeys(filter(None, more))
    led = descendants(body.eqns, given=moved)
    return any(_takes_gradients(eqn) and any(a in led for a in inputs_of(eqn)) for eqn in body.eqns)


def _takes_gradients(eqn: JaxprEqn) -> bool:
    return is_backward(eqn) or any(is_backward(inner) for body in bodies_of(eqn) for inner, _ in equations_within(body))


def _written_out(jaxpr: Jaxpr) -> Jaxpr:
    eqns = Equations()
    made: dict[Var, Atom] = {}

    def now(atoms: Sequence[Atom]) -> list[Atom]:
        return [made.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]

    for eqn in jaxpr.eqns:
        eqn = replace_eqn(eqn, invars=now(eqn.invars))
        if _is_loop_of_steps(eqn):
            made.update(zip(eqn.outvars, _turns(eqns, region_of(eqn)), strict=True))
        else:
            eqns.append(eqn)
    return remove_dead_code(make_jaxpr(jaxpr.invars, now(jaxpr.outvars), eqns))


def _turns(eqns: Equations, scan: Region) -> list[Atom]:
    """Write the turns of a scan; its results."""
    (body,), source = scan.bodies, scan.eqn.source_info
    body = _written_out(body)
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
    return [*carried, *(eqns.call_one(_stacked, of_turns, source) for of_turns in zip(*rows, strict=True))]


def _outer(scan: Region, role: Role) -> list[Atom]:
    return [b.outer for b in scan.of_role(role) if b.outer is not None]


def _stacked(*rows: jax.Array) -> jax.Array:
    return jnp.stack(rows)

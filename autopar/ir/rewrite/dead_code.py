"""Removes dead code, inside loops and branches too.

In:     a flat jaxpr.
Out:    the same program without equations, loop carries, scanned inputs, stacked outputs and barrier operands that
        nothing reads. Unread results of an equation that stays become `DropVar`.
Method: one walk backwards per body; a region's binding is alive if its result is, or if a body needs it for a live
        binding (fixed point).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import compress

from autopar._jax import Atom, DropVar, Jaxpr, JaxprEqn, Var, make_jaxpr, replace_eqn
from autopar.ir.region import Binding, is_region, region_of


def remove_dead_code(jaxpr: Jaxpr, keep_inputs: int | None = None) -> Jaxpr:
    """Remove what no result and no effect needs; the variables stay.

    `keep_inputs`: how many of the first invars stay even if nothing reads them; None: all.
    """
    eqns, alive = _trim(jaxpr, jaxpr.outvars)
    keep_inputs = len(jaxpr.invars) if keep_inputs is None else keep_inputs
    invars = [var for i, var in enumerate(jaxpr.invars) if i < keep_inputs or var in alive]
    return make_jaxpr(invars, jaxpr.outvars, eqns)


def with_equations(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """Replace the program's equations and remove dead code; the same object if the equations are its own."""
    if len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))


def _trim(jaxpr: Jaxpr, wanted: Iterable[Atom]) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations needed for the wanted outputs, and all live variables."""
    alive = {atom for atom in wanted if isinstance(atom, Var)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        results = [var in alive for var in eqn.outvars]
        if not any(results) and not eqn.effects:
            continue
        kept = eqn
        if is_region(eqn):
            kept = _region(eqn, results)
        elif not all(results):
            kept = replace_eqn(eqn, outvars=list(map(_dropped, eqn.outvars, results)))
        alive.update(atom for atom in kept.invars if isinstance(atom, Var))
        eqns.append(kept)
    return eqns[::-1], alive


def _dropped(var: Var, wanted: bool) -> Var:
    return var if wanted else DropVar(var.aval)


def _region(eqn: JaxprEqn, wanted: Sequence[bool]) -> JaxprEqn:
    region = region_of(eqn)
    is_wanted = dict(zip(eqn.outvars, wanted, strict=True))
    alive = [b.role == "test" or is_wanted.get(b.result, False) for b in region.bindings]
    while True:
        trimmed = [
            _trim(body, compress(body.outvars, region.leaving(k, alive))) for k, body in enumerate(region.bodies)
        ]
        needed = {var for body, (_, needs) in zip(region.bodies, trimmed, strict=True) for var in needs}
        grown = [a or any(var in needed for var in b.variables) for a, b in zip(alive, region.bindings, strict=True)]
        if grown == alive:
            break
        alive = grown

    def kept(b: Binding) -> Binding:
        return b if b.result is None else replace(b, result=_dropped(b.result, is_wanted[b.result]))

    return region.rebuild([kept(b) for b in compress(region.bindings, alive)], [eqns for eqns, _ in trimmed])

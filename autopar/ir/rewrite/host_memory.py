"""Removes copies to the host's memory and back, for steps in which nothing can lie there yet (on Ray, as results).

In:     a flat program.
Out:    the same program with everything in the devices' memory.
Method: what such a copy makes is its operand; types say no more of the host.
"""

from __future__ import annotations

from autopar._jax import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Var,
    copies_to_or_from_host,
    make_jaxpr,
    new_var,
    on_device,
    on_host,
    replace_eqn,
)
from autopar.ir.dataflow import known_as
from autopar.ir.region import equations_within, in_bodies


def uses_host_memory(jaxpr: Jaxpr) -> bool:
    """Whether a program copies something to the host's memory, or from there."""
    return any(copies_to_or_from_host(eqn) for eqn, _ in equations_within(jaxpr))


def keep_on_device(jaxpr: Jaxpr) -> Jaxpr:
    """The program without copies to the host's memory or from there; inputs that lie on the host are other variables."""
    if not uses_host_memory(jaxpr) and not any(on_host(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars)):
        return jaxpr
    env: dict[Var, Atom] = {}
    invars = [_moved(var, env) for var in jaxpr.invars]
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands = [known_as(atom, env) for atom in eqn.invars]
        if copies_to_or_from_host(eqn):
            env.update(zip(eqn.outvars, operands, strict=True))
            continue
        results = [_moved(var, env) for var in eqn.outvars]
        eqns.append(replace_eqn(in_bodies(eqn, keep_on_device), invars=operands, outvars=results))
    return make_jaxpr(invars, [known_as(atom, env) for atom in jaxpr.outvars], eqns)


def _moved(var: Var, env: dict[Var, Atom]) -> Var:
    if not on_host(var.aval):
        return var
    moved = env[var] = new_var(on_device(var.aval))
    return moved

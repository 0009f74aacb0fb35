"""Finds values that readers can recompute for free, and so are never stored: views of arguments, and constant arrays.

In:     a flat program.
Out:    by result, the equations that only reshape arguments, and those that fill an array with one number or a count.
"""

from __future__ import annotations

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import inputs_of
from autopar.ir.work import num_elements_of

_RESHAPING = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")


def views_of_arguments(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """The equations that reshape an argument, or a view of one, by result."""
    found: dict[Var, JaxprEqn] = {}
    arguments = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _RESHAPING and len(inputs_of(eqn)) == 1 == len(eqn.invars):
            (atom,), (var,) = eqn.invars, eqn.outvars
            if (atom in arguments or atom in found) and num_elements_of(atom) == num_elements_of(var):
                found[var] = eqn
    return found


def arrays_of_numbers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """The equations that fill an array with one number or an `iota`, by result."""
    names = ("broadcast_in_dim", "iota")
    return {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name in names and not inputs_of(eqn)}

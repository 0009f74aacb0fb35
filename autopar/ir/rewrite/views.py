"""Arguments in another shape: the same bytes, so that whoever reads them can make them anew and nothing is held twice.

In:     a flat program.
Out:    the equations that only reshape arguments, by what they make; those that make arrays of numbers alone.
"""

from __future__ import annotations

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import inputs_of
from autopar.ir.work import num_elements_of

_RESHAPING = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")


def views_of_arguments(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """Equations that make another shape of an argument, or of such a one."""
    found: dict[Var, JaxprEqn] = {}
    arguments = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _RESHAPING and len(inputs_of(eqn)) == 1 == len(eqn.invars):
            (atom,), (var,) = eqn.invars, eqn.outvars
            if (atom in arguments or atom in found) and num_elements_of(atom) == num_elements_of(var):
                found[var] = eqn
    return found


def arrays_of_numbers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """Equations that make an array of one number or of counts, by what they make."""
    names = ("broadcast_in_dim", "iota")
    return {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name in names and not inputs_of(eqn)}

"""Tells whether two programs are equal up to the names of their variables.

In:     a flat program.
Out:    `canonical_key(jaxpr)`: hashable, equal for programs with the same dataflow graph.
Method: variables are numbered in order of appearance, in bodies of loops and branches too. Source lines do not count;
        whether an equation is of the backward pass does, since plans treat it differently.
"""

from __future__ import annotations

from collections.abc import Hashable

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.gradient import is_backward
from autopar.ir.region import is_region, region_of
from autopar.ir.signature import equation_signature


def canonical_key(jaxpr: Jaxpr) -> Hashable:
    """A hashable key, equal for programs that differ only in the names of variables."""
    return _key(jaxpr, {})


def _key(jaxpr: Jaxpr, number: dict[Var, int]) -> Hashable:
    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", str(atom.val), str(atom.aval)
        return number.setdefault(atom, len(number))

    inputs = tuple((name(var), tuple(var.aval.shape), str(var.aval.dtype)) for var in jaxpr.invars)
    eqns = tuple(
        (_what(eqn, number), tuple(map(name, eqn.invars)), tuple(map(name, eqn.outvars)), is_backward(eqn))
        for eqn in jaxpr.eqns
    )
    return inputs, eqns, tuple(map(name, jaxpr.outvars))


def _what(eqn: JaxprEqn, number: dict[Var, int]) -> Hashable:
    if not is_region(eqn):
        return equation_signature(eqn)
    region, reverse = region_of(eqn), eqn.params.get("reverse", False)
    roles = tuple(b.role for b in region.bindings)
    return region.kind, region.trips, reverse, roles, tuple(_key(body, number) for body in region.bodies)

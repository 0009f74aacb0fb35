"""Finds values that readers make anew instead of storing them: views of arguments, copies of those in host memory, constants.

In:     a flat program.
Out:    by result, the equations that only reshape arguments, and those that fill an array with one number or a count; the
        equations that copy arguments from host memory, and compute something no larger from such a copy alone.
"""

from __future__ import annotations

from autopar._jax import Jaxpr, JaxprEqn, Var, copies_to_or_from_host, on_host
from autopar.ir.dataflow import inputs_of
from autopar.ir.region import is_region
from autopar.ir.work import EqualRules, num_elements_of

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


def is_derived(eqn: JaxprEqn, rules: EqualRules) -> bool:
    """Whether an equation computes, element by element or by moving elements, something no larger than an operand."""
    if is_region(eqn) or eqn.effects or any(on_host(v.aval) for v in eqn.outvars):
        return False
    rule, made = rules.of(eqn), sum(map(num_elements_of, eqn.outvars))
    return rule.flops <= made <= max(map(num_elements_of, inputs_of(eqn)), default=0) and not (
        rule.summed or rule.reduced
    )


def copies_of_arguments(jaxpr: Jaxpr) -> dict[JaxprEqn, None]:
    """The equations that copy arguments from host memory, and those that derive values from one such copy alone."""
    found, rules = dict[JaxprEqn, None](), EqualRules()
    arguments, derived = {var for var in jaxpr.invars if on_host(var.aval)}, dict[Var, None]()
    for eqn in jaxpr.eqns if arguments else ():
        read = inputs_of(eqn)
        copies = copies_to_or_from_host(eqn) and arguments.issuperset(read)
        if copies or (len(read) == 1 and read[0] in derived and is_derived(eqn, rules)):
            found[eqn] = None
            derived.update(dict.fromkeys(eqn.outvars))
    return found

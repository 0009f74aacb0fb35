"""Merges equal operations that derive a value from one array: casts, reshapes, transposes and the like, written twice.

In:     a flat program, in which `weight.astype(dtype)` may stand once per reader.
Out:    the same function: each value is derived once per body, loops and branches included.
Method: what compilers do by themselves (common subexpressions), made visible to the planner: copies of one value would be
        sharded and gathered each on its own, and counted as often. What stands behind a barrier, as recomputed layers do,
        has other operands, and stays; so do results of the program. Pipelines keep copies, which may be of several stages.
"""

from __future__ import annotations

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import inputs_of, reading, variables
from autopar.ir.region import in_bodies, is_region
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rewrite.views import is_derived
from autopar.ir.signature import ValueNumbers
from autopar.ir.work import EqualRules


def merge_duplicates(jaxpr: Jaxpr) -> Jaxpr:
    """Derive equal values once; over the same inputs and results. The same object if nothing is derived twice."""
    return _merged(jaxpr, EqualRules())


def _merged(jaxpr: Jaxpr, rules: EqualRules) -> Jaxpr:
    numbers, names, results = ValueNumbers(), dict[Var, Atom](), set(variables(jaxpr.outvars))
    eqns: list[JaxprEqn] = []
    for eqn in (reading(each, names) for each in jaxpr.eqns):
        if is_region(eqn):
            eqns.append(in_bodies(eqn, lambda body: _merged(body, rules)))
            continue
        first = numbers.visit(eqn) if len(inputs_of(eqn)) == 1 else None
        if first is not None and results.isdisjoint(eqn.outvars) and is_derived(eqn, rules):
            names.update(zip(eqn.outvars, first.outvars, strict=True))
        else:
            eqns.append(eqn)
    return with_equations(jaxpr, eqns)

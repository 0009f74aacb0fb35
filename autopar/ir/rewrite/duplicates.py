"""Merges equal operations that derive a value from one argument: casts, reshapes, transposes and the like, written twice.

In:     a flat program, in which `weight.astype(dtype)` may stand once per reader.
Out:    the same function: each value is derived once per body, loops and branches included.
Method: what compilers do by themselves (common subexpressions), made visible to the planner: copies of one weight would be
        sharded and gathered each on its own, and counted as often. What is computed from samples stays, and what is copied
        from host memory: one copy would be held from its first reader to its last. So does what stands behind a barrier,
        as recomputed layers do, which has other operands, and what the program returns. Pipelines keep copies, which may be
        of several stages.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, copies_to_or_from_host
from autopar.ir.dataflow import inputs_of, reading, variables
from autopar.ir.region import in_bodies, is_region, region_of
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rewrite.views import is_derived
from autopar.ir.signature import ValueNumbers
from autopar.ir.work import EqualRules


def merge_duplicates(jaxpr: Jaxpr) -> Jaxpr:
    """Derive equal values of arguments once; over the same inputs and results. The same object if nothing is derived twice."""
    return _merged(jaxpr, dict.fromkeys(jaxpr.invars), EqualRules())


def _merged(jaxpr: Jaxpr, arguments: dict[Var, None], rules: EqualRules) -> Jaxpr:
    """`arguments`: those of the step, and rows of them, that the body reads; what is derived from them is added."""
    numbers, names, results = ValueNumbers(), dict[Var, Atom](), set(variables(jaxpr.outvars))
    eqns: list[JaxprEqn] = []
    for eqn in (reading(each, names) for each in jaxpr.eqns):
        first = None
        if is_region(eqn):
            read = [b for b in region_of(eqn).of_role("const", "xs") if arguments.keys() & variables([b.operand])]
            inside = dict.fromkeys(var for b in read for var in b.variables)
            eqn = in_bodies(eqn, partial(_merged, arguments=inside, rules=rules))
        elif _is_of_argument(eqn, arguments) and is_derived(eqn, rules):
            arguments.update(dict.fromkeys(eqn.outvars))
            first = numbers.visit(eqn)
        if first is not None and results.isdisjoint(eqn.outvars):
            names.update(zip(eqn.outvars, first.outvars, strict=True))
        else:
            eqns.append(eqn)
    return with_equations(jaxpr, eqns)


def _is_of_argument(eqn: JaxprEqn, arguments: Collection[Var]) -> bool:
    operands = inputs_of(eqn)
    return len(operands) == 1 and operands[0] in arguments and not copies_to_or_from_host(eqn)

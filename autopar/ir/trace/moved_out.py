"""Restores the name scopes of equations that JAX hoisted out of a loop.

In:     a flat program. JAX hoists loop-invariant equations to before their `scan`, and drops the scope of the scan: for a
        loss that takes gradients of its own in a loop, "jvp()/transpose(jvp())" becomes "transpose(jvp())", as if the
        backward pass had begun there.
Out:    the same program, with the scope of the scan on these equations.
Method: hoisted equations directly precede the scan, and only each other, the scan, and its backward loops read them.
"""

from __future__ import annotations

from itertools import pairwise

from autopar._jax import Jaxpr, JaxprEqn, new_source_info, replace_eqn
from autopar.ir.dataflow import readers_of, variables
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of
from autopar.ir.rewrite.dead_code import with_equations


def restore_scopes(jaxpr: Jaxpr) -> Jaxpr:
    """Give equations hoisted out of forward loops the scope of their loop."""
    if not any(is_backward(a) and not is_backward(b) for a, b in pairwise(jaxpr.eqns)):
        return jaxpr
    readers, results = readers_of(jaxpr.eqns), set(variables(jaxpr.outvars))
    eqns = list(jaxpr.eqns)
    for at, scan in enumerate(jaxpr.eqns):
        if not _is_forward_loop(scan):
            continue
        moved = {scan}
        for k in range(at - 1, -1, -1):
            eqn = jaxpr.eqns[k]
            read_by = [reader for var in eqn.outvars for reader in readers.get(var, ())]
            if not results.isdisjoint(eqn.outvars) or not all(_is_of_loop(reader, moved) for reader in read_by):
                break
            moved.add(eqn)
            if is_backward(eqn):
                source = eqn.source_info
                scope = scan.source_info.name_stack + source.name_stack
                eqns[k] = replace_eqn(eqn, source_info=new_source_info(source.traceback, scope))
    return with_equations(jaxpr, eqns)


def _is_forward_loop(eqn: JaxprEqn) -> bool:
    return kind_of(eqn) == "scan" and not is_backward(eqn) and "jvp(" in str(eqn.source_info.name_stack)


def _is_of_loop(reader: JaxprEqn, moved: set[JaxprEqn]) -> bool:
    return reader in moved or (kind_of(reader) == "scan" and is_backward(reader))

"""Counts the FLOPs of a Pallas kernel, and of other operations with a program inside.

In:     a `pallas_call`.
Out:    `kernel_flops`: the author's `cost_estimate`, else the FLOPs of its body times the steps of the grid.
Method: the rules of the operations in the body, which are JAX's own; loads and stores count nothing. A loop of unknown length
        is assumed to go once over the buffers that it loads from, which bounds its trips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar._jax import Jaxpr, JaxprEqn, bodies_in, open_jaxpr
from autopar.ir.rules.kernel_access import is_buffer
from autopar.ir.rules.registry import has_rule, rule_for
from autopar.ir.rules.rule import num_elements


def kernel_flops(eqn: JaxprEqn) -> float:
    """FLOPs of the whole kernel, on one device."""
    cost = eqn.params.get("cost_estimate")
    if cost is not None:
        return float(cost.flops)
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    steps = math.prod(length for length in grid if isinstance(length, int))
    return steps * body_flops(open_jaxpr(eqn.params["jaxpr"])[0])


def body_flops(body: Jaxpr) -> float:
    """FLOPs of a program, without operations that have no rule."""
    total = 0.0
    for eqn in body.eqns:
        inside = [body_flops(inner) for inner in bodies_in(eqn)]
        if eqn.primitive.name == "cond":
            total += max(inside, default=0.0)
        elif inside:
            total += _trips(eqn) * sum(inside)
        elif has_rule(eqn.primitive) and all(hasattr(var.aval, "shape") for var in (*eqn.invars, *eqn.outvars)):
            total += rule_for(eqn).flops
    return total


def _trips(eqn: JaxprEqn) -> int:
    """The most times that the body of an equation runs."""
    match eqn.primitive.name:
        case "scan":
            return int(eqn.params["length"])
        case "while":
            return max((parts for body in bodies_in(eqn) for parts in _loads(body)), default=1)
    return 1


def _loads(body: Jaxpr) -> Iterator[int]:
    """For each load, how many such loads cover its buffer."""
    for eqn in body.eqns:
        if eqn.invars and is_buffer(eqn.invars[0]) and eqn.outvars:
            buffer, part = (getattr(var.aval, "shape", ()) for var in (eqn.invars[0], eqn.outvars[0]))
            yield num_elements(buffer) // max(num_elements(part), 1)
        for inner in bodies_in(eqn):
            yield from _loads(inner)

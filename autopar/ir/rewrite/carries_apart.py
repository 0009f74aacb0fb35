"""Takes carries that only samples make out of loops that read parameters.

In:     a flat program, and which of its inputs are the batch.
Out:    the same function. A loss in chunks of a vocabulary or sequence, whose loop also adds up the mask, becomes two loops.
        The sum of the mask is then computed up front, as if it were written beside the loop; in one loop with the loss,
        backward passes would wait for all forward passes.
Method: a carry moves with all carries that its next value is made of, if none of them reads a parameter and if they are
        little of the loop's work, and only if the backward pass waits for it. What both loops read is computed in both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Var, new_var
from autopar.ir.build import rebuilt_apart
from autopar.ir.dataflow import descendants, needed, read_by, variables
from autopar.ir.gradient import feeds_backward
from autopar.ir.region import Binding, Region, kind_of, region_of
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.work import Work
from autopar.tuning import TUNING


def take_carries_apart(jaxpr: Jaxpr, batch: Collection[int]) -> Jaxpr:
    """Give carries that depend on the batch alone loops of their own; inputs and results stay the same.

    `batch`: numbers of the inputs that are the batch.
    """
    if not any(kind_of(eqn) == "scan" for eqn in jaxpr.eqns):
        return jaxpr
    samples = descendants(jaxpr.eqns, given=[jaxpr.invars[k] for k in batch])
    trained = descendants(
        jaxpr.eqns, given=[var for k, var in enumerate(jaxpr.invars) if k not in batch and _is_numbers(var)]
    )
    waits = [eqn for eqn, waited in zip(jaxpr.eqns, feeds_backward(jaxpr), strict=True) if waited]
    awaited, work = read_by(waits), Work()
    pieces = [
        _apart(region_of(eqn), samples, trained, awaited, work)
        if kind_of(eqn) == "scan" and not eqn.effects and any(var in trained for var in eqn.outvars)
        else [eqn]
        for eqn in jaxpr.eqns
    ]
    return with_equations(jaxpr, [eqn for eqns in pieces for eqn in eqns])


def _is_numbers(var: Var) -> bool:
    """Whether a value is an array of floating-point numbers: a parameter, if it is no sample."""
    return bool(var.aval.ndim) and jnp.issubdtype(var.aval.dtype, jnp.floating)


def _apart(
    scan: Region, samples: Collection[Var], trained: Collection[Var], awaited: Collection[Var], work: Work
) -> list[JaxprEqn]:
    """A scan, or a scan of the carries that only samples make, and one of the rest."""
    of_samples, of_parameters = _within(scan, samples), _within(scan, trained)
    moved = [
        b
        for b in scan.carries
        if b.result in awaited and b.var not in of_parameters
        if isinstance(b.value, Var) and b.value in of_samples and b.value not in of_parameters
    ]
    kept = [b for b in scan.bindings if b.result is not None and b not in moved]
    if not moved or not kept:
        return [scan.eqn]
    small, large = (_part(scan, results) for results in (moved, kept))
    costs = [sum(work.of_equations(eqns)) for _, eqns in (small, large)]
    if costs[0] > TUNING.hoisted_work * costs[1]:
        return [scan.eqn]
    return [rebuilt_apart(scan, bindings, [eqns]) for bindings, eqns in (small, large)]


def _within(scan: Region, outside: Collection[Var]) -> Collection[Var]:
    """Values of a scan's body that depend on values outside of it, in any trip."""
    given = [b.var for b in scan.bindings if isinstance(b.operand, Var) and b.operand in outside]
    while True:
        found = descendants(scan.bodies[0].eqns, given=given)
        more = [b.var for b in scan.carries if isinstance(b.value, Var) and b.value in found and b.var not in found]
        if not more:
            return found
        given += more


def _part(scan: Region, results: Sequence[Binding]) -> tuple[list[Binding], list[JaxprEqn]]:
    """The bindings and equations of a scan that makes only these results."""
    carries = [b for b in results if b.role == "carry"]
    while True:
        eqns = needed(scan.bodies[0].eqns, variables(b.value for b in (*carries, *results)), effects=False)
        read = read_by(eqns, [b.value for b in (*carries, *results)])
        more = [b for b in scan.carries if b.var in read and b not in carries]
        if not more:
            break
        carries += more
    kept = [b for b in scan.bindings if (b in carries or b in results if b.values else b.var in read)]
    made = set(results)
    return [b if b in made else _unread(b) for b in kept], eqns


def _unread(b: Binding) -> Binding:
    """A binding whose result, if it has one, another loop makes."""
    return b if b.result is None else replace(b, result=new_var(b.result.aval))

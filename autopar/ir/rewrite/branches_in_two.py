"""A branch that takes a gradient and uses it is split behind its backward pass.

In:     a flat program, in which a `cond` holds a backward pass and what waits for it: a network that is trained in every n-th
        step only. (Where gradients are differentiated again, as for curvature, none of it is told from a forward pass.)
Out:    the same function; such a `cond` is two on the same index: one up to the gradients, one from there on.
Method: as `whole_batch.py` tells the update from the loop. What the second half of one branch reads of its first half, the
        other branches hand over as zeros. Microbatches then add up gradients in the first, and run the second once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Var, close_jaxpr, make_jaxpr, new_var, replace_eqn
from autopar.ir.build import inline_function, renamed
from autopar.ir.dataflow import feeds_backward, inputs_of, variables
from autopar.ir.region import bodies_of, kind_of
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.source import is_backward


def branches_in_two(jaxpr: Jaxpr) -> Jaxpr:
    """The program with such conditions split; over the same inputs and results."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += _in_two(eqn) if kind_of(eqn) == "cond" and not eqn.effects and not is_backward(eqn) else [eqn]
    return jaxpr if len(eqns) == len(jaxpr.eqns) else remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))


def _in_two(eqn: JaxprEqn) -> list[JaxprEqn]:
    index, *operands = eqn.invars
    branches = bodies_of(eqn)
    halves = [_halves(branch) for branch in branches]
    if not any(second for _, second in halves):
        return [eqn]
    handed = [_read_of(first, second, branch) for branch, (first, second) in zip(branches, halves, strict=True)]
    passed = [var for own in handed for var in own]
    firsts = [
        _first(branch, first, passed, set(own), eqn.source_info)
        for branch, (first, _), own in zip(branches, halves, handed, strict=True)
    ]
    seconds = [
        _second(branch, second, passed, set(own))
        for branch, (_, second), own in zip(branches, halves, handed, strict=True)
    ]
    between = [new_var(var.aval) for var in passed]
    params = [{**eqn.params, "branches": tuple(map(close_jaxpr, bodies))} for bodies in (firsts, seconds)]
    return [
        replace_eqn(eqn, invars=[index, *operands], outvars=between, params=params[0]),
        replace_eqn(eqn, invars=[index, *operands, *between], params=params[1]),
    ]


def _halves(branch: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Equations up to the gradients, and those that read them for something else."""
    first, second = [], []
    behind: dict[Var, None] = {}
    for eqn, matters in zip(branch.eqns, feeds_backward(branch), strict=True):
        if not matters and any(a in behind for a in inputs_of(eqn)):
            second.append(eqn)
            behind.update(dict.fromkeys(eqn.outvars))
        else:
            first.append(eqn)
            if is_backward(eqn):
                behind.update(dict.fromkeys(eqn.outvars))
    return first, second


def _read_of(first: Sequence[JaxprEqn], second: Sequence[JaxprEqn], branch: Jaxpr) -> list[Var]:
    """What the first half makes for the second, and for the branch's results."""
    made = {var for eqn in first for var in eqn.outvars}
    read = [*(a for eqn in second for a in inputs_of(eqn)), *variables(branch.outvars)]
    return [var for var in dict.fromkeys(read) if var in made]


def _first(branch: Jaxpr, eqns: Sequence[JaxprEqn], passed: Sequence[Var], own: set[Var], source: Any) -> Jaxpr:
    made, results = list(eqns), []
    for var in passed:
        if var in own:
            results.append(var)
            continue
        zeros, (result,) = inline_function(lambda aval=var.aval: jnp.zeros(aval.shape, aval.dtype), [], source)
        made += zeros
        results.append(result)
    return renamed(make_jaxpr(branch.invars, results, made))


def _second(branch: Jaxpr, eqns: Sequence[JaxprEqn], passed: Sequence[Var], own: set[Var]) -> Jaxpr:
    arriving = [var if var in own else new_var(var.aval) for var in passed]
    return renamed(make_jaxpr([*branch.invars, *arriving], branch.outvars, eqns))

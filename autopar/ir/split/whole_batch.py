"""A step in the same three phases as `microbatch.py`, with the whole batch as its only microbatch.

In:     a flat program and its batch inputs.
Out:    `Microbatches` of count 1: before, what depends on no sample and samples wait for; the loop, forward and backward;
        after, what needs gradients and is no gradient.
Method: data flow and the name stacks of `jax.grad`; a step without a backward pass is all loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import jax
import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr, new_var, shaped
from autopar.ir.build import Equations
from autopar.ir.dataflow import feeds_backward, inputs_of, variables
from autopar.ir.rewrite.views import views_of_arguments
from autopar.ir.source import is_backward
from autopar.ir.split.microbatch import Microbatches, Result, for_the_loop
from autopar.ir.split.placement import BY_EACH


def whole_batch(jaxpr: Jaxpr, batch: Sequence[int]) -> Microbatches:
    """The phases of a step that is not split.

    Args:
        jaxpr: Flat program.
        batch: Inputs whose leading dim runs over samples.
    """
    of_samples: dict[Var, None] = {jaxpr.invars[k]: None for k in batch}
    after_backward: dict[Var, None] = {}
    waits = feeds_backward(jaxpr)
    before, loop, after = [], [], []
    for eqn, matters in zip(jaxpr.eqns, waits, strict=True):
        operands = inputs_of(eqn)
        if any(a in after_backward for a in operands) and not matters:
            after.append(eqn)
            after_backward.update(dict.fromkeys(eqn.outvars))
        elif any(a in of_samples for a in operands):
            loop.append(eqn)
            of_samples.update(dict.fromkeys(eqn.outvars))
            if is_backward(eqn):
                after_backward.update(dict.fromkeys(eqn.outvars))
        else:
            before.append(eqn)
    made = {var for eqn in loop for var in eqn.outvars}
    outer = [*(a for eqn in after for a in inputs_of(eqn)), *variables(jaxpr.outvars)]
    results = [var for var in dict.fromkeys(outer) if var in made]
    # What is an argument in another shape, or numbers in the shape of an array, is made where it is read.
    views = views_of_arguments(jaxpr)
    is_light = [any(var in views for var in eqn.outvars) or _is_of_numbers(eqn) for eqn in before]
    loop = _with_views(loop, list(compress(before, is_light)))
    made = {var for eqn in loop for var in eqn.outvars}
    read = dict.fromkeys(a for eqn in loop for a in inputs_of(eqn) if a not in made)
    pieces = [var for var in read if var in {jaxpr.invars[k] for k in batch}]
    invariants = [var for var in read if var not in pieces]
    number = new_var(shaped(jax.ShapeDtypeStruct((), jnp.int32)))
    inside = [new_var(var.aval) for var in (*invariants, *pieces)]
    eqns = Equations()
    outvars = eqns.substitute(make_jaxpr([*invariants, *pieces], results, loop), inside)
    early, after = for_the_loop(jaxpr, before, after, invariants)
    return Microbatches(
        1,
        tuple(early),
        make_jaxpr([number, *inside], outvars, eqns),
        tuple(invariants),
        tuple(pieces),
        tuple(Result(var, BY_EACH) for var in results),
        tuple(after),
    )


def _is_of_numbers(eqn: JaxprEqn) -> bool:
    """Whether an operation makes an array of numbers alone."""
    return eqn.primitive.name in ("broadcast_in_dim", "iota") and not inputs_of(eqn)


def _with_views(loop: Sequence[JaxprEqn], views: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations of the loop, each of the light ones right before the first that reads it: so it is of the same layer."""
    maker = {var: eqn for eqn in views for var in eqn.outvars}
    found: dict[JaxprEqn, None] = {}

    def make(eqn: JaxprEqn) -> None:
        for operand in inputs_of(eqn):
            if operand in maker and maker[operand] not in found:
                make(maker[operand])
        found[eqn] = None

    for eqn in loop:
        make(eqn)
    return list(found)

"""Joins: copies of what the forward passes of all microbatches make together, which the backward passes wait for.

In:     a flat program, and the values in it that are not complete before every microbatch has made its part.
Out:    the program with a copy of each such value that the forward pass makes and the backward pass reads: the backward pass
        reads the copy.
Method: the loss of a mixture of experts multiplies two means over the batch, so that the gradient of one sample needs the sums
        of all; a contrastive loss needs what all samples have. No forward pass does: a pipeline whose forward passes all come
        first has them in time. The copy is where the phases (`phases.py`) end the one half of a microbatch, and begin the
        other; what is made of copies alone, and of forward values that wait, is made between them. Where that is a head with a
        batch norm, its backward pass is made there, too, and reads copies of what it needs of single samples, such as labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr, new_var
from autopar.ir.build import Equations
from autopar.ir.dataflow import ancestors, inputs_of, known_as, makers, reading
from autopar.ir.gradient import is_behind, made_behind
from autopar.ir.split.placement import Split
from autopar.ir.split.solution import LoopSolution


def with_joins(jaxpr: Jaxpr, wanted: Iterable[Var]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program whose backward pass reads copies of some values, and these copies; itself, if it reads none of them.

    `wanted`: values of it; those that the backward pass makes itself stay as they are.
    """
    behind = made_behind(jaxpr)
    forward = {var: None for var in wanted if var not in behind}
    readers = [eqn for eqn in jaxpr.eqns if is_behind(eqn, behind)]
    copies = {a: new_var(a.aval) for eqn in readers for a in inputs_of(eqn) if a in forward}
    inputs = {var: None for var in jaxpr.invars if var in copies}
    eqns, joins = Equations(), list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        if is_behind(eqn, behind):
            for var in [a for a in dict.fromkeys(inputs_of(eqn)) if a in inputs]:
                joins.append(eqns.name(copies[var], var))
                del inputs[var]
            eqn = reading(eqn, copies)
        eqns.append(eqn)
        joins += [eqns.name(copies[var], var, eqn.source_info) for var in eqn.outvars if var in copies]
    return (make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns), joins) if joins else (jaxpr, [])


def with_rounds(jaxpr: Jaxpr, sums: Iterable[Var]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program in which whatever reads some sums reads copies of them, and these copies; itself, if nothing does.

    `sums`: what a backward pass makes of all samples, such as gradients by which parameters are moved before the next forward
    pass: what is made of the copies is made between these passes.
    """
    wanted = dict.fromkeys(sums)
    copies = {a: new_var(a.aval) for eqn in jaxpr.eqns for a in inputs_of(eqn) if a in wanted}
    eqns, joins = Equations(), list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        eqns.append(reading(eqn, copies))
        joins += [eqns.name(copies[var], var, eqn.source_info) for var in eqn.outvars if var in copies]
    outvars = [known_as(a, copies) for a in jaxpr.outvars]
    return (make_jaxpr(jaxpr.invars, outvars, eqns), joins) if joins else (jaxpr, [])


def samples_behind(jaxpr: Jaxpr, wanted: Sequence[Var], solution: LoopSolution) -> list[Var]:
    """What single samples have, of the forward pass or the batch, and the backward pass makes values of.

    `wanted`: such values: sums, or what all samples have.
    """
    behind, maker = made_behind(jaxpr), makers(jaxpr.eqns)
    made_of = {var: inputs_of(maker[var]) for var in behind}
    seen = ancestors([var for var in wanted if var in behind], lambda var: made_of.get(var, ()))
    return [var for var in seen if var not in behind and isinstance(solution.of(var), Split)]

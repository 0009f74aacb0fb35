"""Joins: copies of joint results of all forward passes, for which the backward passes wait.

In:     a flat program, and the values in it that are known only after the last microbatch.
Out:    the program in which the backward pass reads copies of such values of the forward pass.
Method: the loss of a mixture of experts multiplies two means over the batch, so that the gradient of one sample needs sums over
        all; a contrastive loss needs every sample's embedding. No forward pass needs these, so a pipeline that runs all
        forward passes first has them in time. A copy marks where the phases (`phases.py`) end the forward half of a
        microbatch and begin its backward half; equations on copies, and on forward values that wait, run in between. Where
        these are a head with batch normalization, its backward pass runs there, too, and reads copies of what it needs of
        single samples, such as labels.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr, new_var
from autopar.ir.build import Equations
from autopar.ir.dataflow import ancestors, inputs_of, known_as, makers, reading
from autopar.ir.gradient import is_of_backward, made_by_backward
from autopar.ir.split.placement import Split
from autopar.ir.split.solution import LoopSolution


def with_joins(jaxpr: Jaxpr, wanted: Iterable[Var]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program whose backward pass reads copies of wanted values, and the copying equations; itself, if it reads none.

    `wanted`: values of the program; those that the backward pass makes are left out.
    """
    later = made_by_backward(jaxpr)
    readers = {eqn for eqn in jaxpr.eqns if is_of_backward(eqn, later)}
    return _with_copies(jaxpr, {var for var in wanted if var not in later}, readers)


def with_rounds(
    jaxpr: Jaxpr, values: Iterable[Var], readers: Container[JaxprEqn] | None = None
) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program in which the readers of some values read copies, and the copying equations; itself, if nothing reads them.

    Args:
        values: Joint results of a pass, such as gradients by which parameters move before the next forward pass: equations
            on the copies run between these passes. Arguments among them are there before any pass.
        readers: The equations that read copies; None: all, and what the program returns is copied, too.
    """
    made = makers(jaxpr.eqns)
    better, joins = _with_copies(
        jaxpr, {var for var in values if var in made}, set(jaxpr.eqns) if readers is None else readers
    )
    copies = {join.invars[0]: join.outvars[0] for join in joins} if readers is None else {}
    outvars = [known_as(a, copies) for a in jaxpr.outvars]
    return (make_jaxpr(jaxpr.invars, outvars, better.eqns) if joins else jaxpr), joins


def _with_copies(jaxpr: Jaxpr, wanted: Container[Var], readers: Container[JaxprEqn]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program in which `readers` read copies of wanted values, and the copying equations.

    A value is copied where it is made, an input before it is first read.
    """
    copies = {a: new_var(a.aval) for eqn in jaxpr.eqns if eqn in readers for a in inputs_of(eqn) if a in wanted}
    inputs = copies.keys() & set(jaxpr.invars)
    eqns, joins = Equations(), list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        if eqn in readers:
            first = [var for var in dict.fromkeys(inputs_of(eqn)) if var in inputs]
            joins += [eqns.name(copies[var], var) for var in first]
            inputs.difference_update(first)
            eqn = reading(eqn, copies)
        eqns.append(eqn)
        joins += [eqns.name(copies[var], var, eqn.source_info) for var in eqn.outvars if var in copies]
    return (make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns) if joins else jaxpr), joins


def samples_of_backward(jaxpr: Jaxpr, wanted: Sequence[Var], solution: LoopSolution) -> list[Var]:
    """Split values of the forward pass, or of the batch, on which wanted values of the backward pass depend."""
    later, maker = made_by_backward(jaxpr), makers(jaxpr.eqns)
    made_of = {var: inputs_of(maker[var]) for var in later}
    seen = ancestors([var for var in wanted if var in later], lambda var: made_of.get(var, ()))
    return [var for var in seen if var not in later and isinstance(solution.of(var), Split)]

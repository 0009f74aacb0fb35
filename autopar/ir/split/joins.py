"""Joins: what the forward passes of all microbatches make together, and the backward passes wait for.

In:     a flat program, and the values in it that are not complete before every microbatch has made its part.
Out:    the program with a copy of each such value that the forward pass makes and the backward pass reads: the backward pass
        reads the copy.
Method: the loss of a mixture of experts multiplies two means over the batch, so that the gradient of one sample needs the sums
        of all; a contrastive loss needs what all samples have. No forward pass does: a pipeline whose forward passes all come
        first has them in time. The copy is where the phases (`phases.py`) end the one half of a microbatch, and begin the
        other; what is made of copies alone, and of forward values that wait, is made between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr, new_eqn, new_var, primitives
from autopar.ir.dataflow import inputs_of, reading
from autopar.ir.source import is_backward
from autopar.ir.trace.inline_calls import is_recomputed


def with_joins(jaxpr: Jaxpr, incomplete: Iterable[Var]) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program whose backward pass reads copies of incomplete values, and these copies; itself, if it reads none."""
    behind = made_behind(jaxpr)
    copies: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []
    open_values = dict.fromkeys(incomplete)
    made: dict[Var, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        if is_behind(eqn, behind):
            for var in inputs_of(eqn):
                if var in made and var not in copies:
                    copies[var] = new_var(var.aval)
            eqn = reading(eqn, copies)
        else:
            made.update((var, eqn) for var in eqn.outvars if var in open_values)
        eqns.append(eqn)
    of_maker: dict[JaxprEqn, list[JaxprEqn]] = {}
    for var, copy in copies.items():
        joined = new_eqn(primitives.copy_p, [var], [copy], {}, source_info=made[var].source_info)
        of_maker.setdefault(made[var], []).append(joined)
    joins = [eqn for group in of_maker.values() for eqn in group]
    if not joins:
        return jaxpr, []
    return make_jaxpr(jaxpr.invars, jaxpr.outvars, [e for eqn in eqns for e in (eqn, *of_maker.get(eqn, ()))]), joins


def made_behind(jaxpr: Jaxpr) -> dict[Var, None]:
    """What the backward passes make, and whatever is made of that."""
    behind: dict[Var, None] = {}
    for eqn in jaxpr.eqns:
        if is_behind(eqn, behind):
            behind.update(dict.fromkeys(eqn.outvars))
    return behind


def is_behind(eqn: JaxprEqn, behind: Collection[Var]) -> bool:
    """Whether an equation is of the backward passes, or reads what is made behind."""
    return is_backward(eqn) or is_recomputed(eqn) or any(a in behind for a in inputs_of(eqn))

"""Drawn samples: values with a row per sample that a step makes of nothing, so that the batch does not lead to them.

In:     a flat program and the inputs that are its batch.
Out:    each such value, and its dim that runs over samples: noise for a generator, which the batch never meets; points at
        which a penalty is taken.
Method: what is made of counters (random bits, places on a grid), integers and scalars alone, as far as parameters or samples
        read it, is drawn; it may be samples if it has as many rows as the batch. The placement of a whole value may always be
        a part of it, so what comes of such a choice is exact or refused. Callers therefore make it only where much work would
        else be done on all rows at once, and keep it if less is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import descendants, inputs_of, read_by
from autopar.ir.split.placement import Batch, sample_dims
from autopar.ir.work import Work
from autopar.tuning import TUNING


def drawn_samples(jaxpr: Jaxpr, batch: Batch) -> dict[Var, int]:
    """Values that are drawn and may be samples -> the dim that would run over them."""
    made = descendants(jaxpr.eqns, begins=lambda eqn: not eqn.invars)
    given = [var for k, var in enumerate(jaxpr.invars) if k in batch or _holds_numbers(var)]
    computed = descendants(jaxpr.eqns, given=given)
    shapes = {(dim, jaxpr.invars[k].aval.shape[dim]): None for k, dim in sample_dims(batch).items()}
    found: dict[Var, int] = {}
    for var in read_by(eqn for eqn in jaxpr.eqns if any(out in computed for out in eqn.outvars)):
        if var in made and var not in computed:
            found.update((var, dim) for dim, size in shapes if var.aval.shape[dim : dim + 1] == (size,))
    return found


def _holds_numbers(var: Var) -> bool:
    return bool(var.aval.ndim) and jnp.issubdtype(var.aval.dtype, jnp.inexact)


def drawn_at_once(jaxpr: Jaxpr, batch: Batch, outside: Iterable[Sequence[JaxprEqn]]) -> dict[Var, int]:
    """The drawn samples of a program, if much work on them is done on all rows at once; else none.

    `outside`: the equations that run on all samples at once, of each round.
    """
    drawn = drawn_samples(jaxpr, batch)
    at_once = sum(work_on_drawn(eqns, drawn) for eqns in outside)
    if not at_once or at_once <= TUNING.hoisted_work * sum(Work().of_equations(jaxpr.eqns)):
        return {}
    return drawn


def work_on_drawn(eqns: Sequence[JaxprEqn], drawn: Collection[Var]) -> float:
    """The work of those of some equations that depend, through others of them, on drawn samples."""
    reached = descendants(eqns, given=drawn)
    return sum(Work().of_equations([eqn for eqn in eqns if any(a in reached for a in inputs_of(eqn))]))

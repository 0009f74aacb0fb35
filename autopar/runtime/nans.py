"""Finds the operation that made a NaN: a task that failed under `jax_debug_nans` is run again, one equation at a time.

In:     the task's plan, the arrays it was given, the number of its microbatch.
Out:    the operation and the user's line, or None where it cannot be told.
Method: what JAX does for a jitted function; each operation looks at its own results. The task's program is over whole
        values, so they are put together on the default device: sums over a mesh are added up, pieces are cut out. Sums
        over microbatches begin with zeros, their memory was taken over. A task that calls the host is not run again: its
        effects would happen twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import Literal, bind_eqn
from autopar.inter_op.stage_plan import Placed, TaskPlan
from autopar.intra_op.sharded import calls_host, describe
from autopar.runtime.failure import cause_of


def check_results(results: Sequence[jax.Array]) -> None:
    """Do what JAX does for a jitted function under `jax_debug_nans` and `jax_debug_infs`, and not for a compiled one.

    Raises:
        FloatingPointError: A result holds such a number.
    """
    for flag, what, is_such in (("jax_debug_nans", "nan", np.isnan), ("jax_debug_infs", "inf", np.isinf)):
        if getattr(jax.config, flag):
            for array in results:
                if jnp.issubdtype(array.dtype, jnp.inexact) and is_such(np.asarray(array).astype(np.complex128)).any():
                    raise FloatingPointError(f"invalid value ({what}) encountered")


def find_nan(plan: TaskPlan, arrays: Sequence[Any], microbatch: int) -> str | None:
    """The first operation of a task that makes a NaN, or an infinite number under `jax_debug_infs`, of such operands."""
    if calls_host(plan.body) or plan.task.kind in ("M", "U"):
        return None
    jaxpr = plan.task.jaxpr
    values = [_whole(value, array, microbatch) for value, array in zip(plan.inputs, arrays, strict=False)]
    value_of = dict(zip(jaxpr.invars, values, strict=True))
    for eqn in jaxpr.eqns:
        operands = [jnp.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else value_of[a] for a in eqn.invars]
        try:
            results = bind_eqn(eqn, *operands)
        except Exception as error:  # another one: too large for one device, so it cannot be told
            return describe(eqn) if isinstance(cause_of(error), FloatingPointError) else None
        value_of.update(zip(eqn.outvars, results, strict=True))
    return None


def _whole(value: Placed, array: Any, microbatch: int) -> jax.Array:
    """The value of an operand."""
    if array.is_deleted():
        return jnp.zeros(value.type.shape, value.type.dtype)
    whole = np.asarray(array)
    if value.type.sharding.partial:
        whole = whole.reshape(value.type.num_partial, *value.type.shape).sum(0, dtype=whole.dtype)
    return jnp.asarray(whole[microbatch] if value.kind == "piece" else whole)

"""Keep the order of the program where the backend does not: of collectives, and of what is recomputed.

In:     the results and operands of instructions, as the per-device program is traced.
Out:    the same operands, each made to depend on what comes before it.
Method: XLA:CPU tells collectives apart by the order in which devices reach them, and a loop that communicates may run
        beside a collective outside of it, in another order on another device (seen with jaxlib 0.10: wrong partners, then a
        crash). Compilers for CPU and GPU drop optimization barriers before they schedule, so the dependence is real: a
        select whose predicate is never true, which the compiler cannot know.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import on_host
from autopar.cost.steps import step_kind
from autopar.intra_op.sharded import Body, Compute, Fused, Gate, Instruction, Move, Region


def communicates(instruction: Instruction) -> bool:
    """Whether an instruction, or anything inside it, is a collective."""
    match instruction:
        case Move(step=step):
            return step_kind(step) is not None
        case Fused():
            return True
        case Compute(strategy=strategy):
            return bool(strategy.reductions or strategy.travels)
        case Region(bodies=bodies):
            return any(communicates(inner) for body in bodies for inner in body.instructions)
        case Gate():
            return False


def needs_order(body: Body) -> bool:
    """Whether a body holds a loop or branch that communicates beside other communication."""
    loud = [instruction for instruction in body.instructions if communicates(instruction)]
    return len(loud) > 1 and any(isinstance(instruction, Region) for instruction in loud)


def after(operand: jax.Array, *earlier: jax.Array | None) -> jax.Array:
    """`operand`, which now waits for all that is `earlier`; in the memory of hosts nothing computes, and nothing waits."""
    awaited = [array for array in earlier if array is not None and array.size and not on_host(jax.typeof(array))]
    if not awaited or operand.size == 0 or on_host(jax.typeof(operand)):
        return operand
    # A number of its own: kernels that look into an array to know that it is there hold it until they run. And of several it
    # is made of arrays that are there: XLA would make an element of a sum again for it, and leave the sum for later.
    signs = map(never, map(lax.optimization_barrier, awaited) if len(awaited) > 1 else awaited)
    sign = lax.optimization_barrier(functools.reduce(jnp.logical_or, signs))
    # The other is made of the operand itself: zeros of its shape XLA for GPUs would make in one kernel with those to which
    # something far behind adds, and hold them until then.
    return jnp.where(sign, ~operand if operand.dtype == bool else -operand, operand)


def never(earlier: jax.Array) -> jax.Array:
    """A boolean that is never true, which compilers do not know before the array is there."""
    witness = lax.squeeze(lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim), range(earlier.ndim))
    if jnp.iscomplexobj(witness):
        witness = witness.real
    if witness.dtype == bool:
        witness = witness.astype(jnp.int8)
    return (witness < 1) & (witness > 1)

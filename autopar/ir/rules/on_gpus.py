"""Forms of operations that XLA recognizes on GPUs, or for which it keeps less in memory; the results are the same.

In:     an equation and its local operands.
Out:    its results.
Method: XLA knows the gradient of a strided convolution by its input from the reversed kernel, and calls cuDNN's kernel for it.
        If anything stands between, such as a wait, it spreads the cotangent by zeros instead: a copy as large as the input,
        and, for a stride of two, four times the FLOPs (`MatchBackwardInput` in `conv_rewriter.cc`). So the kernel is reversed
        twice more, with a barrier between: the first is fused with what stands before it or undoes that, the second is
        recognized. The gradient of max pooling is added up in an array of zeros. XLA merges that with the zeros of a rectifier
        before the pooling, writes them in the forward pass, keeps them, and copies them: so these zeros stand behind a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, bind_eqn, scatter_to_selected


def bind_on_gpu(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Run one equation on a GPU."""
    if eqn.primitive.name == "select_and_scatter_add":
        return [_scatter_to_selected(eqn, *operands)]
    return bind_eqn(eqn, *as_on_gpus(eqn, operands))


def as_on_gpus(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands of an equation in the form that XLA for GPUs recognizes."""
    if eqn.primitive.name != "conv_general_dilated" or set(eqn.params["lhs_dilation"]) <= {1}:
        return operands
    kernel_dims = eqn.params["dimension_numbers"].rhs_spec[2:]
    return [operands[0], lax.rev(lax.optimization_barrier(lax.rev(operands[1], kernel_dims)), kernel_dims)]


def _scatter_to_selected(eqn: JaxprEqn, source: jax.Array, operand: jax.Array) -> jax.Array:
    """The gradient of pooling; padded before, as JAX does it for GPUs."""
    padding, shape = eqn.params["padding"], operand.shape
    least = -jnp.inf if jnp.issubdtype(operand.dtype, jnp.floating) else jnp.iinfo(operand.dtype).min
    if eqn.params["select_prim"].name == "le":
        least = jnp.inf
    operand = lax.pad(operand, jnp.asarray(least, operand.dtype), [(*sides, 0) for sides in padding])
    zero = lax.optimization_barrier(jnp.zeros((), source.dtype))
    made = scatter_to_selected(eqn, source, operand, [(0, 0)] * operand.ndim, zero)
    begin = [low for low, _ in padding]
    return lax.slice(made, begin, [low + size for low, size in zip(begin, shape, strict=True)])

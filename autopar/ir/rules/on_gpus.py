"""Forms of operations that XLA recognizes on GPUs; the results are the same.

In:     an equation and its local operands.
Out:    the operands to run it with.
Method: XLA knows the gradient of a strided convolution by its input from the reversed kernel, and calls cuDNN's kernel for it.
        If anything stands between, such as a wait, it spreads the cotangent by zeros instead: a copy as large as the input,
        and, for a stride of two, four times the FLOPs (`MatchBackwardInput` in `conv_rewriter.cc`). So the kernel is reversed
        twice more, with a barrier between: the first is fused with what stands before it or undoes that, the second is
        recognized.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from autopar._jax import JaxprEqn


def as_on_gpus(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands of an equation in the form that XLA for GPUs recognizes."""
    if eqn.primitive.name != "conv_general_dilated" or set(eqn.params["lhs_dilation"]) <= {1}:
        return operands
    kernel_dims = eqn.params["dimension_numbers"].rhs_spec[2:]
    return [operands[0], lax.rev(lax.optimization_barrier(lax.rev(operands[1], kernel_dims)), kernel_dims)]

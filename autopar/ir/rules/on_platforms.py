"""Forms of operations that XLA's backends for CPUs and for GPUs compute faster; the results are the same.

In:     an equation and its local operands; on CPUs the equation that reads its result.
Out:    on CPUs its results, on GPUs the operands to run it with.
Method: on CPUs three forms, measured with JAX 0.10.2 and 0.11.2. A product that contracts the leading dims of both operands, as
        gradients of weights do, goes to Eigen's thread pool, whose threads wake each other for small parts; with the rows of
        the first operand brought to the front by a copy, it goes to YNNPACK, in 0.5 to 0.85 of the time. A reduction whose
        operand has a dim of length one, as with one sample on each device, takes up to seven times as long as without in
        JAX 0.10.2, and the same in 0.11.2. A convolution whose dims have another order than Eigen's, as both gradients have,
        is brought into that order by XLA, but not in loops (`conv_canonicalization.cc` walks through the entry computation
        alone): there it takes 5 to 30 times as long.
        On GPUs XLA knows the gradient of a strided convolution by its input from the reversed kernel, and calls cuDNN's kernel
        for it. If anything stands between, such as a wait, it spreads the cotangent by zeros instead: a copy as large as the
        input, and, for a stride of two, four times the FLOPs (`MatchBackwardInput` in `conv_rewriter.cc`). So the kernel is
        reversed twice more, with a barrier between: the first is fused with what stands before it or undoes that, the second
        is recognized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import JaxprEqn, bind_eqn


def bind_on_cpu(eqn: JaxprEqn, operands: Sequence[jax.Array], reader: JaxprEqn | None = None) -> list[jax.Array]:
    """Run one equation on a CPU device.

    Args:
        eqn: The equation.
        operands: Its local operands.
        reader: The only equation that reads its result; None: there are several, or none here.
    """
    if _contracts_leading(eqn):
        return [_with_rows_first(eqn, operands, is_swapped=reader is not None and _swaps(reader, eqn))]
    if _reduces(eqn) and 1 in operands[0].shape and any(operands[0].shape[d] > 1 for d in eqn.params["axes"]):
        return [_without_units(eqn, operands[0])]
    return bind_eqn(eqn, *operands)


def convolved_on_cpu(eqn: JaxprEqn, params: Mapping[str, Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a convolution with samples first and channels last, as Eigen computes it; `params`: the local ones."""
    lhs, rhs, out = params["dimension_numbers"]
    last, spatial = len(lhs) - 1, tuple(range(1, len(lhs) - 1))
    dims = lax.ConvDimensionNumbers((0, last, *spatial), (last, last - 1, *range(last - 1)), (0, last, *spatial))
    image = lax.transpose(operands[0], (lhs[0], *lhs[2:], lhs[1]))
    kernel = lax.transpose(operands[1], (*rhs[2:], rhs[1], rhs[0]))
    (made,) = bind_eqn(eqn, image, kernel, params={**params, "dimension_numbers": dims})
    return [lax.transpose(made, np.argsort((out[0], *out[2:], out[1])))]


def _contracts_leading(eqn: JaxprEqn) -> bool:
    """Whether it is a float32 product, not a batch of them, over the leading dims of two operands that have others, too."""
    if eqn.primitive.name != "dot_general" or any(var.aval.dtype != np.float32 for var in (*eqn.invars, *eqn.outvars)):
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    leading = tuple(range(len(contracted[0])))
    return (
        bool(leading)
        and not any(batch)
        and all(tuple(dims) == leading for dims in contracted)
        and all(math.prod(var.aval.shape[len(leading) :]) > 1 for var in eqn.invars)
    )


def _swaps(reader: JaxprEqn, product: JaxprEqn) -> bool:
    """Whether a transpose brings the dims of a product's second operand before those of its first."""
    if reader.primitive.name != "transpose":
        return False
    (contracted, _), _ = product.params["dimension_numbers"]
    of_first, ndim = product.invars[0].aval.ndim - len(contracted), product.outvars[0].aval.ndim
    return tuple(reader.params["permutation"]) == (*range(of_first, ndim), *range(of_first))


def _with_rows_first(eqn: JaxprEqn, operands: Sequence[jax.Array], is_swapped: bool) -> jax.Array:
    """A product over the leading dims of two operands, the rows of one of them brought to the front by a copy.

    `is_swapped`: the result is transposed afterwards. Then it is computed so, and XLA drops both transposes.
    """
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth, of_first = len(contracted), operands[0].ndim - len(contracted)
    first, second = reversed(operands) if is_swapped else operands
    left, right = (x.reshape(math.prod(x.shape[:depth]), math.prod(x.shape[depth:])) for x in (first, second))
    left = lax.optimization_barrier(left.T)  # XLA would contract the leading dim again
    params = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    made = lax.dot_general(left, right, (((1,), (0,)), ((), ())), **params)
    made = made.reshape(first.shape[depth:] + second.shape[depth:])
    return jnp.moveaxis(made, range(-of_first, 0), range(of_first)) if is_swapped else made


def _reduces(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith("reduce_") and "axes" in eqn.params and len(eqn.invars) == 1


def _without_units(eqn: JaxprEqn, operand: jax.Array) -> jax.Array:
    """A reduction of the operand without its dims of length one."""
    long = [d for d, size in enumerate(operand.shape) if size != 1]
    axes = tuple(k for k, d in enumerate(long) if d in eqn.params["axes"])
    shape = [size for d, size in enumerate(operand.shape) if d not in eqn.params["axes"]]
    flat = operand.reshape([operand.shape[d] for d in long])
    (made,) = bind_eqn(eqn, flat, params={**eqn.params, "axes": axes})
    return made.reshape(shape)


def as_on_gpus(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands of an equation in the form that XLA for GPUs recognizes."""
    if eqn.primitive.name != "conv_general_dilated" or set(eqn.params["lhs_dilation"]) <= {1}:
        return operands
    kernel_dims = eqn.params["dimension_numbers"].rhs_spec[2:]
    return [operands[0], lax.rev(lax.optimization_barrier(lax.rev(operands[1], kernel_dims)), kernel_dims)]

"""Runs the gradient of max pooling on GPUs, with less in memory; the results are the same.

In:     a `select_and_scatter_add` and its local operands.
Out:    its result.
Method: XLA for GPUs finds where the largest element of each window is, in kernels that wait for nothing of the backward pass,
        and then adds what comes in to zeros. It would merge these with the zeros of a rectifier before the pooling, write them
        in the forward pass, and hold them, as large as the image; and while a collective runs it would begin anything that
        waits for nothing. So the zeros, and what stands beyond the borders of the image, are scalars that are known only once
        there is something to add.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, scatter_to_selected
from autopar.partition.order import after


def add_to_selected(eqn: JaxprEqn, source: jax.Array, operand: jax.Array) -> jax.Array:
    """Add `source` to zeros at the elements of `operand` that windows select; padded before, as JAX does it for GPUs."""
    padding, sides = eqn.params["padding"], (-jnp.inf, jnp.inf)
    if not jnp.issubdtype(operand.dtype, jnp.floating):
        sides = (jnp.iinfo(operand.dtype).min, jnp.iinfo(operand.dtype).max)
    never_selected = jnp.asarray(sides[eqn.params["select_prim"].name == "le"], operand.dtype)
    padded = lax.pad(operand, after(never_selected, source), [(*widths, 0) for widths in padding])
    zero = after(jnp.zeros((), source.dtype), source)
    made = scatter_to_selected(eqn, source, padded, [(0, 0)] * operand.ndim, zero)
    first = [before for before, _ in padding]
    return lax.slice(made, first, [low + size for low, size in zip(first, operand.shape, strict=True)])

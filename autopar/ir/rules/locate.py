"""Global indices on a device that holds one part of the indexed dim.

In:     index arrays as the user's program has them: any integer type, out of range or negative too.
Out:    local indices, and which of them fall into this device's part.
Method: JAX's modes are about global indices, so an index is clamped, or found out of range, before the part's offset is
        taken off. An index that is out of range belongs to the first device, so that exactly one answers it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.ir.rules.rule import Factor, Shard


def signed(index: jax.Array) -> jax.Array:
    """The same indices in a signed type of at least 32 bits; what is too large for it becomes its largest."""
    if jnp.issubdtype(index.dtype, jnp.signedinteger):
        return index.astype(jnp.promote_types(index.dtype, jnp.int32))
    if index.dtype.itemsize >= 4:
        index = jnp.minimum(index, jnp.array(jnp.iinfo(jnp.int32).max, index.dtype))
    return index.astype(jnp.int32)


def clamp(index: jax.Array, last: int) -> jax.Array:
    """Into 0 ... `last`."""
    return jnp.clip(index, 0, last)


def locate(index: jax.Array, factor: Factor, shard: Shard) -> tuple[jax.Array, jax.Array]:
    """Local index, and whether this device answers it.

    Args:
        index: Global, signed; may be out of range.
        factor: Of the indexed dim.
        shard: Where this device stands.

    Returns:
        The local index (-1 where the global one is out of range), and a mask of the same shape; over all devices along
        the dim exactly one is true.
    """
    inside = (index >= 0) & (index < shard.sizes[factor])
    local = jnp.where(inside, index, 0) - jnp.asarray(shard.offset(factor), index.dtype)
    mine = (local >= 0) & (local < shard.local_size(factor))
    first = jnp.asarray(shard.index(factor)) == 0
    return jnp.where(inside, local, -1), jnp.where(inside, mine, first)

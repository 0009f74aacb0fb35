"""Arrays from one submesh to another, in this process.

In:     shape, source and destination sharding.
Out:    `Transfer`: called with an array, returns it in the destination's sharding.
Method: `jax.device_put`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Transfer = Callable[[jax.Array], jax.Array]


def make_transfer(
    shape: Sequence[int], source: jax.sharding.NamedSharding, target: jax.sharding.NamedSharding
) -> Transfer:
    """How an array of this shape gets from one mesh to the other."""
    if source == target:
        # Two stages on one mesh: the sender's program may take the array's memory over.
        return lambda array: jnp.array(array, copy=True)
    return lambda array: jax.device_put(array, target)

"""Steps of a reshard, each as one collective inside of `shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autopar.cost.steps import AllToAll
from autopar.partition.collectives import apply_step


def test_pieces_of_several_layouts_are_exchanged():
    """The gradient of keys and values that were made as one: its halves lie in memory in different orders."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    keys, values = np.arange(24.0).reshape(2, 12), np.arange(24.0, 48.0).reshape(2, 4, 3)

    def exchanged(keys, values):
        joined = jnp.concatenate([keys.reshape(2, 3, 4), jnp.swapaxes(values, 1, 2)], -1)
        return apply_step(joined, AllToAll(("x",), 0, 2), {"x": 2})

    spread = jax.shard_map(exchanged, mesh=mesh, in_specs=(P(), P()), out_specs=P("x"), check_vma=False)
    halves = np.split(np.concatenate([keys.reshape(2, 3, 4), values.swapaxes(1, 2)], -1), 2, -1)
    np.testing.assert_array_equal(jax.jit(spread)(keys, values), np.concatenate([*halves[:1] * 2, *halves[1:] * 2]))

"""Slices that XLA must not join: one element of a slice of integers, times a number, is that and not the element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from autopar.cost.steps import Slice
from autopar.partition.collectives import apply_step

SIZES = {"x": 2, "y": 4}


@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32"])
def test_a_slice_of_a_product_of_a_slice(dtype):
    values = (np.arange(8) * 7).astype(dtype)

    def device(x):
        return apply_step(apply_step(x, Slice(("x",), 0), SIZES) * 3, Slice(("y",), 0), SIZES)

    mesh = jax.make_mesh((2, 4), ("x", "y"))
    run = jax.shard_map(
        device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(("x", "y")), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(run)(values), values * 3)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_a_slice_of_the_step(ours_first):
    """The other slice is the user's."""
    values = np.arange(8, dtype=np.int32) * 7

    def device(x, n):
        if ours_first:
            return (apply_step(x, Slice(("x",), 0), SIZES) * 3)[n][None]
        return apply_step(lax.dynamic_slice_in_dim(x, n, 4) * 3, Slice(("y",), 0), SIZES)

    mesh = jax.make_mesh((2, 4), ("x", "y"))
    specs = PartitionSpec("x" if ours_first else "y")
    run = jax.shard_map(
        device, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec()), out_specs=specs, check_vma=False
    )
    wanted = (values * 3)[[2, 6] if ours_first else slice(2, 6)]
    np.testing.assert_array_equal(jax.jit(run)(values, jnp.int32(2)), wanted)

"""Arrays for tests of what passes between workers: every way to split one over a mesh, every kind of dtype."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from autopar.mesh import ArrayType, Sharding

DTYPES = ("float32", "bfloat16", "float16", "bool", "int32", "uint8", "float8_e4m3fn", "complex64")
DTYPES += ("int4", "int2", "uint2", "float4_e2m1fn")  # several share a byte
SHAPE = (12, 24, 5)
EMPTY = (0, 24, 5)


def shardings(mesh):
    """Every way to split the first two dims."""
    names = mesh.axis_names
    ways = [((), (), ()), ((names[0],), (), ()), ((), (names[0],), ())]
    if len(names) == 2:
        ways += [(names, (), ()), ((names[0],), (names[1],), ()), ((names[1],), (names[0],), ())]
    return [Sharding(way) for way in ways]


def kinds(mesh, dtype="float32", shape=SHAPE):
    return [ArrayType(shape, np.dtype(jnp.dtype(dtype)), sharding, mesh) for sharding in shardings(mesh)]

"""Converts arrays to dtypes that every library supports.

In:     an array of any dtype of JAX.
Out:    the same bits as integers, and back.
Method: dtypes of DLPack and NumPy stay. Others become unsigned integers of the same size; elements below a byte (of which JAX
        packs several into one) become a byte each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_PLAIN = frozenset(
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
_INTEGER = {1: jnp.uint8, 2: jnp.uint16}


def plain_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which arrays of this dtype are sent."""
    return dtype if dtype.name in _PLAIN else np.dtype(_INTEGER[dtype.itemsize])


def is_narrow(dtype: np.dtype) -> bool:
    """Whether an element is smaller than a byte."""
    return dtype != jnp.bool_ and _bits(dtype) < 8


def as_plain(array: jax.Array) -> jax.Array:
    """An array converted to its plain dtype."""
    dtype = array.dtype
    if dtype.name in _PLAIN:
        return array
    if dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    if is_narrow(dtype):
        return lax.bitcast_convert_type(array, f"uint{_bits(dtype)}").astype(jnp.uint8)
    return lax.bitcast_convert_type(array, _INTEGER[dtype.itemsize])


def from_plain(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """The array of this dtype, converted back from its plain dtype."""
    if dtype.name in _PLAIN:
        return array
    if dtype == jnp.bool_:
        return array.astype(dtype)
    if is_narrow(dtype):
        return lax.bitcast_convert_type(array.astype(f"uint{_bits(dtype)}"), dtype)
    return lax.bitcast_convert_type(array, dtype)


def _bits(dtype: np.dtype) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)
    return int(jnp.finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize

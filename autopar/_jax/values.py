"""Adapters for values: types, memory spaces, arrays, typed random keys, pytrees.

In:     arrays, their types, structures of pytrees.
Out:    their properties, and values converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import pxla as _pxla
from jax._src.lax.lax import empty2 as _empty2
from jax._src.lib import xla_client as _xc
from jax._src.random import prng as _prng

from autopar._jax.types import JaxprEqn


def shaped(value: Any) -> Any:
    """The abstract value of an array, a number (weakly typed), or a `jax.ShapeDtypeStruct`.

    Raises `TypeError`: it is none of these.
    """
    return _core.shaped_abstractify(value)


def weakly_typed(array: Any) -> Any:
    """The same array in the same memory, weakly typed as a Python number is; or the same handle of a remote one."""
    if isinstance(array, jax.Array):
        aval = array.aval.update(weak_type=True)
        return _ArrayImpl(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)
    array.weak_type = True
    return array


_HOST = jax.memory.Space.Host


def on_host(aval: Any) -> bool:
    """Whether a value of this type is in host memory."""
    return getattr(aval, "memory_space", None) is _HOST


def on_device(aval: Any) -> Any:
    """The same type in device memory."""
    return aval.update(memory_space=jax.memory.Space.Device) if on_host(aval) else aval


def in_host_memory(aval: Any) -> Any:
    """The same type in host memory."""
    return aval.update(memory_space=jax.memory.Space.Host)


def empty_in_host_memory(size: int, dtype: Any) -> jax.Array:
    """Elements in host memory that nothing has set, to be written by the program; as `lax.scan` makes its stacks."""
    return jax.lax.broadcast(_empty2(dtype, memory_space=_HOST), (size,))


def resized(aval: Any, shape: Sequence[int]) -> Any:
    """The same type with another shape, in the same memory."""
    made = shaped(jax.ShapeDtypeStruct(tuple(shape), aval.dtype))
    return in_host_memory(made) if on_host(aval) else made


def without_axes(aval: Any) -> Any:
    """The same type outside of a `shard_map`, whose types say along which mesh axes values differ."""
    return aval if aval.sharding.mesh.empty else _core.ShapedArray(aval.shape, aval.dtype, aval.weak_type)


def copies_to_or_from_host(eqn: JaxprEqn) -> bool:
    """Whether an equation copies values between device and host memory."""
    if eqn.primitive.name != "device_put":
        return False
    return any(on_host(a.aval) != on_host(v.aval) for a, v in zip(eqn.invars, eqn.outvars, strict=True))


def buffer_addresses(array: Any) -> list[int]:
    """The addresses of an array's shards on devices of this process."""
    return [part.unsafe_buffer_pointer() for part in array._arrays]


def put_shards(kind: jax.ShapeDtypeStruct, parts: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> jax.Array:
    """An array from NumPy shards, one for each of these devices of this process.

    The same as `jax.device_put` and `make_array_from_single_device_arrays`, in 5 us instead of 100.
    """
    aval = _core.ShapedArray(kind.shape, kind.dtype)
    return _pxla.batched_device_put(aval, kind.sharding, parts, devices)


def copied_to(arrays: Sequence[jax.Array], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Copies of arrays in shardings that give the k-th device what the k-th one holds; starts them, and waits for none.

    As `jax.device_put` does it; what that looks up and checks before takes several times as long as a small copy.
    """
    devices = [sharding._internal_device_list.addressable_device_list for sharding in shardings]
    semantics = [_xc.ArrayCopySemantics.ALWAYS_COPY] * len(arrays)
    made: list[jax.Array] = _xc.batched_copy_array_to_devices_with_sharding(arrays, devices, shardings, semantics)
    return made


def is_key(aval: Any) -> bool:
    """Whether an abstract value is an array of typed random keys."""
    return type(getattr(aval, "dtype", None)) is _prng.KeyTy


def key_impl_name(aval: Any) -> str:
    """Name of the generator of a key array, as `jax.random.wrap_key_data(impl=...)` takes it."""
    return aval.dtype._impl.name


def physical_aval(aval: Any) -> Any:
    """The type of a key array's integers (`key[s]` is `uint32[s, 2]`); other types unchanged."""
    return _core.physical_aval(aval)


def key_data(value: Any) -> Any:
    """The integers of a concrete key array, without copying."""
    return value._base_array if isinstance(value, _prng.PRNGKeyArray) else jax.random.key_data(value)


def as_key(value: Any, impl: str) -> jax.Array:
    """Integers as a key array of the generator of that name; a handle of a remote array is fetched."""
    return jax.random.wrap_key_data(value if isinstance(value, jax.Array) else np.asarray(value), impl=impl)


def outermost_node(tree: Any) -> Any:
    """The structure that is the outermost node of `tree`, with a leaf for each child."""
    leaf = jax.tree.structure(0)
    return type(tree).from_node_data_and_children(
        jax.tree_util.default_registry, tree.node_data(), [leaf] * len(tree.children())
    )


def reads_as_array(kind: type) -> None:
    """Make JAX's functions, jitted ones too, accept values of this class as the arrays that `np.asarray` returns."""

    def on_devices(values: Sequence[Any], shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return _pxla.shard_args(shardings, layouts, copy_semantics, [np.asarray(value) for value in values])

    _core.pytype_aval_mappings[kind] = lambda value: _core.ShapedArray(value.shape, value.dtype)
    _dtypes.register_canonicalize_value_handler(kind, None)
    _pxla.shard_arg_handlers[kind] = on_devices

"""Splits and joins stacked layers that are on several stages: one array to the user, one part per stage to the pipeline.

In:     a stacked array as the user passes it, or the parts as programs made them.
Out:    its parts; or the parts joined: a `jax.Array` over the devices of all stages if the parts are alike (the dim of layers
        is split over the stages first), else a `StackedArray`, which has the shape and dtype of the whole and can be used
        as an array: passed to functions of JAX, jitted ones too, and of NumPy, computed with, indexed.
Method: no byte moves: the joined array is made of the parts' own buffers. Joined arrays are remembered, so that splitting
        them again in the next step takes no work. Computing with a `StackedArray` first copies it to the host as a whole.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar._jax import reads_as_array
from autopar.grouping import grouped
from autopar.ir.split.layers.layers import LayerSplit
from autopar.runtime.transfer import shards_by_device

_P = TypeVar("_P", bound=Hashable)


class Shaped:
    """The properties that arrays of ours share with `jax.Array`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    weak_type = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.size * self.dtype.itemsize


class StackedArray(Shaped):
    """An array whose parts along `dim` are on the devices of several pipeline stages."""

    def __init__(self, parts: Sequence[jax.Array], dim: int = 0):
        self.parts, self.dim = tuple(parts), dim
        self.shape = joined_shape([p.shape for p in parts], dim)
        self.dtype = parts[0].dtype

    def block_until_ready(self) -> StackedArray:
        """Wait until all parts are computed."""
        for part in self.parts:
            part.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.concatenate([np.asarray(p) for p in self.parts], axis=self.dim)
        return whole if dtype is None else whole.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(np.asarray(self))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"StackedArray(shape={self.shape}, dtype={self.dtype}, {len(self.parts)} parts)"


def _of_the_whole(name: str) -> property:
    return property(lambda self: getattr(jnp.asarray(self), name), doc=f"`{name}` of the whole array.")


_ARITHMETIC = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OTHER = "neg pos abs invert round eq ne lt le gt ge bool int float complex index getitem contains iter".split()
_READ = ["at", *(name for name in dir(np.ndarray) if hasattr(jax.Array, name) and not name.startswith("_"))]
for _name in (
    *_READ,
    *(f"__{side}{op}__" for op in _ARITHMETIC for side in ("", "r")),
    *(f"__{op}__" for op in _OTHER),
):
    if _name not in {*vars(StackedArray), *vars(Shaped), *Shaped.__annotations__}:
        setattr(StackedArray, _name, _of_the_whole(_name))
reads_as_array(StackedArray)


class Stack:
    """Splits and joins one stacked value of the step."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], parts: Sequence[NamedSharding], dim: int = 0):
        self.shape, self.dim = joined_shape(shapes, dim), dim
        self.sharding = joint_sharding(parts, dim) if len(set(shapes)) == 1 else None
        self._shapes, self._parts = list(shapes), list(parts)
        self._known: dict[int, tuple[weakref.ref, tuple[jax.Array, ...]]] = {}

    def split(self, array: Any) -> Sequence[Any]:
        """The parts of an array; without a copy, if `join` made it."""
        if (
            isinstance(array, StackedArray)
            and array.dim == self.dim
            and [p.sharding for p in array.parts] == self._parts
            and [p.shape for p in array.parts] == self._shapes
        ):
            return array.parts
        known = self._known.get(id(array))
        if known is not None and known[0]() is array:
            return known[1]
        if isinstance(array, jax.Array) and self.sharding is not None and array.sharding == self.sharding:
            return self._of_shards(array)
        array = plainly_typed(array) if isinstance(array, jax.Array) else np.asarray(array)
        return parts_of(array, [shape[self.dim] for shape in self._shapes], self.dim)

    def place(self, array: np.ndarray) -> Any:
        """Place the parts of a whole host array, joined."""
        return self.join(jax.device_put(list(self.split(array)), self._parts))

    def _of_shards(self, array: jax.Array) -> list[jax.Array]:
        data = shards_by_device(array)
        return [
            jax.make_array_from_single_device_arrays(shape, part, [data[d] for d in part.mesh.devices.flat])
            for shape, part in zip(self._shapes, self._parts, strict=True)
        ]

    def join(self, parts: Sequence[jax.Array]) -> Any:
        """The parts as one value."""
        if self.sharding is None:
            return StackedArray(parts, self.dim)
        buffers = []
        for part, kind in zip(parts, self._parts, strict=True):
            data = shards_by_device(part)
            buffers += [data[d] for d in kind.mesh.devices.flat]
        whole = jax.make_array_from_single_device_arrays(self.shape, self.sharding, buffers)
        key = id(whole)
        self._known[key] = weakref.ref(whole, lambda _: self._known.pop(key, None)), tuple(parts)
        return whole


def parts_of(array: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """The parts of these sizes along a dim."""
    return [part_of(array, number, sizes, dim) for number in range(len(sizes))]


def part_of(array: Any, number: int, sizes: Sequence[int], dim: int = 0) -> Any:
    """Part `number` of the parts of these sizes along a dim; the array itself, if it is the only part."""
    if len(sizes) == 1:
        return array
    first = sum(sizes[:number])
    return array[(*(slice(None),) * dim, slice(first, first + sizes[number]))]


def births(
    stacks: LayerSplit, init: Callable[..., list[Any]], first: int, count: int, place_of: Callable[[int], _P]
) -> Iterator[tuple[_P, list[int], Callable[..., list[Any]]]]:
    """For each place that holds new state: the place, the inputs that it holds, and a function that creates them.

    `init` returns `count` of the user's arguments, from number `first` on; `place_of` takes an input of the step over parts
    (`stacks`).
    """
    own_parts = ((leaf, number, at) for leaf in range(count) for number, at in enumerate(stacks.inputs[first + leaf]))
    for place, parts in grouped((place_of(part[2]), part) for part in own_parts).items():

        def own(*args: Any, parts: Sequence[tuple[int, int, int]] = parts) -> list[Any]:
            made = init(*args)
            return [
                part_of(made[leaf], number, stacks.sizes(first + leaf), stacks.input_dims[first + leaf])
                for leaf, number, _ in parts
            ]

        yield place, [at for *_, at in parts], own


def plainly_typed(array: jax.Array) -> jax.Array:
    """The array without an explicit mesh in its type, so that it can be sliced and reshaped like any other."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return array
    mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(array, NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind))


def joined_shape(shapes: Sequence[Sequence[int]], dim: int) -> tuple[int, ...]:
    """The shape of the array that these parts make along a dim."""
    if len(shapes) == 1:
        return tuple(shapes[0])
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])


def joint_spec(spec: PartitionSpec, dim: int) -> PartitionSpec:
    """The spec of the whole over all stages, if its parts along `dim` have this spec on their stages."""
    entries = [*spec, *[None] * (dim + 1 - len(spec))]
    own = entries[dim]
    entries[dim] = ("stage", *(() if own is None else (own,) if isinstance(own, str) else tuple(own)))
    return PartitionSpec(*entries)


def joint_sharding(parts: Sequence[NamedSharding], dim: int = 0) -> NamedSharding | None:
    """The sharding of the whole over the devices of all parts; None: the parts are not alike, or share devices."""
    first = parts[0]
    alike = all(p.spec == first.spec and p.mesh.axis_names == first.mesh.axis_names for p in parts)
    shapes = {p.mesh.devices.shape for p in parts}
    devices = [d for p in parts for d in p.mesh.devices.flat]
    alike = alike and all(p.memory_kind == first.memory_kind for p in parts)
    if not alike or len(shapes) > 1 or len(set(devices)) < len(devices):
        return None
    mesh = jax.sharding.Mesh(np.stack([p.mesh.devices for p in parts]), ("stage", *first.mesh.axis_names))
    return NamedSharding(mesh, joint_spec(first.spec, dim), memory_kind=first.memory_kind)

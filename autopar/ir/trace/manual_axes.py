"""A `shard_map` in the user's step (JAX's `pmap` is one, too), as the work of all of its devices.

In:     a `shard_map` equation; a flat program of its body, one device's.
Out:    `ManualProgram`, functions of plain arrays: what all devices of the user's mesh compute together.
Method: the devices along a mesh axis are a leading dim. Operands are cut into blocks by `in_specs`; one `jax.vmap` per axis
        maps the body, and turns its collectives into sums, slices and permutations of that dim; `out_specs` say how the
        blocks of results are joined. These dims are then split like any others: the plan need not follow the user's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, eval_jaxpr, find_primitives, new_eqn

Names = tuple[tuple[str, ...], ...]
"""For each dim, the mesh axes that it is split over, major to minor."""


@dataclass(frozen=True, slots=True)
class ManualProgram:
    """A `shard_map`.

    Attributes:
        body: What one device computes, flat.
        sizes: The mesh axes that the body may name, in the order of the mesh.
        ins: How the operands are split over them; what the body captures comes last, and is whole.
        outs: How the results are.
    """

    body: Jaxpr
    sizes: dict[str, int]
    ins: tuple[Names, ...]
    outs: tuple[Names, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn, body: Jaxpr) -> Self:
        """The program of `eqn`, whose body, made flat, is `body`."""
        mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
        sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis in manual}
        in_specs = [*eqn.params["in_specs"], *[()] * (len(body.invars) - len(eqn.invars))]
        ins = tuple(_names(spec, var.aval.ndim, sizes) for spec, var in zip(in_specs, body.invars, strict=True))
        outs = zip(eqn.params["out_specs"], body.outvars, strict=True)
        return cls(body, sizes, ins, tuple(_names(spec, atom.aval.ndim, sizes) for spec, atom in outs))

    def cut(self, *operands: jax.Array) -> list[jax.Array]:
        """Each operand with a leading dim for each axis that it is split over, then the dims of one block."""
        return [_cut(x, names, self.sizes) for x, names in zip(operands, self.ins, strict=True)]

    def on_all_devices(self, *blocks: jax.Array) -> Sequence[jax.Array]:
        """The blocks of the results, from those of the operands."""
        mapped: Callable[..., Sequence[jax.Array]] = partial(eval_jaxpr, self.body, ())
        for axis, size in reversed(self.sizes.items()):
            ins, outs = ([_has(axis, names) for names in each] for each in (self.ins, self.outs))
            mapped = partial(_along, mapped, axis, size, ins, outs)
        return mapped(*blocks)

    def join(self, *blocks: jax.Array) -> list[jax.Array]:
        """The inverse of `cut`, for results."""
        return [_join(x, names, self.sizes) for x, names in zip(blocks, self.outs, strict=True)]


def _names(spec: Any, num_dims: int, sizes: dict[str, int]) -> Names:
    """The axes of `sizes` over which each dim is split by a `PartitionSpec`."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return tuple(tuple(a for a in entry if a in sizes) for entry in (*entries, *[()] * (num_dims - len(entries))))


def _has(axis: str, names: Names) -> bool:
    return any(axis in axes for axes in names)


def _cut(x: jax.Array, names: Names, sizes: dict[str, int]) -> jax.Array:
    shape: list[int] = []
    leading: dict[str, int] = {}
    inner = []
    for length, axes in zip(x.shape, names, strict=True):
        leading |= {axis: len(shape) + k for k, axis in enumerate(axes)}
        shape += [sizes[axis] for axis in axes]
        inner.append(len(shape))
        shape.append(length // math.prod(sizes[axis] for axis in axes))
    return x.reshape(shape).transpose([*(leading[axis] for axis in sizes if axis in leading), *inner])


def _join(blocks: jax.Array, names: Names, sizes: dict[str, int]) -> jax.Array:
    present = [axis for axis in sizes if _has(axis, names)]
    order: list[int] = []
    shape = []
    for dim, axes in enumerate(names):
        together = [*map(present.index, axes), len(present) + dim]
        order += together
        shape.append(math.prod(blocks.shape[k] for k in together))
    return blocks.transpose(order).reshape(shape)


def _along(
    body: Callable[..., Sequence[jax.Array]],
    axis: str,
    size: int,
    ins: Sequence[bool],
    outs: Sequence[bool],
    *blocks: jax.Array,
) -> Sequence[jax.Array]:
    """`body` for each device along one axis. A result that is not split along it is that of all devices alike."""
    over = partial(
        jax.vmap,
        lambda _, *args: tuple(body(*args)),
        in_axes=(0, *(0 if split else None for split in ins)),
        axis_name=axis,
    )
    counted = jnp.zeros((size, 0))  # there may be no operand that is split, and `vmap` wants one
    try:
        return over(out_axes=tuple(0 if split else None for split in outs))(counted, *blocks)
    except ValueError:  # a result that `check_vma=False` allows to differ: the first device's
        return tuple(x if split else x[0] for x, split in zip(over(out_axes=0)(counted, *blocks), outs, strict=True))


INVARIANT = ("psum_invariant", "all_gather_invariant")
TYPES_ONLY = ("pvary", "reshard")
"""What changes only what types say of mesh axes."""


def plain_collective(eqn: JaxprEqn) -> JaxprEqn:
    """A collective that `jax.vmap` can map: `INVARIANT` ones differ from those only in the types of their results."""
    if eqn.primitive.name not in INVARIANT:
        return eqn
    (primitive,) = find_primitives(eqn.primitive.name.removesuffix("_invariant"))
    params = {**eqn.params, "axis_index_groups": None}
    return new_eqn(primitive, eqn.invars, eqn.outvars, params, source_info=eqn.source_info)

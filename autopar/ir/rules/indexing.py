"""Rules of reading by index: `gather` and `dynamic_slice`.

In:     `table[ids]`, `take_along_axis`, `x[i]`, `lax.dynamic_slice`, and the transposes of writing by index.
Out:    dims of the indices and dims that are taken whole split freely; so does a dim from which single elements are
        read: each device reads those that it holds, zero elsewhere, and the result is a partial sum
        (`a1,bc->abc`-like: an embedding split on its vocabulary is `vd,bs1->bsd {sum v}`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.linearity import linear_groups, may_be_partial
from autopar.ir.rules.locate import clamp, locate, signed
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, factor_names
from autopar.ir.rules.terms import new_term


@register(*find_primitives("gather"))
def gather(eqn: JaxprEqn) -> ShardingRule:
    """Operand dims that are offsets or batches are shared with the result, indexed ones are summed."""
    table, indices = (v.aval for v in eqn.invars)
    result_shape = eqn.outvars[0].aval.shape
    numbers, slices = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fresh = factor_names()
    sizes: dict[Factor, int] = {}
    whole: list[Factor] = []
    summed: list[Factor] = []

    def new(size: int, *lists: list[Factor]) -> Dim:
        dim = () if size == 1 else (next(fresh),)
        sizes.update(dict.fromkeys(dim, size))
        for names in lists:
            names.extend(dim)
        return dim

    at = [new(size) for size in indices.shape[:-1]]
    batch_of = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    operand: list[Dim] = []
    windows: list[Dim] = []
    for d, (size, taken) in enumerate(zip(table.shape, slices, strict=True)):
        if d in batch_of:
            operand.append(at[batch_of[d]])
            continue
        single = taken == 1 and d in numbers.start_index_map and may_be_partial(table.dtype)
        kept = taken == size
        operand.append(new(size) if kept else new(size, summed) if single else new(size, whole))
        if d not in numbers.collapsed_slice_dims:
            windows.append(operand[d] if kept else new(taken, whole))
    result, rest = [], iter(at)
    for d in range(len(result_shape)):
        result.append(windows[numbers.offset_dims.index(d)] if d in numbers.offset_dims else next(rest))
    vector = new(indices.shape[-1], whole)
    fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    stays = not fills or _fill_adds_up(table.dtype, eqn.params["fill_value"])

    def local(eqn: JaxprEqn, shard: Shard, table: jax.Array, indices: jax.Array) -> Sequence[jax.Array]:
        return _gather_here(eqn, tuple(operand), summed, shard, table, indices)

    return ShardingRule(
        (tuple(operand), (*at, vector)),
        (tuple(result),),
        sizes,
        summed=tuple(summed),
        whole=tuple(whole),
        linear=linear_groups(eqn, (0,)) if stays else (),
        local=local,
    )


def _fill_adds_up(dtype: np.dtype, fill: object) -> bool:
    """Whether the fill of a sum is the sum of the fills of its parts: it is NaN, or nothing."""
    if fill is None:
        return bool(jnp.issubdtype(dtype, jnp.inexact))
    return bool(np.isnan(fill)) or fill == 0  # type: ignore[call-overload]


def _gather_here(
    eqn: JaxprEqn, operand: Term, summed: Sequence[Factor], shard: Shard, table: jax.Array, indices: jax.Array
) -> Sequence[jax.Array]:
    """The per-device program: look up what is here, zero elsewhere."""
    params, numbers, shape = eqn.params, eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    slices = [local if taken == size else taken
              for local, taken, size in zip(table.shape, params["slice_sizes"], shape, strict=True)]
    searched = {d: dim[0] for d, dim in enumerate(operand) if dim and dim[0] in summed and shard.num_shards(dim[0]) > 1}
    if not searched:
        return [eqn.primitive.bind(table, indices, **{**params, "slice_sizes": tuple(slices)})]
    indices = signed(indices)
    columns = {d: indices[..., k] for k, d in enumerate(numbers.start_index_map)}
    if params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:  # what is promised to be in bounds XLA clamps too
        columns = {d: clamp(column, shape[d] - params["slice_sizes"][d]) for d, column in columns.items()}
    mine = jnp.ones(indices.shape[:-1], bool)
    for d, factor in searched.items():
        place, here = locate(columns[d], factor, shard)
        # Out of range stays so, to be filled; what another device answers must only be a legal address.
        columns[d], mine = jnp.where(here, place, 0), mine & here
    found = eqn.primitive.bind(
        table,
        jnp.stack(list(columns.values()), axis=-1),
        **{**params, "slice_sizes": tuple(slices), "indices_are_sorted": False, "unique_indices": False},
    )
    places = [d for d in range(found.ndim) if d not in numbers.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(mine, found.shape, places), found, jnp.zeros_like(found))]


@register(*find_primitives("dynamic_slice"))
def dynamic_slice(eqn: JaxprEqn) -> ShardingRule:
    """`ab,,->b {sum a}` for `x[i]`; a dim of which several elements are taken, but not all, is whole."""
    shape, slices = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    fresh = factor_names()
    operand = new_term(shape, fresh)
    sizes = {dim[0]: size for dim, size in zip(operand, shape, strict=True) if dim}
    adds_up = may_be_partial(eqn.invars[0].aval.dtype)
    result: list[Dim] = []
    whole: list[Factor] = []
    for dim, size, taken in zip(operand, shape, slices, strict=True):
        if taken == size:
            result.append(dim)
            continue
        result.append(() if taken == 1 else (next(fresh),))
        sizes.update(dict.fromkeys(result[-1], taken))
        if taken != 1 or not adds_up:
            whole += [*dim, *result[-1]]
    lost = {f for dim in operand for f in dim} - {f for dim in result for f in dim} - set(whole)

    def local(eqn: JaxprEqn, shard: Shard, array: jax.Array, *starts: jax.Array) -> Sequence[jax.Array]:
        begin, mine, wanted = [], jnp.asarray(True), []
        for d, (start, size, taken) in enumerate(zip(starts, shape, slices, strict=False)):
            place = clamp(signed(start), size - taken)
            if array.shape[d] != size and taken != size:
                place, here = locate(place, operand[d][0], shard)
                place, mine = jnp.where(here, place, 0), mine & here
            begin.append(jnp.asarray(place, jnp.int32))
            wanted.append(array.shape[d] if taken == size else taken)
        found = lax.dynamic_slice(array, begin, wanted)
        return [jnp.where(mine, found, jnp.zeros_like(found)) if lost else found]

    return ShardingRule(
        (operand, *((),) * (len(eqn.invars) - 1)),
        (tuple(result),),
        sizes,
        summed=tuple(f for dim in operand for f in dim if f in lost),
        whole=tuple(whole),
        linear=linear_groups(eqn, (0,)),
        local=local,
    )

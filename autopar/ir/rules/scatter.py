"""Rules of writing by index: the `scatter` family and `dynamic_update_slice`.

In:     `x.at[i].set`, `.add`, ..., the gradient of an embedding lookup, updates of caches.
Out:    window dims and batch dims split freely; so does a dim into which single elements are written: each device writes
        those that it holds. What is added up over the updates may be split too, then the result is a partial sum and the
        operand must come as one.
Method: an index of another device's part is turned into one that is out of range, and writes of those are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.linearity import linear_groups, may_be_partial
from autopar.ir.rules.locate import clamp, locate, signed
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, factor_names, num_elements
from autopar.ir.rules.terms import new_term


@register(*find_primitives("scatter-add", "scatter-sub"))
def scatter_add(eqn: JaxprEqn) -> ShardingRule:
    """`vd,bs1,bsd->vd {sum b s}`: the gradient of an embedding."""
    return _scatter(eqn, adds=may_be_partial(eqn.outvars[0].aval.dtype), linear=linear_groups(eqn, (0, 2)))


@register(*find_primitives("scatter-mul"))
def scatter_mul(eqn: JaxprEqn) -> ShardingRule:
    """Linear in the operand: every element of it is multiplied."""
    return _scatter(eqn, adds=False, linear=linear_groups(eqn, (0,)))


@register(*find_primitives("scatter", "scatter-min", "scatter-max"))
def scatter(eqn: JaxprEqn) -> ShardingRule:
    """`vd,bs1,bsd->vd {whole b s}`: the last of several writes to one place counts, so their order is kept."""
    return _scatter(eqn, adds=False, linear=())


def _scatter(eqn: JaxprEqn, adds: bool, linear: tuple[tuple[int, ...], ...]) -> ShardingRule:
    table, indices, updates = (v.aval for v in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    fresh = factor_names()
    sizes: dict[Factor, int] = {}
    whole: list[Factor] = []

    def new(size: int, *lists: list[Factor]) -> Dim:
        dim = () if size == 1 else (next(fresh),)
        sizes.update(dict.fromkeys(dim, size))
        for names in lists:
            names.extend(dim)
        return dim

    batches = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    summed: list[Factor] = []
    at = [new(size, *(() if d in batches.values() else (summed,) if adds else (whole,)))
          for d, size in enumerate(indices.shape[:-1])]
    window_sizes = iter([updates.shape[d] for d in numbers.update_window_dims])
    operand: list[Dim] = []
    windows: list[Dim] = []
    searched: dict[int, Factor] = {}
    window_of: list[int] = []
    for d, size in enumerate(table.shape):
        if d in batches:
            operand.append(at[batches[d]])
            window_of.append(1)
            continue
        inserted = d in numbers.inserted_window_dims
        taken = 1 if inserted else next(window_sizes)
        single = taken == 1 and size > 1 and d in numbers.scatter_dims_to_operand_dims
        operand.append(new(size) if taken == size or single else new(size, whole))
        window_of.append(taken)
        if single:
            searched[d] = operand[d][0]
        if not inserted:
            windows.append(operand[d] if taken == size else new(taken, whole))
    rest = iter(at)
    update = [windows[numbers.update_window_dims.index(d)] if d in numbers.update_window_dims else next(rest)
              for d in range(len(updates.shape))]
    vector = new(indices.shape[-1], whole)

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        split = {d: factor for d, factor in searched.items() if shard.num_shards(factor) > 1}
        return _scatter_here(eqn, split, window_of, shard, *operands)

    return ShardingRule(
        (tuple(operand), (*at, vector), tuple(update)),
        (tuple(operand),),
        sizes,
        summed=tuple(summed),
        whole=tuple(whole),
        linear=linear,
        joined=dict.fromkeys(summed, (0,)),
        flops=float(num_elements(updates.shape)),
        local=local,
    )


def _scatter_here(
    eqn: JaxprEqn, split: dict[int, Factor], windows: Sequence[int], shard: Shard, table: jax.Array, indices: jax.Array,
    updates: jax.Array,
) -> Sequence[jax.Array]:
    """The per-device program: drop what is written elsewhere."""
    if not split:
        return [eqn.primitive.bind(table, indices, updates, **eqn.params)]
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    indices = signed(indices)
    columns = {d: indices[..., k] for k, d in enumerate(numbers.scatter_dims_to_operand_dims)}
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        columns = {d: clamp(column, shape[d] - windows[d]) for d, column in columns.items()}
    for d, factor in split.items():
        place, here = locate(columns[d], factor, shard)
        columns[d] = jnp.where(here, place, -1)
    params = {**eqn.params, "indices_are_sorted": False, "unique_indices": False,
              "mode": lax.GatherScatterMode.FILL_OR_DROP}
    return [eqn.primitive.bind(table, jnp.stack(list(columns.values()), axis=-1), updates, **params)]


@register(*find_primitives("dynamic_update_slice"))
def dynamic_update_slice(eqn: JaxprEqn) -> ShardingRule:
    """`ab,1b,,->ab`; a dim of which several elements are written, but not all, is whole."""
    shape, taken = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    fresh = factor_names()
    operand: Term = new_term(shape, fresh)
    sizes = {dim[0]: size for dim, size in zip(operand, shape, strict=True) if dim}
    update: list[Dim] = []
    whole: list[Factor] = []
    for dim, size, written in zip(operand, shape, taken, strict=True):
        update.append(dim if written == size else () if written == 1 else (next(fresh),))
        if written not in (1, size):
            sizes[update[-1][0]] = written
            whole += [*dim, *update[-1]]

    def local(eqn: JaxprEqn, shard: Shard, array: jax.Array, new: jax.Array, *starts: jax.Array) -> Sequence[jax.Array]:
        begin, mine, somewhere = [], jnp.asarray(True), False
        for d, (start, size, written) in enumerate(zip(starts, shape, taken, strict=True)):
            place = clamp(signed(start), size - written)
            if array.shape[d] != size and written != size:
                place, here = locate(place, operand[d][0], shard)
                place, mine, somewhere = jnp.where(here, place, 0), mine & here, True
            begin.append(jnp.asarray(place, jnp.int32))
        if somewhere:
            new = jnp.where(mine, new, lax.dynamic_slice(array, begin, new.shape))
        return [lax.dynamic_update_slice(array, new, begin)]

    return ShardingRule(
        (operand, tuple(update), *((),) * (len(eqn.invars) - 2)),
        (operand,),
        sizes,
        whole=tuple(whole),
        linear=linear_groups(eqn, (0, 1)),
        local=local,
    )

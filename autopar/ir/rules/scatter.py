"""Rules of writing by index: the `scatter` family and `dynamic_update_slice`.

In:     `x.at[i].set`, `.add`, ..., the gradient of an embedding lookup, updates of caches.
Out:    window dims and batching dims may be split; so may a dim that single elements are written into: each device
        writes those that it holds. If updates are added, their positions may be split too: the result is then a partial
        sum, and the operand must be one.
Method: a local index is out of range where the global one is another device's, and such writes are dropped. Except for a
        single update: XLA turns it into slices, and merges a slice with the slice that made its table without clamping
        either. So its index is in range on every device, and other devices write the old values again.
        The terms are those of the gather that reads what is written (`locate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, bind_eqn, find_primitives
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.rules.locate import IndexTerms, index_terms, locate, locate_slice, signed, slice_terms
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Shard, ShardingRule, num_elements
from autopar.ir.rules.terms import rule_of


@register(*find_primitives("scatter-add", "scatter-sub"))
def scatter_add(eqn: JaxprEqn) -> ShardingRule:
    """`cd,ab1,abd->cd {sum a b}`: the gradient of an embedding."""
    return _scatter(eqn, (0, 2), adds=may_be_partial(eqn.outvars[0].aval.dtype))


@register(*find_primitives("scatter-mul"))
def scatter_mul(eqn: JaxprEqn) -> ShardingRule:
    """`bc,a1,ac->bc {whole a}`; linear in the operand."""
    return _scatter(eqn, (0,))


@register(*find_primitives("scatter-min", "scatter-max"))
def scatter_extreme(eqn: JaxprEqn) -> ShardingRule:
    """`bc,a1,ac->bc {whole a}`."""
    return _scatter(eqn)


@register(*find_primitives("scatter"))
def scatter(eqn: JaxprEqn) -> ShardingRule:
    """`bc,a1,ac->bc {whole a}`: of several writes to one index only one counts, so a device must see them all.

    Where indices are unique, it is linear in operand and updates together.
    """
    return _scatter(eqn, *([(0, 2)] if _writes_once(eqn) else []), flops_per_update=0)


def _writes_once(eqn: JaxprEqn) -> bool:
    if eqn.params["update_jaxpr"] is not None:  # `x.at[i].apply(f)`: any function of the old value
        return False
    batching = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    positions = [size for d, size in enumerate(eqn.invars[1].aval.shape[:-1]) if d not in batching]
    return bool(eqn.params["unique_indices"]) or num_elements(positions) == 1


def _scatter(eqn: JaxprEqn, *linear: tuple[int, ...], adds: bool = False, flops_per_update: int = 1) -> ShardingRule:
    table, indices, updates = (var.aval for var in eqn.invars)
    taken = _window_lengths(eqn)
    terms = index_terms(table.shape, indices.shape, taken, _mirrored(eqn.params["dimension_numbers"]))

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        return _scatter_here(eqn, terms, taken, shard, *operands)

    return rule_of(
        eqn,
        [terms.table, terms.indices, terms.slices],
        [terms.table],
        linear,
        terms.sizes,
        summed=terms.positions if adds else (),
        whole=terms.whole if adds else (*terms.positions, *terms.whole),
        accumulators=dict.fromkeys(terms.positions, (0,)) if adds else {},
        flops=float(flops_per_update * num_elements(updates.shape)),
        local=local,
    )


def _window_lengths(eqn: JaxprEqn) -> list[int]:
    """The length of an update's window along each dim of the operand."""
    numbers, updates = eqn.params["dimension_numbers"], eqn.invars[2].aval
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    lengths = iter([updates.shape[d] for d in numbers.update_window_dims])
    return [1 if d in single else next(lengths) for d in range(eqn.invars[0].aval.ndim)]


def _mirrored(numbers: lax.ScatterDimensionNumbers) -> lax.GatherDimensionNumbers:
    """The dimension numbers of the gather that reads what a scatter writes."""
    return lax.GatherDimensionNumbers(
        offset_dims=tuple(numbers.update_window_dims),
        collapsed_slice_dims=tuple(numbers.inserted_window_dims),
        start_index_map=tuple(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=tuple(numbers.operand_batching_dims),
        start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
    )


def _scatter_here(
    eqn: JaxprEqn, terms: IndexTerms, taken: Sequence[int], shard: Shard, *operands: jax.Array
) -> Sequence[jax.Array]:
    """The per-device program: apply the updates whose indices this device holds."""
    table, indices, updates = operands
    shape, index_map = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    if all(table.shape[d] == shape[d] for d in index_map):
        return bind_eqn(eqn, *operands)
    indices = signed(indices)
    columns = {d: indices[..., k] for k, d in enumerate(index_map)}
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        columns = {d: jnp.clip(column, 0, shape[d] - taken[d]) for d, column in columns.items()}
    if num_elements(indices.shape[:-1]) == 1:
        return [_write_once(eqn, terms, taken, shard, table, columns, indices, updates)]
    for d, factor in terms.searched.items():
        if shard.num_shards(factor) > 1:
            columns[d], _ = locate(columns[d], factor, shard)  # another device's index is out of range here
    drop = lax.GatherScatterMode.FILL_OR_DROP
    params = {**eqn.params, "indices_are_sorted": False, "unique_indices": False, "mode": drop}
    return bind_eqn(eqn, table, jnp.stack(list(columns.values()), axis=-1), updates, params=params)


def _write_once(
    eqn: JaxprEqn,
    terms: IndexTerms,
    taken: Sequence[int],
    shard: Shard,
    table: jax.Array,
    columns: Mapping[int, jax.Array],
    indices: jax.Array,
    updates: jax.Array,
) -> jax.Array:
    """Apply a single update: read its window, update that, and write it back."""
    shape = eqn.invars[0].aval.shape
    window = [here if length == size else length for here, length, size in zip(table.shape, taken, shape, strict=True)]
    begin, mine = [jnp.int32(0)] * len(shape), jnp.asarray(True)
    for d, column in columns.items():
        place = jnp.reshape(column, ())
        here = (place >= 0) & (place <= shape[d] - taken[d])
        if d in terms.searched:
            place, found = locate(place, terms.searched[d], shard)
            here &= found
        begin[d], mine = jnp.where(here, place, 0).astype(jnp.int32), mine & here
    old = lax.dynamic_slice(table, begin, window)
    (new,) = bind_eqn(eqn, old, jnp.zeros_like(indices), updates)
    return lax.dynamic_update_slice(table, jnp.where(mine, new, old), begin)


@register(*find_primitives("dynamic_update_slice"))
def dynamic_update_slice(eqn: JaxprEqn) -> ShardingRule:
    """`ab,1b,,->ab`; a dim of which several elements are written, but not all, is whole."""
    shape, taken = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    operand, update, single, whole = slice_terms(shape, taken)

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        array, new, *starts = operands
        begin, mine = locate_slice(starts, taken, shape, operand, shard)
        if all(shard.num_shards(factor) == 1 for factor in single):
            return bind_eqn(eqn, array, new, *begin)
        # Other devices write old values back, so that the array can still be updated in place.
        new = jnp.where(mine, new, lax.dynamic_slice(array, begin, new.shape))
        return bind_eqn(eqn, array, new, *begin)

    return rule_of(eqn, [operand, update], [operand], [(0, 1)], whole=whole, moves_data=True, local=local)

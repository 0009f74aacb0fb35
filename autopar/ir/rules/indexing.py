"""Rules of reading by index: `gather` and `dynamic_slice`.

In:     `table[ids]`, `take_along_axis`, `x[i]`, `lax.dynamic_slice`, and the transposes of writing by index.
Out:    dims of the indices and dims that are taken whole may be split; so may a dim from which single elements are
        read, such as the vocabulary v of an embedding: `vd,bs1->bsd {sum v}`.
Method: each device reads the elements that it holds and has zeros for the others, so that the result is a partial sum
        with one nonzero term. `locate.py` makes indices local and keeps the modes' meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import JaxprEqn, bind_eqn, find_primitives
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.rules.locate import IndexTerms, index_terms, locate, locate_slice, signed, slice_terms
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Shard, ShardingRule, num_elements
from autopar.ir.rules.terms import rule_of


@register(*find_primitives("gather"))
def gather(eqn: JaxprEqn) -> ShardingRule:
    """`cd,ab1->abd {sum c}` for an embedding, `ab,a11->a1 {sum b}` for one number of each row."""
    table, indices = (var.aval for var in eqn.invars)
    terms = index_terms(table.shape, indices.shape, eqn.params["slice_sizes"], eqn.params["dimension_numbers"])
    searched = tuple(terms.searched.values())
    adds_up = may_be_partial(table.dtype)

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        return _gather_here(eqn, terms, shard, *operands)

    return rule_of(
        eqn,
        [terms.table, terms.indices],
        [terms.slices],
        [(0,)] if _fill_adds_up(eqn) else (),
        terms.sizes,
        summed=searched if adds_up else (),
        one_hot=searched,
        whole=terms.whole if adds_up else (*searched, *terms.whole),
        moves_data=eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP,  # every device fills
        local=local,
    )


def _fill_adds_up(eqn: JaxprEqn) -> bool:
    """Whether partial sums may pass despite out-of-range fills: the fill is NaN or 0, or there is none."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    if fill is None:  # NaN; for integers the extreme one
        return bool(jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact))
    return bool(np.isnan(fill)) or bool(fill == 0)


def _gather_here(
    eqn: JaxprEqn, terms: IndexTerms, shard: Shard, table: jax.Array, indices: jax.Array
) -> Sequence[jax.Array]:
    """The per-device program: look up the elements held here, zeros for the others."""
    params, numbers, shape = eqn.params, eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    lengths = zip(table.shape, params["slice_sizes"], shape, strict=True)
    params = {**params, "slice_sizes": tuple(local if taken == size else taken for local, taken, size in lengths)}
    split = {d: factor for d, factor in terms.searched.items() if shard.num_shards(factor) > 1}
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if not split and (fills or num_elements(indices.shape[:-1]) > 1):
        return bind_eqn(eqn, table, indices, params=params)
    indices = signed(indices)
    columns = {d: indices[..., k] for k, d in enumerate(numbers.start_index_map)}
    if not fills:  # XLA clamps indices that are promised in bounds too, except where it merges a slice with another
        columns = {d: jnp.clip(column, 0, shape[d] - eqn.params["slice_sizes"][d]) for d, column in columns.items()}
    if not split:
        return bind_eqn(eqn, table, _joint(columns, indices), params=params)
    mine = jnp.ones(indices.shape[:-1], bool)
    for d, factor in split.items():
        place, here = locate(columns[d], factor, shard)
        # Out of range stays so, to be filled; an index of another device just has to be legal.
        columns[d], mine = jnp.where(here, place, 0), mine & here
    params |= {"indices_are_sorted": False, "unique_indices": False}
    (found,) = bind_eqn(eqn, table, _joint(columns, indices), params=params)
    places = [d for d in range(found.ndim) if d not in numbers.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(mine, found.shape, places), found, jnp.zeros_like(found))]


def _joint(columns: Mapping[int, jax.Array], like: jax.Array) -> jax.Array:
    """The array of indices with these columns; `like` if there are none."""
    return jnp.stack(list(columns.values()), axis=-1) if columns else like


@register(*find_primitives("dynamic_slice"))
def dynamic_slice(eqn: JaxprEqn) -> ShardingRule:
    """`ab,,->1b {sum a}` for `x[i]`; a dim of which several elements are taken, but not all, is whole."""
    shape, slices = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    operand, result, single, whole = slice_terms(shape, slices)
    adds_up = may_be_partial(eqn.invars[0].aval.dtype)
    summed = single if adds_up else ()

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        array, *starts = operands
        params = {**eqn.params, "slice_sizes": tuple(shard.local_dim(dim) for dim in result)}
        begin, mine = locate_slice(starts, slices, shape, operand, shard)
        if all(shard.num_shards(factor) == 1 for factor in summed):
            return bind_eqn(eqn, array, *begin, params=params)
        (found,) = bind_eqn(eqn, array, *begin, params=params)
        return [jnp.where(mine, found, jnp.zeros_like(found))]

    whole = whole if adds_up else (*single, *whole)
    return rule_of(
        eqn, [operand], [result], [(0,)], summed=summed, one_hot=summed, whole=whole, moves_data=True, local=local
    )

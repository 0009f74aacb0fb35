"""Rules of operations that move elements and do not change them.

In:     `broadcast_in_dim`, `transpose`, `slice`, `concatenate`, `pad`, `select_n`, `iota`, ...
Out:    dims that keep all their elements in order are shared factors and may be split; a dim that is sliced, padded,
        reversed or concatenated is whole.
Method: a broadcast dim is a factor of the result alone, so a device computes just its shard. All are linear: partial sums
        pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Dim, Factor, LocalProgram, Shard, ShardingRule, Term, factor_names, num_elements
from autopar.ir.rules.terms import new_term, rule_of, without


@register(*find_primitives("broadcast_in_dim"))
def broadcast_in_dim(eqn: JaxprEqn) -> ShardingRule:
    """`b->ab`; an operand dim of length 1 is written `1`: `1b->ab`."""
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result = new_term(target)
    places = eqn.params["broadcast_dimensions"]
    operand = tuple(() if size == 1 else result[place] for size, place in zip(source, places, strict=True))

    def local(eqn: JaxprEqn, shard: Shard, array: jax.Array, *_: jax.Array) -> Sequence[jax.Array]:
        return [lax.broadcast_in_dim(array, _local_shape(result, shard), places)]

    return rule_of(eqn, [operand], [result], [(0,)], moves_data=True, local=local)


@register(*find_primitives("transpose"))
def transpose(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ba`."""
    operand = new_term(eqn.invars[0].aval.shape)
    return rule_of(eqn, [operand], [tuple(operand[d] for d in eqn.params["permutation"])], [(0,)], moves_data=True)


@register(*find_primitives("squeeze", "expand_dims"))
def squeeze(eqn: JaxprEqn) -> ShardingRule:
    """`a1b->ab`, or `ab->a1b`."""
    wide = new_term(max((var.aval.shape for var in (*eqn.invars, *eqn.outvars)), key=len))
    terms = wide, without(wide, eqn.params["dimensions"])
    operand, result = terms if eqn.primitive.name == "squeeze" else terms[::-1]
    return rule_of(eqn, [operand], [result], [(0,)], moves_data=True)


@register(*find_primitives("select_n"))
def select_n(eqn: JaxprEqn) -> ShardingRule:
    """`ab,ab,ab->ab`; the predicate, which is first, may be a scalar; linear in the cases together."""
    shape = eqn.outvars[0].aval.shape
    term = new_term(shape, factor_names())
    predicate = term if eqn.invars[0].aval.shape else ()
    cases = tuple(range(1, len(eqn.invars)))
    operands = [predicate, *(term,) * len(cases)]
    return rule_of(eqn, operands, [term], [cases], moves_data=True, flops=float(num_elements(shape)))


@register(*find_primitives("slice"))
def slice_(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ac {whole b c}`: a dim that is sliced is whole."""
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    kept = [a == b for a, b in zip(source, target, strict=True)]  # equal lengths: the slice takes every element
    strides = eqn.params["strides"] or (1,) * len(source)

    def local(eqn: JaxprEqn, shard: Shard, array: jax.Array) -> Sequence[jax.Array]:
        limits = [
            n if keep else limit for n, keep, limit in zip(array.shape, kept, eqn.params["limit_indices"], strict=True)
        ]
        return [lax.slice(array, eqn.params["start_indices"], limits, strides)]

    return _resized(eqn, kept, local)


@register(*find_primitives("pad"))
def pad(eqn: JaxprEqn) -> ShardingRule:
    """`ab,->ac {whole b c}`: a dim that is padded or cropped is whole."""
    kept = [tuple(map(int, config)) == (0, 0, 0) for config in eqn.params["padding_config"]]
    return _resized(eqn, kept, None)


@register(*find_primitives("rev"))
def rev(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ab {whole b}`: a dim that is reversed is whole."""
    term = new_term(eqn.invars[0].aval.shape)
    whole = tuple(factor for d in eqn.params["dimensions"] for factor in term[d])
    return rule_of(eqn, [term], [term], [(0,)], whole=whole, moves_data=True)


@register(*find_primitives("concatenate", "split"))
def concatenate(eqn: JaxprEqn) -> ShardingRule:
    """`ab,ac->ad {whole b c d}`, or `ad->ab,ac`: the dim along which arrays are joined is whole in each."""
    along = eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"]
    fresh = factor_names()
    shape = [1 if d == along else size for d, size in enumerate(eqn.invars[0].aval.shape)]
    shared = new_term(shape, fresh)
    own = new_term([var.aval.shape[along] for var in (*eqn.invars, *eqn.outvars)], fresh)
    terms = [(*shared[:along], dim, *shared[along + 1 :]) for dim in own]
    count = len(eqn.invars)
    return _moving(eqn, terms[:count], terms[count:], [factor for dim in own for factor in dim])


@register(*find_primitives("stack"))
def stack(eqn: JaxprEqn) -> ShardingRule:
    """`b,b->ab {whole a}`."""
    along = eqn.params["axis"]
    stacked = new_term(eqn.outvars[0].aval.shape)
    return _moving(eqn, [without(stacked, (along,))] * len(eqn.invars), [stacked], stacked[along])


@register(*find_primitives("tile"))
def tile(eqn: JaxprEqn) -> ShardingRule:
    """`b->(ab)`: the number of the copy is a major factor, which the operand lacks."""
    shape, reps = eqn.invars[0].aval.shape, eqn.params["reps"]
    fresh = factor_names()
    sizes: dict[Factor, int] = {}
    operand, result = [], []
    for size, count in zip(shape, reps, strict=True):
        factors = [(next(fresh), n) for n in (count, size) if n != 1]
        sizes.update(factors)
        names = tuple(name for name, _ in factors)
        result.append(names)
        operand.append(names[-1:] if size != 1 else ())

    def local(eqn: JaxprEqn, shard: Shard, array: jax.Array) -> Sequence[jax.Array]:
        counts = [
            shard.local_dim(dim) // n if n else count for dim, n, count in zip(result, array.shape, reps, strict=True)
        ]
        return [jnp.tile(array, counts)]

    return rule_of(eqn, [tuple(operand)], [tuple(result)], [(0,)], sizes, moves_data=True, local=local)


@register(*find_primitives("iota"))
def iota(eqn: JaxprEqn) -> ShardingRule:
    """`->ab`: each device counts from the offset of its shard."""
    shape, along = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    result = new_term(shape)

    def local(eqn: JaxprEqn, shard: Shard, *_: jax.Array) -> Sequence[jax.Array]:
        dtype = eqn.params["dtype"]
        count = lax.broadcasted_iota(dtype, _local_shape(result, shard), along)
        return [count + _offset(shard, result[along]).astype(dtype) if result[along] else count]

    return rule_of(eqn, [], [result], local=local)


@register(*find_primitives("iota_2x32_shape"))
def iota_2x32_shape(eqn: JaxprEqn) -> ShardingRule:
    """`->ab,ab`: the position in row-major order as high and low words, which are the counters of random bits."""
    shape = eqn.outvars[0].aval.shape
    result = new_term(shape)
    small = num_elements(shape) <= 1 << 32

    def local(eqn: JaxprEqn, shard: Shard) -> Sequence[jax.Array]:
        low = jnp.zeros(_local_shape(result, shard), jnp.uint32)
        for d, dim in enumerate(result):
            if dim:
                place = lax.broadcasted_iota(jnp.uint32, low.shape, d) + _offset(shard, dim).astype(jnp.uint32)
                low = low + place * np.uint32(num_elements(shape[d + 1 :]) % (1 << 32))
        return [jnp.zeros_like(low), low]

    whole = () if small else tuple(dim[0] for dim in result if dim)
    return rule_of(eqn, [], [result], whole=whole, local=local if small else None)


@register(*find_primitives("bitcast_convert_type"))
def bitcast_convert_type(eqn: JaxprEqn) -> ShardingRule:
    """`a->a`; between dtypes of different width a last dim is added or removed: `a->ab {whole b}`."""
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    term = new_term(max(source, target, key=len))
    whole = term[-1] if len(source) != len(target) else ()
    return rule_of(eqn, [term[: len(source)]], [term[: len(target)]], whole=whole)


def _resized(eqn: JaxprEqn, kept: Sequence[bool], local: LocalProgram | None) -> ShardingRule:
    """The rule for one array whose dims are kept or resized; further operands are scalars, linear together with it."""
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    fresh = factor_names()
    operand = new_term(source, fresh)
    result = tuple(
        dim if keep else () if size == 1 else (next(fresh),)
        for dim, size, keep in zip(operand, target, kept, strict=True)
    )
    whole = tuple(
        f for term in (operand, result) for dim, keep in zip(term, kept, strict=True) if not keep for f in dim
    )
    return _moving(eqn, [operand], [result], whole, local)


def _moving(
    eqn: JaxprEqn,
    operands: Sequence[Term],
    results: Sequence[Term],
    whole: Sequence[Factor],
    local: LocalProgram | None = None,
) -> ShardingRule:
    """A rule linear in all operands together."""
    together = tuple(range(len(eqn.invars)))
    return rule_of(eqn, operands, results, [together], whole=tuple(whole), moves_data=True, local=local)


def _local_shape(term: Term, shard: Shard) -> tuple[int, ...]:
    return tuple(shard.local_dim(dim) for dim in term)


def _offset(shard: Shard, dim: Dim) -> jax.Array:
    """The first global position that this device holds along a dim of one factor."""
    return jnp.asarray(shard.offset(dim[0]), jnp.int32)

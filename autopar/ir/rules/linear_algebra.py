"""Rules of matrix products and decompositions.

In:     products, grouped and scaled ones too, and `cholesky`, `triangular_solve`, `lu`, `eigh`, `svd`, ...
Out:    `ab,bc->ac {sum b}` for products; for decompositions, batch dims may be split and the dims of the matrix are whole.
Method: a product sums over the contracted factors; if one is split, the result is a partial sum. Linear in either operand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from autopar._jax import JaxprEqn, bind_eqn, find_primitives
from autopar.ir.rules.exchanged_rows import Exchange
from autopar.ir.rules.grouped_product import by_parts, grouped_product_p
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.rules.locate import signed
from autopar.ir.rules.registry import register, register_named
from autopar.ir.rules.rule import (
    Dim,
    Factor,
    LocalProgram,
    RowExchange,
    Shard,
    ShardingRule,
    Term,
    factor_names,
    infer_sizes,
    num_elements,
)
from autopar.ir.rules.terms import drop_units, factors_of, new_term, rule_of, without


@register(*find_primitives("dot_general"))
def dot_general(eqn: JaxprEqn) -> ShardingRule:
    """lhs[batch, m.., k..] * rhs[batch, k.., n..] -> out[batch, m.., n..], summed over k (of booleans: their max)."""
    contracted, batch = eqn.params["dimension_numbers"]
    lhs, rhs, out, summed = _product_terms(eqn, contracted, batch)
    dtype = eqn.outvars[0].aval.dtype
    if may_be_partial(dtype):
        return _product(eqn, (lhs, rhs), out, summed=summed)
    return _product(eqn, (lhs, rhs), out, **{"maxed" if dtype == np.bool_ else "whole": summed})


def _product_terms(
    eqn: JaxprEqn, contracted: Sequence[Sequence[int]], batch: Sequence[Sequence[int]], grouped: Sequence[int] = ()
) -> tuple[Term, Term, Term, tuple[Factor, ...]]:
    """Terms of lhs, rhs and result, with a factor for every dim, and the contracted factors.

    `grouped`: dims of rhs that the result lacks too.
    """
    fresh = factor_names()
    lhs = tuple((next(fresh),) for _ in eqn.invars[0].aval.shape)
    lhs_dim_of = dict(zip((*contracted[1], *batch[1]), (*contracted[0], *batch[0]), strict=True))
    rhs = tuple(lhs[lhs_dim_of[d]] if d in lhs_dim_of else (next(fresh),) for d in range(eqn.invars[1].aval.ndim))
    out = (*(lhs[d] for d in batch[0]), *without(lhs, contracted[0], batch[0]))
    return lhs, rhs, (*out, *without(rhs, contracted[1], batch[1], grouped)), tuple(lhs[d][0] for d in contracted[0])


def _product(
    eqn: JaxprEqn,
    operands: tuple[Term, ...],
    out: Term,
    summed: Sequence[Factor] = (),
    maxed: Sequence[Factor] = (),
    whole: Sequence[Factor] = (),
) -> ShardingRule:
    """A rule linear in the first and in the second operand, with 2 FLOPs for each combination of their factors."""
    all_sizes = infer_sizes([*operands, out], [var.aval.shape for var in (*eqn.invars, *eqn.outvars)])
    flops = 2.0 * math.prod(all_sizes[factor] for factor in factors_of(*operands[:2]))
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating):
        flops *= 4
    (*kept, out), sizes = drop_units([*operands, out], all_sizes)
    return rule_of(
        eqn,
        kept,
        [out],
        [(0,), (1,)],
        sizes,
        summed=tuple(factor for factor in summed if factor in sizes),
        reduced={factor: "max" for factor in maxed if factor in sizes},
        whole=tuple(factor for factor in whole if factor in sizes),
        flops=flops,
    )


@register(*find_primitives("ragged_dot_general"), grouped_product_p)
def ragged_dot_general(eqn: JaxprEqn) -> ShardingRule:
    """A product whose dim `lhs_ragged_dimensions` is divided into groups g, with their lengths in `group_sizes`.

    The ragged dim is free, contracted or batch. Free, as for tokens: `tk,gkn,h->tn {sum k g}`; each group has its own rhs,
    and a device has zeros for rows of groups that it does not hold. Contracted: `tk,tn,h->gkn {sum t}`; each group has its
    own result. In these two cases both the ragged dim and the groups may be split: from the whole list of lengths a device
    computes which of its rows belong to which of its groups. For a batch dim, and for lengths that have batch dims
    themselves, they are whole; the rest is as in `dot_general`.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    (ragged,), group_dims = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    lhs, rhs, out, summed = _product_terms(eqn, contracted, batch, group_dims)
    group: Dim = ("g0",)
    rhs = tuple(group if d in group_dims else dim for d, dim in enumerate(rhs))
    if ragged in contracted[0]:
        out, prefix = (group, *out), [*batch[0], *contracted[0]]
    elif ragged in batch[0]:
        prefix = [*batch[0]]
    else:
        prefix = [*batch[0], *(d for d in range(len(lhs)) if d not in (*contracted[0], *batch[0]))]
    groups = eqn.invars[2].aval.shape[-1] if group_dims else 1
    if eqn.primitive is grouped_product_p and eqn.invars[2].aval.ndim == 2:
        return _in_parts(eqn, (lhs, rhs, out), summed, lhs[ragged][0], groups)
    if eqn.invars[2].aval.ndim == 1 and ragged not in batch[0] and may_be_partial(eqn.outvars[0].aval.dtype):
        lengths: Dim = ("h0",)
        sums = [*summed, *group] if group_dims else summed
        rule = _product(eqn, (lhs, rhs, (lengths,)), out, summed=sums, whole=lengths)
        one_hot = tuple(f for f in group if f in rule.summed)
        local = functools.partial(_ragged_here, rows=lhs[ragged][0], group=group[0])
        return replace(rule, flops=rule.flops / groups, one_hot=one_hot, local=local)
    group_sizes: Term = (group,)
    if eqn.invars[2].aval.ndim > 1:  # one list of lengths per index of the dims before the ragged one
        group_sizes = (*(lhs[d] for d in prefix[: prefix.index(ragged)]), group)
    whole = (*lhs[ragged], *group)
    rule = _product(eqn, (lhs, rhs, group_sizes), out, summed=[f for f in summed if f not in whole], whole=whole)
    return replace(rule, flops=rule.flops / groups)  # each token is multiplied by one group's rhs only


def _in_parts(
    eqn: JaxprEqn, terms: tuple[Term, Term, Term], summed: Sequence[Factor], rows: Factor, groups: int
) -> ShardingRule:
    """`(pt)k,gkn,ph->(pt)n {sum k g}`, `(pt)k,(pt)n,ph->gkn {sum p t}`: rows in equal parts, each sorted by group."""
    part, group, lengths = "p0", "g0", ("h0",)
    lhs, rhs, out = (tuple((part, rows) if dim == (rows,) else dim for dim in term) for term in terms)
    sums = [*summed, part] if rows in summed else [*summed, group]
    rule = _product(eqn, (lhs, rhs, ((part,), lengths)), out, summed=sums, whole=(rows, *lengths))
    one_hot = tuple(f for f in (group,) if f in rule.summed)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    along = [part if term in (lhs, rhs, out) and part in factors_of(term) else group for term in (lhs, rhs, out)]
    exchange = RowExchange(part, group, (*along[:2], None, along[2]))

    def local(
        eqn: JaxprEqn, shard: Shard, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Sequence[jax.Array]:
        if exchange.axes(shard.axes_of):
            return _of_exchanged_rows(eqn, shard, exchange, lhs, rhs, group_sizes)
        if shard.num_shards(group) == 1 < len(group_sizes):  # only the parts are split; a mesh may split it again
            return bind_eqn(eqn, lhs, rhs, group_sizes)

        def one(lhs: jax.Array, rhs: jax.Array, lengths: jax.Array) -> jax.Array:
            return _ragged_here(eqn, shard, lhs, rhs, lengths, rows=rows, group=group)[0]

        return [by_parts(one, numbers, lhs, rhs, group_sizes)]

    return replace(rule, flops=rule.flops / groups, one_hot=one_hot, local=local, exchange=exchange)


def _of_exchanged_rows(
    eqn: JaxprEqn, shard: Shard, over: RowExchange, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> Sequence[jax.Array]:
    """The per-device program where one axis splits both rows and groups: rows are sent to their groups' devices and back.

    `group_sizes`: those of all parts, the same on every device.
    """
    axes, of_parts = over.axes(shard.axes_of), shard.axes_of[over.part]
    # All axes that split the parts, in order, determine a row's part; the exchange is along some of them.
    counts = signed(group_sizes).reshape(*(shard.axis_sizes[axis] for axis in of_parts), -1, group_sizes.shape[-1])
    for d, axis in reversed([*enumerate(of_parts)]):
        if axis not in axes:
            counts = lax.dynamic_index_in_dim(counts, lax.axis_index(axis), d, keepdims=False)
    counts = counts.reshape(shard.num_shards(over.group), *counts.shape[len(axes) :])
    ((of_lhs, of_rhs), _), (ragged,) = (
        eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers,
        eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions,
    )
    exchange = Exchange(counts, lhs.shape[ragged] // counts.shape[1], axes, shard.platform)

    def sent(array: jax.Array, dim: int) -> jax.Array:
        return jnp.moveaxis(exchange.send(jnp.moveaxis(array, dim, 0)), 0, dim)

    sizes = exchange.sizes.astype(group_sizes.dtype)
    if ragged in of_lhs:
        return bind_eqn(eqn, sent(lhs, ragged), sent(rhs, of_rhs[of_lhs.index(ragged)]), sizes)
    (made,) = bind_eqn(eqn, sent(lhs, ragged), rhs, sizes)
    at = sum(d < ragged and d not in of_lhs for d in range(lhs.ndim))
    return [jnp.moveaxis(exchange.bring_back(jnp.moveaxis(made, at, 0)), 0, at)]


def _ragged_here(
    eqn: JaxprEqn, shard: Shard, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, rows: Factor, group: Factor
) -> Sequence[jax.Array]:
    """The per-device program: a product of the device's rows that belong to its groups, rolled to the front."""
    whole_rows, whole_groups = (shard.num_shards(f) == 1 for f in (rows, group))
    if whole_rows and whole_groups:
        return bind_eqn(eqn, lhs, rhs, group_sizes)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    length, first = lhs.shape[ragged], shard.offset(rows)
    lengths = signed(group_sizes)
    ends = jnp.cumsum(lengths)
    begins, ends = (jnp.clip(places - first, 0, length) for places in (ends - lengths, ends))
    if whole_groups:
        return bind_eqn(eqn, lhs, rhs, (ends - begins).astype(group_sizes.dtype))
    begins, ends = (
        lax.dynamic_slice_in_dim(places, shard.offset(group), shard.local_size(group)) for places in (begins, ends)
    )
    begin, end = begins[0], ends[-1]
    own = (ends - begins).astype(group_sizes.dtype)
    lhs = jnp.roll(lhs, -begin, ragged)
    if ragged in contracted[0]:
        return bind_eqn(eqn, lhs, jnp.roll(rhs, -begin, contracted[1][contracted[0].index(ragged)]), own)
    (found,) = bind_eqn(eqn, lhs, rhs, own)
    at = sum(d < ragged and d not in contracted[0] for d in range(lhs.ndim))
    place = lax.broadcasted_iota(jnp.int32, found.shape, at)
    is_own = (place >= begin) & (place < end)
    return [jnp.where(is_own, jnp.roll(found, begin, at), jnp.zeros_like(found))]


@register(*find_primitives("scaled_dot"))
def scaled_dot(eqn: JaxprEqn) -> ShardingRule:
    """A product of operands scaled by blocks along the contracted dims: these dims and the blocks are whole."""
    contracted, batch = eqn.params["dimension_numbers"]
    lhs, rhs, out, summed = _product_terms(eqn, contracted, batch)
    scales = [
        tuple((f"{name}{d + 1}",) if d in dims else dim for d, dim in enumerate(term))
        for name, term, dims in zip("XY", (lhs, rhs), contracted, strict=True)
    ]
    blocks = [scale[d][0] for scale, dims in zip(scales, contracted, strict=True) for d in dims]
    return _product(eqn, (lhs, rhs, *scales), out, whole=(*summed, *blocks))


@register_named("scaled_matmul", "scaled_matmul_wrapper")
def scaled_matmul(eqn: JaxprEqn) -> ShardingRule:
    """`ab(cd),ae(cd),abc,aec->abe {sum c d}`: cuDNN's product with one scale per block of d elements; c may be split.

    Operands whose blocks differ in length are whole along the contracted dim.
    """
    lhs, rhs, lhs_scale, rhs_scale = (var.aval.shape for var in eqn.invars)
    if lhs_scale[2] != rhs_scale[2] or lhs[2] % lhs_scale[2]:
        terms: tuple[Term, ...] = tuple(((f,), (g,), (h,)) for f, g, h in ("abk", "aek", "abx", "aey"))
        return _product(eqn, terms, (("a",), ("b",), ("e",)), whole=("k", "x", "y"))
    depth: Dim = ("c", "d")
    operands = ((("a",), ("b",), depth), (("a",), ("e",), depth), (("a",), ("b",), ("c",)), (("a",), ("e",), ("c",)))
    return _product(eqn, operands, (("a",), ("b",), ("e",)), summed=depth)


def _cubic(factor: float) -> Callable[[int, int], float]:
    return lambda m, n: factor * m * n * min(m, n)


# Dims of a matrix (2) or vector (1) in the first operand, and FLOPs for m x n (Golub & Van Loan, "Matrix Computations").
_DECOMPOSITIONS: dict[str, tuple[int, Callable[[int, int], float]]] = {
    "cholesky": (2, _cubic(1 / 3)),
    "cholesky_update": (2, lambda m, n: 6.0 * n * n),
    "eig": (2, _cubic(25)),
    "eigh": (2, _cubic(9)),
    "geqp3": (2, _cubic(2)),
    "geqrf": (2, _cubic(2)),
    "hessenberg": (2, _cubic(10 / 3)),
    "householder_product": (2, _cubic(2)),
    "lu": (2, _cubic(2 / 3)),
    "lu_pivots_to_permutation": (1, lambda m, n: float(n)),
    "ormqr": (2, _cubic(4)),
    "qr": (2, _cubic(4)),
    "schur": (2, _cubic(25)),
    "svd": (2, _cubic(20)),
    "symmetric_product": (2, lambda m, n: 2.0 * m * m * n),
    "tridiagonal": (2, _cubic(4 / 3)),
}


@register(*find_primitives(*_DECOMPOSITIONS))
def decomposition(eqn: JaxprEqn) -> ShardingRule:
    """`abc->abd,ae,... {whole b c d e ...}`: leading dims are a batch, shared by all operands and results."""
    matrix_dims, matrix_flops = _DECOMPOSITIONS[eqn.primitive.name]
    shape = eqn.invars[0].aval.shape
    m, n = shape[-2:] if matrix_dims == 2 else (1, shape[-1])
    return _of_each(eqn, len(eqn.invars), matrix_dims, matrix_flops(m, n))


def decomposes_one_matrix(eqn: JaxprEqn) -> bool:
    """Whether an equation decomposes a matrix, and not a batch of them."""
    matrix_dims, _ = _DECOMPOSITIONS.get(eqn.primitive.name, (0, None))
    return matrix_dims == 2 and eqn.invars[0].aval.ndim == 2


def _of_each(
    eqn: JaxprEqn,
    num_arrays: int,
    num_dims: int,
    flops: float,
    linear: Sequence[tuple[int, ...]] = (),
    local: LocalProgram | None = None,
) -> ShardingRule:
    """The rule of an operation on the last dims: leading dims are a batch, shared by all operands and results.

    `num_arrays`: operands that are not scalars; `num_dims`: last dims of the first one; `flops`: those of one batch element.
    """
    shape = eqn.invars[0].aval.shape
    lead, fresh = len(shape) - num_dims, factor_names()
    batch = new_term(shape[:lead], fresh)
    arrays = (*eqn.invars[:num_arrays], *eqn.outvars)
    terms = [(*batch, *new_term(var.aval.shape[lead:], fresh)) for var in arrays]
    whole = tuple(factor for term in terms for factor in factors_of(term[lead:]))
    operands, results = terms[:num_arrays], terms[num_arrays:]
    return rule_of(eqn, operands, results, linear, whole=whole, flops=num_elements(shape[:lead]) * flops, local=local)


@register(*find_primitives("triangular_solve"))
def triangular_solve(eqn: JaxprEqn) -> ShardingRule:
    """a[.., m, m] x = b[.., m, n], or x a = b[.., n, m]: batch dims and right-hand sides n may be split; linear in b."""
    fresh, on_left = factor_names(), eqn.params["left_side"]
    *batch, row, column = new_term(eqn.invars[0].aval.shape, fresh)
    sides = eqn.invars[1].aval.shape[-1 if on_left else -2]
    (side,) = new_term([sides], fresh)
    b = (*batch, row, side) if on_left else (*batch, side, row)
    flops = float(num_elements(eqn.invars[0].aval.shape) * sides)
    return rule_of(eqn, [(*batch, row, column), b], [b], [(1,)], whole=(*row, *column), flops=flops)


@register(*find_primitives("tridiagonal_solve"))
def tridiagonal_solve(eqn: JaxprEqn) -> ShardingRule:
    """Three diagonals [.., m] and right-hand sides b[.., m, n]: batch dims and n may be split; linear in b."""
    shape = eqn.invars[3].aval.shape
    b = new_term(shape)
    return rule_of(eqn, [*(b[:-1],) * 3, b], [b], [(3,)], whole=b[-2], flops=8.0 * num_elements(shape))


@register(*find_primitives("fft"))
def fft(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ac {whole b c}`: the transformed dims, the last ones, are whole. Linear; 5 n log2 n FLOPs."""
    lengths = eqn.params["fft_lengths"]
    points = num_elements(lengths)
    flops = 5.0 * points * max(1.0, math.log2(max(points, 1)))
    return _of_each(eqn, 1, len(lengths), flops, [(0,)], _transform)


def _transform(eqn: JaxprEqn, shard: Shard, operand: jax.Array) -> list[jax.Array]:
    """The transform with row-major operand and result: XLA:CPU (jaxlib 0.10) otherwise takes another layout from a collective
    beside it, and then refuses it."""
    row_major = Layout(tuple(range(operand.ndim)))
    results = bind_eqn(eqn, with_layout_constraint(operand, row_major))
    return [with_layout_constraint(result, row_major) for result in results]

"""The rule of convolution: forward, both gradients, strided, transposed, grouped and depthwise.

In:     `conv_general_dilated`.
Out:    as a product, batch b, input channels i (summed), output channels o; the spatial dims are whole unless their
        windows are plain reshapes (`windows.py`): `bisu,oikl->botv {sum i, whole ...}`.
Method: groups are a factor g that leads both channel dims: `b(gi)..,(go)i..->b(go)..`. Where g is split, each device
        holds whole groups, and the local convolution has as many fewer. The gradient by the kernel of a grouped
        convolution counts groups along the batch (`batch_group_count`): `(gb)i..,(go)i..->b(go)..`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from autopar._jax import JaxprEqn, bind_eqn, find_primitives
from autopar.ir.rules.on_platforms import convolved_on_cpu
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, factor_names
from autopar.ir.rules.terms import factors_of, lengths_of, new_term, rule_of
from autopar.ir.rules.windows import Window, WindowFactors

_GROUP = "g0"


@register(*find_primitives("conv_general_dilated"))
def conv_general_dilated(eqn: JaxprEqn) -> ShardingRule:
    """Batch, output channels and groups may be split, input channels are summed; linear in either operand."""
    params = eqn.params
    lhs_shape, rhs_shape, out_shape = (var.aval.shape for var in (*eqn.invars, *eqn.outvars))
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    fresh = factor_names()
    groups = max(feature_groups, batch_groups)
    lengths = out_shape[out_spec[0]], rhs_shape[rhs_spec[1]], rhs_shape[rhs_spec[0]] // groups
    batch, inputs, outputs = dims = new_term(lengths, fresh)
    sizes = {_GROUP: groups, **lengths_of(dims, lengths)}
    group: Dim = (_GROUP,) if groups > 1 else ()
    spatial = _spatial(eqn, fresh)
    for dim in spatial:
        sizes |= dim.sizes
    lhs_batch = (*group, *batch) if batch_groups > 1 else batch
    lhs_features = (*group, *inputs) if feature_groups > 1 else inputs
    lhs = _place(lhs_spec, [lhs_batch, lhs_features, *(dim.operand for dim in spatial)])
    rhs = _place(rhs_spec, [(*group, *outputs), inputs, *(dim.window for dim in spatial)])
    out = _place(out_spec, [batch, (*group, *outputs), *(dim.result for dim in spatial)])
    used = factors_of(lhs, rhs, out)
    products = math.prod(out_shape) * math.prod(rhs_shape[d] for d in rhs_spec[1:])
    dtype = eqn.outvars[0].aval.dtype
    rule = rule_of(
        eqn,
        [lhs, rhs],
        [out],
        [(0,), (1,)],
        {factor: size for factor, size in sizes.items() if factor in used},
        summed=(*inputs, *(factor for dim in spatial for factor in dim.reduced)),
        whole=tuple(factor for dim in spatial for factor in dim.whole if factor in used),
        flops=(8.0 if jnp.issubdtype(dtype, jnp.complexfloating) else 2.0) * products,
        local=_local_convolution,
    )
    return replace(rule, transposed=(1,) if _is_turned(eqn) else ())


def _is_turned(eqn: JaxprEqn) -> bool:
    """Whether the kernel operand is transposed first: cuDNN reads (output channels, window, input channels).

    Not in the gradient by the kernel, where that operand is the cotangent: it has more positions than the result.
    """
    _, rhs_spec, out_spec = eqn.params["dimension_numbers"]
    shape, out_shape = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    if math.prod(shape[d] for d in rhs_spec[2:]) > math.prod(out_shape[d] for d in out_spec[2:]):
        return False
    wanted = [d for d in (rhs_spec[0], *rhs_spec[2:], rhs_spec[1]) if shape[d] > 1]
    return wanted != sorted(wanted)


def _spatial(eqn: JaxprEqn, fresh: Iterator[Factor]) -> list[WindowFactors]:
    params = eqn.params
    lhs_shape, rhs_shape, out_shape = (var.aval.shape for var in (*eqn.invars, *eqn.outvars))
    specs = zip(*(spec[2:] for spec in params["dimension_numbers"]), strict=True)
    return [
        Window(
            lhs_shape[lhs_dim],
            out_shape[out_dim],
            rhs_shape[rhs_dim],
            params["window_strides"][d],
            tuple(params["padding"][d]),
            params["lhs_dilation"][d],
            params["rhs_dilation"][d],
        ).factors(fresh)
        for d, (lhs_dim, rhs_dim, out_dim) in enumerate(specs)
    ]


def _place(spec: Sequence[int], dims: Sequence[Dim]) -> Term:
    """The term of an array from its `dims` in the order (batch or output, feature or input, spatial...), by `spec`."""
    return tuple(dims[spec.index(d)] for d in range(len(spec)))


def _local_convolution(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
    """The per-device program: a convolution with the device's groups."""
    params = dict(eqn.params)
    for count in ("feature_group_count", "batch_group_count"):
        if params[count] > 1:
            params[count] //= shard.num_shards(_GROUP)
    if shard.platform == "cpu":
        return convolved_on_cpu(eqn, params, operands)
    return bind_eqn(eqn, *operands, params=params)

"""Describes an operation as the kernel that one device runs under a strategy.

In:     an operation of the graph, its memory traffic (`traffic.py`), its local shapes under a strategy.
Out:    `Kernel` (`cost/kernels.py`).
Method: a product's sizes follow from its dimension numbers; a convolution is a product over the elements under its window
        (the implicit product of Chetlur et al., "cuDNN", 2014); other contractions are fused products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.lax
import numpy as np

from autopar._jax import Atom, JaxprEqn, copies_to_or_from_host
from autopar.cost.kernels import FusedProducts, HostCopy, Kernel, MemoryPass, Product
from autopar.intra_op.graph import Node
from autopar.intra_op.strategies import Strategy, split_fraction
from autopar.intra_op.traffic import Traffic, is_indexing
from autopar.intra_op.workspace import is_masked, masked_bytes
from autopar.ir.rules import ShardingRule
from autopar.ir.rules.rule import num_elements
from autopar.ir.split.sorted_rows.ordered import PRODUCTS
from autopar.mesh import LogicalMesh, Sharding

Shape = tuple[int, ...]
_Part = tuple[Shape, int]


def kernel_of(node: Node, strategy: Strategy, traffic: Traffic, mesh: LogicalMesh) -> Kernel:
    """The kernel that one device runs for an operation under a strategy."""
    return kernels_of(node, [strategy], traffic, mesh)[0]


def kernels_of(node: Node, strategies: Sequence[Strategy], traffic: Traffic, mesh: LogicalMesh) -> list[Kernel]:
    """The kernel that one device runs for an operation, for each of these strategies."""
    known: list[dict[Sharding, _Part]] = []
    for k, atom in enumerate((*node.eqn.invars, *node.eqn.outvars)):
        ways = dict.fromkeys((*s.operands, *s.results)[k] for s in strategies)
        known.append({sharding: _part(atom, sharding, mesh) for sharding in ways})
    computes, found = is_contraction(node.rule) and not is_indexing(node), []  # whether its FLOPs count
    alike: dict[object, Kernel] = {}  # by all that a kernel depends on
    for strategy in strategies:
        parts = tuple([of[s] for of, s in zip(known, (*strategy.operands, *strategy.results), strict=True)])
        share = split_fraction(strategy, mesh.axis_sizes) if computes else 1.0
        grouped = _grouped(node, strategy, mesh)
        kernel = alike.get((parts, share, grouped))
        if kernel is None:
            kernel = alike[parts, share, grouped] = _kernel(node, share, traffic, parts, computes, grouped)
        found.append(kernel)
    return found


def _part(atom: Atom, sharding: Sharding, mesh: LogicalMesh) -> _Part:
    shape = sharding.local_shape(tuple(atom.aval.shape), mesh)
    return shape, num_elements(shape) * atom.aval.dtype.itemsize


def _kernel(
    node: Node, share: float, traffic: Traffic, parts: Sequence[_Part], computes: bool, grouped: _Grouped | None
) -> Kernel:
    """The kernel, given the device's share of the work, local shapes and bytes (`parts`), and whether FLOPs count."""
    eqn = node.eqn
    shapes, sizes = [shape for shape, _ in parts], [size for _, size in parts]
    if copies_to_or_from_host(eqn):
        return HostCopy(sum(sizes[: len(eqn.invars)]))
    num_bytes = sum(count * sizes[at] for count, at in zip(traffic.counts, traffic.touched, strict=True) if count)
    if not computes:
        turned_bytes = sum(traffic.counts[k] * sizes[traffic.touched[k]] for k in traffic.turned)
        return MemoryPass(num_bytes, traffic.launches, "samples" if traffic.on_samples else "parameters", turned_bytes)
    flops, dtypes = node.rule.flops * share, _multiplied(eqn)
    match eqn.primitive.name:
        case "dot_general":
            return _product(eqn, shapes, num_bytes, dtypes, sizes)
        case "conv_general_dilated":
            return _convolution(eqn, shapes, flops, num_bytes, dtypes)
    if grouped is not None:
        num_bytes += 2 * grouped.masked_bytes
        lengths = _lengths_of_groups(eqn, shapes, grouped)
        if lengths is not None:
            return Product(*lengths, num_bytes, dtypes)
    return FusedProducts(flops, num_bytes, dtypes)


def _multiplied(eqn: JaxprEqn) -> tuple[str, ...]:
    """Dtypes of what is multiplied: of the first two arrays that hold no integers, which are indices, lengths and masks."""
    types = [atom.aval.dtype for atom in eqn.invars if jax.dtypes.issubdtype(atom.aval.dtype, np.number)]
    inexact = [dtype for dtype in types if jax.dtypes.issubdtype(dtype, np.inexact)]
    names = tuple(dtype.name for dtype in (inexact or types)[:2])
    return names or ("bool", "bool")  # no number among them: a product of masks


@dataclass(frozen=True, slots=True)
class _Grouped:
    """How a grouped product is computed.

    Attributes:
        num_devices: Number of devices between which rows are sent to their groups.
        masked_bytes: Bytes of rows copied for each group, masked to it; 0: rows are not masked.
    """

    num_devices: int
    masked_bytes: int


def _grouped(node: Node, strategy: Strategy, mesh: LogicalMesh) -> _Grouped | None:
    if node.eqn.primitive.name not in PRODUCTS:
        return None
    num_devices = math.prod(mesh.size_of(axis) for axis in strategy.exchanged_over)
    return _Grouped(num_devices, masked_bytes(node.eqn, strategy, mesh) if is_masked(node.eqn, mesh) else 0)


def _lengths_of_groups(eqn: JaxprEqn, shapes: Sequence[Shape], grouped: _Grouped) -> tuple[int, int, int, int] | None:
    """Number of products, and rows, columns and depth of each, of a grouped product; None: its groups are of batch dims.

    The device's rows belong to all groups, unless rows were sent to their groups. Masked ones are in every product.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((of_lhs, of_rhs), (batch, _)), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    lhs, rhs, out = shapes[0], shapes[1], shapes[-1]  # local
    if batch or len(lhs) != 2 or len(out) + len(rhs) != 5:
        return None
    sums_rows = ragged in of_lhs
    at = 0 if sums_rows else numbers.rhs_group_dimensions[0]
    stack, local = (eqn.outvars[0], out) if sums_rows else (eqn.invars[1], rhs)
    groups, all_groups = local[at], stack.aval.shape[at]
    own = math.ceil(lhs[ragged] / (groups if grouped.num_devices > 1 else all_groups))
    rows, is_masked = lhs[ragged] * grouped.num_devices, grouped.masked_bytes > 0
    if sums_rows:
        return groups, out[1], out[2], rows if is_masked else own
    depth, columns = rhs[of_rhs[0]], out[-1]
    return (1, rows, columns, groups * depth) if is_masked else (groups, own, columns, depth)


def _product(
    eqn: JaxprEqn, shapes: Sequence[Shape], num_bytes: float, dtypes: tuple[str, ...], sizes: Sequence[int]
) -> Product | MemoryPass:
    """A product of matrices; products with vectors are passes: XLA multiplies and sums elementwise."""
    if 1 in _lengths(eqn, [tuple(atom.aval.shape) for atom in eqn.invars])[1:]:
        return MemoryPass(num_bytes)
    lengths = _lengths(eqn, shapes)
    copied = sum(sizes[k] for k in (0, 1) if _is_scattered(eqn, k))
    return Product(
        *lengths, num_bytes, dtypes, _is_highest(eqn), _work(eqn), is_turned=_is_turned(eqn), turned_bytes=copied
    )


def _lengths(eqn: JaxprEqn, shapes: Sequence[Shape]) -> tuple[int, int, int, int]:
    """Number of products, and rows, columns and depth of each, for operands of these shapes."""
    (lhs_depth, _), (lhs_batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs = shapes[0], shapes[1]
    count = math.prod(lhs[d] for d in lhs_batch)
    depth = math.prod(lhs[d] for d in lhs_depth)
    each = max(1, count * depth)
    return count, num_elements(lhs) // each, num_elements(rhs) // each, depth


def _is_turned(eqn: JaxprEqn) -> bool:
    """Whether the contracted dims come before the row dims in the first operand."""
    (depth, _), (batch, _) = eqn.params["dimension_numbers"]
    rows = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in (*depth, *batch)]
    return bool(rows and depth) and max(depth) < max(rows)


def _is_scattered(eqn: JaxprEqn, operand: int) -> bool:
    """Whether an operand's dims do not lie as batch, then rows and depth in either order; dims of length one aside."""
    of_depth, of_batch = (dims[operand] for dims in eqn.params["dimension_numbers"])
    long = [d for d, size in enumerate(eqn.invars[operand].aval.shape) if size > 1]
    batch, depth = ([d for d in dims if d in long] for dims in (of_batch, of_depth))
    rows = [d for d in long if d not in batch and d not in depth]
    return long not in ([*batch, *rows, *depth], [*batch, *depth, *rows])


def _convolution(
    eqn: JaxprEqn, shapes: Sequence[Shape], flops: float, num_bytes: float, dtypes: tuple[str, ...]
) -> Product:
    """The implicit product of a convolution: pixels are rows, output channels columns, elements under the window depth.

    In the gradient of a filter, channels are rows, and samples, which lie before them, are summed.
    """
    params = eqn.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    groups = max(1, min(max(params["feature_group_count"], params["batch_group_count"]), shapes[1][rhs_spec[0]]))
    columns = max(1, shapes[1][rhs_spec[0]] // groups)
    rows = max(1, num_elements(shapes[2]) // max(1, shapes[2][out_spec[1]]))
    depth = max(1, round(flops / (_work(eqn) * groups * rows * columns)))
    is_turned = lhs_spec[1] < lhs_spec[0]
    work, is_highest = _work(eqn), _is_highest(eqn)
    return Product(groups, rows, columns, depth, num_bytes, dtypes, is_highest, work, True, is_turned)


def _work(eqn: JaxprEqn) -> float:
    return 8.0 if jax.dtypes.issubdtype(eqn.outvars[0].aval.dtype, np.complexfloating) else 2.0


def _is_highest(eqn: JaxprEqn) -> bool:
    """Whether full float32 precision is requested; JAX's default is lower."""
    precision = eqn.params.get("precision")
    every = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.F32_F32_F32) for p in every)


def is_contraction(rule: ShardingRule) -> bool:
    """Whether an operation's FLOPs count; all others are memory-bound."""
    results = sum(num_elements([rule.sizes[f] for dim in term for f in dim]) for term in rule.results)
    operands = sum(num_elements([rule.sizes[f] for dim in term for f in dim]) for term in rule.operands)
    return rule.flops > 4 * (results + operands) or len([o for o in rule.operands if o]) > 1 and bool(rule.summed)

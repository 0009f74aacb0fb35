"""Counts the workspace of grouped products and of max pooling: memory on one device besides operands and results.

In:     an operation, its rule, its strategy.
Out:    `workspace_bytes`; `is_masked`.
Method: XLA computes grouped products (`ragged_dot`) as one product over all groups: for each group there is a copy of the
        rows with those of other groups masked to zero, and FLOPs grow as much. XLA for TPUs has a kernel for them, as do
        programs that call one. Rows that are sent to the devices of their groups need receive buffers for the worst case.
        In the gradient of max pooling XLA for GPUs first finds the largest element of each window and where it is: an index
        along each dim, of 32 bits, or 64 in arrays of 2^31 elements (`SelectAndScatterExpander`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar._jax import JaxprEqn
from autopar.intra_op.sharded import Compute, exchanged_bytes, local_bytes
from autopar.intra_op.strategies import Strategy
from autopar.ir.rules import ShardingRule
from autopar.ir.split.sorted_rows.ordered import PRODUCTS
from autopar.mesh import LogicalMesh


def is_masked(eqn: JaxprEqn, mesh: LogicalMesh) -> bool:
    """Whether an operation is a grouped product that XLA computes with masked rows."""
    is_product = eqn.primitive.name in PRODUCTS and eqn.params.get("tiles") is None
    return is_product and not _is_tpu(mesh)


def _is_tpu(mesh: LogicalMesh) -> bool:
    return any(link.torus for link in mesh.links)


def workspace_at(instruction: Compute, mesh: LogicalMesh) -> int:
    """Workspace of an instruction, bytes on one device."""
    return workspace_bytes(instruction.rule, instruction.eqn, instruction.strategy, mesh)


def workspace_bytes(rule: ShardingRule, eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> int:
    """Workspace of an operation under a strategy, bytes on one device."""
    if rule.selected is not None and not _is_tpu(mesh):
        return _selected_bytes(eqn, rule.selected, strategy, mesh)
    if eqn.primitive.name not in PRODUCTS:
        return 0
    num_devices = math.prod(mesh.size_of(axis) for axis in strategy.exchanged_over)
    room = sum(num_devices * num_bytes for num_bytes in exchanged_bytes(rule, eqn, strategy, mesh))
    return room + (masked_bytes(eqn, strategy, mesh) if is_masked(eqn, mesh) else 0)


def _selected_bytes(eqn: JaxprEqn, operands: Sequence[int], strategy: Strategy, mesh: LogicalMesh) -> int:
    """Bytes of each window's selected element, at least 32 bits of it, and of its place along each dim of the array."""
    array, source = (strategy.operands[k].local_shape(tuple(eqn.invars[k].aval.shape), mesh) for k in operands)
    place = 4 if math.prod(array) < 2**31 else 8
    return math.prod(source) * (len(source) * place + max(4, eqn.outvars[0].aval.dtype.itemsize))


def masked_bytes(eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> int:
    """Bytes of masked rows on one device, one copy per group that it has; parts of the rows are processed in turn."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_lhs, _), _ = numbers.dot_dimension_numbers
    sums_rows = numbers.lhs_ragged_dimensions[0] in of_lhs
    operands = list(zip(eqn.invars, strategy.operands, strict=True))
    weights = (eqn.outvars[0], strategy.results[0]) if sums_rows else operands[1]
    at = 0 if sums_rows else (numbers.rhs_group_dimensions or (None,))[0]
    if at is None:
        return 0
    own_groups = weights[0].aval.shape[at] // math.prod(mesh.size_of(axis) for axis in weights[1].dims[at])
    sizes, sharding = operands[2]
    parts = (
        sharding.local_shape(tuple(sizes.aval.shape), mesh)[0]
        if sizes.aval.ndim == 2 and not strategy.exchanged_over
        else 1
    )
    num_devices = math.prod(mesh.size_of(axis) for axis in strategy.exchanged_over)
    rows = sum(local_bytes(*operand, mesh) for operand in operands[: 2 if sums_rows else 1])
    return own_groups * num_devices * rows // max(1, parts)

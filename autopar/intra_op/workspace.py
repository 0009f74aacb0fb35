"""What an operation takes on one device besides what it reads and makes: bytes, and kernels that do more than they must.

In:     an operation, its rule, how it is split.
Out:    `workspace_bytes`; `is_masked`.
Method: XLA multiplies rows in groups (`ragged_dot`) by one product of all groups: of the rows there is a copy for each
        group, in which the others are zeros, and what it computes is as much more. XLA for TPUs has a kernel, and so has
        who calls one.
        Rows that travel to the devices of their groups have room there for all that could come.
"""

from __future__ import annotations

import math

from autopar._jax import JaxprEqn
from autopar.intra_op.sharded import Compute, local_bytes, travelling_bytes
from autopar.intra_op.strategies import Strategy
from autopar.ir.rules import ShardingRule
from autopar.ir.split.sorted_rows.ordered import PRODUCTS
from autopar.mesh import LogicalMesh


def is_masked(eqn: JaxprEqn, mesh: LogicalMesh) -> bool:
    """Whether an operation is a product of rows in groups that XLA does as one of all groups."""
    is_product = eqn.primitive.name in PRODUCTS and eqn.params.get("tiles") is None
    return is_product and not any(link.torus for link in mesh.links)


def workspace_at(instruction: Compute, mesh: LogicalMesh) -> int:
    """Bytes of one device that an operation of a program needs besides what it reads and makes."""
    return workspace_bytes(instruction.rule, instruction.eqn, instruction.strategy, mesh)


def workspace_bytes(rule: ShardingRule, eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> int:
    """The same of an operation under a strategy."""
    if eqn.primitive.name not in PRODUCTS:
        return 0
    num_devices = math.prod(mesh.size_of(axis) for axis in strategy.travels)
    room = sum(num_devices * num_bytes for num_bytes in travelling_bytes(rule, eqn, strategy, mesh))
    return room + (masked_bytes(eqn, strategy, mesh) if is_masked(eqn, mesh) else 0)


def masked_bytes(eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> int:
    """Bytes on one device of rows that are there for each of its groups, of one part of them after the other."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (of_lhs, _), _ = numbers.dot_dimension_numbers
    sums_rows = numbers.lhs_ragged_dimensions[0] in of_lhs
    operands = list(zip(eqn.invars, strategy.operands, strict=True))
    weights = (eqn.outvars[0], strategy.results[0]) if sums_rows else operands[1]
    at = 0 if sums_rows else (numbers.rhs_group_dimensions or (None,))[0]
    if at is None:
        return 0
    own_groups = weights[0].aval.shape[at] // math.prod(mesh.size_of(axis) for axis in weights[1].dims[at])
    sizes, lying = operands[2]
    parts = lying.local_shape(tuple(sizes.aval.shape), mesh)[0] if sizes.aval.ndim == 2 and not strategy.travels else 1
    num_devices = math.prod(mesh.size_of(axis) for axis in strategy.travels)
    rows = sum(local_bytes(*operand, mesh) for operand in operands[: 2 if sums_rows else 1])
    return own_groups * num_devices * rows // max(1, parts)

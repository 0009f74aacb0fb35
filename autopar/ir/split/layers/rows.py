"""Slices of single layers of a stack, and the pads that are their transposes, on parts of the stack.

In:     a `slice` or `pad` along the dim of layers, and the number of parts.
Out:    the one part that it touches, if it is one; the slice of that part; the parts of the padded value.
Method: ranges of layers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from autopar._jax import JaxprEqn
from autopar.ir.split.placement import units_of_shard


def touched_part(eqn: JaxprEqn, length: int, count: int) -> int | None:
    """The one of `count` parts, of a stack of `length` layers, that a slice reads or that holds a padded operand.

    None: it is no such slice or pad, or touches several parts.
    """
    match eqn.primitive.name:
        case "slice" if eqn.invars[0].aval.shape[0] == length:
            start, limit = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
        case "pad" if eqn.outvars[0].aval.shape[:1] == (length,):
            start, high, interior = eqn.params["padding_config"][0]
            limit = length - high
            if min(start, high) < 0 or interior:
                return None
        case _:
            return None
    layers = [_rows(part, count, length) for part in range(count)]
    return next((part for part, (first, end) in enumerate(layers) if first <= start < limit <= end), None)


def _rows(part: int, count: int, length: int) -> tuple[int, int]:
    """The layers of a part: the first, and one past the last."""
    units = units_of_shard(part, count, length)
    return units.first, units.first + units.size


def slice_of_part(eqn: JaxprEqn, part: int, count: int) -> Callable[[jax.Array], jax.Array]:
    """The slice as a function of the part that it reads."""
    params = eqn.params
    first, _ = _rows(part, count, eqn.invars[0].aval.shape[0])
    starts = (params["start_indices"][0] - first, *params["start_indices"][1:])
    limits = (params["limit_indices"][0] - first, *params["limit_indices"][1:])
    return lambda rows: lax.slice(rows, starts, limits, params["strides"])


def part_of_padded(eqn: JaxprEqn, part: int, number: int, count: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Part `number` of a padded value whose operand lies in `part`, as a function of the pad's operands."""
    length, *rest = eqn.outvars[0].aval.shape
    first, end = _rows(part, count, length)
    low, high, _ = eqn.params["padding_config"][0]
    within = ((low - first, high - (length - end), 0), *eqn.params["padding_config"][1:])
    if number == part:
        return lambda rows, value: lax.pad(rows, value, within)
    mine, behind = _rows(number, count, length)
    return lambda _, value: lax.broadcast(value, (behind - mine, *rest))

"""Reduces owned sums exactly: partial sums each element of which is nonzero on one device only, its owner.

In:     the instructions of a body, in order.
Out:    the copies that are owned sums; a reduction of them that preserves every bit.
Method: lookups in a split table, and values masked to one device, are owned sums, and remain so under operations that only
        move elements. Float addition would lose the sign of zero: -0.0 + 0.0 is 0.0, and some backends begin a sum with
        0.0. So their bits are added, as integers; 16-bit numbers in pairs, since backends widen 16-bit integers. Lookups
        that fill what is out of range (every device fills it), and sums sent together with others, are added by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import Literal
from autopar.cost.steps import AllReduce, ReduceScatter, Step
from autopar.intra_op.sharded import Compute, Copy, Fused, Gate, Instruction, Move


def owned_copies(instruction: Instruction, known: Container[Copy]) -> Iterator[Copy]:
    """The owned sums among an instruction's results, given those `known` among its operands."""
    match instruction:
        case Move() | Fused():
            for move in instruction.moves:
                if move.target.partial and (not move.source.partial or (move.var, move.source) in known):
                    yield move.var, move.target
        case Compute(eqn, _, strategy) if _only_moves(instruction, known):
            for copy in zip(eqn.outvars, strategy.results, strict=True):
                if copy[1].partial:
                    yield copy
        case Gate(_, copies):
            yield from (copy for copy in copies if copy in known)


def _only_moves(compute: Compute, known: Container[Copy]) -> bool:
    rule, strategy = compute.rule, compute.strategy
    if any(strategy.axes_of.get(factor) and factor not in rule.one_hot for factor in rule.summed):
        return False
    carried = [(a, s) for a, s in zip(compute.eqn.invars, strategy.operands, strict=True) if s.partial]
    return not carried or (rule.moves_data and all(isinstance(a, Literal) or (a, s) in known for a, s in carried))


def without_loss(
    arrays: Sequence[jax.Array],
    steps: Sequence[Step],
    axis_sizes: Mapping[str, int],
    carry_out: Callable[[Sequence[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """Apply `carry_out`, one step per array, to owned sums; reductions return the owner's value to the last bit."""
    bits = [_bits(array, step, axis_sizes) for array, step in zip(arrays, steps, strict=True)]
    known = [array for array in bits if array is not None]
    if len(known) < len(bits):
        return carry_out(arrays)
    return [_floats(made, array.dtype) for made, array in zip(carry_out(known), arrays, strict=True)]


def _bits(array: jax.Array, step: Step, axis_sizes: Mapping[str, int]) -> jax.Array | None:
    """The bits of an array as unsigned integers; None: no floats are added, or 16-bit ones do not form pairs."""
    if not isinstance(step, AllReduce | ReduceScatter) or not jnp.issubdtype(array.dtype, jnp.floating):
        return None
    if array.dtype.itemsize > 2:
        return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    if array.dtype.itemsize < 2:
        return None
    is_cut = isinstance(step, ReduceScatter) and step.dim == array.ndim - 1
    parts = 2 * (math.prod(axis_sizes[axis] for axis in step.axes) if is_cut else 1)
    if not array.ndim or array.shape[-1] % parts:
        return None
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], array.shape[-1] // 2, 2), jnp.uint32)


def _floats(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    floats = lax.bitcast_convert_type(bits, dtype)
    return floats.reshape(*bits.shape[:-1], 2 * bits.shape[-1]) if floats.ndim > bits.ndim else floats

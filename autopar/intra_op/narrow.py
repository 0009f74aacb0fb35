"""Finds values that can be sent in the narrower dtype they were widened from, such as gradients converted to float32.

In:     the instructions of a sharded program, in order.
Out:    for each instruction, the dtype in which its results may be sent, if narrower than their own.
Method: after a lossless widening, and after operations that only move elements, all values are representable in the narrow
        dtype. A collective that only moves them can send half the bytes or less, with bitwise equal results; XLA for GPUs
        does so by itself, and would send less than planned. Sums are not representable.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar._jax import Literal
from autopar.intra_op.sharded import Compute, Copy, Instruction, Move


def narrow_dtype(instruction: Instruction, known: Mapping[Copy, np.dtype | None]) -> np.dtype | None:
    """The narrow dtype in which an instruction's results may be sent, given those `known` of copies; None: their own."""
    match instruction:
        case Move(var, source, target):
            return None if source.partial or target.partial else known.get((var, source))
        case Compute(eqn, rule, strategy) if (
            rule.moves_data and len(eqn.outvars) == 1 and not strategy.results[0].partial
        ):
            copies = [(a, s) for a, s in zip(eqn.invars, strategy.operands, strict=True) if not isinstance(a, Literal)]
            if len(copies) != 1:
                return None
            given, made = known.get(copies[0]) or copies[0][0].aval.dtype, eqn.outvars[0].aval.dtype
            return given if _is_part_of(given, made) else None
        case _:
            return None


def _is_part_of(narrow: np.dtype, wide: np.dtype) -> bool:
    """Whether a dtype is smaller than another that represents all its values; complex ones are not split into parts."""
    return narrow.itemsize < wide.itemsize and wide.kind != "c" and np.can_cast(narrow, wide, "safe")

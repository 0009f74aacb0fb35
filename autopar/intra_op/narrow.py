"""Sends values in the dtype that they had before they were widened, such as a gradient that is converted to float32.

In:     the instructions of a sharded program, in order.
Out:    the dtype in which the copies that each makes may travel, where that is narrower than their own.
Method: converting to a dtype that has all numbers of the narrow one, and moving elements, leaves numbers that the narrow one
        has. A collective that only moves them sends half the bytes or less, and to the last bit the same; XLA for GPUs does
        that of its own accord, and would send less than is planned. Sums are no such numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar._jax import Literal
from autopar.intra_op.sharded import Compute, Copy, Instruction, Move


def narrow_dtype(instruction: Instruction, known: Mapping[Copy, np.dtype | None]) -> np.dtype | None:
    """The dtype in which what an instruction makes may travel, if copies are `known` to travel so; None: its own."""
    match instruction:
        case Move(var, source, target):
            return None if source.partial or target.partial else known.get((var, source))
        case Compute(eqn, rule, strategy) if rule.moves and len(eqn.outvars) == 1 and not strategy.results[0].partial:
            copies = [(a, s) for a, s in zip(eqn.invars, strategy.operands, strict=True) if not isinstance(a, Literal)]
            if len(copies) != 1:
                return None
            given, made = known.get(copies[0]) or copies[0][0].aval.dtype, eqn.outvars[0].aval.dtype
            return given if _is_part_of(given, made) else None
        case _:
            return None


def _is_part_of(narrow: np.dtype, wide: np.dtype) -> bool:
    """Whether a dtype is smaller, and the other has all of its numbers; complex ones keep their two parts together."""
    return narrow.itemsize < wide.itemsize and wide.kind != "c" and np.can_cast(narrow, wide, "safe")

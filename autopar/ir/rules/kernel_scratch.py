"""Buffers that outlive a step of a Pallas kernel, as those of attention for TPUs do: who finds what another left in them.

In:     the body of a kernel, such buffers, the numbers of a step.
Out:    `is_begun_anew`: whether such a step stores all of them before it reads any. What was there before is then lost.
Method: the body is gone through with what is known of the step, mostly that it is the first of inner dims of the grid
        (`pl.when(pl.program_id(2) == 0)`), in the order in which it runs. A branch that is known to be taken is gone through,
        too; in others, and in loops, a buffer must not stand before it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.rules.index_map import numbers_of
from autopar.ir.rules.kernel_access import access_of
from autopar.ir.rules.kernel_walk import NotUnderstoodError, Value, Walk


def is_begun_anew(body: Jaxpr, buffers: Iterable[Var], numbers: Mapping[int, np.ndarray]) -> bool:
    """Whether a step stores buffers before it reads them.

    Args:
        body: Of the kernel.
        buffers: Of its arguments those that outlive a step.
        numbers: For dims of the grid, as the kernel counts them, the numbers that such a step may have; of others: any.
    """
    step = _Step(body, numbers, buffers)
    try:
        step.through(body)
    except NotUnderstoodError:
        return False
    return not step.left


class _Step(Walk):
    """What is known at a moment of a step.

    Attributes:
        left: Buffers in which stands what another step left.
    """

    def __init__(self, body: Jaxpr, numbers: Mapping[int, np.ndarray], buffers: Iterable[Var]):
        super().__init__(body, numbers)
        self.left = dict.fromkeys(buffers)

    def made(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
        access, index = access_of(eqn), operands[0] if operands else None
        if any(self.buffers.get(atom) in self.left for atom in eqn.invars if isinstance(atom, Var)):
            if eqn.primitive.name == "cond" and isinstance(index, np.ndarray) and index.size == 1:
                return self.inside(self.branch(eqn, index), eqn.invars[1:], operands[1:])
            if access is None or access.reads or not access.is_whole:
                raise NotUnderstoodError
            del self.left[self.buffers[access.buffer]]
            return [None] * len(eqn.outvars)
        known = [value if isinstance(value, np.ndarray) else None for value in operands]
        return [numbers_of(eqn, known, len(self.axes))] * len(eqn.outvars)

"""Checks whether scratch buffers of a Pallas kernel carry values between steps, as those of attention on TPUs do.

In:     the body of a kernel, its buffers that outlive a step, the grid indices of a step.
Out:    `is_begun_anew`: whether such a step overwrites all of these buffers before it reads any, so that it sees nothing of
        earlier steps.
Method: walk the body in execution order with the known grid indices, mostly index 0 of the inner dims
        (`pl.when(pl.program_id(2) == 0)`). A branch that is known to be taken is walked too; other branches, and loops, must
        not use a buffer before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.rules.index_map import numbers_of
from autopar.ir.rules.kernel_access import access_of
from autopar.ir.rules.kernel_interpreter import Interpreter, NotUnderstoodError, Value


def is_begun_anew(body: Jaxpr, buffers: Iterable[Var], numbers: Mapping[int, np.ndarray]) -> bool:
    """Whether a step overwrites buffers before it reads them.

    Args:
        body: The kernel's body.
        buffers: Its arguments that outlive a step.
        numbers: For dims of the grid, in the kernel's numbering, the indices that the step may have; other dims: any.
    """
    step = _OneStep(body, numbers, buffers)
    try:
        step.through(body)
    except NotUnderstoodError:
        return False
    return not step.left


class _OneStep(Interpreter):
    """A walk through one step. `left`: buffers that still hold values of earlier steps."""

    def __init__(self, body: Jaxpr, numbers: Mapping[int, np.ndarray], buffers: Iterable[Var]):
        super().__init__(body, numbers)
        self.left = dict.fromkeys(buffers)

    def interpret(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
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

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

from autopar._jax import Jaxpr, JaxprEqn, Var, open_jaxpr
from autopar.ir.rules.kernel_access import access_of
from autopar.ir.rules.kernel_loops import Value, Values, known_numbers, varies


def is_begun_anew(body: Jaxpr, buffers: Iterable[Var], numbers_of: Mapping[int, np.ndarray]) -> bool:
    """Whether a step stores buffers before it reads them.

    Args:
        body: Of the kernel.
        buffers: Of its arguments those that outlive a step.
        numbers_of: For dims of the grid, as the kernel counts them, the numbers that such a step may have; of others: any.
    """
    return not _Step(buffers, numbers_of).visit_all(body)


class _Step:
    """What is known at a moment of a step.

    Attributes:
        left: Buffers in which stands what another step left, by the variables that name them.
        spoiled: One of them may have been read.
    """

    def __init__(self, buffers: Iterable[Var], numbers_of: Mapping[int, np.ndarray]):
        self.left: dict[Var, Var] = {buffer: buffer for buffer in buffers}
        self.numbers_of, self.values, self.spoiled = numbers_of, Values(), False

    def visit_all(self, body: Jaxpr) -> bool:
        """Through a body; whether something is left, or was read."""
        for eqn in body.eqns:
            if self.spoiled or not self.left:
                break
            self.visit(eqn)
        return self.spoiled or bool(self.left)

    def visit(self, eqn: JaxprEqn) -> None:
        access = access_of(eqn)
        if access is not None and access.buffer in self.left:
            is_stored = access.stored is not None and access.is_whole and not access.reads
            self.spoiled = not is_stored
            whole = self.left[access.buffer]
            self.left = {name: buffer for name, buffer in self.left.items() if buffer is not whole}
            return
        operands = [self.values.of(atom) for atom in eqn.invars]
        if eqn.primitive.name == "program_id" and eqn.params["axis"] in self.numbers_of:
            numbers = self.numbers_of[eqn.params["axis"]]
            self.values.known[eqn.outvars[0]] = numbers.astype(eqn.outvars[0].aval.dtype)
        elif eqn.primitive.name == "cond" and isinstance(operands[0], np.ndarray) and not varies(operands[0]):
            self._branch(eqn, int(operands[0].flat[0]), operands[1:])
        elif any(atom in self.left for atom in eqn.invars if isinstance(atom, Var)):
            self.spoiled = True
        else:
            self.values.known.update(zip(eqn.outvars, known_numbers(eqn, operands) or (), strict=False))

    def _branch(self, eqn: JaxprEqn, index: int, operands: Sequence[Value]) -> None:
        branches = eqn.params["branches"]
        body, _ = open_jaxpr(branches[min(max(index, 0), len(branches) - 1)])
        self.values.known.update(zip(body.invars, operands, strict=True))
        for var, atom in zip(body.invars, eqn.invars[1:], strict=True):
            if isinstance(atom, Var) and atom in self.left:
                self.left[var] = self.left[atom]
        self.visit_all(body)

"""An abstract interpreter for the body of a Pallas kernel, for one step or for all at once.

In:     the body of a kernel, and the grid indices of the steps.
Out:    `Interpreter`: interprets the body, with its branches and calls.
Method: numbers are computed (`index_map.py`) for all steps at once. Subclasses interpret the other equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as Choice

import numpy as np

from autopar._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr
from autopar.ir.rules.kernel_access import is_buffer

ASKS = ("program_id", "num_programs")
_MAX_VISITS = 2**14


class NotUnderstoodError(Exception):
    """The body does something that the analysis does not understand, so the kernel must not be split this way."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A value that depends on sums over the steps.

    Attributes:
        of: The buffers, or carries of a loop, that the steps add to.
        state: `"old"`: the sum as a step finds it; `"new"`: with the step's addend; `"total"`: linear in complete sums, or
            will be at the last step; `"gone"`: must not be used.
    """

    of: frozenset[Var]
    state: Choice["old", "new", "total", "gone"]


GONE = Sum(frozenset(), "gone")
Value = np.ndarray | Sum | None
"""Known numbers, with one leading dim per dim of steps, of length 1 where all of its steps agree; None: an unknown value that
does not depend on the step."""


class Interpreter:
    """An interpretation of a body.

    Attributes:
        numbers: For dims of steps, the indices of the steps; other dims are unknown.
        known: Variables -> what is known of them.
        buffers: Buffer variables -> the argument of the body that they are.
    """

    def __init__(self, body: Jaxpr, numbers: Mapping[int, np.ndarray]):
        self.body, self.numbers, self.axes = body, numbers, list(numbers)
        self.known: dict[Var, Value] = {}
        self.buffers = {var: var for var in body.invars if is_buffer(var)}
        self.visits = 0

    def interpret(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
        """Interpret an equation; its results."""
        raise NotImplementedError

    def through(self, body: Jaxpr) -> None:
        """Interpret a body. Raises `NotUnderstoodError`: it does something that is not understood."""
        for eqn in body.eqns:
            self.visit(eqn)

    def visit(self, eqn: JaxprEqn) -> None:
        self.visits += 1
        if self.visits > _MAX_VISITS:
            raise NotUnderstoodError
        asks = eqn.primitive.name in ASKS
        made = [self._number(eqn)] if asks else self.interpret(eqn, [self.of(atom) for atom in eqn.invars])
        self.known.update(zip(eqn.outvars, made, strict=True))

    def of(self, atom: Atom | int) -> Value:
        """What is known of a value."""
        if isinstance(atom, Var):
            return self.known.get(atom)
        number = np.asarray(atom.val if isinstance(atom, Literal) else atom)
        return number.reshape((1,) * len(self.axes) + number.shape)

    def inside(self, closed: Jaxpr | ClosedJaxpr, operands: Sequence[Atom], values: Sequence[Value]) -> list[Value]:
        """Interpret a program that is called with these operands; its results."""
        body, consts = open_jaxpr(closed)
        if consts or len(operands) != len(body.invars):
            raise NotUnderstoodError
        for var, atom, value in zip(body.invars, operands, values, strict=True):
            self.known[var] = value
            if isinstance(atom, Var) and atom in self.buffers:
                self.buffers[var] = self.buffers[atom]
        self.through(body)
        return [self.of(atom) for atom in body.outvars]

    def branch(self, eqn: JaxprEqn, index: np.ndarray) -> Jaxpr | ClosedJaxpr:
        """The branch of a `cond` that is taken."""
        branches = eqn.params["branches"]
        return branches[min(max(int(index.item()), 0), len(branches) - 1)]

    def _number(self, eqn: JaxprEqn) -> Value:
        """The grid index, or the grid's length, as an array over all steps: the length differs too if there are fewer."""
        numbers = self.numbers.get(eqn.params["axis"])
        if numbers is None:
            return None
        numbers = numbers if eqn.primitive.name == "program_id" else np.full(len(numbers), len(numbers))
        shape = [len(numbers) if dim == eqn.params["axis"] else 1 for dim in self.axes]
        return numbers.astype(eqn.outvars[0].aval.dtype).reshape(shape)

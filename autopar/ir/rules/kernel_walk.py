"""A way through the body of a kernel, for one step or for all at once.

In:     the body of a Pallas kernel, and the numbers of the steps that are meant.
Out:    `Walk`: goes through the body, through branches and what is called, with what is known of its values.
Method: numbers are computed (`index_map.py`), for all steps at once. What else an equation does is for others to say.
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
    """Fewer steps may be anything."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A value that depends on what steps have added up.

    Attributes:
        of: The buffers, or what a loop carries, in which they add.
        state: As a step finds it; with what it adds; what is complete, or will be at the last step; of no further use.
    """

    of: frozenset[Var]
    state: Choice["old", "new", "total", "gone"]


GONE = Sum(frozenset(), "gone")
Value = np.ndarray | Sum | None
"""Numbers, with a dim in front for each dim of steps, of length 1 where all of these have the same; None: a value that does
not depend on which step it is."""


class Walk:
    """A way through a body, and what is known of its values on it.

    Attributes:
        numbers: For dims of steps, the numbers of the steps; of others nothing is known.
        known: What is known of values.
        buffers: Which argument of the body each buffer is.
    """

    def __init__(self, body: Jaxpr, numbers: Mapping[int, np.ndarray]):
        self.body, self.numbers, self.axes = body, numbers, list(numbers)
        self.known: dict[Var, Value] = {}
        self.buffers = {var: var for var in body.invars if is_buffer(var)}
        self.visits = 0

    def made(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
        """What an equation makes."""
        raise NotImplementedError

    def through(self, body: Jaxpr) -> None:
        """Go through a body.

        Raises:
            NotUnderstoodError: It does something else.
        """
        for eqn in body.eqns:
            self.visit(eqn)

    def visit(self, eqn: JaxprEqn) -> None:
        self.visits += 1
        if self.visits > _MAX_VISITS:
            raise NotUnderstoodError
        asks = eqn.primitive.name in ASKS
        made = [self._number(eqn)] if asks else self.made(eqn, [self.of(atom) for atom in eqn.invars])
        self.known.update(zip(eqn.outvars, made, strict=True))

    def of(self, atom: Atom | int) -> Value:
        """What is known of a value."""
        if isinstance(atom, Var):
            return self.known.get(atom)
        number = np.asarray(atom.val if isinstance(atom, Literal) else atom)
        return number.reshape((1,) * len(self.axes) + number.shape)

    def inside(self, closed: Jaxpr | ClosedJaxpr, operands: Sequence[Atom], values: Sequence[Value]) -> list[Value]:
        """Through a program that is called with these; what it returns."""
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
        """The branch of a condition that is taken."""
        branches = eqn.params["branches"]
        return branches[min(max(int(index.item()), 0), len(branches) - 1)]

    def _number(self, eqn: JaxprEqn) -> Value:
        """Which step it is. How many there are is not the same for all steps either: it is another number for fewer."""
        numbers = self.numbers.get(eqn.params["axis"])
        if numbers is None:
            return None
        numbers = numbers if eqn.primitive.name == "program_id" else np.full(len(numbers), len(numbers))
        shape = [len(numbers) if dim == eqn.params["axis"] else 1 for dim in self.axes]
        return numbers.astype(eqn.outvars[0].aval.dtype).reshape(shape)

"""Steps of a grid that go over whole arrays block by block, which they find by their own number (`program_id`).

In:     the body of a Pallas kernel, a dim of its grid; some of its steps, those of heads that share their keys, may be one.
Out:    `steps_over_blocks`: the steps of that dim as a loop over blocks; None: fewer of them may be anything.
Method: a step is a trip of such a loop (`kernel_loops.py`), its number the trip's. A loop inside of a step is gone through
        trip by trip, and so is each branch. Nothing else that a step does may depend on its number. What a step keeps for the
        next is looked at elsewhere (`kernel_scratch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar._jax import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, all_equations, bodies_in, open_jaxpr, scan_counts
from autopar.ir.rules.kernel_access import Access, is_buffer
from autopar.ir.rules.kernel_loops import FREE, BlockLoop, NotUnderstoodError, Trip, Value, Walk, varies

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_MAX_VISITS = 2**14


def steps_over_blocks(
    body: Jaxpr, dim: int, num_trips: int, trip_steps: int, results: Sequence[int], scratch: Sequence[int]
) -> BlockLoop | None:
    """The steps of a dim of the grid, as the kernel counts it, as a loop over blocks.

    Args:
        body: Of the kernel.
        dim: Which.
        num_trips: Of the loop.
        trip_steps: Steps of the dim that are one trip.
        results: Positions of results among the body's arguments. One that is walked nowhere must move with the grid.
        scratch: The same of buffers that outlive a step.
    """
    found = []
    for first in range(trip_steps):
        walk = Walk(num_trips, [body.invars[at] for at in results])
        numbers = first + trip_steps * np.arange(num_trips)
        try:
            _Step(walk, body, dim, numbers, [body.invars[at] for at in scratch]).visit_all(body)
        except NotUnderstoodError:
            return None
        found.append(tuple(sorted((body.invars.index(buffer), where) for buffer, where in walk.walked)))
    return BlockLoop(None, num_trips, found[0], adds_up=False) if len(set(found)) == 1 else None


class _Step(Trip):
    """The values of one step, which stands for all of its dim."""

    def __init__(self, around: Walk, body: Jaxpr, dim: int, numbers: np.ndarray, scratch: Sequence[Var]):
        super().__init__(around, {var: var for var in body.invars if is_buffer(var)})
        self.dim, self.numbers, self.scratch, self.visits = dim, numbers, scratch, 0

    def visit_all(self, body: Jaxpr) -> None:
        for eqn in body.eqns:
            self.visit(eqn)

    def visit(self, eqn: JaxprEqn) -> None:
        self.visits += 1
        if self.visits > _MAX_VISITS:
            raise NotUnderstoodError
        match eqn.primitive.name:
            case "program_id":
                numbers = self.numbers.astype(eqn.outvars[0].aval.dtype)
                self.values.known[eqn.outvars[0]] = numbers if eqn.params["axis"] == self.dim else FREE
            case "num_programs" if eqn.params["axis"] == self.dim:
                raise NotUnderstoodError
            case "scan":
                self._loop(eqn)
            case "cond":
                self._branches(eqn)
            case name if name in _CALLS:
                closed = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
                made = self._inside(closed, eqn.invars, [self.values.of(atom) for atom in eqn.invars])
                self.values.known.update(zip(eqn.outvars, made, strict=True))
            case _:
                inside = (inner for body in bodies_in(eqn) for inner in all_equations(body))
                if any(inner.primitive.name in ("program_id", "num_programs") for inner in inside):
                    raise NotUnderstoodError
                super().visit(eqn)

    def may_touch(self, access: Access, walks: bool, is_result: bool) -> bool:
        """As of a loop; a result that is walked nowhere moves with the grid, and its block is the step's own."""
        if self.buffers[access.buffer] in self.scratch:
            return not walks
        return super().may_touch(access, walks, is_result) if walks else is_result or access.reads

    def _inside(self, closed: Jaxpr | ClosedJaxpr, operands: Sequence[Atom], values: Sequence[Value]) -> list[Value]:
        """Through a program that is called with these; what it returns."""
        body, consts = open_jaxpr(closed)
        if consts or len(operands) != len(body.invars):
            raise NotUnderstoodError
        for var, atom, value in zip(body.invars, operands, values, strict=True):
            self.values.known[var] = value
            if isinstance(atom, Var) and atom in self.buffers:
                self.buffers[var] = self.buffers[atom]
        self.visit_all(body)
        return [self.values.of(var) for var in body.outvars]

    def _loop(self, eqn: JaxprEqn) -> None:
        num_consts, num_carry = scan_counts(eqn.params)
        inside, _ = open_jaxpr(eqn.params["jaxpr"])
        if len(inside.invars) > num_consts + num_carry or len(inside.outvars) > num_carry:
            raise NotUnderstoodError
        values = [self.values.of(atom) for atom in eqn.invars]
        for _ in range(eqn.params["length"]):
            values[num_consts:] = self._inside(eqn.params["jaxpr"], eqn.invars, values)
        self.values.known.update(zip(eqn.outvars, values[num_consts:], strict=True))

    def _branches(self, eqn: JaxprEqn) -> None:
        index, *values = [self.values.of(atom) for atom in eqn.invars]
        made = [self._inside(branch, eqn.invars[1:], values) for branch in eqn.params["branches"]]
        if varies(index) or any(varies(value) for each in made for value in each):
            raise NotUnderstoodError
        self.values.known.update(dict.fromkeys(eqn.outvars, FREE))

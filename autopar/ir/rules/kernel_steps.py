"""Finds grid dims and loops of a Pallas kernel that can be split: fewer steps over shorter buffers compute part of each result.

In:     the body of a kernel, and the steps: those of a grid dim, or the trips of a loop in the body.
Out:    `loops_over_blocks`, `steps_over_blocks`: each step has its own block of some buffers, at an offset that it computes;
        `dims_added_up`: results are sums over the steps; `is_begun_anew`: a step sees nothing of earlier ones in buffers that
        outlive a step, as those of attention on TPUs do.
Method: one interpretation of the body for all steps (`kernel_buffers.py`). Whether a step overwrites buffers before it reads
        them: one for a single step, with the known grid indices, mostly index 0 of the inner dims
        (`pl.when(pl.program_id(2) == 0)`). A branch that is known to be taken is interpreted too; other branches, and loops,
        must not use a buffer before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.rules.index_map import numbers_of
from autopar.ir.rules.kernel_access import access_of, with_last_steps
from autopar.ir.rules.kernel_buffers import TRIPS, BufferUse, Dims
from autopar.ir.rules.kernel_interpreter import Interpreter, NotUnderstoodError, Value


@dataclass(frozen=True, eq=False, slots=True)
class BlockLoop:
    """A loop over blocks.

    Attributes:
        at: Its number among the equations of the body; None: its trips are the steps of a grid dim.
        trips: Number of trips.
        walked: (position among the body's arguments, dim) of the buffers that it goes over, in `trips` equal blocks.
        adds_up: Whether some results are sums over the trips.
    """

    at: int | None
    trips: int
    walked: tuple[tuple[int, int], ...]
    adds_up: bool


def loops_over_blocks(body: Jaxpr, results: Sequence[int]) -> list[BlockLoop]:
    """The loops of a body over blocks. `results`: positions of results among its arguments; scratch buffers follow them."""
    found = []
    made, scratch = [body.invars[at] for at in results], body.invars[max(results, default=-1) + 1 :]
    for at, eqn in enumerate(body.eqns):
        if eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.params["reverse"]:
            use = BufferUse(body, {TRIPS: np.arange(eqn.params["length"])}, TRIPS, made, scratch)
            try:
                sums = use.through_loop(eqn)
            except NotUnderstoodError:
                continue
            found.append(BlockLoop(at, eqn.params["length"], use.places, bool(sums)))
    return found


def steps_over_blocks(
    body: Jaxpr, dim: int, num_trips: int, trip_steps: int, results: Sequence[int], scratch: Sequence[int]
) -> BlockLoop | None:
    """The steps of a grid dim as a loop over blocks; None: they are not understood.

    Args:
        body: The kernel's body.
        dim: The grid dim, in the kernel's numbering.
        num_trips: Trips of the loop.
        trip_steps: Steps of the dim per trip.
        results: Positions of results among the body's arguments. A result without blocks of the loop must move with the grid.
        scratch: Positions of buffers that outlive a step.
    """
    made, kept = [body.invars[at] for at in results], [body.invars[at] for at in scratch]
    found = []
    for first in range(trip_steps):
        numbers = first + trip_steps * np.arange(num_trips)
        use = BufferUse(body, {dim: numbers}, dim, made, kept, own=(*made, *kept))
        try:
            use.through(body)
        except NotUnderstoodError:
            return None
        found.append(use.places)
    return BlockLoop(None, num_trips, found[0], adds_up=False) if len(set(found)) == 1 else None


def dims_added_up(
    body: Jaxpr, grid: Sequence[int | None], shared: Mapping[int, Dims], scratch: Sequence[int] = ()
) -> Dims:
    """The grid dims, in the kernel's numbering, over which all results that do not move with them are sums.

    Args:
        body: The kernel's body.
        grid: Lengths of these dims.
        shared: For each result, by its position among the body's arguments, the dims (longer than 1) that it does not
            move with.
        scratch: Positions of buffers that outlive a step.
    """
    of_result = {body.invars[at]: dims for at, dims in shared.items()}
    kept = [body.invars[at] for at in scratch]

    def adds_up(dim: int, times: int) -> bool:
        """Whether results are sums over the steps of a dim, and still would be with `times` as many steps."""
        lengths = {d: length * (times if d == dim else 1) for d, length in enumerate(grid) if length is not None}
        longer = with_last_steps(body, {dim: (lengths[dim] // times, lengths[dim])})
        sums = [var for var, dims in of_result.items() if dim in dims]
        numbers = {d: np.arange(length) for d, length in lengths.items()}
        first = {d: steps if d == dim else steps[:1] for d, steps in numbers.items() if d >= dim}
        passed = [var for var in kept if not is_begun_anew(longer, [var], first)]
        own = [var for var in body.invars if var not in sums and var not in passed]
        use = BufferUse(longer, numbers, dim, sums, passed, own)
        try:
            use.through(longer)
        except NotUnderstoodError:
            return False
        complete = all(use.is_sum(var, use.zeroed.get(var)) for var in passed)
        return complete and not use.walked and all(use.is_result_sum(var, of_result[var]) for var in sums)

    dims = sorted(frozenset[int]().union(*shared.values()))
    # Twice the steps rule out a body that is a sum for this number of steps only.
    return frozenset(dim for dim in dims if grid[dim] is not None and adds_up(dim, 1) and adds_up(dim, 2))


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

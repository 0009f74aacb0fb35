"""Finds the readers of a value in the sharded program, and the conversions for them.

In:     `Body` and a variable of its program.
Out:    readers with the shardings that they need; conversions, one line each. Bodies of scans are included.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar._jax import JaxprEqn, Var
from autopar.cost import collective_seconds
from autopar.cost.steps import step_kind
from autopar.intra_op.sharded import Body, Compute, Fused, Instruction, Move, Region, describe, move_bytes
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of, trip_count
from autopar.mesh import LogicalMesh, Sharding
from autopar.plan.words import bytes_text, seconds_text


def readers(body: Body, var: Var) -> Iterator[tuple[str, Sharding, int]]:
    """The operations that read a value, in scans too: (operation, sharding, number of runs)."""
    for instruction, name, times in _near(body, var):
        if isinstance(instruction, Compute | Region):
            asked = [sharding for read, sharding in instruction.reads if read is name]
            yield from ((describe_phase(instruction.eqn), sharding, times) for sharding in asked)


def conversions(body: Body, var: Var, mesh: LogicalMesh) -> Iterator[str]:
    """The conversions of a value to other shardings, in scans too, one line each."""
    for instruction, name, times in _near(body, var):
        if isinstance(instruction, Move | Fused):
            moves = instruction.moves
            yield from (_move_text(m, mesh, times, len(moves) - 1) for m in moves if m.var is name)


def _near(body: Body, var: Var, times: int = 1) -> Iterator[tuple[Instruction, Var, int]]:
    """Each instruction of a body, and of scans that a value enters: with the name of the value there, and its runs."""
    for instruction in body.instructions:
        if not isinstance(instruction, Region) or kind_of(instruction.eqn) != "scan":
            yield instruction, var, times
            continue
        inner = instruction.bodies[0]
        for atom, (name, _) in zip(instruction.eqn.invars, inner.inputs, strict=True):
            if atom is var:
                yield from _near(inner, name, times * trip_count(instruction.eqn))


def _move_text(move: Move, mesh: LogicalMesh, times: int, companions: int) -> str:
    text = f"{move.source} to {move.target} for {move.reader}: "
    kind = step_kind(move.step)
    if kind is None:
        return text + "each device keeps its part, no communication"
    num_bytes = move_bytes(move, mesh)
    seconds = collective_seconds(kind, num_bytes, move.step.axes, mesh)
    text += f"{kind} over {','.join(move.step.axes)}, {bytes_text(num_bytes)}, {seconds_text(seconds)}"
    return (
        text
        + (f", {times} times" if times > 1 else "")
        + (f", in one message with {companions} other{'s' * (companions > 1)}" if companions else "")
    )


def describe_phase(eqn: JaxprEqn) -> str:
    """An equation as text, and whether it belongs to the backward pass."""
    return describe(eqn) + (", backward" if is_backward(eqn) else "")


def result_sharding(instruction: Compute | Region, var: Var) -> Sharding:
    """The sharding in which an instruction leaves one of its results."""
    results = instruction.strategy.results if isinstance(instruction, Compute) else instruction.results
    return results[list(instruction.eqn.outvars).index(var)]

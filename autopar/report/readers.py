"""Finds the readers of a value in the sharded program, and the conversions for them.

In:     `Body` and a variable of its program.
Out:    readers with the shardings that they need; conversions, one line each. Bodies of scans are included.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar._jax import JaxprEqn, Var
from autopar.cost import collective_seconds
from autopar.cost.steps import step_kind
from autopar.intra_op.sharded import Body, Compute, Fused, Move, Region, describe, move_bytes
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of, trip_count
from autopar.mesh import LogicalMesh, Sharding
from autopar.plan.words import bytes_text, seconds_text


def readers(body: Body, var: Var, times: int = 1) -> Iterator[tuple[str, Sharding, int]]:
    """The operations that read a value, in scans too: (operation, sharding, number of runs)."""
    for instruction in body.instructions:
        match instruction:
            case Compute(eqn, _, strategy):
                for atom, sharding in zip(eqn.invars, strategy.operands, strict=True):
                    if atom is var:
                        yield describe_phase(eqn), sharding, times
            case Region(eqn, operands, _, bodies):
                is_scan = kind_of(eqn) == "scan"
                for k, (atom, sharding) in enumerate(zip(eqn.invars, operands, strict=True)):
                    if atom is var and is_scan:
                        yield from readers(bodies[0], bodies[0].inputs[k][0], times * trip_count(eqn))
                    elif atom is var:
                        yield describe_phase(eqn), sharding, times


def conversions(body: Body, var: Var, mesh: LogicalMesh, times: int = 1) -> Iterator[str]:
    """The conversions of a value to other shardings, one line each."""
    for instruction in body.instructions:
        match instruction:
            case Move() | Fused():
                moves = instruction.moves
                yield from (_move_text(m, mesh, times, len(moves) - 1) for m in moves if m.var is var)
            case Region(eqn, _, _, bodies) if kind_of(eqn) == "scan":
                for k, atom in enumerate(eqn.invars):
                    if atom is var:
                        yield from conversions(bodies[0], bodies[0].inputs[k][0], mesh, times * trip_count(eqn))


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

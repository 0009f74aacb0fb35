"""The sharded program: the instructions of every device, in order, with explicit conversions between shardings.

In:     (types only; `lower.py` makes it.)
Out:    `Body`, a list of `Move | Fused | Compute | Region | Gate`; `collectives_of` lists its collectives, `calls_host`
        tells whether it calls the user's functions.
Method: a *copy* is a value in one sharding, `(var, sharding)`; an instruction makes copies from copies. A copy may be
        redefined: later readers read the new one. The plan's predictions (`plan/`) and the per-device program
        (`partition/`) both derive from this list, so that they agree.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np

from autopar._jax import JaxprEqn, Literal, Var, on_host
from autopar.cost.steps import AllGather, CollectiveKind, ReduceScatter, Step, reduced_itemsize, step_kind
from autopar.errors import listed
from autopar.intra_op.graph import Phase
from autopar.intra_op.strategies import Strategy
from autopar.ir.region import bodies_of, trip_count
from autopar.ir.rules import ShardingRule
from autopar.ir.source import UNKNOWN, source_line
from autopar.mesh import LogicalMesh, Sharding

Copy = tuple[Var, Sharding]

BUCKET_BYTES = 64 << 20
"""Largest message of several values, where memory does not ask for smaller ones (`buckets.py`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Noted:
    """What is noted of every instruction, since every pass over a program asks for it.

    Attributes:
        reads, makes: The copies that it reads and makes.
        needs: Those that must be computed before it begins: what it reads, and what it waits for.
    """

    reads: tuple[Copy, ...] = field(init=False, repr=False)
    makes: tuple[Copy, ...] = field(init=False, repr=False)
    needs: tuple[Copy, ...] = field(init=False, repr=False)

    def _note(self, reads: tuple[Copy, ...], makes: tuple[Copy, ...], awaited: tuple[Copy, ...] = ()) -> None:
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "makes", makes)
        object.__setattr__(self, "needs", reads + awaited)


@dataclass(frozen=True, slots=True, eq=False)
class Move(_Noted):
    """Make the copy of `var` in `target` from the one in `source` by one step.

    Attributes:
        reader: Description of the reader.
        earlier: A copy that the move waits for, so that a repeated gather is not made too early.
        phase: Phase of the reader.
        narrow: The dtype in which it is sent (`narrow.py`); None: its own.
    """

    var: Var
    source: Sharding
    target: Sharding
    step: Step
    reader: str = ""
    earlier: Copy | None = None
    phase: Phase = "f"
    narrow: np.dtype | None = None

    def __post_init__(self) -> None:
        awaited = () if self.earlier is None else (self.earlier,)
        self._note(((self.var, self.source),), ((self.var, self.target),), awaited)

    @property
    def moves(self) -> tuple[Move, ...]:
        """Itself alone: what is asked of each of several `Fused` moves is asked of one, too."""
        return (self,)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is sent."""
        return self.var.aval.dtype if self.narrow is None else self.narrow

    def __str__(self) -> str:
        return f"{self.var}: {self.source} => {self.target} by {self.step}"


@dataclass(frozen=True, slots=True, eq=False)
class Fused(_Noted):
    """Several moves of one kind over the same axes, sent as one message."""

    moves: tuple[Move, ...]

    def __post_init__(self) -> None:
        reads = tuple([(move.var, move.source) for move in self.moves])
        awaited = tuple([move.earlier for move in self.moves if move.earlier is not None])
        self._note(reads, tuple([(move.var, move.target) for move in self.moves]), awaited)

    def __str__(self) -> str:
        return "together: " + "; ".join(map(str, self.moves))


@dataclass(frozen=True, slots=True, eq=False)
class Compute(_Noted):
    """Run one equation under a strategy, which reads and makes these copies."""

    eqn: JaxprEqn
    rule: ShardingRule
    strategy: Strategy

    def __post_init__(self) -> None:
        reads = _but_literals(self.eqn.invars, self.strategy.operands)
        self._note(reads, tuple(zip(self.eqn.outvars, self.strategy.results, strict=True)))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.eqn.outvars))} = {self.eqn.primitive} [{self.rule}] by {self.strategy}"


@dataclass(frozen=True, slots=True, eq=False)
class Region(_Noted):
    """Run a structured equation: operands and results in these shardings, bodies in the order of its parameters."""

    eqn: JaxprEqn
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    bodies: tuple[Body, ...]

    def __post_init__(self) -> None:
        reads = _but_literals(self.eqn.invars, self.operands)
        self._note(reads, tuple(zip(self.eqn.outvars, self.results, strict=True)))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.eqn.outvars))} = {self.eqn.primitive} ({len(self.bodies)} bodies)"


@dataclass(frozen=True, slots=True, eq=False)
class Gate(_Noted):
    """Readers of `copies` from here on wait for `earlier`, so that recomputation does not run too early."""

    earlier: Copy
    copies: tuple[Copy, ...]

    def __post_init__(self) -> None:
        self._note((self.earlier, *self.copies), ())

    def __str__(self) -> str:
        return f"{', '.join(str(var) for var, _ in self.copies)} from here on after {self.earlier[0]}"


Instruction = Move | Fused | Compute | Region | Gate


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A program or the body of a loop or branch.

    Attributes:
        inputs: Its input variables and their shardings.
        instructions: The instructions, in order of execution.
        outputs: Its results and their shardings.
        bucket: The most bytes that it sends as one message of several values.
    """

    inputs: tuple[Copy, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[tuple[Var | Literal, Sharding], ...]
    bucket: int = BUCKET_BYTES

    @property
    def results(self) -> dict[Copy, None]:
        """The copies among its outputs, in order."""
        return {(atom, sharding): None for atom, sharding in self.outputs if not isinstance(atom, Literal)}


def _but_literals(atoms: Sequence[Var | Literal], shardings: Sequence[Sharding]) -> tuple[Copy, ...]:
    return tuple([(a, s) for a, s in zip(atoms, shardings, strict=True) if not isinstance(a, Literal)])


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of the step.

    Attributes:
        kind: Kind of collective.
        axes: Mesh axes it runs over.
        bytes: Operand bytes on one device; for an all-gather, result bytes on one device.
        times: Executions per step, loop trips counted (of a `while` as `trip_count` assumes).
        operation: The operation it serves, and the user's source line.
        stage: The pipeline stage whose mesh it runs on.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    times: int
    operation: str
    stage: int = 0

    def __str__(self) -> str:
        return f"{self.kind} over {','.join(self.axes)}: {self.bytes} B x {self.times} ({self.operation})"


def local_bytes(atom: Var | Literal, sharding: Sharding, mesh: LogicalMesh) -> int:
    """Bytes of one device's shard of a value in device memory: 0 if it is in host memory."""
    return 0 if on_host(atom.aval) else share_bytes(atom, sharding, mesh)


def share_bytes(atom: Var | Literal, sharding: Sharding, mesh: LogicalMesh) -> int:
    """Bytes of one device's shard of a value, in whichever memory."""
    return sharding.local_bytes(atom.aval.shape, atom.aval.dtype, mesh)


def instructions_within(body: Body, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """The instructions of a program, in loops and branches, too, with their executions in `times` runs."""
    for instruction in body.instructions:
        yield instruction, times
        if isinstance(instruction, Region):
            for inner in instruction.bodies:
                yield from instructions_within(inner, times * trip_count(instruction.eqn))


def with_bodies(instruction: Instruction, rewrite: Callable[[Body], Body]) -> Instruction:
    """The instruction, with the bodies of a loop or branch rewritten; the same one, if these are the same."""
    if not isinstance(instruction, Region):
        return instruction
    bodies = tuple(map(rewrite, instruction.bodies))
    is_same = all(map(operator.is_, bodies, instruction.bodies))
    return instruction if is_same else dataclasses.replace(instruction, bodies=bodies)


def computed(body: Body, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Equations that each device computes, in loops and branches, too, with their executions in `times` runs."""
    return ((i.eqn, times) for i, times in instructions_within(body, times) if isinstance(i, Compute))


def communicates(instruction: Instruction) -> bool:
    """Whether an instruction is or contains a collective."""
    match instruction:
        case Move(step=step):
            return step_kind(step) is not None
        case Fused():
            return True
        case Compute(strategy=strategy):
            return bool(strategy.reductions or strategy.exchanged_over)
        case Region(bodies=bodies):
            return any(communicates(inner) for body in bodies for inner in body.instructions)
        case Gate():
            return False


def collectives_of(body: Body, mesh: LogicalMesh) -> Iterator[Collective]:
    """All collectives of a program, in order; one entry per instruction, `times` counts loop trips.

    Every branch of a `cond` is counted as if it were taken; trips of a `while` are those assumed.
    """
    return (sent for _, sent in sent_by(body, mesh))


def sent_by(body: Body, mesh: LogicalMesh) -> Iterator[tuple[Instruction, Collective]]:
    """The collectives of a program as in `collectives_of`, each with its instruction."""
    for instruction, times in instructions_within(body):
        if isinstance(instruction, Compute) and not communicates(instruction):
            continue  # most do not: fast
        for sent in sent_in(instruction, mesh, times):
            yield instruction, sent


def sent_in(instruction: Instruction, mesh: LogicalMesh, times: int = 1) -> Iterator[Collective]:
    """The collectives of one instruction that is run so many times, but for those in bodies."""
    match instruction:
        case Compute(eqn, rule, strategy):
            for reduction, axes in strategy.reductions:
                for var, sharding in instruction.makes:
                    elements = local_bytes(var, sharding, mesh) // var.aval.dtype.itemsize
                    num_bytes = elements * reduced_itemsize(reduction, var.aval.dtype)
                    yield Collective("all-reduce", axes, num_bytes, times, describe(eqn))
            for num_bytes in exchanged_bytes(rule, eqn, strategy, mesh):
                yield Collective("ragged-all-to-all", strategy.exchanged_over, num_bytes, times, describe(eqn))
        case Move() | Fused():
            moves = instruction.moves
            kind = step_kind(moves[0].step)
            if kind is not None:
                readers = list(dict.fromkeys(move.reader for move in moves))
                num_bytes = sum(move_bytes(move, mesh) for move in moves)
                yield Collective(kind, moves[0].step.axes, num_bytes, times, listed(readers, 1))
        case Region() | Gate():
            pass
        case _:
            assert_never(instruction)


def exchanged_bytes(rule: ShardingRule, eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh) -> list[int]:
    """For each array of rows that is sent to the devices of their groups, the bytes that a device sends: its own rows, taking
    groups as equally large."""
    if rule.exchange is None or not strategy.exchanged_over:
        return []
    copies = [*zip(eqn.invars, strategy.operands, strict=True), *zip(eqn.outvars, strategy.results, strict=True)]
    return [local_bytes(*copies[k], mesh) for k in rule.exchange.exchanged]


def is_callback(instruction: Compute) -> bool:
    """Whether an instruction calls a user's function on the host; JAX's own prints do not count."""
    return instruction.rule.host_call and "callback" in instruction.eqn.params


def calls_host(body: Body) -> bool:
    """Whether a program calls a user's function on the host, also in loops and branches."""
    return any(isinstance(i, Compute) and is_callback(i) for i, _ in instructions_within(body))


def describe(eqn: JaxprEqn) -> str:
    """A description of an equation: its primitive and the user's source line."""
    return f"{eqn.primitive} at {source_line(eqn)}"


def describe_moment(eqn: JaxprEqn) -> str:
    """A description of an equation; for a loop of our own, which has no source line, of its first equation with one."""
    inner = [e for body in bodies_of(eqn) for e in body.eqns]
    known = [e for e in inner if source_line(e) != UNKNOWN]
    if source_line(eqn) != UNKNOWN or not known:
        return describe(eqn)
    return f"the loop over microbatches, which begins with {describe(known[0])},"


def move_bytes(move: Move, mesh: LogicalMesh) -> int:
    """The bytes of a move as in `Collective.bytes`."""
    num_bytes = local_bytes(move.var, move.target if isinstance(move.step, AllGather) else move.source, mesh)
    return num_bytes * move.dtype.itemsize // move.var.aval.dtype.itemsize


def transposed_bytes(instruction: Instruction, mesh: LogicalMesh) -> int:
    """Bytes that are transposed for an instruction's collectives: parts of a dim that others precede are not contiguous."""
    moves = instruction.moves if isinstance(instruction, Move | Fused) else ()
    return sum(
        move_bytes(move, mesh)
        for move in moves
        if isinstance(move.step, AllGather | ReduceScatter)
        and math.prod(move.source.local_shape(tuple(move.var.aval.shape), mesh)[: move.step.dim]) > 1
    )

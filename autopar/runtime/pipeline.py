"""The local runtime of pipelines: one process, one dispatching thread, a submesh of devices per stage.

In:     stages and streams, the devices.
Out:    `Pipeline`: compiled once, called with flat arrays.
Method: the streams of all meshes are merged into one order in which nothing waits (a message is sent before it is
        received) and turned into calls of compiled programs. JAX dispatches them asynchronously, so that meshes work at
        the same time. Buffers are let go of where the streams say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import Jaxpr, Var
from autopar.inter_op.stage_plan import StagePlan
from autopar.ir.state import Roles
from autopar.ir.unstack import Unstacked
from autopar.partition.task import ArrayType, TaskFunction, array_type, task_function
from autopar.plan.emit import Streams
from autopar.plan.instructions import Free, Instruction, MeshId, Recv, Run, Send, writes
from autopar.runtime.local import device_mesh
from autopar.runtime.stacks import Stack
from autopar.runtime.transfer import Transfer, make_transfer


class Pipeline:
    """A pipeline on the devices of this process.

    Attributes:
        programs: XLA's executables by name.
        functions: What they were compiled from.
        in_shardings: For each argument of the step where it must be: one sharding; of what is read by no one, None.
    """

    def __init__(
        self,
        stages: Sequence[StagePlan],
        streams: Streams,
        devices: Sequence[Sequence[jax.Device]],
        jaxpr: Jaxpr,
        roles: Roles,
        stacks: Unstacked,
        home: Mapping[Var, int],
    ):
        """Compile everything.

        Args:
            stages: Each on its mesh.
            streams: What the meshes do.
            devices: Of each stage.
            jaxpr: The step, its stacks in parts.
            roles: Of that step.
            stacks: What the user's arguments and results have become in it.
            home: Stage at which each argument lives.
        """
        self._streams, self._arguments, self._results = streams, list(jaxpr.invars), list(jaxpr.outvars)
        self._places = [device_mesh(s.mesh, d) for s, d in zip(stages, devices, strict=True)]
        self._donated = {v for v, d in zip(jaxpr.invars, roles.donated, strict=True) if d}
        self._home, self._unstacked, self._stages = home, stacks, list(stages)
        self._types = [array_type(b.border, self._places[b.stage]) for b in streams.buffers]
        self.functions: dict[str, TaskFunction] = {}
        self.programs: dict[str, jax.stages.Compiled] = {}
        for stage, places in zip(stages, self._places, strict=True):
            self._compile_stage(stage, places)
        self._order = merged(streams.instructions)
        self._calls = [self._call(mesh, instruction) for mesh, instruction in self._order]
        receivers = {i.message: i.buffers for s in streams.instructions.values() for i in s if isinstance(i, Recv)}
        self._received = {
            (mesh, at): receivers[i.message]
            for mesh, stream in streams.instructions.items()
            for at, i in enumerate(stream)
            if isinstance(i, Send)
        }
        self._numbers = self._make_numbers()
        self._entries = self._make_entries()
        self._seen: list[Any] = [None] * len(self._entries)
        self.placements = self._shardings()
        self._stacks_in, self._stacks_out = self._make_stacks(roles)
        self.in_shardings = [
            self.placements[parts[0]] if len(parts) == 1 else self._stacks_in[k].sharding or self.placements[parts[0]]
            for k, parts in enumerate(stacks.inputs)
        ]

    # Compiling.

    def _compile_stage(self, stage: StagePlan, places: jax.sharding.Mesh) -> None:
        for plan in stage.tasks:
            name = plan.task.name
            self.functions[name] = task_function(plan, places, self._streams.overwritten[name])
            self.programs[name] = _compile(self.functions[name], name)

    def _call(self, mesh: MeshId, instruction: Instruction) -> Callable[[dict[int, Any]], None]:
        match instruction:
            case Run(program, _, _, inputs, outputs):
                return _run(self.programs[program], inputs, outputs)
            case Send(sent, peer, message):
                buffers = next(
                    i.buffers for i in self._streams.instructions[peer] if isinstance(i, Recv) and i.message == message
                )
                moves = [self._transfer(a, b) for a, b in zip(sent, buffers, strict=True)]
                return _send(moves, sent, buffers)
            case Recv():
                return _nothing
            case Free(buffers):
                return _free(buffers)

    def _transfer(self, source: int, target: int) -> Transfer:
        a, b = self._streams.buffers[source], self._streams.buffers[target]
        meshes = [s.mesh for s in self._stages]
        return make_transfer(
            self._types[source],
            a.border.sharding,
            meshes[a.stage],
            b.border.sharding,
            meshes[b.stage],
            self._types[target],
        )

    def _make_numbers(self) -> dict[int, jax.Array]:
        return {
            at: jax.device_put(np.int32(microbatch), self._types[at].sharding)
            for (_, microbatch), at in self._streams.numbers.items()
        }

    def _make_entries(self) -> list[tuple[int, int, ArrayType, str]]:
        """What is placed at the beginning of a step: (argument, buffer, type, kind)."""
        position = {var: k for k, var in enumerate(self._arguments)}
        found = []
        for (var, _), at in self._streams.arguments.items():
            found.append((position[var], at, self._types[at], "argument"))
        for (var, _), at in self._streams.pieces.items():
            found.append((position[var], at, self._types[at], "piece"))
        return found

    def _shardings(self) -> list[Any]:
        found: list[Any] = [None] * len(self._arguments)
        for k, at, kind, what in self._entries:
            home = self._home.get(self._arguments[k])
            if what == "argument" and (found[k] is None or self._streams.buffers[at].stage == home):
                found[k] = kind.sharding
        for k, _, kind, what in self._entries:
            if what == "piece" and found[k] is None:
                spec = jax.sharding.PartitionSpec(*kind.sharding.spec[1:])
                found[k] = jax.sharding.NamedSharding(kind.sharding.mesh, spec)
        anywhere = jax.sharding.NamedSharding(self._places[0], jax.sharding.PartitionSpec())
        return [f if f is not None else anywhere for f in found]

    def _make_stacks(self, roles: Roles) -> tuple[dict[int, Stack], dict[int, Stack]]:
        """The arguments and results of the user's step that are parts here."""
        entering, leaving = {}, {}
        for k, parts in enumerate(self._unstacked.inputs):
            if len(parts) > 1:
                shape = self._arguments[parts[0]].aval.shape
                whole = (shape[0] * len(parts), *shape[1:])
                entering[k] = Stack(whole, [self.placements[at] for at in parts])
        into = {out: at for out, at in roles.aliases.items()}
        by_first = {parts[0]: k for k, parts in enumerate(self._unstacked.inputs)}
        for k, parts in enumerate(self._unstacked.outputs):
            if len(parts) > 1:
                leaving[k] = entering[by_first[into[parts[0]]]]
        return entering, leaving

    def stack(self, argument: int) -> Stack | None:
        """How an argument of the user's comes apart; None: it is whole."""
        return self._stacks_in.get(argument)

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """State that is born in its place: `init` is run once for each stage, which keeps what is its own.

        Args:
            init: Makes the leaves.
            args: Its arguments.
            first: The first of the user's arguments' leaves that it makes.
            count: How many.
        """
        wanted: dict[Any, list[tuple[int, int]]] = {}
        for leaf in range(count):
            for number, at in enumerate(self._unstacked.inputs[first + leaf]):
                wanted.setdefault(self.placements[at].mesh, []).append((leaf, number))
        made: dict[tuple[int, int], Any] = {}
        for entries in wanted.values():

            def own(*args: Any, entries: list[tuple[int, int]] = entries) -> list[Any]:
                leaves = init(*args)
                return [self._part(leaves[leaf], first + leaf, number) for leaf, number in entries]

            shardings = [self.placements[self._unstacked.inputs[first + leaf][number]] for leaf, number in entries]
            made.update(zip(entries, jax.jit(own, out_shardings=shardings)(*args), strict=True))
        found = []
        for leaf in range(count):
            positions = self._unstacked.inputs[first + leaf]
            parts = [made[leaf, number] for number in range(len(positions))]
            found.append(self._stacks_in[first + leaf].join(parts) if len(positions) > 1 else parts[0])
        return found

    def _part(self, array: Any, leaf: int, number: int) -> Any:
        count = len(self._unstacked.inputs[leaf])
        rows = array.shape[0] // count if count > 1 else 0
        return array[number * rows : (number + 1) * rows] if count > 1 else array

    # Running.

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step on the user's flat arguments."""
        held = self._begin(arrays)
        for call in self._calls:
            call(held)
        return self._end(held)

    def measure(self, arrays: Sequence[Any]) -> tuple[list[Any], dict[tuple[MeshId, int], float]]:
        """Run one step with nothing at the same time as anything else.

        Returns:
            The results, and the seconds of each instruction by (mesh, position in its stream).
        """
        held = self._begin(arrays)
        jax.block_until_ready(list(held.values()))
        seconds: dict[tuple[MeshId, int], float] = {}
        at = dict.fromkeys(self._streams.instructions, 0)
        for (mesh, instruction), call in zip(self._order, self._calls, strict=True):
            started = time.perf_counter()
            call(held)
            written = writes(instruction) if isinstance(instruction, Run) else self._received.get((mesh, at[mesh]), ())
            jax.block_until_ready([held[b] for b in written if b in held])
            seconds[mesh, at[mesh]] = time.perf_counter() - started
            at[mesh] += 1
        return self._end(held), seconds

    def _begin(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """The buffers that are there when the step begins."""
        parts: list[Any] = []
        for k, positions in enumerate(self._unstacked.inputs):
            if len(positions) > 1:
                parts += self._stacks_in[k].split(arrays[k])
            else:
                parts.append(arrays[k])
        held: dict[int, Any] = dict(self._numbers)
        self._place(parts, held)
        return held

    def _end(self, held: Mapping[int, Any]) -> list[Any]:
        """The user's flat results."""
        made = [
            held[at] if at is not None else jnp.asarray(atom.val, atom.aval.dtype)
            for at, atom in zip(self._streams.results, self._results, strict=True)
        ]
        return [
            self._stacks_out[k].join([made[at] for at in positions]) if len(positions) > 1 else made[positions[0]]
            for k, positions in enumerate(self._unstacked.outputs)
        ]

    def _place(self, arrays: Sequence[Any], held: dict[int, Any]) -> None:
        away: list[tuple[Any, ArrayType, int]] = []
        for number, (k, at, kind, what) in enumerate(self._entries):
            array = arrays[k]
            if what == "piece":
                away.append(
                    (
                        jnp.reshape(array, kind.shape)
                        if isinstance(array, jax.Array)
                        else np.reshape(array, kind.shape),
                        kind,
                        at,
                    )
                )
                continue
            if isinstance(array, jax.Array):
                if array.sharding is self._seen[number]:
                    held[at] = array
                    continue
                if array.sharding == kind.sharding:
                    self._seen[number] = array.sharding
                    held[at] = array
                    continue
            if self._arguments[k] in self._donated:
                array = jnp.array(array, copy=True) if isinstance(array, jax.Array) else np.array(array)
            away.append((array, kind, at))
        if away:
            moved = jax.device_put([a for a, _, _ in away], [kind.sharding for _, kind, _ in away])
            for (_, _, at), array in zip(away, moved, strict=True):
                held[at] = array


def _run(
    compiled: jax.stages.Compiled, inputs: Sequence[int], outputs: Sequence[int]
) -> Callable[[dict[int, Any]], None]:
    def call(held: dict[int, Any]) -> None:
        held.update(zip(outputs, compiled(*[held[at] for at in inputs]), strict=True))

    return call


def _send(moves: Sequence[Transfer], sent: Sequence[int], buffers: Sequence[int]) -> Callable[[dict[int, Any]], None]:
    """Sending begins the copy: it goes on while both meshes work, and the sender may let go of its buffer."""

    def call(held: dict[int, Any]) -> None:
        for move, source, target in zip(moves, sent, buffers, strict=True):
            held[target] = move(held[source])

    return call


def _nothing(held: dict[int, Any]) -> None:
    """The value is there, or on its way: programs wait for it."""


def _free(buffers: Sequence[int]) -> Callable[[dict[int, Any]], None]:
    def call(held: dict[int, Any]) -> None:
        for at in buffers:
            held.pop(at, None)

    return call


def _compile(made: TaskFunction, name: str) -> jax.stages.Compiled:
    def program(*arrays: jax.Array) -> list[jax.Array]:
        return made.function(*arrays)

    program.__name__ = program.__qualname__ = name.replace("/", "_")
    jitted = jax.jit(
        program,
        in_shardings=tuple(t.sharding for t in made.inputs),
        out_shardings=[t.sharding for t in made.outputs],
        donate_argnums=tuple(k for k, d in enumerate(made.donated) if d),
    )
    return jitted.lower(*(t.struct() for t in made.inputs)).compile()


def merged(streams: Mapping[MeshId, Sequence[Instruction]]) -> list[tuple[MeshId, Instruction]]:
    """One order of all instructions in which every message is sent before it is received: meshes take turns.

    Raises:
        AssertionError: The streams wait for each other; `plan/check.py` would have said so.
    """
    at = dict.fromkeys(streams, 0)
    sent: set[int] = set()
    found: list[tuple[MeshId, Instruction]] = []
    while any(at[mesh] < len(stream) for mesh, stream in streams.items()):
        moved = False
        for mesh, stream in streams.items():
            ran = False
            while at[mesh] < len(stream):
                instruction = stream[at[mesh]]
                if isinstance(instruction, Recv) and instruction.message not in sent:
                    break
                if isinstance(instruction, Run):
                    if ran:
                        break
                    ran = True
                if isinstance(instruction, Send):
                    sent.add(instruction.message)
                found.append((mesh, instruction))
                at[mesh] += 1
                moved = True
        assert moved, "the streams wait for each other"
    return found

"""A step on a Ray cluster, as the driver sees it.

In:     a `Job`, a `RayMachine`.
Out:    `RayStep`, called with flat arrays like `runtime/pipeline.py`'s `Pipeline`.
Method: each worker gets its share of the job once. A step is one call of each worker: arguments that are there already
        go as keys, others in the parts that the worker's devices want. New state stays there; other results come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import StepError
from autopar.ir.split.layers import LayerSplit
from autopar.mesh import ArrayType, Box, Sharding
from autopar.mesh.ray_nodes import RayMachine
from autopar.partition.host_calls import Raised
from autopar.partition.task import abstract_mesh
from autopar.runtime.ray.driver.callbacks import all_raised, callback_error
from autopar.runtime.ray.driver.clocks import spans_of
from autopar.runtime.ray.driver.faults import microbatch_of
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray, host_array, remote_sharding
from autopar.runtime.ray.driver.workers import Workers, ended, joined
from autopar.runtime.ray.functions import check_no_calls
from autopar.runtime.ray.job import Entry, Job, exported
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.share import Report, Share, StepCall
from autopar.runtime.ray.transport.parcels import holders_of, messages_of, own_boxes, pack, slices
from autopar.runtime.stacks import Stack, part_of, parts_of
from autopar.streams.clock import recorded
from autopar.streams.instructions import BufferId, MeshId
from autopar.streams.streams import Streams
from autopar.streams.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Interface:
    """What a job's arguments and results are to the user.

    Attributes:
        stacks: Which of them are in parts.
        kept: Results (of the job) that stay on the workers: new state.
        results: The job's results as the jaxpr has them: constants are there by value.
        name: Of the step.
        streams: What the meshes do.
    """

    stacks: LayerSplit
    kept: frozenset[int]
    results: tuple[Any, ...]
    name: str
    streams: Streams


class RayStep:
    """A step on the workers of a cluster.

    Attributes:
        job: What the workers do.
        workers: They.
        programs: What was sent to them, by name.
        in_shardings: For each argument of the step how it lies.
    """

    def __init__(self, machine: RayMachine, job: Job, interface: Interface, platform: str):
        """Start workers, unless there are some, and let them compile.

        Args:
            machine: The Ray cluster.
            job: The step.
            interface: What it is to the user.
            platform: Of the devices.
        """
        self.job, self._interface, self._platform = job, interface, platform
        self.workers: Workers = machine.workers(job.layout, lambda: Workers(machine, job.layout))
        self.programs = {program.name: program for own in job.programs.values() for program in own}
        self.functions = self.programs
        self._number = self.workers.number()[0]
        self._kept: dict[MeshId, list[int]] = {mesh: [] for mesh in job.streams}
        self._fetched: list[BufferId] = []
        for k, at in enumerate(job.results):
            if at is not None and k in interface.kept:
                self._kept[job.mesh_of[at]].append(k)
            if at is not None and k not in interface.kept and at not in self._fetched:
                self._fetched.append(at)
        self._holders = {at: holders_of(job.types[at], self.workers.seats_on(job.mesh_of[at])) for at in self._fetched}
        self._entries: dict[MeshId, list[Entry]] = {mesh: [] for mesh in job.streams}
        self._read: dict[int, list[Entry]] = {}
        for entry in job.entries:
            self._entries[job.mesh_of[entry.buffer]].append(entry)
            self._read.setdefault(entry.argument, []).append(entry)
        self._cuts = {
            (entry.buffer, seat.number): _cuts(job.types[entry.buffer], seat)
            for mesh, own in self._entries.items()
            for entry in own
            for seat in self.workers.seats_on(mesh)
        }
        self.in_shardings = [
            remote_sharding([self._kind(at) for at in parts], dim)
            for parts, dim in zip(interface.stacks.inputs, interface.stacks.input_dims, strict=True)
        ]
        # Between GPUs a step cannot be left: what was begun to be sent would wait for ever.
        self._pauses = {} if self.workers.direct else job.pauses
        self._load()

    is_remote = True
    devices: tuple[jax.Device, ...] = ()

    @property
    def closed(self) -> bool:
        """Whether its workers have ended."""
        return self.workers.closed

    def _load(self) -> None:
        messages = messages_of(self.job, self.workers.seats)
        self.workers.know(self._number, self.job)
        self.workers.open(sorted({(m.source, m.target) for m in messages.values()}))
        shares = {seat.number: (self._number, self._share(seat, messages)) for seat in self.workers.seats}
        self.workers.call("compile", shares)
        self.workers.prepare("load", dict.fromkeys(shares, (self._number,)))

    def _share(self, seat: Seat, messages: Mapping[int, Any]) -> Share:
        job, mesh = self.job, seat.mesh
        return Share(
            programs=job.programs[mesh],
            stream=job.streams[mesh],
            messages={number: m for number, m in messages.items() if mesh in (m.source, m.target)},
            types={at: kind for at, kind in enumerate(job.types) if job.mesh_of[at] == mesh},
            microbatches=tuple(microbatch_of(instruction, job) for instruction in job.streams[mesh]),
            numbers={at: number for at, number in job.numbers.items() if job.mesh_of[at] == mesh},
            entries=tuple((entry.buffer, job.donated[entry.argument]) for entry in self._entries[mesh]),
            kept=tuple(at for at in map(job.results.__getitem__, self._kept[mesh]) if at is not None),
            fetched=tuple((at, self._devices(at, seat)) for at in self._fetched if self._devices(at, seat)),
            callbacks=job.callbacks[mesh],
            pause=self._pauses.get(mesh),
        )

    def _devices(self, at: BufferId, seat: Seat) -> tuple[int, ...]:
        return tuple(device for device, _ in self._holders[at].get(seat.number, ()))

    def _kind(self, argument: int) -> ArrayType:
        """How an argument lies where it lives; what no one reads lies nowhere, and whole."""
        entries = self._read.get(argument, [])
        whole = [e for e in entries if not e.is_piece]
        homes = [e for e in whole if self.job.mesh_of[e.buffer] == self.job.home[argument]]
        if homes or whole:
            return self.job.types[(homes or whole)[0].buffer]
        if entries:
            kind = self.job.types[entries[0].buffer]
            shape = (kind.shape[0] * kind.shape[1], *kind.shape[2:])
            return ArrayType(shape, kind.dtype, Sharding(kind.sharding.dims[1:]), kind.mesh)
        return self._unread(argument)

    def _unread(self, argument: int) -> ArrayType:
        aval, home = self._interface.stacks.jaxpr.invars[argument].aval, self.job.home[argument]
        mesh = next(kind.mesh for kind, at in zip(self.job.types, self.job.mesh_of, strict=True) if at == home)
        return ArrayType(tuple(aval.shape), np.dtype(aval.dtype), Sharding.replicated(len(aval.shape)), mesh)

    # Steps.

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step on the user's flat arguments.

        Raises:
            WorkerError: It failed; the workers have ended.
            StepError: A callback raised; the workers go on.
            DonatedError: An argument was donated before.
        """
        return self._carry_out(arrays, False)[0]

    def measure(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Run one step of a pipeline, in which each program and message is waited for; as of a call, and when they were."""
        if self.workers.closed:
            raise ended()
        offsets = self.workers.clocks()
        results, reports = self._carry_out(arrays, True)
        runs, messages = spans_of(self.job, self.workers.seats, reports, offsets)
        return results, recorded(self._interface.streams, runs, messages)

    def _carry_out(self, arrays: Sequence[Any], is_measured: bool) -> tuple[list[Any], dict[int, Report]]:
        if self.workers.closed:
            raise ended()
        parts, donated = self._parts(arrays)
        given = {mesh: [self._key(entry, parts) for entry in own] for mesh, own in self._entries.items()}
        values = self._all_values(given, parts)
        released = self.workers.take_released()  # from here on nothing fails but the step itself
        taken = {copy: None for copy in donated if copy.owner is self.workers}
        for copy in taken:
            released.setdefault(copy.mesh, []).append(copy.key)
        keep = {mesh: self.workers.number(len(own)) for mesh, own in self._kept.items()}
        step = self.workers.number()[0]
        calls = {}
        for seat in self.workers.seats:
            keys, dropped = tuple(given[seat.mesh]), tuple(released.get(seat.mesh, ()))
            own = values[seat.number]
            calls[seat.number] = (StepCall(self._number, step, keys, own, keep[seat.mesh], dropped, is_measured),)
        for copy in taken:
            copy.is_deleted = True
        made = self.workers.run(calls, self._number)
        raised = all_raised(made)
        if self._pauses and raised:
            self._leave(calls, taken)
            raise self._callback_error(raised, False)
        if self._pauses:
            made = self.workers.call("go_on", dict.fromkeys(calls, ()), job=self._number)
            raised = all_raised(made)
        results = self._results({number: tiles for number, (tiles, _) in made.items()}, keep)
        if raised:
            whole = results if all(r.makes_nothing for r in raised) else None
            raise self._callback_error(raised, bool(taken), whole)
        return results, {number: report for number, (_, report) in made.items()}

    def _callback_error(self, raised: Sequence[Raised], state_lost: bool, results: Any = None) -> StepError:
        return callback_error(self._interface.name, self._interface.streams, raised, state_lost, results)

    def _leave(self, calls: Iterable[int], taken: Iterable[Copy]) -> None:
        """Do not carry on with a step: what it was to take is there again."""
        self.workers.call("leave", dict.fromkeys(calls, ()), job=self._number)
        for copy in taken:
            copy.is_deleted = False

    def _parts(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Copy]]:
        """The job's arguments out of the user's, and what of them is donated."""
        parts: list[Any] = []
        donated: list[Copy] = []
        stacks = self._interface.stacks
        for array, positions, dim in zip(arrays, stacks.inputs, stacks.input_dims, strict=True):
            if isinstance(array, RemoteArray):
                array.check()
                if self.job.donated[positions[0]]:
                    donated += [copy for part in array.parts for copy in part.copies]
                if self._lies_so(array, positions, dim):
                    parts += array.parts
                    continue
            if len(positions) == 1:
                parts.append(array)
                continue
            whole = host_array(array)
            parts += parts_of(whole, self._sizes(positions, dim), dim)
        return parts, donated

    def _sizes(self, positions: Sequence[int], dim: int) -> list[int]:
        """Lengths of the parts of a stack; of what is no stack, 1 for the whole."""
        invars = self._interface.stacks.jaxpr.invars
        return [invars[at].aval.shape[dim] for at in positions] if len(positions) > 1 else [1]

    def _lies_so(self, array: RemoteArray, positions: Sequence[int], dim: int) -> bool:
        """Whether an array is in the parts that the job wants."""
        if len(array.parts) != len(positions) or array.dim != dim:
            return False
        sizes = [part.copies[0].kind.shape[dim] for part in array.parts] if len(positions) > 1 else [1]
        return sizes == self._sizes(positions, dim)

    def _key(self, entry: Entry, parts: list[Any]) -> int | None:
        """Under which key an argument is where it is wanted; None: it must be sent, and is then in this process."""
        part = parts[entry.argument]
        if isinstance(part, Part):
            mesh, kind = self.job.mesh_of[entry.buffer], self.job.types[entry.buffer]
            for copy in part.copies:
                same = copy.kind is kind or copy.kind == kind
                if copy.owner is self.workers and copy.mesh == mesh and same:
                    return copy.key
        return None

    def _all_values(
        self, given: Mapping[MeshId, Sequence[int | None]], parts: Sequence[Any]
    ) -> dict[int, tuple[list[np.ndarray], ...]]:
        """For each worker the arguments that it must be sent; what is elsewhere is fetched once for all."""
        wanted = {
            seat.number: [
                entry for entry, key in zip(self._entries[seat.mesh], given[seat.mesh], strict=True) if key is None
            ]
            for seat in self.workers.seats
        }
        arguments = dict.fromkeys(entry.argument for own in wanted.values() for entry in own)
        here = {argument: _fetched(parts[argument]) for argument in arguments}
        return {
            seat.number: tuple(self._values(entry, here[entry.argument], seat) for entry in wanted[seat.number])
            for seat in self.workers.seats
        }

    def _values(self, entry: Entry, array: np.ndarray, seat: Seat) -> list[np.ndarray]:
        """An argument as a worker wants it: only what its devices hold."""
        kind = self.job.types[entry.buffer]
        whole = np.asarray(array, kind.dtype).reshape(kind.shape)
        return [pack(whole[cut]) for cut in self._cuts[entry.buffer, seat.number]]

    def _results(self, made: Mapping[int, Sequence[Any]], keep: Mapping[MeshId, range]) -> list[Any]:
        job = self.job
        tiles = {number: iter(own) for number, own in made.items()}
        arrived: list[np.ndarray] = []
        for at in self._fetched:
            own = {number: next(tiles[number]) for number in self._holders[at]}
            arrived.append(joined(job.types[at], self._holders[at], own))
        here: dict[BufferId, jax.Array] = dict(zip(self._fetched, jax.device_put(arrived), strict=True))
        there = {
            k: Part((Copy(self.workers, mesh, self._result_type(k), key),))
            for mesh, results in self._kept.items()
            for key, k in zip(keep[mesh], results, strict=True)
        }
        found: list[Any] = []
        for positions, dim in zip(self._interface.stacks.outputs, self._interface.stacks.output_dims, strict=True):
            if positions[0] in self._interface.kept and job.results[positions[0]] is not None:
                found.append(RemoteArray([there[k] for k in positions], dim))
                continue
            parts = [self._value(k, here) for k in positions]
            found.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim))
        return found

    def _result_type(self, result: int) -> ArrayType:
        at = self.job.results[result]
        assert at is not None, "a constant does not stay on the workers"
        return self.job.types[at]

    def _value(self, result: int, here: Mapping[BufferId, jax.Array]) -> jax.Array:
        at = self.job.results[result]
        if at is not None:
            return here[at]
        atom = self._interface.results[result]
        return jnp.asarray(atom.val, atom.aval.dtype)

    # State.

    def stack(self, argument: int) -> Stack | None:
        """How an argument of the user's comes apart in this process: it is not here."""
        return None

    def hold(self, arrays: Sequence[Any], first: int) -> list[RemoteArray | Any]:
        """Put arguments that are the same in every step where they are read; as of `Runtime`."""
        found: list[Any] = []
        for array, positions in zip(arrays, self._interface.stacks.inputs[first:], strict=True):
            entries = [e for e in self._read.get(positions[0], []) if not e.is_piece]
            if len(positions) > 1 or not entries:
                found.append(array)
                continue
            copies, here = [], _fetched(array)
            for entry in entries:
                key, kind, mesh = self.workers.number()[0], self.job.types[entry.buffer], self.job.mesh_of[entry.buffer]
                seats = self.workers.seats_on(mesh)
                tiles = {s.number: (key, kind, self._values(entry, here, s)) for s in seats}
                self.workers.call("put", tiles, subject=str(kind))
                copies.append(Copy(self.workers, mesh, kind, key))
            found.append(RemoteArray([Part(tuple(copies))]))
        return found

    def wanted(self, argument: int) -> list[tuple[MeshId, ArrayType, bool]]:
        """Where one of the user's arguments, which is in one part, is read: on which mesh, how, whether in microbatches."""
        (at,) = self._interface.stacks.inputs[argument]
        entries = self._read.get(at, [])
        return [(self.job.mesh_of[e.buffer], self.job.types[e.buffer], e.is_piece) for e in entries]

    def homes(self, argument: int) -> tuple[list[tuple[MeshId, ArrayType]], int]:
        """Where the parts of one of the user's arguments live between steps, and along which dim they lie."""
        stacks = self._interface.stacks
        return [(self.job.home[at], self._kind(at)) for at in stacks.inputs[argument]], stacks.input_dims[argument]

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """State that is born in its place: `init` is run on each mesh, which keeps what is its own; as of `Runtime`."""
        inputs, dims = self._interface.stacks.inputs, self._interface.stacks.input_dims
        wanted: dict[MeshId, list[tuple[int, int]]] = {}
        for leaf in range(count):
            for number, at in enumerate(inputs[first + leaf]):
                wanted.setdefault(self.job.home[at], []).append((leaf, number))
        made: dict[tuple[int, int], Part] = {}
        for mesh, entries in wanted.items():
            kinds = [self._kind(inputs[first + leaf][number]) for leaf, number in entries]

            def own(entries: list[tuple[int, int]] = entries) -> list[Any]:
                leaves = init(*args)
                sizes = {leaf: self._sizes(inputs[first + leaf], dims[first + leaf]) for leaf, _ in entries}
                return [part_of(leaves[leaf], number, sizes[leaf], dims[first + leaf]) for leaf, number in entries]

            jitted = jax.jit(own, out_shardings=[kind.on(abstract_mesh(kind.mesh)) for kind in kinds])
            check_no_calls(jitted.trace().jaxpr, "create_state(...)")
            code, keys = exported(jitted, (), self._platform), self.workers.number(len(entries))
            made_there = {s.number: (code, list(keys), kinds) for s in self.workers.seats_on(mesh)}
            self.workers.call("create", made_there, subject=", ".join(map(str, kinds[:4])) + " ..." * (len(kinds) > 4))
            for entry, key, kind in zip(entries, keys, kinds, strict=True):
                made[entry] = Part((Copy(self.workers, mesh, kind, key),))
        return [
            RemoteArray([made[leaf, number] for number in range(len(inputs[first + leaf]))], dims[first + leaf])
            for leaf in range(count)
        ]


def _fetched(part: Any) -> np.ndarray:
    return host_array(RemoteArray([part]) if isinstance(part, Part) else part)


def _cuts(kind: ArrayType, seat: Seat) -> list[tuple[slice, ...]]:
    whole: Box = tuple((0, length) for length in kind.shape)
    return [slices(box, whole) for box in own_boxes(kind, seat)]

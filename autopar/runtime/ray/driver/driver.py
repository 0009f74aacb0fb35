"""The driver's side of a step on a Ray cluster.

In:     a `StepPlan`, a `RayMachine`.
Out:    `RayStep`, called with flat arrays like `runtime/pipeline.py`'s `Pipeline`.
Method: each worker gets its share of the job once. A step is one call of each worker: arguments that the worker holds are
        passed as keys, others as the parts that its devices want. New state stays on the workers, except random keys, which
        are small, and which only this process knows as keys; other results come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import StepError
from autopar.ir.dims import in_pieces
from autopar.mesh import ArrayType, Box
from autopar.mesh.ray_nodes import RayMachine
from autopar.partition.host_calls import Raised
from autopar.partition.task import abstract_mesh
from autopar.runtime.failure import first_raised, step_error
from autopar.runtime.ray.driver.clocks import spans_of
from autopar.runtime.ray.driver.faults import microbatch_of
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray, host_array, remote_sharding
from autopar.runtime.ray.driver.workers import Workers, ended, joined
from autopar.runtime.ray.functions import check_calls, check_no_calls
from autopar.runtime.ray.job import exported, make_job
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.share import Report, Share, StepCall
from autopar.runtime.ray.transport.parcels import holders_of, messages_of, own_boxes, pack, slices
from autopar.runtime.stacks import Stack, births, parts_of
from autopar.streams.assemble import StepPlan
from autopar.streams.clock import recorded
from autopar.streams.instructions import BufferId, MeshId, Streams
from autopar.streams.order import merged
from autopar.streams.timeline import Timeline

_Entry = tuple[int, BufferId]
"""The number of an argument or result, and its buffer."""


class RayStep:
    """A step on the workers of a cluster; attributes as in `Runtime`."""

    def __init__(self, machine: RayMachine, planned: StepPlan):
        """Start workers, unless the machine has some for this layout, and let them compile.

        Raises:
            ClusterError: Ray has no room for the workers.
            WorkerError: A worker failed.
            NotBuiltYetError: Workers do not support a host callback of the step.
        """
        check_calls([task.body for stage in planned.stages for task in stage.tasks])
        self._platform = "cpu" if machine.accelerator is None else "cuda"
        self.job = job = make_job(planned, self._platform)
        self._planned, self._stacks, self._streams = planned, planned.stacks, planned.streams
        self._buffers, self._donated = planned.streams.buffers, planned.roles.donated
        self.workers: Workers = machine.workers(job.layout, lambda: Workers(machine, job.layout))
        self.programs = {program.name: program for own in job.programs.values() for program in own}
        self.functions = self.programs
        self._number = self.workers.number()[0]
        self._kept: dict[MeshId, list[_Entry]] = {mesh: [] for mesh in self._streams.instructions}
        self._fetched: list[BufferId] = []
        for k, at in enumerate(self._streams.results):
            if at is not None and self._stays(k):
                self._kept[self._buffers[at].mesh].append((k, at))
            elif at is not None and at not in self._fetched:
                self._fetched.append(at)
        seats_of = {at: self.workers.seats_on(buffer.mesh) for at, buffer in enumerate(self._buffers)}
        self._holders = {at: holders_of(job.types[at], seats_of[at]) for at in self._fetched}
        self._entries: dict[MeshId, list[_Entry]] = {mesh: [] for mesh in self._streams.instructions}
        self._read: dict[int, list[BufferId]] = {}
        for argument, at in self._streams.arguments:
            self._entries[self._buffers[at].mesh].append((argument, at))
            self._read.setdefault(argument, []).append(at)
        self._cuts = {
            (at, seat.number): _cuts(job.types[at], seat) for _, at in self._streams.arguments for seat in seats_of[at]
        }
        self._kinds = [kind for kind, _ in planned.arguments_at_home()]
        self.in_shardings = [
            remote_sharding([self._kinds[at] for at in parts], dim)
            for parts, dim in zip(self._stacks.inputs, self._stacks.input_dims, strict=True)
        ]
        # With NCCL a step cannot be abandoned: sends in flight would wait for ever.
        self._pauses = {} if self.workers.direct else job.pauses
        self._load()

    is_remote = True
    devices: tuple[jax.Device, ...] = ()

    @property
    def closed(self) -> bool:
        """Whether its workers have ended."""
        return self.workers.closed

    def _stays(self, result: int) -> bool:
        """Whether a result stays on the workers: new state, except random keys."""
        return result in self._planned.roles.aliases and not self._planned.program.key_outputs[result]

    def _is_whole(self, at: BufferId) -> bool:
        """Whether an argument is placed as it is, without a leading dim of microbatches."""
        return self._buffers[at].value.kind != "piece"

    def _load(self) -> None:
        messages = messages_of(self.job, self.workers.seats)
        self.workers.know(self._number, self.job)
        self.workers.open(sorted({(m.source, m.target) for m in messages.values()}))
        shares = {seat.number: (self._number, self._share(seat, messages)) for seat in self.workers.seats}
        self.workers.call("compile", shares)
        self.workers.prepare("load", dict.fromkeys(shares, (self._number,)))

    def _share(self, seat: Seat, messages: Mapping[int, Any]) -> Share:
        job, mesh, buffers, stream = self.job, seat.mesh, self._buffers, self._streams.instructions[seat.mesh]
        return Share(
            programs=job.programs[mesh],
            stream=stream,
            messages={number: m for number, m in messages.items() if mesh in (m.source, m.target)},
            types={at: kind for at, kind in enumerate(job.types) if buffers[at].mesh == mesh},
            microbatches=tuple(microbatch_of(instruction, job) for instruction in stream),
            numbers={at: buffers[at].microbatch for at in self._streams.numbers if buffers[at].mesh == mesh},
            entries=tuple((at, self._donated[argument]) for argument, at in self._entries[mesh]),
            kept=tuple(at for _, at in self._kept[mesh]),
            fetched=tuple((at, self._devices(at, seat)) for at in self._fetched if self._devices(at, seat)),
            callbacks=job.callbacks[mesh],
            pause=self._pauses.get(mesh),
        )

    def _devices(self, at: BufferId, seat: Seat) -> tuple[int, ...]:
        return tuple(device for device, _ in self._holders[at].get(seat.number, ()))

    # Steps.

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step on the user's flat arguments.

        Raises:
            WorkerError: It failed; the workers have ended.
            StepError: A callback raised; the workers keep running.
            DonatedError: An argument was donated before.
        """
        return self._carry_out(arrays, False)[0]

    def measure(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Run one step and wait for each program; as in a call, and the timeline of programs and messages as they ran."""
        if self.workers.closed:
            raise ended()
        offsets = self.workers.clocks()
        results, reports = self._carry_out(arrays, True)
        runs, messages = spans_of(self.job, self.workers.seats, reports, offsets)
        return results, recorded(self._streams, runs, messages)

    def _carry_out(self, arrays: Sequence[Any], is_measured: bool) -> tuple[list[Any], dict[int, Report]]:
        if self.workers.closed:
            raise ended()
        parts, donated = self._parts(arrays)
        given = {mesh: [self._key(entry, parts) for entry in own] for mesh, own in self._entries.items()}
        values = self._all_values(given, parts)
        released = self.workers.take_released()  # from here on only the step itself can fail
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
        made = self.workers.call("run", calls, job=self._number)
        raised = _raised(made)
        if self._pauses and raised:
            self._leave(calls, taken)
            raise callback_error(self._planned.program.name, self._streams, raised, False)
        if self._pauses:
            made = self.workers.call("go_on", dict.fromkeys(calls, ()), job=self._number)
            raised = _raised(made)
        results = self._results({number: tiles for number, (tiles, _) in made.items()}, keep)
        if raised:
            whole = results if all(r.makes_nothing for r in raised) else None
            raise callback_error(self._planned.program.name, self._streams, raised, bool(taken), whole)
        return results, {number: report for number, (_, report) in made.items()}

    def _leave(self, calls: Iterable[int], taken: Iterable[Copy]) -> None:
        """Abandon a step at the pause: its donated arguments are available again."""
        self.workers.call("leave", dict.fromkeys(calls, ()), job=self._number)
        for copy in taken:
            copy.is_deleted = False

    def _parts(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Copy]]:
        """The job's arguments, made of the user's, and the donated copies among them."""
        parts: list[Any] = []
        donated: list[Copy] = []
        stacks = self._stacks
        for k, (array, positions) in enumerate(zip(arrays, stacks.inputs, strict=True)):
            if isinstance(array, RemoteArray):
                array.check()
                if self._donated[positions[0]]:
                    donated += [copy for part in array.parts for copy in part.copies]
                if self._lies_so(array, k):
                    parts += array.parts
                    continue
            if len(positions) == 1:
                parts.append(array)
                continue
            parts += parts_of(host_array(array), stacks.sizes(k), stacks.input_dims[k])
        return parts, donated

    def _lies_so(self, array: RemoteArray, argument: int) -> bool:
        """Whether an array has the parts that the job wants."""
        dim, wanted = self._stacks.input_dims[argument], self._stacks.sizes(argument)
        if len(array.parts) != len(wanted) or array.dim != dim:
            return False
        return len(wanted) == 1 or [part.copies[0].kind.shape[dim] for part in array.parts] == wanted

    def _key(self, entry: _Entry, parts: list[Any]) -> int | None:
        """The key of an argument on the mesh, and in the sharding, that wants it; None: it must be sent from this process."""
        argument, at = entry
        part = parts[argument]
        if isinstance(part, Part):
            mesh, kind = self._buffers[at].mesh, self.job.types[at]
            for copy in part.copies:
                same = copy.kind is kind or copy.kind == kind
                if copy.owner is self.workers and copy.mesh == mesh and same:
                    return copy.key
        return None

    def _all_values(
        self, given: Mapping[MeshId, Sequence[int | None]], parts: Sequence[Any]
    ) -> dict[int, tuple[list[np.ndarray], ...]]:
        """The arguments to send to each worker; those on other meshes are fetched once for all workers."""
        wanted = {
            seat.number: [
                entry for entry, key in zip(self._entries[seat.mesh], given[seat.mesh], strict=True) if key is None
            ]
            for seat in self.workers.seats
        }
        arguments = dict.fromkeys(argument for own in wanted.values() for argument, _ in own)
        here = {argument: _fetched(parts[argument]) for argument in arguments}
        return {
            seat.number: tuple(self._values(at, here[argument], seat) for argument, at in wanted[seat.number])
            for seat in self.workers.seats
        }

    def _values(self, at: BufferId, array: np.ndarray, seat: Seat) -> list[np.ndarray]:
        """The packed parts of an argument that a worker's devices hold."""
        kind = self.job.types[at]
        whole = np.asarray(array, kind.dtype)
        whole = whole if whole.shape == kind.shape else in_pieces(whole, kind.shape)
        return [pack(whole[cut]) for cut in self._cuts[at, seat.number]]

    def _results(self, made: Mapping[int, Sequence[Any]], keep: Mapping[MeshId, range]) -> list[Any]:
        tiles = {number: iter(own) for number, own in made.items()}
        arrived: list[np.ndarray] = []
        for at in self._fetched:
            own = {number: next(tiles[number]) for number in self._holders[at]}
            arrived.append(joined(self.job.types[at], self._holders[at], own))
        here: dict[BufferId, jax.Array] = dict(zip(self._fetched, jax.device_put(arrived), strict=True))
        there = {
            k: Part((Copy(self.workers, mesh, self.job.types[at], key),))
            for mesh, results in self._kept.items()
            for key, (k, at) in zip(keep[mesh], results, strict=True)
        }
        found: list[Any] = []
        for positions, dim in zip(self._stacks.outputs, self._stacks.output_dims, strict=True):
            if positions[0] in there:
                found.append(RemoteArray([there[k] for k in positions], dim))
                continue
            parts = [self._value(k, here) for k in positions]
            found.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim))
        return found

    def _value(self, result: int, here: Mapping[BufferId, jax.Array]) -> jax.Array:
        at, atom = self._streams.results[result], self._planned.program.jaxpr.outvars[result]
        if at is not None:
            return here[at]
        return jnp.asarray(atom.val, atom.aval.dtype)

    # State.

    def stack(self, argument: int) -> Stack | None:
        """None: arguments are held by other processes."""
        return None

    def hold(self, arrays: Sequence[Any], first: int) -> list[RemoteArray | Any]:
        """Place arguments that stay the same in all steps; as in `Runtime`."""
        found: list[Any] = []
        for array, positions in zip(arrays, self._stacks.inputs[first:], strict=True):
            entries = [at for at in self._read.get(positions[0], []) if self._is_whole(at)]
            if len(positions) > 1 or not entries:
                found.append(array)
                continue
            copies, here = [], _fetched(array)
            for at in entries:
                key, kind, mesh = self.workers.number()[0], self.job.types[at], self._buffers[at].mesh
                tiles = {s.number: (key, kind, self._values(at, here, s)) for s in self.workers.seats_on(mesh)}
                self.workers.call("put", tiles, subject=str(kind))
                copies.append(Copy(self.workers, mesh, kind, key))
            found.append(RemoteArray([Part(tuple(copies))]))
        return found

    def wanted(self, argument: int) -> list[tuple[MeshId, ArrayType, bool]]:
        """Where an argument of one part is read: (mesh, type, whether with a leading dim of microbatches)."""
        (own,) = self._stacks.inputs[argument]
        return [(self._buffers[at].mesh, self.job.types[at], not self._is_whole(at)) for at in self._read.get(own, [])]

    def homes(self, argument: int) -> tuple[list[tuple[MeshId, ArrayType]], int]:
        """The (mesh, type) of each part of an argument between steps, and the dim along which it is split into parts."""
        stacks = self._stacks
        return [(self.job.home[at], self._kinds[at]) for at in stacks.inputs[argument]], stacks.input_dims[argument]

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """Create state in its shardings: `init` runs on each mesh, which keeps its own part; as in `Runtime`."""
        made: dict[int, Part] = {}
        for mesh, ats, own in births(self._stacks, init, first, count, lambda at: self.job.home[at]):
            kinds = [self._kinds[at] for at in ats]
            shardings = [kind.on(abstract_mesh(kind.mesh)) for kind in kinds]
            jitted = jax.jit(functools.partial(own, *args), out_shardings=shardings)
            check_no_calls(jitted.trace().jaxpr)
            code, keys = exported(jitted, (), self._platform), self.workers.number(len(ats))
            made_there = {s.number: (code, list(keys), kinds) for s in self.workers.seats_on(mesh)}
            self.workers.call("create", made_there, subject=", ".join(map(str, kinds[:4])) + " ..." * (len(kinds) > 4))
            for at, key, kind in zip(ats, keys, kinds, strict=True):
                made[at] = Part((Copy(self.workers, mesh, kind, key),))
        state = zip(self._stacks.inputs, self._stacks.input_dims, strict=True)
        return [RemoteArray([made[at] for at in ats], dim) for ats, dim in list(state)[first : first + count]]


def _raised(made: Mapping[int, tuple[Any, Report | None]]) -> list[Raised]:
    """The exceptions of callbacks in the reports of all workers."""
    return [r for _, report in made.values() if report is not None for r in report.raised]


def callback_error(
    step: str, streams: Streams, raised: Sequence[Raised], state_lost: bool, results: Any = None
) -> StepError:
    """The error of a step whose callbacks raised on workers, with its cause; arguments as in `step_error`."""
    updates = {name for name, plan in streams.programs.items() if plan.task.kind == "U"}
    order = (instruction for _, instruction in merged(streams.instructions, updates))
    place, cause = first_raised(raised, order, streams.programs)
    error = step_error(step, place, cause, state_lost, results)
    error.__cause__ = cause
    return error


def _fetched(part: Any) -> np.ndarray:
    return host_array(RemoteArray([part]) if isinstance(part, Part) else part)


def _cuts(kind: ArrayType, seat: Seat) -> list[tuple[slice, ...]]:
    whole: Box = tuple((0, length) for length in kind.shape)
    return [slices(box, whole) for box in own_boxes(kind, seat)]

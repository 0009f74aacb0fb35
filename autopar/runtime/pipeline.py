"""The local runtime of pipelines: one process, one dispatching thread, a submesh of devices per stage.

In:     a `StepPlan`, compiled.
Out:    `Pipeline`, called with flat arrays.
Method: the streams of all meshes are merged into one order, in which every message is sent before it is received, and turned
        into calls of compiled programs. JAX dispatches them asynchronously, so that meshes work at the same time. The
        updates, which overwrite state, are started last. Programs that call the host are waited for before the updates, and
        at the end of the step, so that what a callback raises is raised by the call of its own step, and if possible before
        the state is overwritten.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import StepError
from autopar.ir.dims import in_pieces
from autopar.ir.trace.state import Roles
from autopar.runtime.acts import Act, Live, Receive, SendTo, act, end_of, then_look
from autopar.runtime.compile import Compiled
from autopar.runtime.failure import (
    CallbacksRaised,
    Place,
    cause_of,
    find_nan,
    first_failed,
    first_raised,
    is_gone,
    place_in,
    step_error,
)
from autopar.runtime.memory import let_go
from autopar.runtime.placing import Placing
from autopar.runtime.stacks import Stack, births, plainly_typed
from autopar.runtime.transfer import Transfer, make_transfer
from autopar.streams.assemble import StepPlan
from autopar.streams.clock import measured
from autopar.streams.instructions import BufferId, Instruction, MeshId, Recv, Run, Send, writes
from autopar.streams.order import merged
from autopar.streams.timeline import Timeline


class Pipeline:
    """A pipeline on the devices of this process; attributes as in `Runtime`.

    `num_compiled`: how many programs were compiled; the others are equal to one of these.
    """

    closed = False
    is_remote = False

    def __init__(self, planned: StepPlan, compiled: Compiled):
        """Prepare for calls."""
        jaxpr, roles, stacks, streams = planned.program.jaxpr, planned.roles, planned.stacks, planned.streams
        self._name, self._watch = planned.program.name, compiled.watch
        self._streams, self._arguments, self._results = streams, list(jaxpr.invars), list(jaxpr.outvars)
        self._places = compiled.places
        self.devices = tuple(device for places in compiled.places for device in places.devices.flat)
        self._is_donated = roles.donated
        self._unstacked = stacks
        self._types = [b.value.type.struct(self._places[b.stage]) for b in streams.buffers]
        self.functions, self.programs = compiled.functions, compiled.programs
        self.num_compiled = compiled.num_compiled
        updates = {n for n, plan in streams.programs.items() if plan.task.kind == "U"}
        self._order = merged(streams.instructions, updates)
        self._steps, self._under_way = itertools.count(), dict[tuple[int, int], list[list[jax.Array]]]()
        watched = {name for name, function in self.functions.items() if function.calls_host}
        sends, receives = self._ways()
        self._acts = [
            act(at, instruction, self.programs, watched, sends, receives)
            for at, (_, instruction) in enumerate(self._order)
        ]
        self._watch_acts(updates, watched)
        # Arguments placed at the beginning of a step: (argument, buffer, type, kind).
        self._entries = [(k, at, self._types[at], streams.buffers[at].value.kind) for k, at in streams.arguments]
        paths, positions = dict(enumerate(planned.program.in_paths)), [k for k, *_ in self._entries]
        self._placing = Placing(
            self._name,
            [paths.get(k, "") for k in positions],
            [kind for _, _, kind, _ in self._entries],
            [roles.donated[k] for k in positions],
        )
        self.placements = [kind.on(self._places[stage]) for kind, stage in planned.arguments_at_home()]
        self._shared = self._shared_results()
        self._stacks_in, self._stacks_out = self._make_stacks(roles)
        self.in_shardings = [
            self.placements[parts[0]] if len(parts) == 1 else self._stacks_in[k].sharding or self.placements[parts[0]]
            for k, parts in enumerate(stacks.inputs)
        ]

    def _ways(self) -> tuple[dict[int, SendTo], dict[int, Receive]]:
        """The functions that send and receive each message; copies are in flight while both meshes work."""
        received = {i.message: i.buffers for _, i in self._order if isinstance(i, Recv)}
        sent = {i.message: i.buffers for _, i in self._order if isinstance(i, Send)}
        moves = {message: self._moves(sent[message], received[message]) for message in sent}
        return (
            {message: functools.partial(self._send, message, own) for message, own in moves.items()},
            {message: functools.partial(self._receive, message, own) for message, own in moves.items()},
        )

    def _moves(self, sent: Sequence[BufferId], received: Sequence[BufferId]) -> list[Transfer]:
        ends = [[self._streams.buffers[at] for at in pair] for pair in zip(sent, received, strict=True)]
        return [
            make_transfer(a.value.type.array, self._places[a.stage], b.value.type.array, self._places[b.stage])
            for a, b in ends
        ]

    def _send(self, message: int, moves: Sequence[Transfer], step: int, arrays: Sequence[jax.Array]) -> None:
        self._under_way[step, message] = [move.start(array) for move, array in zip(moves, arrays, strict=True)]

    def _receive(self, message: int, moves: Sequence[Transfer], step: int) -> list[jax.Array]:
        arriving = self._under_way.pop((step, message))
        return [move.finish(parts) for move, parts in zip(moves, arriving, strict=True)]

    def _watch_acts(self, updates: Collection[str], watched: Collection[str]) -> None:
        """Check for exceptions of callbacks before the first update is started, and at the end of the step."""
        runs = {k: i.program for k, (_, i) in enumerate(self._order) if isinstance(i, Run)}
        first_update = next((k for k, program in runs.items() if program in updates), len(self._order))
        calling = [k for k, program in runs.items() if program in watched]
        for stop, numbers in (
            (first_update, [k for k in calling if k < first_update]),
            (len(self._order), [k for k in calling if k >= first_update]),
        ):
            if numbers:
                self._acts[stop - 1] = then_look(self._acts[stop - 1], [end_of(k) for k in numbers], self._watch)

    @functools.cached_property
    def _numbers(self) -> dict[BufferId, jax.Array]:
        """The buffers with the numbers of microbatches; made at the first step, since compiling needs no devices."""
        return {
            at: jax.device_put(np.int32(self._streams.buffers[at].microbatch), self._types[at].sharding)
            for at in self._streams.numbers
        }

    def _shared_results(self) -> list[int]:
        """Results in the buffer of an argument that is not donated, or of an earlier result."""
        seen = {at for k, at, _, _ in self._entries if not self._is_donated[k]}
        found = []
        for k, at in enumerate(self._streams.results):
            if at is not None and at in seen:
                found.append(k)
            elif at is not None:
                seen.add(at)
        return found

    def _make_stacks(self, roles: Roles) -> tuple[dict[int, Stack], dict[int, Stack]]:
        """The arguments and results of the user's step that are split into parts here."""
        entering, leaving = {}, {}
        for k, parts in enumerate(self._unstacked.inputs):
            if len(parts) > 1:
                dim = self._unstacked.input_dims[k]
                shapes = [tuple(self._arguments[at].aval.shape) for at in parts]
                entering[k] = Stack(shapes, [self.placements[at] for at in parts], dim)
        into = {out: at for out, at in roles.aliases.items()}
        by_first = {parts[0]: k for k, parts in enumerate(self._unstacked.inputs)}
        for k, parts in enumerate(self._unstacked.outputs):
            if len(parts) > 1:
                leaving[k] = entering[by_first[into[parts[0]]]]
        return entering, leaving

    def hold(self, arrays: Sequence[Any], first: int) -> list[Any]:
        """Place arguments that stay the same in all steps; as in `Runtime`."""
        return jax.device_put(list(arrays), self.in_shardings[first:])

    def stack(self, argument: int) -> Stack | None:
        """How an argument of the user's is split into parts; None: it is whole."""
        return self._stacks_in.get(argument)

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """Create state in its shardings: `init` runs once on each stage, which keeps its own part; as in `Runtime`."""
        made: dict[int, Any] = {}
        for _, ats, own in births(self._unstacked, init, first, count, lambda at: self.placements[at].mesh):
            shardings = [self.placements[at] for at in ats]
            made.update(zip(ats, jax.jit(own, out_shardings=shardings)(*args), strict=True))
        parts = [[made[at] for at in ats] for ats in self._unstacked.inputs[first : first + count]]
        return [self._stacks_in[k].join(own) if len(own) > 1 else own[0] for k, own in enumerate(parts, first)]

    # Running.

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step on the user's flat arguments.

        Raises:
            StepError: A program failed; names it and its microbatch, and says whether the arguments are intact.
            DonatedError: An argument was donated before.
        """
        parts = self._split(arrays)
        return self._carry_out(parts, self._begin(parts), self._acts)

    def _carry_out(self, parts: Sequence[Any], live: Live, acts: Sequence[Act]) -> list[Any]:
        done, step = 0, next(self._steps)
        try:
            for carry_out in acts:
                carry_out(step, live)
                done += 1
        except Exception as error:
            for key in [key for key in self._under_way if key[0] == step]:
                del self._under_way[key]
            failure, cause = self._failure(error, done, parts, live)
            raise failure from cause
        finally:
            let_go(parts, self._is_donated)
        return self._end(live)

    def measure(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Run one step, one instruction after the other, and simulate its timeline with their measured times.

        Raises:
            StepError: As in a call.
            DonatedError: As in a call.
        """
        parts = self._split(arrays)
        live = self._begin(parts)
        jax.block_until_ready(list(live.values()))
        seconds: dict[tuple[MeshId, int], float] = {}
        at = dict.fromkeys(self._streams.instructions, 0)
        sent_at: dict[int, tuple[MeshId, int]] = {}

        def timed(carry_out: Act, mesh: MeshId, instruction: Instruction, step: int, live: Live) -> None:
            started = time.perf_counter()
            carry_out(step, live)
            made = [live[b] for b in writes(instruction)]
            jax.block_until_ready(self._under_way[step, instruction.message] if isinstance(instruction, Send) else made)
            place = mesh, at[mesh]
            if isinstance(instruction, Send):
                sent_at[instruction.message] = place
            elif isinstance(instruction, Recv):
                place = sent_at[instruction.message]  # what is done there belongs to the message
            seconds[place] = seconds.get(place, 0.0) + time.perf_counter() - started
            at[mesh] += 1

        acts = [functools.partial(timed, own, *place) for place, own in zip(self._order, self._acts, strict=True)]
        return self._carry_out(parts, live, acts), measured(self._streams, seconds)

    def _split(self, arrays: Sequence[Any]) -> list[Any]:
        """The user's arguments, with stacks split into parts."""
        parts: list[Any] = []
        for k, positions in enumerate(self._unstacked.inputs):
            if len(positions) > 1:
                parts += self._stacks_in[k].split(arrays[k])
            else:
                parts.append(arrays[k])
        return parts

    def _begin(self, parts: Sequence[Any]) -> Live:
        """The live buffers at the beginning of the step."""
        given = [parts[k] for k, *_ in self._entries]
        arrays = [
            _in_pieces(array, kind.shape) if what == "piece" else array
            for array, (_, _, kind, what) in zip(given, self._entries, strict=True)
        ]
        placed = self._placing.place(given, arrays)
        return self._numbers | {at: array for (_, at, *_), array in zip(self._entries, placed, strict=True)}

    def _end(self, live: Mapping[int, Any]) -> list[Any]:
        """The user's flat results."""
        made = [
            live[at] if at is not None else jnp.asarray(atom.val, atom.aval.dtype)
            for at, atom in zip(self._streams.results, self._results, strict=True)
        ]
        for k in self._shared:
            made[k] = jnp.array(made[k], copy=True)  # a later step may overwrite its memory
        self._placing.set_results(made)
        return [
            self._stacks_out[k].join([made[at] for at in positions]) if len(positions) > 1 else made[positions[0]]
            for k, positions in enumerate(self._unstacked.outputs)
        ]

    def _failure(self, error: Exception, at: int, parts: Sequence[Any], live: Live) -> tuple[StepError, BaseException]:
        """The error of a step that failed at instruction `at`, and its cause."""
        first_failed(
            (None, [live[k]]) for k in sorted(live) if k < 0
        )  # wait, or callbacks that still run would raise in the next step
        raised = [*(error.raised if isinstance(error, CallbacksRaised) else ()), *self._watch.take()]
        lost, results = any(map(is_gone, parts)), None
        if raised:
            place, cause = first_raised(raised, (i for _, i in self._order), self._streams.programs)
            if at == len(self._order) - 1 and all(r.makes_nothing for r in raised):
                results = self._end(live)
        else:
            programs = ((k, [live[b] for b in (*writes(self._order[k][1]), end_of(k)) if b in live]) for k in range(at))
            failed = first_failed([(-1, parts), *programs])
            cause = cause_of(error)
            place = self._place_at(at if failed is None else failed, cause, live)
        failure = step_error(self._name, place, cause, lost, results)
        live.clear()  # the exception's frames would keep the buffers alive
        return failure, cause

    def _place_at(self, number: int, cause: BaseException, live: Mapping[int, Any]) -> Place:
        """The place of an instruction; if the cause is a NaN, with the operation that made it."""
        if number < 0:
            return Place(None, "step", None, "an argument, which the program that was to make it has failed to make")
        mesh, instruction = self._order[number]
        if not isinstance(instruction, Run):
            return Place(mesh, "step", None, f"`{instruction}`")
        operation = None
        if isinstance(cause, FloatingPointError):
            plan, arrays = self._streams.programs[instruction.program], [live[b] for b in instruction.inputs]
            operation = find_nan(plan, arrays, instruction.microbatch)
        return place_in(
            self._streams.programs[instruction.program].task,
            instruction.microbatch,
            f"`{operation}`" if operation else "",
        )


def _in_pieces(array: Any, shape: tuple[int, ...]) -> Any:
    """A batch argument with a leading dim of microbatches; a deleted one as it is."""
    if is_gone(array):
        return array
    return in_pieces(plainly_typed(array) if isinstance(array, jax.Array) else np.asarray(array), shape)

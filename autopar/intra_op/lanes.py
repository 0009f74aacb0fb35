"""Simulates a sharded program on two lanes: one for kernels, one for collectives.

In:     `Body`, seconds of each operation, the mesh, the fraction of a collective that overlaps with kernels.
Out:    `Lanes`: seconds of the program, and the exposed seconds of each collective.
Method: list scheduling: each lane runs one task at a time, of those that are ready the first in program order, but kernels
        that a collective waits for before others. XLA's latency-hiding scheduler orders a program like this, given enough
        memory. In a loop, work that does not depend on the trip before, such as gathering the next layer's parameters,
        overlaps with that trip (pipelined collectives). A program's seconds are those of its kernels plus exposed ones:
        when the kernels' lane waits or is stopped, the collective that runs then is exposed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar._jax import JaxprEqn, Var, copies_to_or_from_host
from autopar.cost import collective_seconds
from autopar.intra_op.copied_rows import row_bytes
from autopar.intra_op.host_order import host_waits
from autopar.intra_op.sharded import (
    Body,
    Collective,
    Compute,
    Copy,
    Instruction,
    Region,
    local_bytes,
    sent_in,
    transposed_bytes,
)
from autopar.ir.region import region_of, trip_count
from autopar.mesh import Device, LogicalMesh
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Lanes:
    """The simulated times of a program.

    Attributes:
        seconds: Until the end of its last kernel or collective.
        compute_seconds: Seconds of its kernels.
        exposed: Exposed seconds of each collective, in the order of `collectives_of`, over all its executions.
    """

    seconds: float
    compute_seconds: float
    exposed: tuple[float, ...]


class _Task(NamedTuple):
    """A task of one of the lanes.

    Attributes:
        kernel: Seconds on the kernels' lane; None: it is a collective.
        sent: Seconds on the collectives' lane; of an operation, those of immediate reductions after its kernel.
        needs: Tasks that it depends on.
        places: Indices of its collectives, or, of a loop, of those in it, among all of the body.
        inner: For a loop or branches, the exposed seconds of each of `places`.
    """

    kernel: float | None
    sent: float
    needs: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    inner: tuple[float, ...] = ()


def run_lanes(body: Body, seconds_of: Callable[[JaxprEqn], float], mesh: LogicalMesh, device: Device) -> Lanes:
    """Simulate a program.

    `seconds_of`: seconds of one run of a plain equation on one device.
    `device`: says which fraction of a collective overlaps with kernels, and what its transposes take.
    """
    build = _Build(seconds_of, mesh, device)
    build.add(body, {}, is_program=True)
    end, exposed = _Clock(build.tasks, build.count, device.achieved.overlap).run()
    return Lanes(end, end - sum(exposed), exposed)


class _Build:
    """Builds the tasks of a body, or of several trips of one.

    Attributes:
        known: The task of each instruction seen so far, by its id, without what it needs: trips of a loop repeat them.
    """

    def __init__(
        self,
        seconds_of: Callable[[JaxprEqn], float],
        mesh: LogicalMesh,
        device: Device,
        known: dict[int, _Task | None] | None = None,
    ):
        self.seconds_of, self.mesh, self.device = seconds_of, mesh, device
        self.known = {} if known is None else known
        self.tasks: list[_Task] = []
        self.count = 0

    def add(
        self, body: Body, given: Mapping[Copy, tuple[int, ...]], is_program: bool = False
    ) -> dict[Copy, tuple[int, ...]]:
        """Append a body's tasks; returns the tasks that each of its copies depends on.

        `is_program`: it is the body of no loop or branch.
        """
        maker, place = dict(given), 0
        waits = host_waits(body, lambda copy: local_bytes(*copy, self.mesh), is_program)
        for position, instruction in enumerate(body.instructions):
            waited = (*instruction.needs, *waits[position]) if position in waits else instruction.needs
            if len(waited) == 1:
                needs = maker.get(waited[0], ())
            else:
                needs = tuple(dict.fromkeys([n for copy in waited for n in maker.get(copy, ())]))
            if id(instruction) not in self.known:
                alone = self.region(instruction) if isinstance(instruction, Region) else self.plain(instruction)
                self.known[id(instruction)] = alone
            task = self.known[id(instruction)]
            if task is not None:
                self.tasks.append(task._replace(needs=needs, places=tuple([place + k for k in task.places])))
                place += len(task.places)
            # Views and slices are no tasks: their readers depend on what they are made of.
            made = (len(self.tasks) - 1,) if task is not None else needs
            for copy in instruction.makes:
                maker[copy] = made
        self.count = place
        return maker

    def plain(self, instruction: Instruction) -> _Task | None:
        kernel: float | None = None
        own: list[Collective] = []
        if isinstance(instruction, Compute):
            kernel = self.seconds_of(instruction.eqn)
            if copies_to_or_from_host(instruction.eqn):  # overlaps with kernels, like a collective
                return _Task(None, kernel)
        if (
            not isinstance(instruction, Compute)
            or instruction.strategy.reductions
            or instruction.strategy.exchanged_over
        ):
            own = list(sent_in(instruction, self.mesh))
            kernel = kernel or self.device.turning_seconds(transposed_bytes(instruction, self.mesh)) or None
            if kernel is None and own and all(c.kind in self.device.achieved.awaited for c in own):
                kernel = 0.0  # one that reduces at once
        if not kernel and not own:
            return None
        sent = sum(collective_seconds(c.kind, c.bytes, c.axes, self.mesh) for c in own)
        return _Task(kernel, sent, places=tuple(range(len(own))))

    def region(self, region: Region) -> _Task:
        """A loop, or branches, as one task."""
        trips = trip_count(region.eqn)
        seconds, exposed = trips * self.device.row_seconds(row_bytes(region, self.mesh)), []
        for inner in region.bodies:
            of_body, of_each = self.turns(region, inner, trips)
            seconds += of_body
            exposed += of_each
        return _Task(seconds, 0.0, places=tuple(range(len(exposed))), inner=tuple(exposed))

    def turns(self, region: Region, inner: Body, trips: int) -> tuple[float, list[float]]:
        """Seconds of all trips of a loop, and exposed seconds per collective, extrapolated from the first few trips."""
        build = _Build(self.seconds_of, self.mesh, self.device, self.known)
        ends: list[tuple[float, tuple[float, ...]]] = []
        given: dict[Copy, tuple[int, ...]] = {}
        parts, body = region_of(region.eqn), region.bodies.index(inner)
        entering, leaving = parts.entering(body, parts.bindings), parts.leaving(body, parts.bindings)
        begun = [copy for b, copy in zip(entering, inner.inputs, strict=True) if b.role == "carry"]
        ended = [copy for b, copy in zip(leaving, inner.outputs, strict=True) if b.role == "carry"]
        turns = min(TUNING.loop_turns, trips)
        for number in range(turns):
            maker = build.add(inner, given)
            pairs = zip(begun, ended, strict=False)  # the test of a `while` makes no carry
            given = {copy: maker[atom, s] for copy, (atom, s) in pairs if isinstance(atom, Var) and (atom, s) in maker}
            if number >= turns - 2:
                ends.append(_Clock(build.tasks, build.count, self.device.achieved.overlap).run())
        seconds, exposed = ends[-1]
        if trips <= TUNING.loop_turns:
            return seconds, list(exposed)
        rest = trips - TUNING.loop_turns
        before, exposed_before = ends[-2]
        more = [max(0.0, a - b) for a, b in zip(exposed, exposed_before, strict=True)]
        return seconds + rest * (seconds - before), [a + rest * b for a, b in zip(exposed, more, strict=True)]


class _Lane:
    """A lane's queue: of the tasks that are ready, the first by rank is next; else the one that is ready first."""

    def __init__(self, ranks: Sequence[tuple[int, int]]):
        self.ranks = ranks
        self.coming: list[tuple[float, int]] = []
        self.waiting: list[tuple[tuple[int, int], int]] = []
        self.free = 0.0

    def add(self, number: int, when: float) -> None:
        heapq.heappush(self.coming, (when, number))

    def start(self) -> float:
        """When the lane's next task can start; inf: it has none yet."""
        while self.coming and self.coming[0][0] <= self.free:
            number = heapq.heappop(self.coming)[1]
            heapq.heappush(self.waiting, (self.ranks[number], number))
        return self.free if self.waiting else self.coming[0][0] if self.coming else math.inf

    def take(self) -> int:
        return heapq.heappop(self.waiting)[1] if self.waiting else heapq.heappop(self.coming)[1]


class _Clock:
    """Runs tasks on both lanes, event by event.

    Attributes:
        exposed: Exposed seconds of each collective.
        spans: Collectives so far: begin, end, indices.
    """

    def __init__(self, tasks: Sequence[_Task], count: int, overlap: float):
        self.tasks, self.overlap, self.exposed = tasks, overlap, [0.0] * count
        self.done = [0.0] * len(tasks)
        self.missing = [len(task.needs) for task in tasks]
        self.readers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for need in task.needs:
                self.readers[need].append(number)
        # Kernels that a collective waits for go first, so that it can overlap with the others.
        feeds = [any(tasks[reader].kernel is None for reader in those) for those in self.readers]
        ranks = [(int(task.kernel is not None and not feeds[number]), number) for number, task in enumerate(tasks)]
        self.kernels, self.sending = _Lane(ranks), _Lane(ranks)
        self.spans: list[tuple[float, float, tuple[int, ...]]] = []

    def run(self) -> tuple[float, tuple[float, ...]]:
        """Run all tasks; returns the end of the last one, and the exposed seconds of each collective."""
        for number in range(len(self.tasks)):
            self.announce(number)
        for _ in self.tasks:
            start, start_sent = self.kernels.start(), self.sending.start()
            assert min(start, start_sent) < math.inf, "the program waits for itself"
            if start_sent <= start:
                self.send(self.sending.take(), start_sent)
            else:
                self.compute(self.kernels.take(), start)
        self.wait(max(self.kernels.free, self.sending.free))
        return self.kernels.free, tuple(self.exposed)

    def announce(self, number: int) -> None:
        """Queue a task in its lane if all that it needs is scheduled."""
        if not self.missing[number]:
            task = self.tasks[number]
            lane = self.sending if task.kernel is None else self.kernels
            lane.add(number, max((self.done[need] for need in task.needs), default=0.0))

    def finish(self, number: int, when: float) -> None:
        self.done[number] = when
        for reader in self.readers[number]:
            self.missing[reader] -= 1
            self.announce(reader)

    def wait(self, until: float) -> None:
        """Let the kernels' lane idle until a time: the collectives that run meanwhile are exposed."""
        free = self.kernels.free
        for begin, end, places in reversed(self.spans):
            if end <= free:
                break
            _spread(self.exposed, places, max(0.0, min(end, until) - max(begin, free)))
        self.kernels.free = max(free, until)

    def send(self, number: int, start: float) -> None:
        """Run a collective, which stops kernels for a fraction of it."""
        task = self.tasks[number]
        stopping = (1 - self.overlap) * task.sent
        self.wait(start)
        self.kernels.free += stopping
        _spread(self.exposed, task.places, stopping)
        self.sending.free = start + task.sent
        self.spans.append((start + stopping, self.sending.free, task.places))
        self.finish(number, self.sending.free)

    def compute(self, number: int, start: float) -> None:
        """Run a kernel; or a whole loop, which occupies both lanes."""
        task, kernels, sending = self.tasks[number], self.kernels, self.sending
        self.wait(max(start, sending.free) if task.inner else start)
        kernels.free += task.kernel or 0.0
        for place, seconds in zip(task.places, task.inner, strict=False):
            self.exposed[place] += seconds
        if task.inner:
            sending.free = kernels.free
        if task.sent:  # it reduces at once
            self.wait(max(kernels.free, sending.free))
            kernels.free += task.sent
            sending.free = kernels.free
            _spread(self.exposed, task.places, task.sent)
        self.finish(number, kernels.free)


def _spread(exposed: list[float], places: Sequence[int], seconds: float) -> None:
    for place in places:
        exposed[place] += seconds / len(places)

"""The sharded program on a clock: a lane for kernels, a lane for collectives.

In:     `Body`, seconds of each operation, the mesh, the part of a collective that leaves the kernels alone.
Out:    `Lanes`: seconds of the program, and of each collective how many of its seconds nothing hides.
Method: each lane does one thing after the other: of what could start the first in the program, kernels that a collective
        waits for before others. What reads a collective's result waits for it. So XLA's latency-hiding scheduler orders a
        program, given memory enough. In a loop what does not wait for the turn before, such as gathering
        the parameters of the next layer, runs behind it (pipelined collectives). Seconds are those of the kernels and those
        exposed: when the kernels' lane waits, or is stopped, it is for the collective that then runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import JaxprEqn, copies_to_or_from_host
from autopar.cost import collective_seconds
from autopar.intra_op.sharded import (
    Body,
    Collective,
    Compute,
    Copy,
    Instruction,
    Region,
    collectives_of,
    copies_awaited,
)
from autopar.ir.region import region_of, trip_count
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Lanes:
    """A program on the clock.

    Attributes:
        seconds: From its beginning to the end of its last kernel or collective.
        compute_seconds: Of its kernels.
        exposed: Of each collective, in the order of `collectives_of`, the seconds that nothing hides; all times together.
    """

    seconds: float
    compute_seconds: float
    exposed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    """Something on one of the lanes.

    Attributes:
        kernel: Seconds on the kernels' lane; None: it is a collective.
        sent: Seconds on the collectives' lane, of an operation that reduces at once after its kernel.
        needs: Tasks that must be done before.
        places: The collectives that it is or, being a loop, holds; by their place in the body.
        inner: Of a loop or branches, what is exposed of each.
    """

    kernel: float | None
    sent: float
    needs: tuple[int, ...]
    places: tuple[int, ...] = ()
    inner: tuple[float, ...] = ()


def run_lanes(body: Body, seconds_of: Callable[[JaxprEqn], float], mesh: LogicalMesh, overlap: float) -> Lanes:
    """Put a program on the clock.

    `seconds_of`: seconds of one run of a plain equation on one device.
    `overlap`: part of a collective that leaves the kernels alone; 0: every collective stops them.
    """
    build = _Build(seconds_of, mesh, overlap)
    build.add(body, {}, in_turn=True)
    end, exposed = _Clock(build.tasks, build.count, overlap).run()
    return Lanes(end, end - sum(exposed), exposed)


class _Build:
    """Tasks of a body, or of several turns of one."""

    def __init__(self, seconds_of: Callable[[JaxprEqn], float], mesh: LogicalMesh, overlap: float):
        self.seconds_of, self.mesh, self.overlap = seconds_of, mesh, overlap
        self.tasks: list[_Task] = []
        self.latest: tuple[int, ...] = ()
        self.count = 0

    def add(
        self, body: Body, given: Mapping[Copy, tuple[int, ...]], in_turn: bool = False
    ) -> dict[Copy, tuple[int, ...]]:
        """Append a body's tasks; returns the tasks that each of its copies waits for.

        What lies in the host's memory from the beginning comes from there not before its turn, if `in_turn`: until then no
        memory is counted for it.
        """
        maker, place = dict(given), 0
        waiting = set(body.inputs) if in_turn else set()
        for instruction in body.instructions:
            waited = instruction.reads
            if not isinstance(instruction, Compute):
                waited = (*waited, *copies_awaited(instruction))
            if len(waited) == 1:
                needs = maker.get(waited[0], ())
            else:
                needs = tuple(dict.fromkeys([n for copy in waited for n in maker.get(copy, ())]))
            if isinstance(instruction, Compute) and copies_to_or_from_host(instruction.eqn):
                needs = (*needs, *self.latest) if not waiting.isdisjoint(waited) else needs
            task = self.region(instruction, needs, place) if isinstance(instruction, Region) else None
            task = task or self.plain(instruction, needs, place)
            if task is not None:
                self.tasks.append(task)
                place += len(task.places)
                self.latest = (len(self.tasks) - 1,) if task.kernel is not None else self.latest
            # A view or a slice is made where it is read: whoever reads it waits for what it is made of.
            made = (len(self.tasks) - 1,) if task is not None else needs
            for copy in instruction.makes:
                maker[copy] = made
        self.count = place
        return maker

    def plain(self, instruction: Instruction, needs: tuple[int, ...], place: int) -> _Task | None:
        kernel: float | None = None
        own: list[Collective] = []
        if isinstance(instruction, Compute):
            kernel = self.seconds_of(instruction.eqn)
            if copies_to_or_from_host(instruction.eqn):  # beside the kernels, like collectives
                return _Task(None, kernel, needs)
        if not isinstance(instruction, Compute) or instruction.strategy.reductions or instruction.strategy.travels:
            own = list(collectives_of(Body((), (instruction,), ()), self.mesh))
        if not kernel and not own:
            return None
        sent = sum(collective_seconds(c.kind, c.bytes, c.axes, self.mesh) for c in own)
        return _Task(kernel, sent, needs, tuple(range(place, place + len(own))))

    def region(self, region: Region, needs: tuple[int, ...], place: int) -> _Task:
        """A loop, or branches: one task."""
        trips = trip_count(region.eqn)
        seconds, exposed = 0.0, []
        for inner in region.bodies:
            of_body, of_each = self.turns(region, inner, trips)
            seconds += of_body
            exposed += of_each
        return _Task(seconds, 0.0, needs, tuple(range(place, place + len(exposed))), tuple(exposed))

    def turns(self, region: Region, inner: Body, trips: int) -> tuple[float, list[float]]:
        """Seconds and what is exposed of all turns of a loop: the first few are simulated."""
        build = _Build(self.seconds_of, self.mesh, self.overlap)
        ends: list[tuple[float, tuple[float, ...]]] = []
        given: dict[Copy, tuple[int, ...]] = {}
        for _ in range(min(TUNING.loop_turns, trips)):
            maker = build.add(inner, given)
            if region.eqn.primitive.name == "scan":
                loop = region_of(region.eqn)
                first, last = len(loop.consts), len(loop.consts) + len(loop.carries)
                carried = zip(inner.inputs[first:last], inner.outputs[: last - first], strict=True)
                given = {copy: maker[out] for copy, out in carried if out in maker}  # type: ignore[index]
            ends.append(_Clock(build.tasks, build.count, self.overlap).run())
        seconds, exposed = ends[-1]
        if trips <= TUNING.loop_turns:
            return seconds, list(exposed)
        rest = trips - TUNING.loop_turns
        before, exposed_before = ends[-2]
        more = [max(0.0, a - b) for a, b in zip(exposed, exposed_before, strict=True)]
        return seconds + rest * (seconds - before), [a + rest * b for a, b in zip(exposed, more, strict=True)]


class _Lane:
    """What a lane does next: of the tasks whose operands are there the first by rank, else the one that can start first."""

    def __init__(self, ranks: Sequence[tuple[int, int]]):
        self.ranks = ranks
        self.coming: list[tuple[float, int]] = []
        self.waiting: list[tuple[tuple[int, int], int]] = []
        self.free = 0.0

    def add(self, number: int, when: float) -> None:
        heapq.heappush(self.coming, (when, number))

    def start(self) -> float:
        """When the lane can go on; inf: it has nothing to do yet."""
        while self.coming and self.coming[0][0] <= self.free:
            number = heapq.heappop(self.coming)[1]
            heapq.heappush(self.waiting, (self.ranks[number], number))
        return self.free if self.waiting else self.coming[0][0] if self.coming else math.inf

    def take(self) -> int:
        return heapq.heappop(self.waiting)[1] if self.waiting else heapq.heappop(self.coming)[1]


class _Clock:
    """Both lanes, event by event.

    Attributes:
        exposed: Of each collective, the seconds that no kernel hides.
        spans: Of collectives so far: when they begin and end, and which they are.
    """

    def __init__(self, tasks: Sequence[_Task], count: int, overlap: float):
        self.tasks, self.overlap, self.exposed = tasks, overlap, [0.0] * count
        self.done = [0.0] * len(tasks)
        self.missing = [len(task.needs) for task in tasks]
        self.readers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for need in task.needs:
                self.readers[need].append(number)
        # A kernel that a collective waits for goes before others: that is what hides it.
        feeds = [any(tasks[reader].kernel is None for reader in those) for those in self.readers]
        ranks = [(int(task.kernel is not None and not feeds[number]), number) for number, task in enumerate(tasks)]
        self.kernels, self.sending = _Lane(ranks), _Lane(ranks)
        self.spans: list[tuple[float, float, tuple[int, ...]]] = []

    def run(self) -> tuple[float, tuple[float, ...]]:
        """The end of the last task, and what is exposed of each collective."""
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
        """Put a task into its lane if all that it needs is on its way."""
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
        """The kernels' lane does nothing from now on: whichever collectives run then are exposed."""
        free = self.kernels.free
        for begin, end, places in reversed(self.spans):
            if end <= free:
                break
            _spread(self.exposed, places, max(0.0, min(end, until) - max(begin, free)))
        self.kernels.free = max(free, until)

    def send(self, number: int, start: float) -> None:
        """A collective: of a part of it kernels stand still."""
        task = self.tasks[number]
        stopping = (1 - self.overlap) * task.sent
        self.wait(start)
        self.kernels.free += stopping
        _spread(self.exposed, task.places, stopping)
        self.sending.free = start + task.sent
        self.spans.append((start + stopping, self.sending.free, task.places))
        self.finish(number, self.sending.free)

    def compute(self, number: int, start: float) -> None:
        """A kernel, or a whole loop, which has both lanes for itself."""
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

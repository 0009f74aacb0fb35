"""The sharded program on a clock: a lane for kernels, a lane for collectives.

In:     `Body`, seconds of each operation, the mesh, the part of a collective that leaves the kernels alone.
Out:    `Lanes`: seconds of the program, and of each collective how many of its seconds nothing hides.
Method: kernels run one after the other, in the order of the program. A collective starts when its operand is made and the
        lane is free, of several that which is read first; what reads its result waits for it. So XLA's latency-hiding
        scheduler orders a program, given memory enough. In a loop what does not wait for the turn before, such as gathering
        the parameters of the next layer, runs behind it (pipelined collectives). Seconds are those of the kernels and those
        exposed: when the kernels' lane waits, or is stopped, it is for the collective that then runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import JaxprEqn
from autopar.cost import collective_seconds
from autopar.intra_op.sharded import Body, Compute, Copy, Instruction, Region, collectives_of, copies_made, copies_read
from autopar.ir.structure import scan_parts, trip_count
from autopar.mesh import LogicalMesh

TURNS = 3
"""So many turns of a loop are simulated; each further one takes as long as the last of these."""


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

    Args:
        body: The program.
        seconds_of: Seconds of one run of a plain equation on one device.
        mesh: Its mesh.
        overlap: Part of a collective that leaves the kernels alone; 0: every collective stops them.
    """
    build = _Build(seconds_of, mesh, overlap)
    build.add(body, {})
    end, exposed = _run(build.tasks, build.count, overlap)
    return Lanes(end, end - sum(exposed), exposed)


class _Build:
    """Tasks of a body, or of several turns of one."""

    def __init__(self, seconds_of: Callable[[JaxprEqn], float], mesh: LogicalMesh, overlap: float):
        self.seconds_of, self.mesh, self.overlap = seconds_of, mesh, overlap
        self.tasks: list[_Task] = []
        self.count = 0

    def add(self, body: Body, given: Mapping[Copy, int]) -> dict[Copy, int]:
        """Append a body's tasks; returns the task that makes each of its copies."""
        maker, place = dict(given), 0
        for instruction in body.instructions:
            needs = tuple(dict.fromkeys(maker[copy] for copy in copies_read(instruction) if copy in maker))
            task = self.region(instruction, needs, place) if isinstance(instruction, Region) else None
            task = task or self.plain(instruction, needs, place)
            if task is not None:
                self.tasks.append(task)
                place += len(task.places)
            # A slice or a mask is made where it is read: whoever reads it waits for what it is made of.
            at = len(self.tasks) - 1 if task is not None else max(needs, default=None)
            for copy in copies_made(instruction):
                if at is not None:
                    maker.setdefault(copy, at)
        self.count = place
        return maker

    def plain(self, instruction: Instruction, needs: tuple[int, ...], place: int) -> _Task | None:
        own = list(collectives_of(Body((), (instruction,), ()), self.mesh))
        sent = sum(collective_seconds(c.kind, c.bytes, c.axes, self.mesh) for c in own)
        kernel = self.seconds_of(instruction.eqn) if isinstance(instruction, Compute) else None
        if kernel is None and not own:
            return None
        return _Task(kernel, sent, needs, tuple(range(place, place + len(own))))

    def region(self, region: Region, needs: tuple[int, ...], place: int) -> _Task:
        """A loop, or branches: one task."""
        trips = trip_count(region.eqn) if region.eqn.primitive.name == "scan" else 1
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
        given: dict[Copy, int] = {}
        for _ in range(min(TURNS, trips)):
            maker = build.add(inner, given)
            if region.eqn.primitive.name == "scan":
                parts = scan_parts(region.eqn)
                first, last = len(parts.consts), len(parts.consts) + len(parts.carries)
                carried = zip(inner.inputs[first:last], inner.outputs[: last - first], strict=True)
                given = {copy: maker[out] for copy, out in carried if out in maker}  # type: ignore[index]
            ends.append(_run(build.tasks, build.count, self.overlap))
        seconds, exposed = ends[-1]
        if trips <= TURNS:
            return seconds, list(exposed)
        rest = trips - TURNS
        before, exposed_before = ends[-2]
        more = [max(0.0, a - b) for a, b in zip(exposed, exposed_before, strict=True)]
        return seconds + rest * (seconds - before), [a + rest * b for a, b in zip(exposed, more, strict=True)]


def _run(tasks: Sequence[_Task], count: int, overlap: float) -> tuple[float, tuple[float, ...]]:
    """Event by event: the end of the last task, and what is exposed of each collective."""
    done = [0.0] * len(tasks)
    missing = [len(task.needs) for task in tasks]
    readers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for need in task.needs:
            readers[need].append(number)
    exposed = [0.0] * count
    kernels = [number for number, task in enumerate(tasks) if task.kernel is not None]
    coming: list[tuple[float, int]] = []  # collectives whose operands are, or will be, there: (when, number)
    waiting: list[int] = []  # those whose operands are there: the first to be read goes first
    spans: list[tuple[float, float, tuple[int, ...]]] = []  # of collectives: begin, end, which
    free_kernel = free_sent = 0.0
    at = 0

    def announce(number: int) -> None:
        if tasks[number].kernel is None and not missing[number]:
            heapq.heappush(coming, (max((done[need] for need in tasks[number].needs), default=0.0), number))

    def finish(number: int, when: float) -> None:
        done[number] = when
        for reader in readers[number]:
            missing[reader] -= 1
            announce(reader)

    def wait(until: float) -> None:
        """The kernels' lane does nothing from now on: whichever collectives run then are exposed."""
        for begin, end, places in reversed(spans):
            if end <= free_kernel:
                break
            _spread(exposed, places, max(0.0, min(end, until) - max(begin, free_kernel)))

    for number in range(len(tasks)):
        announce(number)
    while at < len(kernels) or coming or waiting:
        while coming and coming[0][0] <= free_sent:
            heapq.heappush(waiting, heapq.heappop(coming)[1])
        start_sent = free_sent if waiting else coming[0][0] if coming else math.inf
        start_kernel = math.inf
        if at < len(kernels) and not missing[kernels[at]]:
            needed = max((done[need] for need in tasks[kernels[at]].needs), default=0.0)
            start_kernel = max(free_kernel, needed, free_sent if tasks[kernels[at]].inner else 0.0)
        assert min(start_kernel, start_sent) < math.inf, "the program waits for itself"
        if start_sent <= start_kernel:
            number = heapq.heappop(waiting) if waiting else heapq.heappop(coming)[1]
            task = tasks[number]
            stopping = (1 - overlap) * task.sent
            if start_sent > free_kernel:
                wait(start_sent)
            free_kernel = max(free_kernel, start_sent) + stopping
            _spread(exposed, task.places, stopping)
            free_sent = start_sent + task.sent
            spans.append((start_sent + stopping, free_sent, task.places))
            finish(number, free_sent)
            continue
        number = kernels[at]
        task = tasks[number]
        at += 1
        wait(start_kernel)
        free_kernel = start_kernel + (task.kernel or 0.0)
        for place, seconds in zip(task.places, task.inner, strict=False):
            exposed[place] += seconds
        if task.inner:
            free_sent = free_kernel
        if task.sent:  # it reduces at once
            begin = max(free_kernel, free_sent)
            wait(begin)
            free_kernel = free_sent = begin + task.sent
            _spread(exposed, task.places, task.sent)
        finish(number, free_kernel)
    wait(max(free_kernel, free_sent))
    return max(free_kernel, free_sent), tuple(exposed)


def _spread(exposed: list[float], places: Sequence[int], seconds: float) -> None:
    for place in places:
        exposed[place] += seconds / len(places)

"""The driver's side of the workers of one layout.

In:     a `RayMachine`, the devices of each mesh.
Out:    `Workers`: calls to all workers, which return or raise one `WorkerError`.
Method: a failed call ends the job: all actors are killed, and the placement groups removed; except for calls that change
        nothing on the workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import BatchError, WorkerError, warn
from autopar.mesh import ArrayType
from autopar.mesh.ray_nodes import RayMachine
from autopar.runtime.digest import Digest, digest
from autopar.runtime.ray.driver.actors import end_all, start_all
from autopar.runtime.ray.driver.calls import FailedError, positions, settle, wait_for, where
from autopar.runtime.ray.driver.clocks import clock_offset
from autopar.runtime.ray.driver.faults import Failure, worker_error, write_error
from autopar.runtime.ray.job import Job
from autopar.runtime.ray.seats import Layout, Seat, by_mesh, seats_of
from autopar.runtime.ray.transport.direct import Pair
from autopar.runtime.ray.transport.parcels import box_shape, holders_of, slices, unpack
from autopar.streams.instructions import MeshId


class Workers:
    """The workers of one layout.

    Attributes:
        seats: The seat of each worker.
        layout: The devices of each mesh.
        on_gpu: Whether these are GPUs.
        direct: Whether messages go from GPU to GPU, by NCCL; else through Ray.
        closed: Whether the workers have ended.
    """

    def __init__(self, machine: RayMachine, layout: Layout):
        """Start the workers, and connect them.

        Raises:
            ClusterError: Ray has no room for them.
            NodeLostError: A node is lost.
        """
        self.layout, self.closed = layout, False
        self.on_gpu = machine.accelerator is not None
        self.seats = seats_of(layout, machine.devices_per_host)
        self._machine, self._released = machine, list[tuple[MeshId, int]]()
        self._of_mesh = by_mesh(self.seats)
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._opened: list[Pair] = []
        self._groups: list[Any] = []
        self._actors: dict[int, Any] = {}
        self._end = weakref.finalize(self, end_all, self._actors, self._groups)
        try:
            start_all(machine, self.seats, self._actors, self._groups)
            self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> None:
        """Form a `jax.distributed` group of the workers of each mesh, and connect all workers."""
        everyone = {seat.number: () for seat in self.seats}
        self.prepare("pid", everyone)
        joining = [own for own in self._of_mesh.values() if len(own) > 1]
        hosts = self._machine.hosts
        firsts = self.prepare("coordinator", {own[0].number: (hosts[own[0].host].address,) for own in joining})
        joined = {seat.number: (firsts[own[0].number], len(own)) for own in joining for seat in own}
        self.prepare("join", joined)
        self.direct = self.on_gpu and self._can_go_direct(everyone)
        owner = {mesh: {device: s.number for s in own for device in s.devices} for mesh, own in self._of_mesh.items()}
        word, host = secrets.token_bytes(32), {seat.number: hosts[seat.host].address for seat in self.seats}
        ports = self.prepare("listen", {n: (host[n], word) for n in everyone})
        addresses = {n: (host[n], ports[n]) for n in everyone}
        self.prepare("connect", {n: (dict(self._actors), addresses, word, owner, self.direct) for n in everyone})

    def _can_go_direct(self, everyone: Mapping[int, tuple[Any, ...]]) -> bool:
        """Whether all workers can send from GPU to GPU; warns of those that cannot."""
        can = self.prepare("can_go_direct", everyone)
        without = dict.fromkeys(self._machine.hosts[s.host].address for s in self.seats if not can[s.number])
        if without and len(self._of_mesh) > 1:
            warn(
                f"messages between GPUs go through the memory of hosts, which is slow: there is no CuPy with NCCL on "
                f"{', '.join(without)}; pip install 'autopar[cuda12]' (or [cuda13]) there."
            )
        return not without

    def open(self, pairs: Sequence[Pair]) -> None:
        """Open the channels between these meshes that are not open yet, one after the other; nothing without NCCL."""
        for pair in pairs if self.direct else ():
            if pair in self._opened or pair[0] == pair[1]:
                continue
            sources, targets = (self._of_mesh[mesh] for mesh in pair)
            unique_id = self.prepare("new_channel", {sources[0].number: ()})[sources[0].number]
            counts = sum(s.count for s in sources), sum(s.count for s in targets)
            self.prepare("open", {s.number: (pair, unique_id, *counts) for s in (*sources, *targets)})
            self._opened.append(pair)

    def prepare(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """A call while workers start, limited by `start_seconds`."""
        return self.call(method, arguments, at_start=True)

    def clocks(self) -> dict[int, tuple[float, float]]:
        """By host: seconds that its clock is ahead of this process's, and the error bound."""
        nodes = [host.node for host in self._machine.hosts]
        found: dict[str, tuple[float, float]] = {}
        for seat in self.seats:
            number, node = seat.number, nodes[seat.host]
            offset = clock_offset(lambda n=number: self.call("clock", {n: ()})[n], time.perf_counter)  # type: ignore[misc]
            found[node] = min(found.get(node, offset), offset, key=lambda o: o[1])
        return {seat.host: found[nodes[seat.host]] for seat in self.seats}

    # Calls.

    def number(self, count: int = 1) -> range:
        """So many consecutive numbers that were never used before."""
        found = [next(self._numbers) for _ in range(count)]
        return range(found[0], found[0] + count) if found else range(0)

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        at_start: bool = False,
        job: int = -1,
        subject: str = "",
        harmless: bool = False,
    ) -> dict[int, Any]:
        """Call a method of several workers at the same time, and wait for all.

        Args:
            method: The method of `Worker`.
            arguments: Its arguments, by worker.
            at_start: Whether the limits for starting apply, instead of those for steps.
            job: The job whose stream the workers execute, for errors; -1: none.
            subject: What the call is about, for errors.
            harmless: Whether workers are unchanged if the method raises.

        Raises:
            WorkerError: A worker failed. All have ended, unless the call is harmless.
        """
        if self.closed:
            raise ended()
        refs: dict[int, Any] = {}
        machine, option = self._machine, "start_seconds" if at_start else "wait_seconds"
        limits = (machine.start_seconds,) * 2 if at_start else (machine.silence_seconds, machine.wait_seconds)
        try:
            for number, own in arguments.items():
                refs[number] = getattr(self._actors[number], method).remote(*own)
            return wait_for(refs, lambda n: where(self._actors[n]), *limits)
        except FailedError as failed:
            goes_on = harmless and failed.failure.how == "raised"
            failure = dataclasses.replace(failed.failure, method=method, subject=subject, option=option)
            raise self._told(failure, job, goes_on) from failure.cause
        except BaseException:
            if not harmless:
                self.close()  # the streams are half executed: the arrays on the workers are useless
            raise

    def _told(self, failure: Failure, job: int, goes_on: bool) -> WorkerError:
        try:
            others = {n: actor for n, actor in self._actors.items() if n != failure.worker}
            return worker_error(failure, self.seats, positions(others), self._jobs.get(job), goes_on)
        finally:
            if not goes_on:
                self.close()

    def know(self, number: int, job: Job) -> None:
        """Remember a job, whose streams errors refer to."""
        self._jobs[number] = job

    # Arrays.

    def fetch(self, mesh: MeshId, key: int, kind: ArrayType) -> np.ndarray:
        """The whole array in this process; if that fails, the workers keep running."""
        parts = holders_of(kind, self._of_mesh[mesh])
        asked = {n: (key, kind, [device for device, _ in own]) for n, own in parts.items()}
        tiles = self.call("fetch", asked, subject=str(kind), harmless=True)
        return joined(kind, parts, tiles)

    def seats_on(self, mesh: MeshId) -> list[Seat]:
        """The seats of a mesh."""
        return self._of_mesh[mesh]

    def release(self, mesh: MeshId, key: int) -> None:
        """Free an array: its workers are told with the next step."""
        self._released.append((mesh, key))

    def take_released(self) -> dict[MeshId, list[int]]:
        """The keys of arrays to free, by mesh; each is returned once."""
        found: dict[MeshId, list[int]] = {}
        while self._released:
            mesh, key = self._released.pop()
            found.setdefault(mesh, []).append(key)
        return found

    # Checkpoints (`saves.py`): their failures end no worker; the next step shows whether it is alive.

    def unseen(self, workers: Sequence[int], token: Path, writing: bool) -> dict[int, str]:
        """Why each of these workers cannot read, or write, beside a file; "": it can."""
        asked = dict.fromkeys(workers, (str(token), digest(token)[1], writing))
        return self.call("unseen", asked, harmless=True)

    def write(self, save: int, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, dict[str, Digest]]:
        """Write the parts of a save; may be called on any thread, beside the steps.

        Raises:
            WorkerError: A worker has ended, or makes no progress.
            OSError: A worker could not write.
            RuntimeError: It failed in another way.
        """
        refs = self.begin("disk", "write", {number: (save, *own) for number, own in arguments.items()})
        try:
            return self._watched(refs, "disk")
        except FailedError as failed:
            # Stop the others: they would write into the folder while the caller deletes it.
            self.forget(save)
            settle(refs, self._machine.silence_seconds)
            failure = dataclasses.replace(failed.failure, method="write")
            raise write_error(failure, self.seats) from failed.failure.cause

    # Calls on other threads of the workers, beside the steps.

    def begin(self, part: str, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Start a call of a method of `Disk` or `Readings` on several workers, on its own thread."""
        actors = self._living()
        return {
            number: actors[number].beside.options(concurrency_group=part).remote(part, method, *own)
            for number, own in arguments.items()
        }

    def end_reading(self, refs: Mapping[int, Any], method: str) -> dict[int, Any]:
        """Wait for calls that were started on the thread for batches.

        Raises:
            BatchError: The user's function raised; the workers keep running.
            WorkerError: A worker failed. All have ended.
        """
        try:
            return self._watched(refs, "readings")
        except FailedError as failed:
            if isinstance(failed.failure.cause, BatchError):
                raise failed.failure.cause from None
            raise self._told(dataclasses.replace(failed.failure, method=method), -1, False) from failed.failure.cause

    def _watched(self, refs: Mapping[int, Any], part: str) -> dict[int, Any]:
        """Wait for calls of `Disk` or `Readings`, which also tell how long they have made no progress."""
        actors = self._living()
        limits = self._machine.silence_seconds, self._machine.wait_seconds
        ask = lambda n: actors[n].standing.options(concurrency_group="control").remote(part)  # noqa: E731
        return wait_for(refs, ask, *limits)

    def _living(self) -> dict[int, Any]:
        actors = dict(self._actors)
        if self.closed or not actors:
            raise ended()
        return actors

    def forget(self, save: int) -> None:
        """Tell the workers to free the copies of a save; does not wait."""
        for actor in dict(self._actors).values():
            actor.beside.options(concurrency_group="control").remote("disk", "forget", save)

    def close(self) -> None:
        """End all workers."""
        self.closed = True
        self._end()


def ended() -> WorkerError:
    """The error for using workers that have ended."""
    return WorkerError(
        "the workers of this step have ended.",
        given="a step or an array of theirs",
        wrong="after a failure, or after close(), nothing is left of them.",
        do="begin again with arrays of this process: call the step, which starts new workers.",
    )


def joined(
    kind: ArrayType, parts: Mapping[int, Sequence[tuple[int, Any]]], tiles: Mapping[int, Sequence[np.ndarray]]
) -> np.ndarray:
    """A whole array, from its packed parts by worker; `parts`: (device, box) of each."""
    whole = tuple((0, length) for length in kind.shape)
    made: np.ndarray | None = None
    for number, own in parts.items():
        for (_, box), data in zip(own, tiles[number], strict=True):
            part = unpack(data, box_shape(box), kind.dtype)
            if box == whole:
                return part
            made = np.empty(kind.shape, kind.dtype) if made is None else made
            made[slices(box, whole)] = part
    assert made is not None, "an array has parts"
    return made

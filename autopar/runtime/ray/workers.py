"""The actors of a job: started, called, watched, ended. The only file here that imports Ray.

In:     a `RayMachine`, the devices of each mesh.
Out:    `Workers`: calls of all of them that return, or end in one `WorkerError`.
Method: one placement group per host, one bundle and one actor per mesh there. While a call runs, actors that have not
        answered it are asked where they stand; one that is dead, silent for too long, too long at one place, or has
        raised ends the job: all actors are killed, and the placement groups removed, which also ends processes that do
        not listen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.errors import ClusterError, NodeLostError, WorkerError, warn
from autopar.mesh.ray_nodes import RayMachine
from autopar.plan.instructions import MeshId
from autopar.runtime.digest import Digest, digest
from autopar.runtime.ray.clocks import clock_offset
from autopar.runtime.ray.direct import Pair
from autopar.runtime.ray.faults import Failure, worker_error, write_error
from autopar.runtime.ray.job import BufferType, Job
from autopar.runtime.ray.parcels import box_shape, holders_of, slices, unpack
from autopar.runtime.ray.seats import Layout, Seat, by_mesh, environment, seats_of
from autopar.runtime.ray.share import Position
from autopar.runtime.ray.worker import Worker

POLL_SECONDS = 1.0
"""How often workers that are busy are asked where they stand."""
GRACE_SECONDS = 2.0
"""Who waits too long for a message says so itself, and has this long to, before one that stands too long is ended."""
GROUPS = {"mail": 2, "control": 1, "disk": 1}
"""Threads of an actor beside its one dispatching thread: for parcels that come in, for answering at any time, and for
writing checkpoints."""


class Workers:
    """The workers of one layout.

    Attributes:
        seats: One for each worker.
        layout: The devices of each mesh.
        on_gpu: Whether they are GPUs.
        direct: Whether messages go from GPU to GPU, by NCCL; else through Ray.
        closed: Whether the workers have ended.
    """

    def __init__(self, machine: RayMachine, layout: Layout):
        """Start them.

        Raises:
            ClusterError: Ray has no room for them; NodeLostError: a node has gone.
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
        self._end = weakref.finalize(self, _end, self._actors, self._groups)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(concurrency_groups=GROUPS, max_restarts=0)(Worker)
        hosts: dict[int, list[Seat]] = {}
        for seat in self.seats:
            hosts.setdefault(seat.host, []).append(seat)
        groups = {host: self._reserve(host, own) for host, own in hosts.items()}
        self._wait_for_room(groups)
        for host, own in hosts.items():
            for bundle, seat in enumerate(own):
                variables = environment(
                    seat, self.on_gpu, os.environ.get("XLA_FLAGS", ""), bool(jax.config.jax_enable_x64)
                )
                options = {
                    "num_cpus": self._bundle(seat)["CPU"],
                    "num_gpus": self._bundle(seat).get("GPU", 0),
                    "runtime_env": {"env_vars": variables},
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(groups[host], bundle),
                }
                self._actors[seat.number] = actor.options(**options).remote(seat, self._machine.wait_seconds)
        self._meet()

    def _bundle(self, seat: Seat) -> dict[str, float]:
        # Virtual CPU devices share the cores there are; a bundle must ask for something.
        return {"CPU": 1, "GPU": seat.count} if self.on_gpu else {"CPU": 0.01}

    def _reserve(self, host: int, seats: Sequence[Seat]) -> Any:
        from ray.util.placement_group import placement_group

        node = {"ray.io/node-id": self._machine.hosts[host].node}
        bundles = [self._bundle(seat) for seat in seats]
        group = placement_group(bundles, "STRICT_PACK", bundle_label_selector=[node] * len(bundles))
        self._groups.append(group)
        return group

    def _wait_for_room(self, groups: Mapping[int, Any]) -> None:
        import ray

        ready = {group.ready(): host for host, group in groups.items()}
        deadline = time.monotonic() + self._machine.start_seconds
        while True:
            _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=POLL_SECONDS)
            if not waiting:
                return
            host = ready[waiting[0]]
            node = self._machine.hosts[host]
            own = [seat for seat in self.seats if seat.host == host]
            given = (
                f"{len(own)} workers on host {host}, node {node.address}: "
                f"{', '.join(str(self._bundle(seat)) for seat in own)}"
            )
            if node.node not in (n["NodeID"] for n in ray.nodes() if n["Alive"]):
                raise NodeLostError(
                    "a node of the cluster is lost.",
                    given=given,
                    wrong="Ray says that this node is not alive any more.",
                    do="call Cluster.ray(...) again: it takes the nodes that are left.",
                    node=node.address,
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    "Ray has no room for the workers.",
                    given=given,
                    wrong=f"they were not placed in {self._machine.start_seconds:.0f} s; free are "
                    f"{ray.available_resources()}.",
                    do="end what else runs there (cluster.machine.close() ends the workers of other steps), or wait longer: "
                    "Cluster.ray(start_seconds=...).",
                )

    def _meet(self) -> None:
        """Processes of one mesh form a group; all get to know each other."""
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
        """Whether all can send from GPU to GPU; if one cannot, no one does."""
        can = self.prepare("can_go_direct", everyone)
        without = dict.fromkeys(self._machine.hosts[s.host].address for s in self.seats if not can[s.number])
        if without and len(self._of_mesh) > 1:
            warn(
                f"messages between GPUs go through the memory of hosts, which is slow: there is no CuPy with NCCL on "
                f"{', '.join(without)}; pip install 'autopar[cuda12]' (or [cuda13]) there."
            )
        return not without

    def open(self, pairs: Sequence[Pair]) -> None:
        """Open channels from mesh to mesh, where there are any and they are not open yet; one after the other."""
        for pair in pairs if self.direct else ():
            if pair in self._opened or pair[0] == pair[1]:
                continue
            sources, targets = (self._of_mesh[mesh] for mesh in pair)
            unique_id = self.prepare("new_channel", {sources[0].number: ()})[sources[0].number]
            counts = sum(s.count for s in sources), sum(s.count for s in targets)
            self.prepare("open", {s.number: (pair, unique_id, *counts) for s in (*sources, *targets)})
            self._opened.append(pair)

    def prepare(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """A call before the first step that ends soon, or not at all."""
        seconds = self._machine.start_seconds
        return self.call(method, arguments, silence_seconds=seconds, standing_seconds=seconds, option="start_seconds")

    def run(self, calls: Mapping[int, tuple[Any, ...]], job: int) -> dict[int, Any]:
        """One step of a job; arguments as of `Worker.run`."""
        return self.call("run", calls, job=job)

    def clocks(self) -> dict[int, tuple[float, float]]:
        """By host, how much its clock is ahead of this one's, and how far off that may be."""
        nodes = [host.node for host in self._machine.hosts]
        found: dict[str, tuple[float, float]] = {}
        for seat in self.seats:
            number, node = seat.number, nodes[seat.host]
            offset = clock_offset(lambda n=number: self.call("clock", {n: ()})[n], time.perf_counter)  # type: ignore[misc]
            found[node] = min(found.get(node, offset), offset, key=lambda o: o[1])
        return {seat.host: found[nodes[seat.host]] for seat in self.seats}

    # Calls.

    def number(self, count: int = 1) -> range:
        """Numbers that were never used before, one behind the other."""
        found = [next(self._numbers) for _ in range(count)]
        return range(found[0], found[0] + count) if found else range(0)

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        silence_seconds: float | None = None,
        standing_seconds: float | None = None,
        option: str = "wait_seconds",
        job: int = -1,
        subject: str = "",
        harmless: bool = False,
    ) -> dict[int, Any]:
        """Call a method of several workers at the same time, and wait for all.

        Args:
            method: Of `Worker`.
            arguments: By worker.
            silence_seconds: How long they may not answer to anything; None: as the machine says.
            standing_seconds: How long one may stand at one place; None: as the machine says.
            option: Which setting says how long one may stand, for messages of errors.
            job: Which job's stream they are at, for messages of errors.
            subject: What the call is about, for messages of errors.
            harmless: Whether they are as they were, also if the method raises.

        Raises:
            WorkerError: One of them failed. All have ended, unless it was harmless.
        """
        if self.closed:
            raise ended()
        refs: dict[int, Any] = {}
        limits = silence_seconds or self._machine.silence_seconds, standing_seconds or self._machine.wait_seconds
        try:
            for number, own in arguments.items():
                refs[number] = getattr(self._actors[number], method).remote(*own)
            return dict(zip(refs, self._wait(refs, *limits), strict=True))
        except _FailedError as failed:
            goes_on = harmless and failed.failure.how == "raised"
            failure = dataclasses.replace(failed.failure, method=method, subject=subject, option=option)
            raise self._told(failure, job, goes_on) from failure.cause
        except BaseException:
            if not harmless:
                self.close()  # the streams are half done: what the workers hold is of no use any more
            raise

    def _told(self, failure: Failure, job: int, goes_on: bool) -> WorkerError:
        try:
            return worker_error(failure, self.seats, self._positions(failure), self._jobs.get(job), goes_on)
        finally:
            if not goes_on:
                self.close()

    def _wait(
        self,
        refs: Mapping[int, Any],
        silence_seconds: float,
        standing_seconds: float,
        ask: Callable[[int], Any] | None = None,
    ) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        begun = time.monotonic()
        heard = dict.fromkeys(refs, begun)
        asked: dict[int, Any] = {}
        while True:
            try:
                return ray.get(list(refs.values()), timeout=POLL_SECONDS)
            except GetTimeoutError:
                pass
            except RayError as error:
                raise _FailedError(_first_failed(refs, error)) from error
            standing: dict[int, Position] = {}
            for number, ref in refs.items():
                if ray.wait([ref], timeout=0)[0]:
                    heard[number] = time.monotonic()
                elif number not in asked:
                    asked[number] = (ask or self._where)(number)
                elif ray.wait([asked[number]], timeout=0)[0]:
                    heard[number] = time.monotonic()
                    with contextlib.suppress(RayError):  # it ended, and its own call tells so
                        standing[number] = ray.get(asked[number])
                    del asked[number]
                elif time.monotonic() - heard[number] > silence_seconds:
                    raise _FailedError(Failure(number, "silent", None, silence_seconds))
            number, position = max(standing.items(), key=lambda one: one[1].seconds, default=(-1, Position(0, None)))
            if min(position.seconds, time.monotonic() - begun) > standing_seconds + GRACE_SECONDS:
                raise _FailedError(Failure(number, "stuck", None, position.seconds, position=position))

    def _where(self, number: int) -> Any:
        return self._actors[number].where.options(concurrency_group="control").remote()

    def _positions(self, failure: Failure) -> dict[int, Position]:
        """Where the others stand."""
        import ray

        asked = {self._where(n): n for n in self._actors if n != failure.worker}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS) if asked else ([], [])
        found = {}
        for ref in done:
            try:
                found[asked[ref]] = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # it ended too; the first failure is the one that is told
        return found

    def know(self, number: int, job: Job) -> None:
        """What a job's streams are, for messages of errors."""
        self._jobs[number] = job

    # Arrays.

    def fetch(self, mesh: MeshId, key: int, kind: BufferType) -> np.ndarray:
        """The whole of an array; if that fails, the workers go on."""
        parts = holders_of(kind, self._of_mesh[mesh])
        asked = {n: (key, kind, [device for device, _ in own]) for n, own in parts.items()}
        tiles = self.call("fetch", asked, subject=str(kind), harmless=True)
        return joined(kind, parts, tiles)

    def seats_on(self, mesh: MeshId) -> list[Seat]:
        """The seats of a mesh."""
        return self._of_mesh[mesh]

    def release(self, mesh: MeshId, key: int) -> None:
        """No one wants an array any more: told to its workers with the next step."""
        self._released.append((mesh, key))

    def take_released(self) -> dict[MeshId, list[int]]:
        """What no one wants any more, by mesh; each is told once."""
        found: dict[MeshId, list[int]] = {}
        while self._released:
            mesh, key = self._released.pop()
            found.setdefault(mesh, []).append(key)
        return found

    # Checkpoints: whatever comes of them, no worker is ended here; whether it lives the next step will tell.

    def unseen(self, workers: Sequence[int], token: Path, writing: bool) -> dict[int, str]:
        """As of `Owner`."""
        asked = dict.fromkeys(workers, (str(token), digest(token)[1], writing))
        return self.call("unseen", asked, harmless=True)

    def read(self, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """`Worker.read` of several workers."""
        self.call("read", arguments, harmless=True)

    def take(self, save: int, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """As of `Owner`; when it returns, the arrays may be overwritten."""
        own = {number: (save, *rest) for number, rest in arguments.items()}
        self.call("take", own, harmless=True)

    def write(self, save: int, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, dict[str, Digest]]:
        """As of `Owner`; called on any thread, while steps go on.

        Raises:
            WorkerError: A worker has ended, or does not come on.
            OSError: A worker could not write; RuntimeError: it failed in another way.
        """
        import ray

        actors = dict(self._actors)
        if self.closed or not actors:
            raise ended()
        limits = self._machine.silence_seconds, self._machine.wait_seconds
        refs = {
            number: actors[number].write.options(concurrency_group="disk").remote(save, *own)
            for number, own in arguments.items()
        }
        try:
            written = self._wait(
                refs, *limits, lambda n: actors[n].writing.options(concurrency_group="control").remote()
            )
            return dict(zip(refs, written, strict=True))
        except _FailedError as failed:
            # What the others write would come up again behind whoever takes away the folder.
            self.forget(save)
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._machine.silence_seconds)
            failure = dataclasses.replace(failed.failure, method="write")
            raise write_error(failure, self.seats) from failed.failure.cause

    def forget(self, save: int) -> None:
        """As of `Owner`; waits for nothing."""
        for actor in dict(self._actors).values():
            actor.forget.options(concurrency_group="control").remote(save)

    def close(self) -> None:
        """End all workers."""
        self.closed = True
        self._end()


class _FailedError(Exception):
    def __init__(self, failure: Failure):
        super().__init__(failure)
        self.failure = failure


def _first_failed(refs: Mapping[int, Any], error: BaseException) -> Failure:
    """Which of these calls ended in an error of Ray's, and how; `error` is what waiting for all of them raised."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    for number, ref in refs.items():
        if ray.wait([ref], timeout=0)[0]:
            try:
                ray.get(ref)
            except RayTaskError as raised:
                return Failure(number, "raised", raised.cause or raised)
            except RayError as died:  # of the actor, or of the node that had its answer
                return Failure(number, "died", died)
    return Failure(next(iter(refs)), "died", error)


def ended() -> WorkerError:
    """The workers have ended, and what they held is gone."""
    return WorkerError(
        "the workers of this step have ended.",
        given="a step or an array of theirs",
        wrong="after a failure, or after close(), nothing is left of them.",
        do="begin again with arrays of this process: call the step, which starts new workers.",
        worker=None,
        stage=None,
        instruction=None,
        microbatch=None,
        waited_for=None,
    )


def joined(
    kind: BufferType, parts: Mapping[int, Sequence[tuple[int, Any]]], tiles: Mapping[int, Sequence[np.ndarray]]
) -> np.ndarray:
    """A whole array of its parts, packed, by worker."""
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


def _end(actors: dict[int, Any], groups: list[Any]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    if not ray.is_initialized():
        return  # Ray has gone, and with it all that ran there
    for actor in actors.values():
        ray.kill(actor)
    for group in groups:
        remove_placement_group(group)
    actors.clear()
    groups.clear()

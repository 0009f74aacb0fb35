"""Starts and ends the actors of a job, and waits for their calls.

In:     a `RayMachine`, seats.
Out:    actors by worker; `end_all`; the results of calls in progress, or one `FailedError`: which actor failed, and how.
Method: one placement group per host, with one bundle and one actor per mesh there. Removing a placement group also ends
        processes that do not respond. Actors that have not answered are asked for their position. Waiting ends if one has
        died, has raised, does not answer for too long, or stays at one position for too long.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.errors import ClusterError, NodeLostError
from autopar.grouping import grouped
from autopar.mesh.ray_nodes import RayMachine
from autopar.runtime.ray.driver.faults import Failure
from autopar.runtime.ray.seats import Seat, environment
from autopar.runtime.ray.share import Position
from autopar.runtime.ray.worker.worker import Worker

GROUPS = {"mail": 2, "control": 1, "disk": 1, "readings": 1}
"""Threads of an actor besides its dispatching thread: to receive parcels, to answer at any time, to write checkpoints, and to
read batches."""


def start_all(machine: RayMachine, seats: Sequence[Seat], actors: dict[int, Any], groups: list[Any]) -> None:
    """Start the actors of all seats, and add them to `actors`, by worker, and their placement groups to `groups`.

    Raises:
        ClusterError: Ray has no room for them. `actors` and `groups` have those that were started.
        NodeLostError: A node is lost; likewise.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(concurrency_groups=GROUPS, max_restarts=0)(Worker)
    on_gpu = machine.accelerator is not None
    hosts = grouped((seat.host, seat) for seat in seats)
    group_of: dict[int, Any] = {}
    for host, own in hosts.items():
        group_of[host] = _reserve(machine, host, own)
        groups.append(group_of[host])
    _wait_for_room(machine, hosts, group_of)
    for host, own in hosts.items():
        for bundle, seat in enumerate(own):
            variables = environment(seat, on_gpu, os.environ.get("XLA_FLAGS", ""), bool(jax.config.jax_enable_x64))
            wanted = _bundle(seat, on_gpu)
            options = {
                "num_cpus": wanted["CPU"],
                "num_gpus": wanted.get("GPU", 0),
                "runtime_env": {"env_vars": variables},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group_of[host], bundle),
            }
            actors[seat.number] = actor.options(**options).remote(seat, machine.wait_seconds)


def end_all(actors: dict[int, Any], groups: list[Any]) -> None:
    """End actors, remove their placement groups, and clear both."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if not ray.is_initialized():
        return  # Ray has ended, and all actors with it
    for actor in actors.values():
        ray.kill(actor)
    for group in groups:
        remove_placement_group(group)
    actors.clear()
    groups.clear()


def _bundle(seat: Seat, on_gpu: bool) -> dict[str, float]:
    # Virtual CPU devices share the cores; a bundle must ask for something.
    return {"CPU": 1, "GPU": seat.count} if on_gpu else {"CPU": 0.01}


def _reserve(machine: RayMachine, host: int, seats: Sequence[Seat]) -> Any:
    from ray.util.placement_group import placement_group

    node = {"ray.io/node-id": machine.hosts[host].node}
    bundles = [_bundle(seat, machine.accelerator is not None) for seat in seats]
    return placement_group(bundles, "STRICT_PACK", bundle_label_selector=[node] * len(bundles))


def _wait_for_room(machine: RayMachine, hosts: Mapping[int, Sequence[Seat]], groups: Mapping[int, Any]) -> None:
    import ray

    ready = {group.ready(): host for host, group in groups.items()}
    deadline = time.monotonic() + machine.start_seconds
    while True:
        _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=POLL_SECONDS)
        if not waiting:
            return
        host = ready[waiting[0]]
        node = machine.hosts[host]
        wanted = ", ".join(str(_bundle(seat, machine.accelerator is not None)) for seat in hosts[host])
        given = f"{len(hosts[host])} workers on host {host}, node {node.address}: {wanted}"
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
                wrong=f"they were not placed in {machine.start_seconds:.0f} s; free are {ray.available_resources()}.",
                do="end what else runs there (cluster.machine.close() ends the workers of other steps), or wait longer: "
                "Cluster.ray(start_seconds=...).",
            )


POLL_SECONDS = 1.0
"""Seconds between two questions for the position of a busy worker."""
GRACE_SECONDS = 2.0
"""Time beyond the limit for a worker that waits for a message to report that itself."""


class FailedError(Exception):
    """A call failed."""

    def __init__(self, failure: Failure):
        super().__init__(failure)
        self.failure = failure


def where(actor: Any) -> Any:
    """Start to ask an actor for its position."""
    return actor.where.options(concurrency_group="control").remote()


def wait_for(
    refs: Mapping[int, Any], ask: Callable[[int], Any], silence_seconds: float, standing_seconds: float
) -> dict[int, Any]:
    """Wait for one call of each of several actors, by worker; `ask` starts to ask one for its position.

    Raises:
        FailedError: One failed, has not answered for `silence_seconds`, or stays at one position for `standing_seconds`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    begun = time.monotonic()
    heard = dict.fromkeys(refs, begun)
    asked: dict[int, Any] = {}
    while True:
        try:
            return dict(zip(refs, ray.get(list(refs.values()), timeout=POLL_SECONDS), strict=True))
        except GetTimeoutError:
            pass
        except RayError as error:
            raise FailedError(_first_failed(refs, error)) from error
        standing: dict[int, Position] = {}
        for number, ref in refs.items():
            if ray.wait([ref], timeout=0)[0]:
                heard[number] = time.monotonic()
            elif number not in asked:
                asked[number] = ask(number)
            elif ray.wait([asked[number]], timeout=0)[0]:
                heard[number] = time.monotonic()
                with contextlib.suppress(RayError):  # it ended, and its own call will raise
                    standing[number] = ray.get(asked[number])
                del asked[number]
            elif time.monotonic() - heard[number] > silence_seconds:
                raise FailedError(Failure(number, "silent", None, silence_seconds))
        number, position = max(standing.items(), key=lambda one: one[1].seconds, default=(-1, Position(0, None)))
        if min(position.seconds, time.monotonic() - begun) > standing_seconds + GRACE_SECONDS:
            raise FailedError(Failure(number, "stuck", None, position.seconds, position=position))


def settle(refs: Mapping[int, Any], seconds: float) -> None:
    """Wait until calls have ended, successfully or not, for at most so many seconds."""
    import ray

    ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)


def positions(actors: Mapping[int, Any]) -> dict[int, Position]:
    """The positions of the actors that answer."""
    import ray

    asked = {where(actor): number for number, actor in actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS) if asked else ([], [])
    found = {}
    for ref in done:
        with contextlib.suppress(ray.exceptions.RayError):  # it ended too; the first failure is reported
            found[asked[ref]] = ray.get(ref)
    return found


def _first_failed(refs: Mapping[int, Any], error: BaseException) -> Failure:
    """The first of these calls that failed, and how; `error`: raised when waiting for all of them."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    for number, ref in refs.items():
        if ray.wait([ref], timeout=0)[0]:
            try:
                ray.get(ref)
            except RayTaskError as raised:
                return Failure(number, "raised", raised.cause or raised)
            except RayError as died:  # the actor died, or the node that held its answer
                return Failure(number, "died", died)
    return Failure(next(iter(refs)), "died", error)

"""Starts and ends the actors of a job.

In:     a `RayMachine`, seats.
Out:    actors by worker; `end_all`.
Method: one placement group per host, with one bundle and one actor per mesh there. Removing a placement group also ends
        processes that do not respond.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.errors import ClusterError, NodeLostError
from autopar.grouping import grouped
from autopar.mesh.ray_nodes import RayMachine
from autopar.runtime.ray.driver.calls import POLL_SECONDS
from autopar.runtime.ray.seats import Seat, environment
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

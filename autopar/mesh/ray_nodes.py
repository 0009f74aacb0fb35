"""Finds the nodes of a Ray cluster.

In:     the address of a Ray cluster, or none: the one this process is connected to, or that runs here, or a new one.
Out:    `RayMachine`: its nodes, and how long to wait for their workers.
Method: Ray lists its nodes and their GPUs. Nodes without GPUs are hosts of virtual CPU devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import ClusterError

ACCELERATOR = "accelerator_type:"
"""Prefix of the Ray resource that names a node's accelerator."""


@dataclass(frozen=True, slots=True)
class RayHost:
    """A host: a node of the cluster, as its Ray id and IP address; without GPUs it may be one of several on a node."""

    node: str
    address: str


@dataclass(eq=False, repr=False)
class RayMachine:
    """A Ray cluster, and autopar's workers on it.

    Attributes:
        hosts: The hosts, in the order of the cluster's devices.
        devices_per_host: Devices used of each.
        accelerator: Ray's name of the GPUs; None: the devices are virtual CPU devices.
        wait_seconds: How long a worker may wait at one instruction of a step, for a message or a program.
        silence_seconds: How long a worker may not answer before it counts as hung.
        start_seconds: How long workers may take to start.
        groups: The started groups of workers, by the devices of their meshes.
    """

    hosts: tuple[RayHost, ...]
    devices_per_host: int
    accelerator: str | None
    wait_seconds: float
    silence_seconds: float
    start_seconds: float
    groups: dict[Any, Any] = field(default_factory=dict, init=False)

    def workers(self, layout: Any, start: Callable[[], Any]) -> Any:
        """The workers of a layout; started at first use, and again after they have ended."""
        group = self.groups.get(layout)
        if group is None or group.closed:
            group = self.groups[layout] = start()
        return group

    def close(self) -> None:
        """End all workers, whose arrays are lost; Ray keeps running."""
        while self.groups:
            self.groups.popitem()[1].close()


def find_hosts(
    address: str | None, hosts: int | None, devices_per_host: int | None
) -> tuple[tuple[RayHost, ...], int, str | None]:
    """Connect to Ray and choose among its nodes; arguments as of `Cluster.ray`.

    Returns:
        The hosts, the devices of each, and Ray's name of the GPUs (None: there are none).

    Raises:
        ClusterError: Ray is not installed or not reachable, or the nodes have different numbers of GPUs, or too few.
    """
    ray = _connected(address)
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
    with_gpus = [n for n in nodes if n["Resources"].get("GPU", 0) >= 1]
    enough = [n for n in with_gpus if int(n["Resources"]["GPU"]) >= (devices_per_host or 1)]
    found = [RayHost(n["NodeID"], n["NodeManagerAddress"]) for n in (enough if with_gpus else nodes)]
    if not with_gpus:
        return tuple(found[k % len(found)] for k in range(hosts or len(found))), devices_per_host or 1, None
    counts = [int(n["Resources"]["GPU"]) for n in with_gpus]
    kinds = {k.removeprefix(ACCELERATOR) for n in enough for k in n["Resources"] if k.startswith(ACCELERATOR)}
    wanted = devices_per_host or min(counts)
    wrong = ""
    if devices_per_host is None and len(set(counts)) > 1:
        wrong = "a mesh needs equally many on each host."
    elif (hosts or 1) > len(found):
        wrong = f"{hosts or len(with_gpus)} hosts with {wanted} GPUs each are wanted."
    elif len(kinds) > 1:
        wrong = f"they are of several kinds: {', '.join(sorted(kinds))}."
    if wrong:
        raise ClusterError(
            "the nodes do not form the cluster that is wanted.",
            given=f"nodes with {', '.join(map(str, counts))} GPUs",
            wrong=wrong,
            do="pass Cluster.ray(hosts=, devices_per_host=) that there are, or connect to equal nodes.",
        )
    return tuple(found[: hosts or len(found)]), wanted, next(iter(sorted(kinds)), "")


def _connected(address: str | None) -> Any:
    given = f"Cluster.ray({'' if address is None else repr(address)})"
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            "Ray is not installed.",
            given=given,
            wrong=f"{error}.",
            do="pip install 'autopar[ray]', or use Cluster.local().",
        ) from error
    if not ray.is_initialized():
        try:
            # Show the workers' output here: it may be the user's (`jax.debug.print`).
            ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ClusterError(
                "the Ray cluster cannot be reached.",
                given=given,
                wrong=str(error),
                do='start one (`ray start --head`) and pass its address, "auto" on one of its nodes, or none for this '
                "machine alone.",
            ) from error
    return ray

"""Places each stage on devices between which there are the fast links that its mesh counts on.

In:     devices of each stage, the cluster.
Out:    the first device of each stage, which has that many from there on.
Method: in the order of the stages where that will do. Otherwise whole hosts first, in order, and parts of hosts after
        them, the largest first, each into the first host with room.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PipelineError
from autopar.mesh import Cluster


def place_stages(sizes: Sequence[int], cluster: Cluster) -> list[int]:
    """The first device of each stage.

    A stage that a host can hold lies in one host; one of whole hosts begins with a host.

    `sizes`: devices of each stage; together at most the cluster's.

    Raises:
        PipelineError: Parts of hosts do not go into the hosts.
    """
    host = cluster.devices_per_host
    in_order = [sum(sizes[:k]) for k in range(len(sizes))]
    if all(_lies_well(first, size, host) for first, size in zip(in_order, sizes, strict=True)):
        return in_order
    found = [-1] * len(sizes)
    used = [0] * cluster.hosts
    for number in sorted(range(len(sizes)), key=lambda k: (-sizes[k] if sizes[k] < host else -host, k)):
        size = sizes[number]
        hosts = -(-size // host)
        wanted = min(size, host)
        for first in range(cluster.hosts - hosts + 1):
            if all(used[h] + wanted <= host for h in range(first, first + hosts)):
                found[number] = first * host + used[first]
                for h in range(first, first + hosts):
                    used[h] += wanted
                break
        else:
            raise PipelineError(
                "the stages do not fit the hosts.",
                given=f"stages of {', '.join(map(str, sizes))} devices, {cluster.hosts} hosts of {host}",
                wrong=f"stage {number}, of {size} devices, finds no host with so many free: a stage that a host can hold "
                "does not span two.",
                do="choose submeshes that fill the hosts.",
                num_stages=len(sizes),
            )
    return found


def _lies_well(first: int, size: int, host: int) -> bool:
    if size % host == 0:
        return first % host == 0
    return size > host or first // host == (first + size - 1) // host

"""Places stages on consecutive devices, so that a stage that fits one host is on one host.

In:     the number of devices of each stage, the cluster.
Out:    the first device of each stage.
Method: in stage order, if that breaks no stage over hosts. Otherwise first fit decreasing: stages of whole hosts first, in
        order, then parts of hosts, the largest first, each on the first host with room.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PipelineError
from autopar.mesh import Cluster


def place_stages(sizes: Sequence[int], cluster: Cluster) -> list[int]:
    """The first device of each stage.

    A stage no larger than a host is placed within one host; a stage of whole hosts begins at a host's first device.

    `sizes`: devices of each stage; together at most the cluster's.

    Raises `PipelineError`: parts of hosts do not go into the hosts.
    """
    host = cluster.devices_per_host
    in_order = [sum(sizes[:k]) for k in range(len(sizes))]
    if all(_is_aligned(first, size, host) for first, size in zip(in_order, sizes, strict=True)):
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
                wrong=f"no host has the {size} free devices of stage {number}: a stage that a host can hold does not span "
                "two.",
                do="choose submeshes that fill the hosts.",
                num_stages=len(sizes),
            )
    return found


def _is_aligned(first: int, size: int, host: int) -> bool:
    if size % host == 0:
        return first % host == 0
    return size > host or first // host == (first + size - 1) // host

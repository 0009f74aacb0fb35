"""Small Ray clusters on this machine; needs Ray, and imports it only when asked for one."""

from __future__ import annotations

from typing import Any

import autopar
from tests.patience import PATIENCE_SECONDS
from tests.sweep import QUICK, SLOW


def start_ray() -> None:
    """Ray with few processes of its own. It tells no one that it runs."""
    import os

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)


def start_two_nodes() -> tuple[Any, Any]:
    """As if there were two machines, this process on the first: the cluster, and its second node."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    second = nodes.add_node(**node)
    ray.init(address=nodes.address, log_to_driver=False)
    return nodes, second


def make_cluster(hosts: int, devices_per_host: int, **options: Any) -> autopar.Cluster:
    """So many hosts on this machine, slow enough that small models are split; no limit is hit that a test does not set."""
    limits = dict.fromkeys(("wait_seconds", "silence_seconds", "start_seconds"), PATIENCE_SECONDS)
    options = {"device": SLOW, "intra": QUICK, "inter": QUICK, **limits, **options}
    return autopar.Cluster.ray(hosts=hosts, devices_per_host=devices_per_host, **options)

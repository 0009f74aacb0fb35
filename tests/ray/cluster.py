"""Small Ray clusters on this machine; needs Ray, and imports it only when asked for one."""

from __future__ import annotations

from typing import Any

import autopar
from tests.sweep import QUICK, SLOW


def start_ray() -> None:
    """Ray with few processes of its own. It tells no one that it runs."""
    import os

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)


def make_cluster(hosts: int, devices_per_host: int, **options: Any) -> autopar.Cluster:
    """So many hosts on this machine, slow enough that small models are split."""
    options = {"device": SLOW, "intra": QUICK, "inter": QUICK, "wait_seconds": 60.0, **options}
    return autopar.Cluster.ray(hosts=hosts, devices_per_host=devices_per_host, **options)

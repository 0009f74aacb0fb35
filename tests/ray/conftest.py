"""Ray for these tests: one small cluster on this machine, which leaves no process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from tests.patience import wait_until
from tests.ray.cluster import make_cluster, start_ray


def children(of: int) -> set[int]:
    """All processes that came from one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = {of}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found - {of}


def wait_until_gone(pids: set[int]) -> None:
    """Return when none of these processes is left."""
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the end of processes {sorted(pids)}")


@pytest.fixture(scope="package")
def ray_started() -> Iterator[None]:
    """Ray on this machine, as long as these tests run."""
    ray = pytest.importorskip("ray")
    before = children(os.getpid())
    start_ray()
    yield
    started = children(os.getpid()) - before
    ray.shutdown()
    wait_until_gone(started)


@pytest.fixture(scope="package")
def one_host(ray_started: None) -> Iterator[autopar.Cluster]:
    """One host of four devices, whose workers go from test to test; where one kills them, the next step starts others."""
    cluster = make_cluster(1, 4)
    yield cluster
    cluster.machine.close()


@pytest.fixture(scope="module")
def clusters(one_host: autopar.Cluster) -> Iterator[dict[tuple[int, int], autopar.Cluster]]:
    """Clusters by hosts and devices per host; those of one shape share their workers."""
    larger = {shape: make_cluster(*shape) for shape in ((1, 8), (4, 2))}
    yield {(1, 4): one_host, **larger}
    for cluster in larger.values():
        cluster.machine.close()

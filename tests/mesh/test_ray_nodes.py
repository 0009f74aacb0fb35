"""What Ray says of its nodes becomes a cluster, or an error that says why not; Ray itself is not needed."""

from __future__ import annotations

import sys
import types

import pytest

from autopar import Cluster, Device, Link
from autopar.errors import ClusterError
from autopar.mesh.cluster import CPU


def node(name, gpus=0, kind="H100", alive=True):
    resources = {"CPU": 8.0, f"node:{name}": 1.0}
    if gpus:
        resources |= {"GPU": float(gpus), f"accelerator_type:{kind}": 1.0}
    return {"NodeID": f"id-{name}", "NodeManagerAddress": name, "Alive": alive, "Resources": resources}


@pytest.fixture
def nodes(monkeypatch):
    """Makes a Ray of these nodes, to which this process is connected."""

    def make(*found):
        ray = types.SimpleNamespace(is_initialized=lambda: True, nodes=lambda: list(found))
        monkeypatch.setitem(sys.modules, "ray", ray)

    return make


def test_nodes_with_gpus(nodes):
    nodes(node("10.0.0.2", 8), node("10.0.0.1", 8), node("10.0.0.9"), node("10.0.0.3", 8, alive=False))
    cluster = Cluster.ray()
    assert (cluster.hosts, cluster.devices_per_host, cluster.machine.accelerator) == (2, 8, "H100")
    assert [host.address for host in cluster.machine.hosts] == ["10.0.0.1", "10.0.0.2"]
    assert cluster == Cluster.of("2x8 h100") and cluster.devices is None
    assert Cluster.ray(hosts=1, devices_per_host=4).num_devices == 4


def test_nodes_with_fewer_gpus_are_passed_over(nodes):
    """A head with one small GPU is no part of the cluster."""
    nodes(node("10.0.0.1", 1, "T4"), node("10.0.0.2", 8), node("10.0.0.3", 8))
    for options in ({"hosts": 2}, {}):
        cluster = Cluster.ray(devices_per_host=8, **options)
        assert [host.address for host in cluster.machine.hosts] == ["10.0.0.2", "10.0.0.3"]
        assert cluster.machine.accelerator == "H100"
    with pytest.raises(ClusterError, match="nodes with 1, 8, 8 GPUs(.*\n)*.*3 hosts with 8 GPUs"):
        Cluster.ray(hosts=3, devices_per_host=8)


def test_nodes_without_gpus(nodes):
    nodes(node("10.0.0.1"), node("10.0.0.2"))
    cluster = Cluster.ray(devices_per_host=2)
    assert (cluster.hosts, cluster.devices_per_host, cluster.device) == (2, 2, CPU)
    assert cluster.machine.accelerator is None and Cluster.ray().num_devices == 2
    several = Cluster.ray(hosts=4)
    assert [host.address for host in several.machine.hosts] == ["10.0.0.1", "10.0.0.2"] * 2


def test_stated_rates(nodes):
    nodes(node("10.0.0.1", 2, "MYSTERY"))
    stated = {"device": Device("toy", 1e9), "intra": Link(1e-6, 1e9), "inter": Link(1e-5, 1e8)}
    assert Cluster.ray(**stated).device.name == "toy"
    with pytest.raises(ClusterError, match="'MYSTERY' of platform gpu(.*\n)*.*pass Cluster.ray"):
        Cluster.ray()


@pytest.mark.parametrize(
    "found, options, wrong",
    [
        ((node("a", 8), node("b", 4)), {}, "equally many"),
        ((node("a", 8), node("b", 8)), {"devices_per_host": 16}, "2 hosts with 16 GPUs"),
        ((node("a", 8),), {"hosts": 2}, "2 hosts with 8 GPUs"),
        ((node("a", 8), node("b", 8, "A100")), {}, "several kinds: A100, H100"),
    ],
)
def test_nodes_that_form_no_cluster(nodes, found, options, wrong):
    nodes(*found)
    with pytest.raises(ClusterError, match=wrong):
        Cluster.ray(**options)


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match="Ray is not installed(.*\n)*.*pip install 'autopar"):
        Cluster.ray()

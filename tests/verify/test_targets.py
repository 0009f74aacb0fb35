"""Devices to compile for, and what is said where that cannot be."""

import jax
import pytest

from autopar import Cluster
from autopar.errors import AutoparError, ClusterError
from autopar.mesh.find_device import compute_capability, find_device
from autopar.verify import targets
from autopar.verify.targets import GPUS, find_target


@pytest.mark.parametrize("name, extra", [("h100", "autopar[verify]"), ("tpu-v5e", f"jax[tpu]=={jax.__version__}")])
def test_the_compiler_is_not_installed(monkeypatch, name, extra):
    monkeypatch.setattr(targets, "_is_there", lambda module: False)
    with pytest.raises(AutoparError, match="is not installed") as error:
        find_target(name, Cluster.of(f"8 {name}"))
    assert extra in str(error.value)


@pytest.mark.parametrize("name", ["mi300x", "v100"])
def test_no_description(name):
    with pytest.raises(ClusterError, match="without having it"):
        find_target(name, Cluster.of(f"8 {name}"))


def test_no_such_device():
    with pytest.raises(ClusterError, match="no such device"):
        find_target("h1000", Cluster.of("8 h100"))


def test_the_devices_of_this_process():
    cluster = Cluster.local()
    found = find_target(None, cluster)
    assert list(found.devices) == list(cluster.devices) and not found.options


@pytest.mark.parametrize("name", GPUS)
def test_descriptions_agree_with_the_catalog(name):
    device, gpu = find_device(name).device, GPUS[name]
    assert gpu.memory_bytes == pytest.approx(device.memory_bytes, rel=0.08)
    assert gpu.memory_bytes_per_second == pytest.approx(device.memory_bytes_per_second, rel=0.05)
    capability = compute_capability(device)
    assert f"major: {capability[0]} minor: {capability[1]}" in gpu.text(capability)


@pytest.mark.parametrize(
    "generation, count, text",
    [
        ("v5e", 8, "v5e:2x4"),
        ("v5e", 16, "v5e:4x4"),
        ("v6e", 4, "v6e:2x2"),
        ("v4", 8, "v4:2x2x2"),
        ("v5p", 16, "v5p:2x2x4"),
    ],
)
def test_topology_of_a_slice(generation, count, text):
    assert targets._tpu_topology(generation, count) == text

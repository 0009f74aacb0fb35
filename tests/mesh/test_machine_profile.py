"""Profiles of machines: to a file and back, damage told of, clusters that are planned with them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import jax
import pytest

import autopar
from autopar.errors import ProfileError
from autopar.mesh import Achieved, Cluster, Device, Link, MachineProfile, find_device
from autopar.mesh.machine_profile import Measured

SHARED = Achieved(launch_seconds=1e-6, cores=1, tile_seconds=1e-6, balance=9.0, convolution=1.5, host_cores=2)
CPU = MachineProfile(
    "cpu",
    "cpu",
    8,
    {"host": "here", "processor": "a core"},
    "2026-01-02T03:04:05+00:00",
    Device("cpu", {"float32": 1e10, "bfloat16": 2e10}, math.inf, 4e9, SHARED),
    Link(1e-5, 2e9, shared_memory=True),
    None,
    (Measured("product", "[8, 8] x [8, 8]", 2e-5, 1e-5), Measured("product", "[9, 9] x [9, 9]", 1e-5, 1.5e-5)),
)
H100 = find_device("h100")
GPU = MachineProfile("gpu", "NVIDIA H100 80GB HBM3", 8, {}, "2026-01-02", H100.device, Link(2e-6, 3e11, 1e11, True))


@pytest.mark.parametrize(
    "profile", [CPU, GPU, dataclasses.replace(CPU, inter=Link(1e-4, math.inf, groups=((2, 0.5),)))]
)
def test_to_a_file_and_back(profile, tmp_path):
    path = tmp_path / "machine.json"
    profile.save(path)
    assert MachineProfile.load(path) == profile
    assert MachineProfile.load(path).device.watts == profile.device.watts
    assert json.loads(path.read_text())["version"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("profile", [CPU, GPU])
def test_files_of_before_the_host_was_described(profile, tmp_path):
    path = tmp_path / "machine.json"
    profile.save(path)
    record = json.loads(path.read_text())
    del record["device"]["host_bytes_per_second"], record["device"]["host_memory_bytes"]
    path.write_text(json.dumps(record))
    assert MachineProfile.load(path) == profile


def test_how_well_it_agrees():
    assert CPU.errors == {"product": pytest.approx(0.5)}
    assert "2026-01-02" in repr(CPU) and "median error, product" in CPU._repr_html_()


def saved(tmp_path, change):
    """The path of a profile whose JSON was changed."""
    path = tmp_path / "machine.json"
    CPU.save(path)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    "change, wrong",
    [
        (lambda r: r.update(version=0), "of version 0; this autopar reads version 1"),
        (lambda r: r.update(version=99), "of version 99"),
        (lambda r: r.update(format="autopar plan"), "but no autopar machine profile"),
        (lambda r: r.pop("device"), '"device" is missing'),
        (lambda r: r["device"]["achieved"].pop("balance"), '"device.achieved.balance" is missing'),
        (lambda r: r["device"]["achieved"].update(overlap=3), "overlap=3"),
        (lambda r: r["device"]["peak_flops"].update(float32=0), "peak_flops"),
        (lambda r: r["device"]["achieved"].update(fresh_bytes_per_second=0), "fresh_bytes_per_second"),
        (lambda r: r["intra"].update(latency_seconds=-1), "intra.latency_seconds"),
        (lambda r: r["intra"].update(shared_memory=2), "true or false"),
        (lambda r: r["measured"][0].update(seconds=0), "more than 0"),
        (lambda r: r.update(num_devices=0), "a whole number of 1 or more"),
    ],
)
def test_damage_is_named(change, wrong, tmp_path):
    with pytest.raises(ProfileError, match=wrong) as caught:
        MachineProfile.load(saved(tmp_path, change))
    assert caught.value.path == str(tmp_path / "machine.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": NaN}', '"autopar machine profile"'])
def test_what_is_no_profile(text, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match="cannot be read"):
        MachineProfile.load(path)
    with pytest.raises(ProfileError, match="No such file"):
        MachineProfile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be written"):
        CPU.save(tmp_path / "no" / "folder.json")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not text"):
        MachineProfile.load(path)


def places(value, at=()):
    """Where there are values in a piece of JSON."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def test_whatever_stands_there(tmp_path):
    """Any entry replaced by anything: a profile that can be computed with, or an error of ours."""
    path = tmp_path / "machine.json"
    CPU.save(path)
    record = json.loads(path.read_text())
    for place in list(places(record))[1:]:
        for value in (None, -1, 0, 1e300, "x", [], {}, True):
            changed = copy.deepcopy(record)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            try:
                found = MachineProfile.load(path)
            except ProfileError:
                continue
            assert isinstance(found.for_devices(4)[0], Device) and found.errors is not None


# Clusters.


def test_a_file_of_before_passes_were_measured(tmp_path):
    path = tmp_path / "machine.json"
    CPU.save(path)
    record = json.loads(path.read_text())
    for name in ("passes", "update_passes", "kept_bytes", "array_seconds", "copy_seconds"):
        del record["device"]["achieved"][name]
    path.write_text(json.dumps(record))
    assert MachineProfile.load(path) == CPU


def test_local_with_a_profile(tmp_path):
    path = tmp_path / "machine.json"
    CPU.save(path)
    for profile in (CPU, path, str(path)):
        cluster = Cluster.local(profile=profile)
        assert (cluster.device, cluster.intra) == (CPU.device, CPU.intra)
        assert str(cluster) == "8 cpu (calibrated 2026-01-02)"
    assert Cluster.local(profile=CPU).inter == Cluster.local().inter, "what was not measured is the catalog's"
    assert Cluster.local(profile=CPU, intra=Link(1, 1)).intra == Link(1, 1), "what the user states goes before"
    assert "calibrated" not in str(Cluster.local())


def test_fewer_devices_share_the_same_cores():
    device, intra, inter = CPU.for_devices(4)
    assert device.peak_flops["float32"] == 2e10 and device.memory_bytes_per_second == 8e9
    assert device.achieved.tile_seconds == 5e-7 and device.achieved.launch_seconds == 5e-7
    assert intra == Link(5e-6, 4e9, shared_memory=True) and inter is None
    assert Cluster.local(jax.devices()[:4], profile=CPU).device == device
    assert GPU.for_devices(4) == (GPU.device, GPU.intra, None), "a GPU's cores are its own"


def test_a_cluster_that_is_described():
    faster = dataclasses.replace(GPU, device=dataclasses.replace(H100.device, memory_bytes_per_second=3e12))
    cluster = Cluster.of("8x8 h100", profile=faster)
    assert cluster.device == faster.device and cluster.intra == faster.intra and cluster.inter == H100.inter
    assert str(cluster) == "8 x 8 H100 (calibrated 2026-01-02)"


@pytest.mark.parametrize(
    "make, wrong",
    [
        (lambda: Cluster.of("8 h100", profile=CPU), "measured on 8 'cpu' of platform cpu"),
        (lambda: Cluster.of("8 a100", profile=GPU), "'A100-80GB'"),
        (lambda: Cluster.of("8 h100 + 8 a100", profile=GPU), "'A100-80GB'"),
        (lambda: Cluster.local(profile=GPU), "these devices are 'cpu'"),
        (lambda: Cluster.local(profile=3), "it is of type int"),
        (lambda: Cluster.local(profile="none.json"), "No such file"),
    ],
)
def test_a_profile_of_something_else(make, wrong):
    with pytest.raises(ProfileError, match=wrong):
        make()


def test_a_plan_says_that_it_is_calibrated():
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - 0.1 * gradient, loss

    types = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    step = autopar.parallelize(step, cluster=Cluster.local(profile=CPU), method=autopar.DataParallel())
    assert "calibrated 2026-01-02" in str(step.plan(*types))

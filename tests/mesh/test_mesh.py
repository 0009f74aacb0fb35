"""Devices, clusters and logical meshes: tables, and errors by message."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import ClusterError, DeviceCountError, MeshError
from autopar.mesh import (
    Cluster,
    Device,
    Link,
    LogicalMesh,
    Sharding,
    find_device,
    finer_meshes,
    logical_mesh,
    logical_meshes,
)
from autopar.mesh.catalog import MODELS


@pytest.mark.parametrize(
    "text, hosts, per_host, name",
    [
        ("8x8 h100", 8, 8, "H100"),
        ("8 x 8 H100", 8, 8, "H100"),
        ("4 a100", 1, 4, "A100-80GB"),
        ("8x1 h200", 8, 1, "H200"),
        ("2x8 A100-40GB", 2, 8, "A100-40GB"),
        ("1x8 v100-32", 1, 8, "V100-32GB"),
        ("16x4 tpu v4", 16, 4, "TPU v4"),
    ],
)
def test_of(text, hosts, per_host, name):
    cluster = Cluster.of(text)
    assert (cluster.hosts, cluster.devices_per_host, cluster.device.name) == (hosts, per_host, name)
    assert cluster.num_devices == hosts * per_host


def test_of_several_kinds():
    cluster = Cluster.of("2x8 h100 + 4x8 a100")
    assert [str(group) for group in cluster.groups] == ["2 x 8 H100", "4 x 8 A100-80GB"]
    assert cluster.num_devices == 48
    assert str(cluster) == "2 x 8 H100 + 4 x 8 A100-80GB"


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("eight h100", "is not hosts x devices and a name"),
        ("8x8", "is not hosts x devices"),
        ("8x8 h1000", "Did you mean h100"),
        ("0x8 h100", "`hosts` must be a whole number, 1 or more"),
    ],
)
def test_of_unreadable(text, wrong):
    with pytest.raises(ClusterError, match=wrong):
        Cluster.of(text)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("TPU v5 lite", "TPU v5e"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("h100-500w", "H100-500W"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("Tesla T4", "T4"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A800 80GB PCIe", "A800"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("TPU v3", "TPU v3"),
        ("TPU v5", "TPU v5p"),
        ("TPU7x", "TPU7x"),
    ],
)
def test_names_as_jax_reports_them(kind, name):
    assert find_device(kind).device.name == name


def test_catalog():
    for name, model in MODELS.items():
        device = model.device
        assert find_device(name) is find_device(device.name) is model
        others = ("tpu", "mi", "gaudi", "trainium")
        assert (model.capability is None) == any(word in name for word in others), "NVIDIA's have one"
        assert model.source
        assert 1e13 < device.flops_per_second(jnp.bfloat16) < 1e16
        assert device.flops_per_second(jnp.float32) <= device.flops_per_second(jnp.bfloat16) * 1.001
        assert 1e10 <= device.memory_bytes < 1e12
        assert 1e11 < device.memory_bytes_per_second < 1e13
        assert model.inter.bytes_per_second <= model.intra.bytes_per_second
        hash(device)
        assert pickle.loads(pickle.dumps(device)) == device == copy.deepcopy(device)


def test_a_limit_of_power_slows_attention_as_it_does_products():
    limited, usual = (find_device(name).device.achieved for name in ("h100-500w", "h100"))
    assert limited.fused / usual.fused == pytest.approx(limited.product / usual.product)


def test_devices_that_jax_makes_of_a_chip():
    """A slice of TPUs has as many as JAX has: one a core, or one of a chip's two."""
    assert [Cluster.of(name).num_devices for name in ("v3-8", "v4-8", "v5p-16", "v5e-16")] == [8, 4, 8, 16]


def test_flops_of_a_dtype():
    device = Device("d", {"bfloat16": 4.0, "float32": 2.0})
    assert [device.flops_per_second(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, jnp.int8)] == [
        4,
        4,
        2,
        2,
        4,
    ]
    assert Device("d", 3.0).flops_per_second(jnp.int8) == 3
    narrow = jnp.float4_e2m1fn, jnp.float8_e4m3fn
    assert [device.flops_per_second(t) for t in narrow] == [4, 4]
    assert [Cluster.of("1 b200").device.flops_per_second(t) for t in narrow] == [9e15, 4.5e15]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Device("d", 0),
        lambda: Device("d", {}),
        lambda: Device("d", 1.0, memory_bytes=-1),
        lambda: Link(-1, 1),
        lambda: Link(0, 0),
        lambda: Cluster(hosts=0),
        lambda: Cluster(devices_per_host=1.5),
        lambda: Cluster.local(devices=[]),
    ],
)
def test_impossible_machines(make):
    with pytest.raises(ClusterError, match="given:"):
        make()


def test_local():
    cluster = Cluster.local()
    assert cluster.devices == tuple(jax.devices()) and cluster.num_devices == len(jax.devices())
    stated = Cluster.local(jax.devices()[:4], device=Device("toy", 40e6), intra=Link(1e-6, 1e6))
    assert (stated.devices_per_host, stated.device.name, stated.intra) == (4, "toy", Link(1e-6, 1e6))
    assert stated == Cluster(1, 4, Device("toy", 40e6), Link(1e-6, 1e6), stated.inter)


FAST, SLOW = Link(1e-6, 1e11), Link(1e-5, 1e10)


@pytest.mark.parametrize(
    "hosts, per_host, count, max_axes, meshes",
    [
        (1, 8, None, 3, ["(x=8)", "(x=2, y=4)", "(x=2, y=2, z=2)"]),
        (8, 1, None, 3, ["(x=8)", "(x=2, y=4)", "(x=2, y=2, z=2)"]),
        (2, 8, None, 3, ["(x=2, y=8)", "(x=2, y=2, z=4)"]),
        (4, 4, None, 3, ["(x=4, y=4)", "(x=2, y=2, z=4)", "(x=4, y=2, z=2)"]),
        (2, 8, 8, 2, ["(x=8)", "(x=2, y=4)"]),
        (2, 8, None, 1, ["(x=16)"]),
        (1, 6, None, 3, ["(x=6)", "(x=2, y=3)"]),
        (1, 7, None, 3, ["(x=7)"]),
        (1, 1, None, 3, ["(x=1)"]),
    ],
)
def test_logical_meshes(hosts, per_host, count, max_axes, meshes):
    found = logical_meshes(Cluster(hosts, per_host, intra=FAST, inter=SLOW), count, max_axes)
    assert [str(mesh) for mesh in found] == meshes
    for mesh in found:
        assert mesh.num_devices == (count or hosts * per_host)


def test_every_axis_has_the_link_it_takes():
    cluster = Cluster(2, 8, intra=FAST, inter=SLOW)
    assert [mesh.links for mesh in logical_meshes(cluster)] == [(SLOW, FAST), (SLOW, FAST, FAST)]
    several = [dataclasses.replace(SLOW, in_host=(count, FAST.bytes_per_second)) for count in (8, 2)]
    assert logical_meshes(cluster, max_axes=1)[0].links == (several[0],)
    assert logical_mesh(cluster, (4, 4)).links == (several[1], FAST)
    assert logical_mesh(cluster, (2, 2, 4)).links == (SLOW, FAST, FAST)
    with pytest.raises(DeviceCountError, match="it has 8 places"):
        logical_mesh(cluster, (2, 4))
    with pytest.raises(MeshError, match="not whole hosts"):
        logical_meshes(cluster, 12)


@pytest.mark.parametrize(
    "make, wrong",
    [
        (lambda: LogicalMesh((0, 2)), "1 or more"),
        (lambda: LogicalMesh(()), "1 or more"),
        (lambda: LogicalMesh((2, 2), ("x",)), "as many names"),
        (lambda: LogicalMesh((2, 2), ("x", "x")), "all different"),
        (lambda: LogicalMesh((2, 2), links=(FAST,)), "links, there are 1"),
    ],
)
def test_no_mesh(make, wrong):
    with pytest.raises(MeshError, match=wrong):
        make()


def test_sharding():
    mesh, sharding = LogicalMesh((2, 4)), Sharding((("x", "y"), ()), ())
    assert sharding.local_shape((16, 3), mesh) == (2, 3)
    assert sharding.num_shards(mesh) == 8
    assert not sharding.is_valid((12, 3), mesh)
    assert str(sharding) == "[xy, -]"
    assert str(Sharding(((), ("y",)), ("x",))) == "[-, y] partial x"
    assert str(Sharding((("data", "model"), ()), ("x", "y"))) == "[data+model, -] partial x+y"
    assert sharding.partition_spec() == jax.sharding.PartitionSpec(("x", "y"), None)


def test_neighbours_of_a_hybrid_cube_have_a_part_of_its_links():
    cluster = Cluster.of("1x8 v100")
    whole, pair, four = (logical_mesh(cluster, shape).links[-1].bytes_per_second for shape in ((8,), (4, 2), (2, 4)))
    assert pair == pytest.approx(whole / 6), "the first two of a host have one link of six"
    assert four == pytest.approx(2 * whole / 3)
    switched = Cluster.of("1x8 a100")
    assert {link for shape in ((8,), (4, 2)) for link in logical_mesh(switched, shape).links} == {switched.intra}


def test_pods_have_a_third_link():
    """Two pods of two hosts: an axis has the link of the farthest that it reaches."""
    across = Link(5e-5, 1e9)
    machine = Cluster(4, 2, Device(), Link(1e-6, 1e11), Link(1e-5, 1e10), hosts_per_pod=2, across=across)
    assert [machine.level_over(reach) for reach in (1, 2, 4, 8)] == [0, 0, 1, 2]
    assert logical_mesh(machine, (2, 2, 2)).links == (across, machine.inter, machine.intra)
    assert logical_mesh(machine, (4, 2)).links == (across, machine.intra)
    shapes = {mesh.shape: mesh.links for mesh in logical_meshes(machine)}
    assert shapes[2, 2, 2] == (across, machine.inter, machine.intra) and shapes[4, 2] == (across, machine.intra)
    assert {mesh.shape: mesh.links for mesh in logical_meshes(machine, 4)} == {(2, 2): (machine.inter, machine.intra)}
    assert machine.level_between(0, 1) == 0 and machine.level_between(1, 2) == 1 and machine.level_between(3, 4) == 2
    assert "between pods of 2 hosts" in machine._repr_html_()


@pytest.mark.parametrize("fields", [{"hosts_per_pod": 3}, {"hosts_per_pod": 2}, {"across": Link(1e-5, 1e9)}])
def test_pods_are_equal_and_joined(fields):
    given = {"hosts_per_pod": 3, "across": Link(1e-5, 1e9)} if fields == {"hosts_per_pod": 3} else fields
    with pytest.raises(ClusterError, match="pods"):
        Cluster(4, 2, **given)


def test_there_is_one_object_of_each_sharding():
    """However it is asked for: to compare two is to compare addresses, in the process to which one is sent, too."""
    sharding = Sharding(((), ("x", "y")), ("z",))
    assert pickle.loads(pickle.dumps(sharding)) is sharding is copy.deepcopy(sharding)
    assert Sharding(partial=("z",), dims=((), ("x", "y"))) is sharding is dataclasses.replace(sharding)
    assert Sharding.replicated(2) is Sharding(((), ())) is Sharding(((), ()), ()) is not sharding
    assert Sharding(((), ("x", "y"))) != sharding


def test_meshes_over_hosts_and_a_part_of_each():
    """Their first axis takes the link of the level that it reaches over: within a pod that of hosts, else that between pods.

    It has two devices of each host, whose cards its rings share, at most at the rate between the two.
    """
    intra, inter, across = Link(1e-6, 1e11), Link(1e-5, 1e10), Link(1e-4, 1e9)
    cluster = Cluster(4, 4, device=Device(), intra=intra, inter=inter, hosts_per_pod=2, across=across)
    for num_devices, outer in ((8, inter), (16, across)):
        (mesh,) = finer_meshes(cluster, num_devices, wide=False)
        assert mesh.shape == (num_devices // 2, 2)
        assert mesh.links == (dataclasses.replace(outer, in_host=(2, 1e11)), intra)
        assert mesh.links[0].ring_bytes_per_second == 2 * outer.bytes_per_second
    slow = dataclasses.replace(cluster, intra=Link(1e-6, 5e9))
    assert finer_meshes(slow, 8, wide=False)[0].links[0].ring_bytes_per_second == 5e9
    assert finer_meshes(cluster, 4, wide=False) == []


@pytest.mark.parametrize(
    "spec, shapes",
    [
        ("64x8 h100", [(8, 8, 8), (4, 16, 8), (2, 32, 8), (64, 2, 4)]),
        ("4x8 h100", [(2, 2, 8), (4, 2, 4)]),
        ("1x8 h100", [(2, 2, 2)]),
    ],
)
def test_meshes_that_split_the_hosts_evenly_come_first(spec, shapes):
    cluster = Cluster.of(spec)
    found = [mesh.shape for mesh in finer_meshes(cluster, cluster.num_devices) if len(mesh.shape) > 2]
    assert found == shapes

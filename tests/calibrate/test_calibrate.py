"""Calibration: parameters are found again from times that were computed with them; and a short one on real devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import zlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import autopar
from autopar.calibrate.blocks import blocks
from autopar.calibrate.calibrate import host_memory_bytes
from autopar.calibrate.cases import all_cases, between_products, collective
from autopar.calibrate.fit import Fitted, Sample, as_measured, fit
from autopar.calibrate.timing import CALL_SECONDS, _enough_turns, dispatch, fresh_memory, shared_cores, undisturbed
from autopar.calibrate.words import profile_text
from autopar.cli import main
from autopar.cost.kernels import Product
from autopar.errors import ClusterError, ProfileError
from autopar.mesh import Achieved, Cluster, Device, Link, MachineProfile, find_device
from tests.small_mlp import make_batch, make_params, train_step

CPU = Device(
    "cpu",
    {"float32": 2e10, "bfloat16": 5e9},
    memory_bytes_per_second=6e9,
    achieved=Achieved(launch_seconds=3e-6, cores=1, tile=(256, 256), tile_seconds=4e-6, balance=30.0, convolution=1.3),
)
XLA_ON_CPUS = dataclasses.replace(
    CPU, achieved=dataclasses.replace(CPU.achieved, passes=6.0, update_passes=2.5, turning=12.0)
)
SHARED = Link(9e-6, 2.2e9, shared_memory=True)


@functools.cache
def cases_of(is_cpu):
    """All cases of 8 devices: their programs are traced."""
    return all_cases(8, is_cpu, blocks(is_cpu))


def samples_of(truth, is_cpu, noise=0.0):
    """Times as the cost model has them, with an error of so many parts; that of a case does not depend on other cases."""

    def error(case):
        return noise * np.random.default_rng(zlib.crc32(f"{case.kind} {case.text}".encode())).normal()

    return [Sample(case, truth.seconds(case) * math.exp(error(case))) for case in cases_of(is_cpu)]


@pytest.mark.parametrize("noise, near", [(0.0, 0.05), (0.1, 0.25)])
def test_parameters_are_found_again(noise, near):
    samples = samples_of(Fitted(XLA_ON_CPUS, SHARED), True, noise)
    start = Device("cpu", 1e10, achieved=Achieved(cores=1, tile=(256, 256), tile_seconds=1e-6, balance=20.0))
    found = fit(samples, start, Link(1e-5, 1e9, shared_memory=True))
    assert found.device.memory_bytes_per_second == pytest.approx(6e9, rel=near)
    assert found.device.peak_flops["float32"] == pytest.approx(2e10, rel=2 * near)
    if not noise:  # a launch is what is left of the smallest kernels' time
        assert found.device.achieved.launch_seconds == pytest.approx(3e-6, rel=0.15)
    assert found.device.achieved.passes == pytest.approx(6.0, rel=2 * near)
    assert found.device.achieved.update_passes == pytest.approx(2.5, rel=2 * near)
    assert found.device.achieved.turning == pytest.approx(12.0, rel=2 * near)
    assert found.link.latency_seconds == pytest.approx(9e-6, rel=near)
    assert found.link.bytes_per_second == pytest.approx(2.2e9, rel=near)
    assert found.link.shared_memory
    assert np.median([m.error for m in as_measured(samples, found)]) < near


def test_a_gpu_of_the_catalog_keeps_its_peaks():
    model = find_device("h100")
    reached = dataclasses.replace(model.device.achieved, product=0.6, memory=0.8, fused=0.3)
    truth = Fitted(dataclasses.replace(model.device, achieved=reached), Link(5e-6, 3e11, 2.74e11, True))
    found = fit(samples_of(truth, False), model.device, model.intra)
    assert found.device.peak_flops == model.device.peak_flops
    assert found.device.achieved.product == pytest.approx(0.6, rel=0.05)
    assert found.device.achieved.memory == pytest.approx(0.8, rel=0.05)
    assert found.device.achieved.fused == pytest.approx(0.3, rel=0.05)
    assert found.device.achieved.cores == model.device.achieved.cores
    assert found.link.bytes_per_second == pytest.approx(3e11, rel=0.1)


def test_other_programs_on_shared_cores_do_not_stretch_what_is_measured():
    """Kernels count by the cores they keep busy; where devices meet and cores rest, the clock counts, less the stretch."""
    kernels = [case for case in all_cases(8, True) if not case.collectives][:3]
    meeting = collective("all-reduce", 4096, 8)
    loaded: list[float] = []
    assert [undisturbed(case, 3e-3, 1e-3, loaded) for case in kernels] == [1e-3] * 3
    assert undisturbed(meeting, 6e-3, 1e-3, loaded) == pytest.approx(2e-3)
    assert undisturbed(meeting, 6e-3, 4e-3, loaded) == 4e-3
    quiet: list[float] = []
    assert undisturbed(kernels[0], 1e-3, 1e-3, quiet) == 1e-3
    assert undisturbed(meeting, 6e-3, 1e-3, quiet) == 6e-3


def test_few_products_do_not_make_tiles_longer_than_the_smallest_product():
    """Two large products, the smaller one slower for its FLOPs, leave the time of a tile open; the smallest says what it is
    at most."""
    kinds = {case.kind: case for case in reversed(cases_of(True))}
    large = [case for case in cases_of(True) if case.kind == "product"][:3]
    few = [
        Sample(kinds["launch"], 6e-6),
        *(Sample(c, s) for c, s in zip(large, (4.1e-3, 16.4e-3, 5.1e-3), strict=True)),
    ]
    start = dataclasses.replace(CPU, peak_flops=1e10)
    open_ended, found = fit(few[1:], start, SHARED), fit(few, start, SHARED)
    assert open_ended.device.achieved.tile_seconds > 2e-5
    assert found.device.achieved.tile_seconds <= 3e-6 * (1 + 1e-9)
    assert found.seconds(kinds["launch"]) <= 2 * 6e-6


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
def test_short_collectives_are_measured_between_products(kind):
    """One that needs what the products of all devices make; it is as long as the model's collective of these bytes."""
    case = between_products(kind, 4)
    assert case.text in {c.text for c in cases_of(True)} and len(case.kernels) > 2
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(case.turn, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    arrays = [np.ones(shape, np.float32) for shape in case.shapes]
    assert run(*arrays).shape == case.shapes[0]
    assert kind in jax.jit(run).lower(*arrays).compile().as_text()


@pytest.mark.parametrize("is_cpu", [True, False])
def test_time_for_two_of_each_collective_tells_latency_and_rate_apart(is_cpu):
    """Where time runs out, a long and a short one were measured, and not two long ones in different groups."""
    truth = Fitted(CPU, SHARED) if is_cpu else Fitted(find_device("h100").device, Link(3e-6, 3e11))
    samples = samples_of(truth, is_cpu)
    sent = [s for s in samples if s.case.collectives]
    kinds = {kind: [s for s in sent if s.case.kind == kind][:2] for kind in dict.fromkeys(s.case.kind for s in sent)}
    few = [*(s for s in samples if not s.case.collectives), *(s for own in kinds.values() for s in own)]
    found = fit(few, truth.device, Link(1e-5, 1e10, shared_memory=is_cpu)).link
    assert found.latency_seconds == pytest.approx(truth.link.latency_seconds, rel=0.1)
    assert found.bytes_per_second == pytest.approx(truth.link.bytes_per_second, rel=0.1)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_little_time_measures_the_rate_of_products(is_cpu):
    """Within the first case of every kind is a product that takes time, not one that is only launched."""
    kinds = [case.kind for case in cases_of(is_cpu)]
    assert kinds.index("product") < kinds.index("scatter") and kinds.index("product") < kinds.index("launch")


def test_memory_is_new_where_the_system_gave_pages(monkeypatch):
    """A size counts as kept where a program took few new pages, however long it took; the rate is that of the others."""
    taken = {100: (1.0, 20.0), 200: (2.0, 0.0), 400: (4.0, 400.0), 800: (4.0, 800.0)}
    timing = sys.modules["autopar.calibrate.timing"]  # `autopar.calibrate` is the function of that name
    sought: list[int] = []

    def of_fresh(devices, size):
        sought.append(size)
        return taken.get(size, (1.0, 0.0 if size <= 320 else float(size)))

    monkeypatch.setattr(timing, "_of_fresh", of_fresh)
    found = fresh_memory((), (100, 200, 400, 800))
    assert 300 <= found["kept_bytes"] <= 320 and found["fresh_bytes_per_second"] == 200.0
    assert len(sought) == 4 + 3, "the rates of these are not asked for"
    assert fresh_memory((), (100, 200)) == {"kept_bytes": 200.0, "fresh_bytes_per_second": math.inf}
    assert fresh_memory((), (400, 800)) == {"kept_bytes": 0.0, "fresh_bytes_per_second": 200.0}


def test_a_program_costs_what_it_does_among_others(monkeypatch):
    """Where cores rest between programs, a program costs more than one that runs alone; what arrays cost is as before."""
    timing = sys.modules["autopar.calibrate.timing"]
    monkeypatch.setattr(timing, "_started", lambda devices, count: 90e-6 + 2 * count * 5e-6)
    for among, expected in ((400e-6, 390e-6), (50e-6, 90e-6)):
        monkeypatch.setattr(timing, "_among_others", lambda devices, among=among: among)
        found = dispatch((), among_others=True)
        assert found == pytest.approx({"dispatch_seconds": expected, "array_seconds": 5e-6})
    assert dispatch(())["dispatch_seconds"] == pytest.approx(90e-6)


def test_devices_share_cores_on_cpus_only():
    assert 1 <= shared_cores(jax.devices()) <= len(jax.devices())
    assert shared_cores([SimpleNamespace(platform="gpu")] * 8) == 0


def test_devices_share_the_memory_of_their_host():
    assert 4 * host_memory_bytes(4) == host_memory_bytes(1) > 2**28


def test_what_was_not_measured_stays():
    model = find_device("h100")
    only = [s for s in samples_of(Fitted(model.device, model.intra), False) if s.case.kind == "pass"]
    found = fit(only, model.device, model.intra)
    assert found.link is None
    assert found.device.achieved.product == model.device.achieved.product


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"])
def test_a_collective_of_few_bytes_has_elements(kind):
    case = collective(kind, 4, 8)
    assert min(map(min, case.shapes)) >= 1


def test_few_turns_are_measured_where_there_is_no_time():
    """Turns that take no longer than the first, which something else disturbed, do not say that thousands are needed."""
    assert _enough_turns(lambda count: (0.3, 0.3), deadline=0.0) == 2
    enough = _enough_turns(lambda count: (0.001 * count,) * 2, deadline=math.inf)
    assert 0.001 * enough == pytest.approx(CALL_SECONDS, rel=0.2)


@pytest.fixture(scope="module")
def profile():
    return autopar.calibrate(seconds=4)


def test_this_machine(profile, tmp_path):
    """Within a few seconds, on 8 virtual devices: a profile that is written, read, and planned with."""
    assert (profile.platform, profile.num_devices) == ("cpu", 8)
    assert profile.device.achieved.host_cores >= 1 and profile.device.achieved.dispatch_seconds > 0
    assert profile.device.achieved.array_seconds > 0
    assert 0 < profile.device.achieved.copy_seconds < 1e-2
    assert profile.intra is None or profile.intra.shared_memory
    assert all(m.seconds > 0 and m.fitted_seconds > 0 for m in profile.measured)
    assert {"host", "jax", "cores"} <= set(profile.machine)
    profile.save(tmp_path / "machine.json")
    assert MachineProfile.load(tmp_path / "machine.json") == profile
    params, batch = make_params(2, 16), make_batch(16, 16)
    step = autopar.parallelize(train_step, cluster=Cluster.local(profile=profile), method=autopar.DataParallel())
    (_, loss), (_, expected) = step(params, batch), jax.jit(train_step)(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_as_text(profile):
    text = profile_text(profile)
    assert "8 cpu, measured" in text and "Median error of what was fitted" in text
    assert "between hosts   not measured: the catalog's" in text


def test_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "machine.json"
    with pytest.warns(
        UserWarning, match=r"1 seconds were enough for \d+ .* Not measured at all, .*all-to-all.* more seconds"
    ):
        assert main(["calibrate", "--devices", "2", "--seconds", "1", "--save", str(path)]) == 0
    assert f'Cluster.local(profile="{path}")' in capsys.readouterr().out
    assert MachineProfile.load(path).num_devices == 2
    assert main(["calibrate", "--devices", "0"]) == 2
    assert main(["calibrate", "--devices", "99"]) == 2
    assert "there are not so many devices" in capsys.readouterr().err


def test_no_time_and_no_devices():
    with pytest.raises(ProfileError, match="`seconds` must be a number, more than 0"):
        autopar.calibrate(jax.devices()[:1], seconds=0)
    with pytest.raises(ClusterError, match="one host is calibrated at a time"):
        autopar.calibrate([])


def test_cases_run_in_the_forms_of_steps():
    """What is fitted to weight gradients and whole layers is measured as programs of steps compute it on CPUs."""
    cases = [c for c in cases_of(True) if c.kind in ("turned", "layer")]
    assert len({c.kind for c in cases}) == 2
    for case in cases:
        arrays = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
        made = jax.make_jaxpr(case.turn)(*arrays)
        assert [v.aval.shape for v in made.jaxpr.outvars] == [case.shapes[0]]
        assert "optimization_barrier" in str(made)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_convolution_is_measured_with_its_gradients(is_cpu):
    """That of the filter sums over samples, which lie before the channels: it is priced as such a product, the others not."""
    first = next(case for case in cases_of(is_cpu) if case.kind == "convolution")
    found = [kernel for kernel in first.kernels if isinstance(kernel, Product)]
    assert len(found) == 3 and all(kernel.is_convolution for kernel in found)
    assert len({kernel.rows * kernel.columns * kernel.depth for kernel in found}) == 1
    assert [kernel.depth for kernel in found if kernel.is_turned] == [math.prod(first.shapes[0][:3])]

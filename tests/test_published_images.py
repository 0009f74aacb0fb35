"""Convolutional nets in tables of published runs: what their names say, and their steps."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from published_images import gradient_work  # noqa: E402
from published_machines import machine_of  # noqa: E402
from published_nets import mesh_of, net_of  # noqa: E402
from published_runs import DATA, read_runs  # noqa: E402
from published_steps import predict  # noqa: E402


@pytest.mark.parametrize(
    "model, millions, gigaflops",
    [("ResNet-50", 25.5, 8.2), ("resnet152", 60.2, 23.1), ("WRN-50-2", 68.9, 22.8), ("Wide-ResNet-50", 68.9, 22.8),
     # As Alpa's artifact states them, from its FLOP/s.
     ("Wide-ResNet-50 250M (base channels 160, width 2, 224x224)", 254.1, 79.9),
     ("Wide-ResNet-50 6.8B (base channels 320, width 16, 224x224)", 6727.7, 2103)],
)  # fmt: skip
def test_sizes_follow_from_the_name(model, millions, gigaflops):
    net = net_of({"model": model})
    assert net is not None
    assert net.params() == pytest.approx(millions * 1e6, rel=0.01)
    assert net.flops() == pytest.approx(gigaflops * 1e9, rel=0.06)


def test_other_models_are_no_nets():
    assert all(net_of({"model": name}) is None for name in ("GPT-2", "ResNeXt-101", "ResNet-18", "ViT-L", ""))


def test_what_sharded_a_net():
    row = {"framework": "Alpa (auto_sharding)", "notes": "logical mesh (4, 2)"}
    assert mesh_of(row, 8) == (4, 2) and mesh_of(row | {"notes": ""}, 8) == () and mesh_of(row, 1) is None
    assert mesh_of({"tp": "1", "pp": "1"}, 8) is None
    for cells in ({"pp": "2"}, {"framework": "Alpa (heuristic)"}, {"framework": "Alpa (auto)", "notes": "3 stages"}):
        with pytest.raises(ValueError):
            mesh_of(row | cells, 8)


def test_steps_of_a_net():
    """Twice the microbatches take twice as long, gradients are sent, and libraries normalize in one kernel as compilers do."""
    run = next(run for run in read_runs(DATA)[0] if run.net and run.mesh is None and run.devices == 4)
    assert run.net is not None
    small = replace(
        run, net=replace(run.net, depths=(1, 1, 1, 1), base=32, width=64, pixels=64), batch=32, microbatch=8
    )
    one, two = (predict(replace(small, batch=batch)) for batch in (32, 64))
    assert two.compute == pytest.approx(2 * one.compute) and 0 < one.data == two.data
    assert predict(replace(small, compiled=False)).compute == one.compute
    assert predict(replace(small, microbatch=4)).needed_bytes < one.needed_bytes
    work = gradient_work(small.net, 8, "float32", machine_of(small).device, machine_of(small).intra)
    assert work.kernels["backward"] and work.kept_bytes > 0

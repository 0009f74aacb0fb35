"""What the hosts of published runs do: launch kernels ahead of the device, begin anew with a microbatch, send and wait."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

from published_frameworks import ADDED_BYTES, WIDE_ADDED_BYTES, gradient_bytes  # noqa: E402
from published_machines import machine_of  # noqa: E402
from published_memory import state_bytes  # noqa: E402
from published_sending import border_seconds, data_seconds  # noqa: E402
from published_steps import compose, predict  # noqa: E402
from published_table import read_row  # noqa: E402, F401
from published_work import PHASES, layer_of, sizes_of, work_of  # noqa: E402

from autopar.mesh import LogicalMesh  # noqa: E402

STAGED = {"layers": "8", "pp": "4", "dp": "2", "zero": "0", "recompute": "none", "precision": "bf16"}


def test_what_the_host_is_late_for_hides_collectives(read):
    """A device that waits for launches communicates meanwhile, if more slowly, too; one that no host keeps waiting does not."""
    run = read(framework="PyTorch", tp="8", dp="1", global_batch="1", heads="8", attention="unfused", recompute="none")
    machine = machine_of(run)
    layer, ends = layer_of(run, machine, machine.intra), work_of("ends", sizes_of(run), machine.device, machine.intra)
    fast, slow = (
        LogicalMesh((8,), links=(replace(machine.intra, latency_seconds=times * machine.intra.latency_seconds),))
        for times in (1, 1.5)
    )
    assert layer.communication(PHASES, fast) < layer.launching(PHASES, run) - layer.compute(PHASES, machine.device, run)
    late, alone = (
        [compose(each, machine, mesh, layer, ends).seconds for mesh in (fast, slow)]
        for each in (run, replace(run, compiled=True))
    )
    assert late[0] == pytest.approx(late[1]) and alone[0] < 0.97 * alone[1]
    assert layer.launching(PHASES, replace(run, compiled=True)) == 0


def test_a_host_catches_up_while_the_device_is_busy_with_the_loss(read):
    """It is late with the layers of each microbatch at first, and ahead when gradients go back, if logits take long enough."""
    cells = {"framework": "nanotron", "dp": "8", "zero": "0", "recompute": "none"}
    small, large = (read(**cells, vocab=words, seq=tokens) for words, tokens in (("1k", "512"), ("512k", "4096")))
    machine = machine_of(large)
    layer = layer_of(large, machine, machine.intra)
    late = layer.launching(PHASES[:2], large) - layer.compute(PHASES[:2], machine.device, large)
    behind = layer.compute(PHASES, machine.device, large) + late

    def of_a_layer(run):
        more = replace(run, layers=run.layers + 8)
        return (predict(more).compute - predict(run).compute) / 8 / run.count

    assert 0 < late < 0.6 * layer.launching(PHASES, large)
    assert of_a_layer(small) == pytest.approx(layer.launching(PHASES, large))
    assert of_a_layer(large) == pytest.approx(behind, rel=0.02)


def test_gradients_that_are_summed_in_32_bits_are_reduced_so(read):
    """nanotron adds them by kernels of their own, the first ones to zeros, and sends the sums; buckets hold them once more."""
    wide, narrow = (read(framework=name, zero="0", dp="8") for name in ("nanotron", "Megatron-LM"))
    assert (gradient_bytes(wide), gradient_bytes(narrow)) == (WIDE_ADDED_BYTES, ADDED_BYTES)
    assert gradient_bytes(replace(wide, batch=wide.data)) == WIDE_ADDED_BYTES
    took = [data_seconds(run, machine_of(run), 1e9, 1, 0.0, 0.0)[0] for run in (wide, narrow)]
    assert took[0] == pytest.approx(2 * took[1], rel=0.05)
    assert (state_bytes(wide), state_bytes(read(framework="nanotron", gpus="1", dp="1"))) == (2 + 6 + 12, 2 + 4 + 12)
    behind = data_seconds(wide, machine_of(wide), 1e9, 1, 1.0, 3.0)[0]
    assert 0 < behind < 0.3 * took[0]


def test_a_network_reaches_what_the_same_job_measured(read):
    """Among replicas on all hosts, and from stage to stage; a GPU has its part of its host's."""
    cells = {
        "framework": "nanotron",
        "zero": "0",
        "gpus": "32",
        "dp": "32",
        "global_batch": "32",
        "interconnect": "3.2 Tb/s EFA",
    }
    notes = "in the same job all GPUs reached 80 GB/s in an all-reduce"
    slow, usual = read(**cells, notes=notes), read(**cells)
    assert machine_of(slow).together == 80e9 / 8 < machine_of(usual).inter.bytes_per_second
    took = [data_seconds(run, machine_of(run), 1e9, 1, 0.0, 0.0)[0] for run in (slow, usual)]
    assert took[0] > 2 * took[1]
    cells |= {"framework": "Megatron-LM", "layers": "8", "pp": "4", "dp": "8"}
    slow, usual = read(**cells, notes=notes), read(**cells)
    assert border_seconds(slow, machine_of(slow), True) > border_seconds(usual, machine_of(usual), True)


def test_stages_that_send_one_after_the_other_wait_longer(read):
    """Three messages for each of three arrays, and the host reads what they are."""
    apart, at_once = (read(**STAGED, framework=name) for name in ("nanotron", "Megatron-LM"))
    machine = machine_of(apart)
    assert border_seconds(apart, machine, False) > 5 * border_seconds(at_once, machine, False)


def test_each_of_two_stages_has_one_border(read):
    two, four = read(**STAGED | {"pp": "2", "dp": "4"}), read(**STAGED)
    machine = machine_of(two)
    assert border_seconds(two, machine, False) == border_seconds(two, machine, True)
    assert border_seconds(four, machine, False) == 2 * border_seconds(four, machine, True)

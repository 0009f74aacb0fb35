"""What rows of published runs do not say: what frameworks do then, and what machines of many spellings have."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

import published_sending  # noqa: E402
from published_cells import recomputed_part, zero_of  # noqa: E402
from published_choices import alternatives, settle  # noqa: E402
from published_frameworks import (  # noqa: E402
    ADDED_BYTES,
    FSDP_BYTES,
    LOSS_BYTES,
    NARROW_FSDP_BYTES,
    eager_seconds,
    expert_launches,
    gradient_bytes,
)
from published_machines import _network_rate, machine_of, model_of  # noqa: E402
from published_memory import ends_bytes, state_bytes, wide_bytes  # noqa: E402
from published_steps import Prediction, data_seconds, loss_seconds, params_of, predict  # noqa: E402
from published_table import read_row  # noqa: E402, F401
from published_work import PHASES, Work  # noqa: E402

from autopar.cost.kernels import MemoryPass, Product, kernel_seconds  # noqa: E402


@pytest.mark.parametrize("schedule, chunks", [("1F1B", 1), ("interleaved 1F1B", 2)])
def test_torchtitan_has_as_many_microbatches_as_stages(read, schedule, chunks):
    """And two stages on each device where they are interleaved; others tune both."""
    cells = {
        "layers": "8",
        "pp": "2",
        "dp": "4",
        "microbatch": "",
        "global_batch": "64",
        "schedule": schedule,
        "zero": "3",
    }
    taken = list(alternatives(read(**cells, framework="torchtitan")))
    assert {(run.microbatch, run.count, run.chunks) for run in taken} == {(8, 2, chunks)}
    assert len({run.microbatch for run in alternatives(read(**cells, framework="Megatron-LM"))}) > 1


def test_stages_of_torchtitan_gather_once(read):
    """What FSDP gathered stays until the last microbatch, and so do gradients: as much is sent as with ZeRO-1."""
    cells = {"layers": "8", "pp": "2", "dp": "4", "zero": "3"}
    staged, alone = (
        read(**cells, framework="torchtitan"),
        read(**cells | {"pp": "1", "dp": "8"}, framework="torchtitan"),
    )
    assert (staged.zero, staged.hides_gradients) == (1, True) and (alone.zero, alone.hides_gradients) == (3, False)
    assert read(**cells, framework="PyTorch FSDP").zero == 3


def test_an_interleaved_schedule_has_chunks_whatever_its_column_says(read):
    cells = {"layers": "8", "pp": "2", "dp": "4", "vpp": "1"}
    assert dict(read(**cells, schedule="interleaved 1F1B").unstated)["chunks"] == (2, 4)
    assert (
        read(**cells, schedule="1F1B").chunks == 1 and read(**cells | {"vpp": "2"}, schedule="interleaved").chunks == 2
    )


def test_the_last_stage_has_a_head_and_its_logits(read):
    run = read(
        layers="4", pp="2", dp="4", framework="Megatron-LM", recompute="none", zero="0", vocab="512k", microbatch="2"
    )
    first, middle, last = (params_of(replace(run, pipeline=3), 2, stage) for stage in range(3))
    assert first - middle == last - middle == 512000 * 256
    other = predict(replace(run, vocabulary=1024)).needed_bytes
    assert predict(run).needed_bytes - other > 16 * 511000 * 256 + 8 * 511000 * 2 * 512


@pytest.mark.parametrize(
    "cells, part",
    [({"recompute": "full"}, 1), ({"recompute": "selective layer"}, 0.5), ({"recompute": "every other layer"}, 0.5),
     ({"recompute": "selective", "framework": "torchtitan"}, 0.5), ({"recompute": "selective"}, 1),
     ({"recompute": "8 of 32 layers"}, 0.25), ({"recompute": "selective AC (1/3)"}, 1 / 3), ({"recompute": "block, 40 %"}, 0.4),
     ({"recompute": "none"}, 1)],
)  # fmt: skip
def test_a_part_of_the_layers_is_made_again(cells, part):
    assert recomputed_part(cells) == pytest.approx(part)


def test_seconds_of_a_part_are_between_none_and_all(read):
    def told(run):
        return Prediction(*[{"none": 3.0, "full": 4.0}[run.recompute]] * 9)

    assert settle(read(recompute="every second layer"), told)[1].seconds == 3.5


@pytest.mark.parametrize(
    "cells, expected",
    [({"zero": "ZeRO-1 over 8"}, (1, 8)), ({"zero": "zero1=4"}, (1, 4)), ({"zero": "HSDP"}, (3, 8)),
     ({"zero": "FSDP within a node"}, (3, 8)), ({"zero": "1"}, (1, 64)), ({"zero": "", "framework": "NeMo 24.07"}, (1, 64)),
     ({"zero": "", "framework": "PyTorch FSDP (Composer)"}, (3, 64)), ({"zero": "", "framework": "Megatron-LM"}, (0, 1)),
     ({"zero": "", "framework": "DeepSpeed ZeRO-3"}, (3, 64)), ({"zero": "no", "framework": "LitGPT FSDP"}, (0, 1))],
)  # fmt: skip
def test_over_how_many_the_state_is_split(cells, expected):
    assert zero_of(cells, 64) == expected


def test_who_has_the_same_part_of_the_state_adds_it_up(read):
    """Parameters that are split within hosts are not gathered between them, gradients still cross.

    That is faster where links between hosts are slow, as published of clouds (Zhang et al., "MiCS", VLDB 2022). With a card for
    each device, a ring through all hosts sends within and between them at the same time; two of three bytes still cross.
    """
    cells = {"gpus": "64", "dp": "64", "global_batch": "64", "gpu_type": "V100", "framework": "JAX"}
    apart, whole = (read(**cells, zero=text) for text in ("HSDP", "FSDP"))
    machine = machine_of(whole)

    def sent(run):
        return sum(data_seconds(run, machine, 1e9, 2, 1e-9, 2e-9))

    assert 0.4 * sent(whole) < sent(apart) < sent(whole)
    assert sent(replace(whole, zero=1)) == pytest.approx(sent(replace(whole, zero=0)), rel=0.2)


def test_first_stage_of_deepspeed_adds_up_all_gradients(read):
    """Everywhere, and gathers what was updated: three rounds where others make two."""
    first, second, other = (
        read(zero=stage, framework=name, precision="fp16", gpu_type="A100")
        for name, stage in (("Megatron-DeepSpeed", "1"), ("Megatron-DeepSpeed", "2"), ("Megatron-LM", "1"))
    )
    took = [data_seconds(run, machine_of(run), 1e10, 1, 0.0, 0.0)[0] for run in (first, second, other)]
    assert took[0] == pytest.approx(1.5 * took[2], rel=0.1) and took[1] == took[2]


def test_batches_in_tokens_are_whole_samples_of_every_replica(read):
    cells = {"seq": "2048", "gpus": "64", "dp": "64", "microbatch": ""}
    assert read(**cells, global_batch="4.0M tokens").batch == 31 * 64
    assert read(**cells, global_batch="4M tokens").batch == 2048  # people mean 2^22
    assert read(**cells, global_batch="4194304").batch == 2048
    assert read(**cells, global_batch="2048").batch == 2048


def test_runs_without_a_compiler_say_so(read):
    """torchtitan compiles where it is told to, which 8 bits and collectives behind products need."""
    titan = {"framework": "torchtitan"}
    assert read(**titan).compiled and not read(**titan, notes="eager, FSDP").compiled
    assert not read(**titan, notes="FSDP").compiled and read(**titan, notes="FSDP + torch.compile").compiled
    assert not any(
        read(**titan, notes=f"FSDP, {text}").compiled for text in ("compile off", "compile: False", "compile time 3 s")
    )
    assert read(**titan, notes="AsyncTP").compiled and read(**titan, notes="vanilla TP").compiled
    assert read(**titan, notes="FSDP", precision="fp8 linear").compiled
    assert not read(framework="PyTorch", notes="no torch.compile").compiled
    assert read(framework="PyTorch", notes="torch.compile").compiled


def test_experts_are_multiplied_one_by_one_before_containers_did_it_at_once(read):
    kernels = (Product(4, 512, 256, 256, 1e6, ("float8_e4m3fn",) * 2),)
    cells = {
        "model": "Mixtral 8x1B",
        "ep": "2",
        "framework": "Megatron-Bridge",
        "precision": "MXFP8",
        "gpu_type": "GB200",
    }
    times = {
        (name, device): expert_launches(read(**cells | {"source": f"{name} container", "gpu_type": device}), kernels)
        for name in ("26.04", "26.06.01")
        for device in ("GB200", "H100 80GB")
    }
    assert [key for key, seconds in times.items() if seconds == 0] == [("26.06.01", "GB200")]


@pytest.mark.parametrize(
    "name, device",
    [("V100-32GB NVLink", "V100-32GB"), ("DGX-1 V100", "V100-16GB"), ("p4d.24xlarge", "A100-40GB"), ("a3-megagpu-8g", "H100"),
     ("MI250X GCDs", "MI250X"), ("TPU v3 cores", "TPU v3"), ("A100s 80GB", "A100-80GB"), ("A10G 24 GB", "A10G"),
     ("p5.48xlarge (H100)", "H100"), ("Hopper H100", "H100")],
)  # fmt: skip
def test_devices_among_other_words(read, name, device):
    assert model_of(read(gpu_type=name)).device.name == device


@pytest.mark.parametrize(
    "text, gigabits",
    [("8x400 Gb/s IB", 400), ("3.2 Tb/s EFA per node", 400), ("1,600 Gbit/s", 200), ("4x HDR 200 Gb/s", 100),
     ("8x HDR (200Gb/s)", 200), ("NVLink 600 GB/s; 8 NICs of 200 Gb/s", 200), ("400 Gb/s RDMA per GPU", 400),
     ("8x HDR InfiniBand (200 Gb/s)", 200), ("4x Slingshot 200 Gb/s", 100), ("8 Mellanox HDR 200G", 200), ("8x400G", 400),
     ("Slingshot-11 (4 NICs x 25 GB/s)", 100), ("50 GB/s per GPU", 400), ("RoCE 4x200", 100), ("8 HDR HCAs", 200),
     ("3200 Gbps EFA", 400), ("NVIDIA Quantum-2 400Gb/s InfiniBand", 50),
     ("100 Gigabit Ethernet", 12.5), ("8 x NDR", 400), ("NVLink 900 GB/s, 400 GB/s IB", 400), ("NVLink; IB", None),
     ("NVLink 4 links; 4 Omni-Path 100 Gb/s per node", 50)],
)  # fmt: skip
def test_networks_of_many_spellings(text, gigabits):
    assert _network_rate(text, 8) == (gigabits and pytest.approx(gigabits / 8 * 1e9))


def test_a_card_of_the_usual_rate_is_that_of_one_device(read):
    """Who says no number of cards means each one's rate, unless a host is said to have it. Links of a torus are no cards."""
    run = read(gpus="64", dp="64", global_batch="64")
    usual = machine_of(run).inter
    assert machine_of(replace(run, network="400 Gb/s NDR InfiniBand")).inter == usual
    less = machine_of(replace(run, network="400 Gb/s InfiniBand per node")).inter.bytes_per_second
    assert less == pytest.approx(usual.bytes_per_second / 8)
    pod = replace(run, device="TPU v5p")
    assert machine_of(replace(pod, network="ICI 4800 Gbps")) == machine_of(pod)


def test_fsdp_copies_what_it_gathers(read):
    """With every microbatch; Megatron, which has buffers for it, does not. torchtitan's gradients are reduced in 32 bits."""
    cells = {"zero": "3", "microbatch": "2"}
    names = ("PyTorch FSDP", "Megatron-LM", "JAX", "TorchTitan")
    runs = {name: read(**cells, framework=name) for name in names}
    assert {name: gradient_bytes(run) for name, run in runs.items()} == {
        "PyTorch FSDP": NARROW_FSDP_BYTES,
        "Megatron-LM": 0,
        "JAX": 0,
        "TorchTitan": FSDP_BYTES,
    }
    # In several microbatches each device adds up its part only.
    assert gradient_bytes(read(zero="3", framework="PyTorch FSDP")) == NARROW_FSDP_BYTES + ADDED_BYTES / 8
    assert gradient_bytes(read(zero="1", framework="PyTorch")) == ADDED_BYTES
    seconds = {name: data_seconds(run, machine_of(run), 1e9, 1, 0.0, 0.0)[1] for name, run in runs.items()}
    assert seconds["PyTorch FSDP"] == seconds["Megatron-LM"]
    assert seconds["Megatron-LM"] < seconds["TorchTitan"] < 4 / 3 * seconds["Megatron-LM"] * 1.01


def test_third_stage_of_deepspeed_gathers_array_by_array(read, monkeypatch):
    """Ahead only where not as much is there as may be; what is used again after as much is gathered a third time."""
    run = read(gpus="64", dp="64", global_batch="64", zero="3", recompute="full", framework="DeepSpeed")

    def waiting(most, forward):
        monkeypatch.setattr(published_sending, "LIVE_PARAMETERS", most)
        return data_seconds(run, machine_of(run), 3e10, 1, forward, 4 * forward)[1]

    # Long products hide what is gathered ahead.
    assert waiting(1, 1e3) > 3 * waiting(math.inf, 1e3)
    # Without any, nothing is hidden: a layer is gathered twice, and all but its last array three times.
    last = run.hidden / (run.hidden * (2 + run.gated) + run.attention_weights / run.width)
    assert waiting(1, 0.0) == pytest.approx((4 - last) / 3 * waiting(math.inf, 0.0), rel=0.02)


def test_megatron_computes_the_loss_pass_by_pass(read):
    """In 32 bits, of each device's part of the vocabulary; what the plan has of it does not count twice."""
    sizes = {"gpus": "8", "dp": "4", "tp": "2", "microbatch": "2", "seq": "2048", "vocab": "51200"}
    run, bridge, jax = (read(**sizes, framework=name) for name in ("Megatron-LM", "Megatron-Bridge", "JAX"))
    device = machine_of(run).device
    none, some = (
        Work({phase: kernels for phase in PHASES}, {}, kept_bytes=0, working_bytes=0, eager_bytes=0)
        for kernels in ((), (MemoryPass(1e8), Product(1, 4096, 25600, 4096, 1e8, ("bfloat16", "bfloat16"))))
    )
    passes = kernel_seconds(MemoryPass(LOSS_BYTES * 2 * 2048 * 25600), device)
    assert loss_seconds(run, none, device) == passes
    assert loss_seconds(run, some, device) == pytest.approx(passes - 3 * eager_seconds(MemoryPass(1e8), device))
    assert loss_seconds(bridge, none, device) == loss_seconds(jax, none, device) == 0
    assert predict(replace(run, framework="Megatron-LM")).compute > predict(replace(run, framework="Megatron")).compute


def test_cards_send_over_pcie(read):
    """But for those whose row says that bridges join them."""
    card, bridged = (
        machine_of(replace(read(gpu_type="A100 PCIe 80GB"), network=text)) for text in ("", "NVLink bridges")
    )
    assert card.intra.bytes_per_second < 0.2 * bridged.intra.bytes_per_second


def test_small_heads_take_as_many_exponentials(read):
    """Forward 497 TFLOP/s instead of 648 on H100 (FlashAttention-3, fig. 5), and 0.77 in both passes."""
    sizes = {"framework": "PyTorch", "hidden": "1024"}

    def reached(heads, device="H100"):
        return machine_of(read(**sizes, heads=heads, gpu_type=device)).device.achieved.fused

    assert reached("16") / reached("8") == pytest.approx(0.79, abs=0.04)
    assert (
        reached("16", "A100") / reached("8", "A100")
        > reached("16") / reached("8")
        > reached("16", "B200") / reached("8", "B200")
    )
    assert reached("4") == reached("8") and reached("16", "TPU v5e") == reached("8", "TPU v5e")


def test_attention_made_for_older_devices_is_slower_on_newer_ones(read):
    def reached(kind, device):
        return machine_of(read(framework="PyTorch", attention=kind, gpu_type=device)).device.achieved.fused

    on_hopper, on_ampere = (
        [reached(kind, device) for kind in ("flash v1", "flash v2", "flash v3")] for device in ("H100", "A100")
    )
    assert on_hopper == sorted(on_hopper) and on_hopper[1] < 0.6 * on_hopper[2]
    assert on_ampere[0] < on_ampere[1] == on_ampere[2]


def test_products_with_a_scale_for_each_row_are_slower(read):
    rows, tensors = (machine_of(read(precision=f"fp8 {kind}")).device.achieved for kind in ("rowwise", "tensorwise"))
    assert rows.narrow < tensors.narrow and rows.product == tensors.product
    assert not read(precision="bf16").by_rows


def test_fp16_on_ampere_came_before_fused_attention(read):
    kernels = {(name, device): read(attention="", precision=name, gpu_type=device).kernel
               for name in ("fp16", "bf16") for device in ("A100", "H100", "V100")}  # fmt: skip
    assert [key for key, kernel in kernels.items() if kernel == 0] == [
        ("fp16", "A100"),
        ("fp16", "V100"),
        ("bf16", "V100"),
    ]
    assert predict(read(attention="", precision="fp16", gpu_type="A100")).seconds > 0


def test_stages_of_torchtitan_keep_gradients_in_the_width_they_are_reduced_in(read):
    """Weights and gradients whole, of 2 and 4 bytes, and the rest split; alone, everything is."""
    cells = {"layers": "8", "zero": "3", "framework": "torchtitan"}
    assert state_bytes(read(**cells, pp="2", dp="4")) == 2 + 4 + 12 / 4
    assert state_bytes(read(**cells, pp="1", dp="8")) == (2 + 2 + 12) / 8


def test_a_loss_over_a_split_vocabulary_is_made_of_four_tensors_of_its_logits(read):
    """In torchtitan; elsewhere it holds what the plan of embedding and loss says."""
    ends = Work({}, {}, kept_bytes=1, working_bytes=2, eager_bytes=4)
    assert [ends_bytes(read(framework=name), 1, ends) for name in ("OneFlow", "PyTorch")] == [3, 5]
    once = {"framework": "OneFlow", "precision": "fp16", "zero": "0", "microbatch": "2"}
    assert state_bytes(read(**once)) == 18
    assert state_bytes(read(**once, global_batch="32")) == 18 + 4  # of microbatches, added up
    cells = {"tp": "2", "dp": "4", "zero": "1"}
    assert ends_bytes(read(**cells, framework="torchtitan"), 512, ends) == 512 * (2 * 256 + 16 * 1000 / 2)
    assert (
        ends_bytes(read(framework="torchtitan"), 512, ends)
        == ends_bytes(read(**cells, framework="NeMo"), 512, ends)
        == 5
    )


def test_operands_of_8_bits_are_kept_in_16_by_pytorch(read):
    """So that its memory is that of 16 bits; Transformer Engine keeps what it multiplies."""
    cells = {"recompute": "none", "microbatch": "2"}
    narrow, wide = (read(**cells, framework="torchtitan", precision=name) for name in ("fp8", "bf16"))
    assert wide_bytes(narrow, 1024) == 1024 * (3 * 256 + 512) and wide_bytes(wide, 1024) == 0
    assert wide_bytes(read(**cells, precision="fp8"), 1024) == 0  # a program of XLA's
    kept = [predict(run).memory_bytes for run in (narrow, wide)]
    assert 0.92 * kept[1] < kept[0] <= kept[1]


def test_rings_through_several_hosts_use_all_of_their_cards(read):
    """One tensor-parallel group over two hosts has the card of a host to itself."""
    cells = {"gpus": "16", "dp": "1", "tp": "16", "heads": "16", "hidden": "1024", "framework": "Megatron-LM"}
    machine = machine_of(replace(read(**cells), network="100 Gb/s IB per node"))
    assert machine.link_of(8) == machine.intra
    assert machine.link_of(16).ring_bytes_per_second == pytest.approx(8 * machine.inter.bytes_per_second)
    fast = machine_of(replace(read(**cells), network="8x400 Gb/s IB"))
    assert fast.link_of(16).ring_bytes_per_second == fast.intra.bytes_per_second
    pod = machine_of(replace(read(**cells), device="TPU v5p"))
    assert pod.link_of(16).ring_bytes_per_second == pod.inter.bytes_per_second  # no faster than its ring


def test_maxtext_splits_what_lies_between_layers(read):
    """So that a device keeps a part of it only."""
    cells = {"dp": "4", "tp": "2", "gpu_type": "TPU v5p", "microbatch": "4", "recompute": "full"}
    split, whole = (read(**cells, framework=name) for name in ("MaxText (JAX)", "Pax (JAX)"))
    assert split.sequence and not whole.sequence
    assert predict(split).memory_bytes < predict(whole).memory_bytes

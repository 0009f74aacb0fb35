"""Cells of published runs as strangers write them: numbers, units and words that say the same in other ways."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

from published_cells import (  # noqa: E402
    attention_of,
    batch_of,
    degree_of,
    gib_of,
    number_of,
    rate_of,
    recompute_of,
    seconds_of,
    teraflops_of,
    usual_attention,
    zero_of,
)
from published_choices import alternatives, settle  # noqa: E402
from published_names import is_gated  # noqa: E402
from published_steps import Prediction  # noqa: E402
from published_table import read_row  # noqa: E402, F401


def test_counts_of_servers_and_powers():
    numbers = {"16 nodes x 8": 128, "8 nodes of 8 GPUs": 64, "32 x 8 H100": 256, "64 of 72": 64, "2^22 tokens": 1 << 22,
               "12,5": 12.5, "1,234": 1234, "31737 (30341)": 31737}  # fmt: skip
    assert {text: number_of({"x": text}, "x") for text in numbers} == numbers
    assert [degree_of({"tp": text}, "tp") for text in ("none", "no", "TP8", "")] == [1, 1, 8, None]


def test_times_and_memory_in_other_units():
    times = {"0.5 it/s": 2, "2m10s": 130, "1.5 min": 90, "320 milliseconds": 0.32, "3.1 s/it": 3.1, "135ms": 0.135,
             "1.5 s/step": 1.5, "12.5 s (3 min to start)": 12.5, "2 steps per second": 0.5, "2 min": 120}  # fmt: skip
    assert {text: seconds_of({"s": text}, "s") for text in times} == times
    memory = {"35196 MiB": 35196 / 1024, "63.2 GB": 63.2, "60 GB (61,440 MiB)": 60, "80 %": None}
    assert {text: gib_of({"m": text}, "m") for text in memory} == memory


def test_rates_of_all_devices_and_of_more_than_tera():
    rates = {"65,000 total": 8125, "8.1k": 8100, "8100 tok/s/GPU": 8100}
    assert {text: rate_of({"tokens_per_s_per_gpu": text}, 8) for text in rates} == rates
    flops = {"180 TFLOPS": 180, "1.2 PFLOP/s": 1200, "44 % MFU": None, "489 (49 %)": 489}
    assert {text: teraflops_of({"tflops_per_gpu": text}) for text in flops} == flops


def test_batches_of_tokens_sequences_and_devices():
    batches = {"1,024": 1024, "4M tokens": 2048, "4.2M tokens": 2048, "2^21 tokens": 1024, "16 per GPU": 128, "64 x 2048": 64,
               "512 sequences of 2048": 512, "1024 (2M tokens)": 1024, "256 (4 per GPU)": 256, "4e6 tokens": 1952}  # fmt: skip
    assert {text: batch_of({"global_batch": text}, 2048, 8) for text in batches} == batches


def test_words_of_recomputation():
    again = {"disabled": "none", "N": "none", "without": "none", "everything_saveable": "none", "y": "full", "enabled": "full",
             "per-layer": "full", "nothing_saveable": "full", "SAC": None, "SAC (attention)": "selective",
             "core_attn": "selective", "layernorm": "selective"}  # fmt: skip
    assert {text: recompute_of({"recompute": text}) for text in again} == again
    # Megatron-LM's word for attention, and others' for as much as memory asks for.
    named = {"Megatron-LM": "selective", "NeMo": "selective", "PyTorch FSDP": None}
    assert {name: recompute_of({"recompute": "selective", "framework": name}) for name in named} == named


def test_words_of_split_state():
    zeros = {"dist-opt": (1, 64), "P_os": (1, 64), "use_distributed_optimizer": (1, 64), "SHARD_GRAD_OP": (2, 64),
             "os+g": (2, 64), "HSDP 2x32": (3, 32), "FSDP 16 x DP 4": (3, 16), "replicated": (0, 1), "magic": None}  # fmt: skip
    assert {text: zero_of({"zero": text}, 64) for text in zeros} == zeros


def test_words_of_attention():
    kernels = {"FlexAttention": 2, "FA-2": 2, "flash_attention_2": 2, "flash-attention-3": 3, "Transformer Engine": 3, "CK": 3,
               "fused softmax": 0, "dot_product": 0}  # fmt: skip
    assert {text: attention_of({"attention": text, "gpu_type": "H100"}) for text in kernels} == kernels


def test_attention_of_older_devices_and_frameworks():
    kernels = {("TPU v3-256", "JAX"): 0, ("v5e-128", "MaxText"): 3, ("TPU v4", "T5X"): 3, ("DGX A100", "Megatron-DeepSpeed"): 0,
               ("DGX A100", "Megatron-LM"): 3}  # fmt: skip
    assert {
        (device, name): usual_attention({"gpu_type": device, "framework": name, "precision": "bf16"})
        for device, name in kernels
    } == kernels


def test_sides_of_an_mlp_tell_of_its_gate():
    sides = {("Amber", "11008"): True, ("Amber", "16384"): False, ("GPT", "11008"): False, ("Amber", ""): False}
    assert {(name, ffn): is_gated(name.lower(), {"hidden": "4096", "ffn": ffn}) for name, ffn in sides} == sides


def test_a_rate_without_a_batch_is_of_one_microbatch_on_each_replica(read):
    cells = {"global_batch": "", "seconds_per_step": "", "tokens_per_s_per_gpu": "1024", "microbatch": "2"}
    run = read(**cells)
    assert (run.batch, run.count, run.seconds) == (16, 1, 1.0)
    for missing in ({"microbatch": ""}, {"pp": "2", "dp": "4"}, {"seconds_per_step": "1.5"}):
        assert read(**cells | missing).reason == "global_batch is not stated"


def test_state_is_split_where_nothing_denies_it_and_it_would_not_fit(read):
    def with_state(run):
        return Prediction(1.0, 1, 0, 0, 0, 0, 1, 2e9 / run.shards, 1e9)

    cells = {"framework": "Megatron-LM", "zero": ""}
    assert (
        settle(read(**cells), with_state)[0].zero,
        settle(read(**cells | {"zero": "none"}), with_state)[0].zero,
    ) == (1, 0)
    failed = settle(read(**cells, status="OOM", seconds_per_step=""), with_state)
    assert failed[0].zero == 0 and failed[1].needed_bytes == 2e9


def test_what_is_not_understood_is_open(read):
    assert dict(read(zero="magic").unstated) == {"zero": ((0, 1),)}


def test_a_rate_is_that_of_any_batch(read):
    """A batch that its replicas cannot share is taken for one that they can, where tokens per second are published."""
    rate = {"seconds_per_step": "", "tokens_per_s_per_gpu": "5000", "global_batch": "20", "recompute": "full"}
    run = read(**rate)
    assert run.batch in (16, 24) and run.seconds == pytest.approx(run.batch * 512 / 5000 / 8)
    assert "does not divide" in read(**rate | {"seconds_per_step": "1.5"}).reason


def test_words_beside_the_name_of_an_architecture(read):
    sizes = {"layers": "", "hidden": "", "heads": "", "ffn": "", "vocab": "", "ep": "8"}
    assert read(model="Qwen3 MoE 30B", **sizes).experts.number == 128


def test_experts_may_be_gathered_instead_of_dealt_out(read):
    cells = {"model": "OLMoE, 8 experts", "params_B": "0.01"}
    degrees = {zero: {run.experts.parallel for run in alternatives(read(**cells, zero=zero))} for zero in ("1", "3")}
    assert degrees == {"1": {8}, "3": {1, 8}}


def test_experts_are_dealt_out_within_a_stage(read):
    """Layouts whose stages have too few devices for the experts' degree are none."""
    open_cells = {"dp": "", "pp": "", "tp": "", "zero": "1", "framework": "Megatron-LM"}
    assert {run.pipeline for run in alternatives(read(model="MoE, 8 experts", ep="8", **open_cells))} == {1}


@pytest.mark.parametrize(
    "model, layers, width, gated",
    [("Llama 3.0 8B", 32, 4096, True), ("llama v2 70b", 80, 8192, True), ("GPT3-20B", 44, 6144, False),
     ("Nemotron-22B", 40, 6144, False), ("OLMo 2 32B", 64, 5120, True), ("phi-4", 40, 5120, True)],
)  # fmt: skip
def test_more_names_of_architectures(read, model, layers, width, gated):
    run = read(model=model, layers="", hidden="", heads="", ffn="", vocab="")
    assert (run.layers, run.width, run.gated) == (layers, width, gated)

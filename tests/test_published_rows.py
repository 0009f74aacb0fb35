"""Tables of published runs as strangers write them: what cells say, what is taken for granted, which rows are left out."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

import published  # noqa: E402
from published_architectures import with_sizes  # noqa: E402
from published_cells import (  # noqa: E402
    attention_of,
    count_of,
    devices_of,
    dtype_of,
    number_of,
    recompute_of,
    seconds_of,
    text_of,
    zero_of,
)
from published_choices import alternatives, settle  # noqa: E402
from published_frameworks import HOST_SECONDS, MASK_GROUP, expert_launches, mask_kernels, waiting_part  # noqa: E402
from published_machines import by_devices, machine_of, model_of  # noqa: E402
from published_memory import eager_bytes, state_bytes  # noqa: E402
from published_runs import Left  # noqa: E402
from published_steps import Prediction, expert_params_of, params_of, predict, to_experts_seconds  # noqa: E402
from published_table import ROW, read_row, table_of  # noqa: E402, F401

from autopar.cost.kernels import MemoryPass, Product  # noqa: E402


@pytest.mark.parametrize(
    "text, expected",
    [("1,024", 1024), ("8 GPUs", 8), ("48x8", 384), ("250k", 250000), ("about 250k", 250000), ("2.5", 2.5),
     ("3 500", 3500), ("8 (1 node)", 8), ("not stated", None), ("n/a", None), ("-3", None), ("", None), ("see recipe", None)],
)  # fmt: skip
def test_numbers(text, expected):
    assert number_of({"x": text}, "x") == expected


def test_cells_of_many_spellings():
    assert count_of({"seq": "8k"}, "seq", kilo=1024) == 8192 and count_of({}, "seq") is None
    assert seconds_of({"s": "850 ms"}, "s") == 0.85 and seconds_of({"s": "12.5 s"}, "s") == 12.5
    assert text_of({"x": None}, "x") == ""
    dtypes = {"NVFP4": "float4", "FP8-CS (current scaling)": "float8", "int8 + bf16": "int8", "amp_bf16": "bfloat16",
              "fp16 mixed": "float16", "16-mixed": "float16", "W8A8": "int8", "TF32": "float32", "mixed": None}  # fmt: skip
    assert {text: dtype_of({"precision": text}) for text in dtypes} == dtypes
    again = {"Selective attention": "selective", "Selective": None, "yes": "full", "none (yaml null)": "none", "offload": None,
             "AC: none": "none", "AC (selective)": None, "AC": "full", "activation checkpointing": "full",
             "minimal": "dots", "minimal_flash": "dots with context",
             "": None, "False": "none", "save_dot_except_mlpwi": "dots except mlp"}  # fmt: skip
    assert {text: recompute_of({"recompute": text}) for text in again} == again
    zeros = {"distributed optimizer": (1, 64), "FSDP2": (3, 64), "HSDP 8": (3, 8), "ZeRO-2": (2, 64), "stage 3": (3, 64),
             "zero_3": (3, 64), "FSDP (ZeRO-2)": (2, 64),
             "DDP": (0, 1), "": (0, 1), "FULL_SHARD": (3, 64)}  # fmt: skip
    assert {text: zero_of({"zero": text}, 64) for text in zeros} == zeros
    for text in ("4", "ZeRO-Offload"):
        with pytest.raises(ValueError):
            zero_of({"zero": text}, 64)
    kernels = {"flash": 2, "flash (cuDNN/TE)": 3, "FA3": 3, "SDPA flash v2": 2, "triton": 1, "unfused": 0, "": None}
    assert {text: attention_of({"attention": text}) for text in kernels} == kernels
    frameworks = {
        "PyTorch FSDP (Composer)": 1,
        "torchtitan": 2,
        "Megatron-DeepSpeed": 2,
        "NeMo/Megatron": 3,
        "MaxText": 3,
    }
    assert {name: attention_of({"attention": "flash", "framework": name}) for name in frameworks} == frameworks


@pytest.mark.parametrize(
    "text, devices",
    [("64", 64), ("1,024 H100s", 1024), ("8 nodes x 8", 64), ("8 nodes", 64), ("16 x DGX H100", 128), ("4 DGX A100", 32),
     ("2 nodes (16 GPUs)", 16), ("64 GPUs (8 nodes)", 64)],
)  # fmt: skip
def test_devices_may_be_counted_by_hosts(text, devices):
    assert devices_of({"gpus": text}) == devices


def test_rows_that_say_all_take_nothing_for_granted(read):
    run = read()
    assert run.unstated == () and [run] == list(alternatives(run))
    assert (run.vocabulary, run.tensor, run.data, run.shards, run.gated) == (1000, 1, 8, 8, True)


@pytest.mark.parametrize(
    "cells, named",
    [({"vocab": ""}, "vocabulary"), ({"ffn": "n/a"}, "hidden"), ({"heads": "?"}, "heads"), ({"precision": "mixed"}, "dtype"),
     ({"attention": ""}, "kernel"), ({"microbatch": "auto"}, "microbatch"), ({"recompute": "see recipe"}, "recompute"),
     ({"tp": "", "dp": ""}, "layout"), ({"zero": ""}, "zero"), ({"seconds_per_step": "", "tflops_per_gpu": "400"}, "seconds"),
     ({"model": "Mixtral 4x1B", "ep": "4"}, "experts")],
)  # fmt: skip
def test_what_a_row_leaves_open_is_remembered(read, cells, named):
    assert [name for name, _ in read(**cells).unstated] == [named]


@pytest.mark.parametrize(
    "cells, reason",
    [({"layers": ""}, "layers is not stated"), ({"gpus": "7"}, "multiply to the devices"),
     ({"tp": "8", "dp": "1"}, "divide among tensor-parallel"),
     ({"kv_heads": "3"}, "heads of keys"), ({"model": "EfficientNet"}, "no transformer"),
     ({"model": "Mamba"}, "no transformer"), ({"model": "Llama LoRA"}, "only adapters"),
     ({"pp": "4", "dp": "2"}, "more stages than layers"),
     ({"status": "crashed"}, "crashed"), ({"seconds_per_step": ""}, "no time"), ({"microbatch": "3"}, "batch does not divide"),
     ({"model": "MoE", "ep": "8"}, "mixture of experts"), ({"zero": "9"}, "no ZeRO-9")],
)  # fmt: skip
def test_rows_that_are_left_out_say_why(read, cells, reason):
    assert reason in read(**cells).reason


@pytest.mark.parametrize(
    "model, layers, hidden, size, vocabulary",
    [("LLAMA3-8B", 32, 4096, 0, 128256), ("Llama-2-70b", 80, 8192, 0, 32000), ("GPT-3 175B", 96, 12288, 0, 50257),
     ("Qwen3-8B", 36, 4096, 0, 151936), ("gemma 2 9B", 42, 3584, 256, 256000), ("BERT-large", 24, 1024, 0, 30522),
     ("t5-11b", 24, 1024, 128, 32128), ("ViT-H/14", 32, 1280, 0, 1000)],
)  # fmt: skip
def test_sizes_of_public_architectures_need_not_be_stated(read, model, layers, hidden, size, vocabulary):
    """But then the row did not say them. A model of another depth is another one."""
    sizes = dict.fromkeys(("layers", "hidden", "heads", "ffn", "vocab"), "")
    run = read(model=model, **sizes)
    assert (run.layers, run.width, run.size, run.vocabulary) == (layers, hidden, size, vocabulary)
    assert dict(run.unstated)["sizes"] and predict(run).seconds > 0
    assert "not stated" in read(model=model, **sizes | {"layers": "7"}).reason


def test_names_of_architectures_are_not_of_others():
    """Each is found by its own name only: of two that fit, the first one would be taken."""
    names = {"mixtral-8x7B": 4096, "Mistral 7B": 4096, "gpt-oss-20b": 2880, "TinyLlama": 2048, "Llama-3.2-3B": 3072,
             "llama 7b": 4096, "Qwen3_235B_a22b": 4096, "kimi-k2": 7168, "GPT-2 (124M)": 768, "GPT 2.7B": 2560,
             "DeepSeek-V2": 5120, "DeepSeek-V2-Lite": 2048, "DeepSeek-V3": 7168, "Mistral-Nemo-12B": 5120,
             "StarCoder2-7B": 4608,
             "OLMo-7B": 4096, "OLMoE-1B-7B": 2048, "Qwen1.5-MoE-A2.7B": 2048, "Phi-3.5-MoE": 4096, "SmolLM2-1.7B": 2048,
             "my own 7B": None, "nanoGPT": None}  # fmt: skip
    found = {name: with_sizes({"model": name})[0].get("hidden") for name in names}
    assert {name: width and int(width) for name, width in found.items()} == names


def test_a_model_of_other_heads_has_other_heads_of_keys(read):
    sizes = dict.fromkeys(("layers", "hidden", "ffn", "vocab"), "")
    assert read(model="GPT-3 175B", heads="128", **sizes).kv_heads == 128
    assert read(model="Llama 3 70B", heads="64", **sizes).kv_heads == 8


def test_degrees_that_are_left_open(read):
    """Heads divide among the devices that share them, and who splits the state does not split tensors besides."""
    open_cells = {"tp": "", "dp": "", "pp": "1", "zero": "0", "framework": "Megatron-LM"}
    assert {layout[0] for layout in dict(read(**open_cells).unstated)["layout"]} == {1, 2, 4}
    assert dict(read(**open_cells | {"zero": "3"}).unstated)["layout"] == ((1, 1, 8, 1),)


def test_small_models_run_many_samples_at_once(read):
    tried = dict(read(seq="128", global_batch="512", microbatch="", framework="PyTorch").unstated)["microbatch"]
    assert tried == (1, 2, 4, 16, 64)


def test_where_nothing_fits_the_least_is_taken(read):
    """What is not stated to be made again is not, and of microbatches the smallest is nearest to what was run."""
    run = read(recompute="none", framework="Megatron-LM", microbatch="", global_batch="64")

    def told(taken):
        return Prediction(10 - taken.microbatch, *[0.0] * 6, 200 * taken.microbatch, 100)

    assert settle(run, told)[0].microbatch == 1


def test_sequence_parallelism_came_before_hopper(read):
    cells = {"tp": "2", "dp": "4", "framework": "ours"}
    assert read(**cells).sequence and not read(**cells, gpu_type="A100").sequence
    assert not read(**cells | {"framework": "autodist"}).sequence


def test_schedules_that_hide_the_way_to_experts(read):
    run = read(model="Mixtral 64x1B", gpus="64", dp="64", ep="64", global_batch="64", framework="ours")
    assert predict(replace(run, schedule="DualPipe")).tensor < 0.5 * predict(run).tensor


def test_a_decoder_beside_an_encoder(read):
    """Of two lengths; without words on the second, T5's own part of the first. Its cross attention has weights too."""
    sizes = {
        "model": "T5",
        "layers": "2",
        "hidden": "256",
        "heads": "4",
        "ffn": "512",
        "vocab": "1024",
        "recompute": "none",
    }
    said = read(**sizes, notes="decoder of 128 tokens")
    assert said.decoder == 128 and said.unstated == () and not said.causal
    assert read(**sizes, seq="512/96").decoder == 96
    assert dict(read(**sizes).unstated)["decoder"] == (114,)
    alone = replace(said, decoder=0)
    width, layers = 256, 2
    more = layers * (2 * 4 * width**2 + 2 * width * 512)
    assert params_of(said, layers, 1) - params_of(alone, layers, 1) == more
    assert predict(alone).seconds < predict(said).seconds < 2.5 * predict(alone).seconds
    split = replace(said, tensor=2, data=4, decoder=57, framework="NeMo", sequence=True)
    assert predict(split).seconds > 0


def test_what_a_name_does_not_say_the_parameters_do(read):
    """Of 13B with 40 layers of 5120 and 13824, each has a gate."""
    sizes = {"model": "ours", "layers": "40", "hidden": "5120", "heads": "40", "ffn": "13824", "vocab": "32000"}
    assert read(**sizes, params_B="13").gated and not read(**sizes, params_B="10.2").gated
    assert not read(model="BERT").causal and read(model="gpt").causal


@pytest.mark.parametrize(
    "cells, number, active, share",
    [({"model": "Mixtral 8x7B"}, 8, 2, 1.0),
     ({"model": "GShard (16 experts)", "ffn": "8192", "hidden": "1024", "heads": "16", "layers": "16", "vocab": "32000",
       "params_B": "2.383"}, 16, 2, 0.5),
     # Of the rates: 3.85e9 * 6 FLOPs for each token.
     ({"model": "Qwen3 30B", "ffn": "768", "hidden": "2048", "heads": "32", "kv_heads": "4", "layers": "48", "vocab": "151936",
       "seq": "4096", "params_B": "30.5", "tflops_per_gpu": "923", "tokens_per_s_per_gpu": "39936"}, 128, 8, 1.0)],
)  # fmt: skip
def test_how_many_experts_there_are_follows_from_the_row(read, cells, number, active, share):
    found = read(**({"ep": "8", "gpus": "8"} | cells)).experts
    assert (found.number, found.active, found.parallel) == (number, active, 8)
    assert found.share == pytest.approx(share, abs=0.05)


def test_tokens_go_to_their_experts_and_back(read):
    """Between hosts they go once for each host, and the experts of a device are its part of them."""
    inside = read(model="Mixtral 8x1B", gpus="64", dp="64", ep="8", global_batch="64")
    across = read(model="Mixtral 64x1B", gpus="64", dp="64", ep="64", global_batch="64")
    machine, rack = machine_of(inside), machine_of(replace(across, device="GB200", network="NVL72"))
    assert 0 < to_experts_seconds(inside, machine) < to_experts_seconds(across, machine)
    assert to_experts_seconds(across, rack) < to_experts_seconds(across, machine)
    assert expert_params_of(inside, 2) == 2 * 3 * 256 * 512
    assert predict(inside).seconds > 0


def test_the_host_launches_what_experts_do(read):
    """One by one where their tokens are counted first; not where they have room for so many, nor in a program of XLA's."""
    sizes = {"model": "Mixtral 8x1B", "framework": "Megatron-LM", "ep": "2"}
    wide, narrow = (Product(4, 512, 256, 256, 1e6, (name, name)) for name in ("bfloat16", "float8_e4m3fn"))
    run = read(**sizes)
    assert expert_launches(run, (wide, MemoryPass(1e6))) == pytest.approx(5 * HOST_SECONDS)
    assert expert_launches(run, (narrow,)) == pytest.approx(20 / 3 * HOST_SECONDS)
    assert expert_launches(read(**sizes | {"framework": "MaxText (JAX)"}), (wide,)) == 0
    dropped, kept = (read(**sizes | {"model": f"Mixtral 8x1B ({word})"}) for word in ("tokendrop", "dropless"))
    assert expert_launches(dropped, (wide,)) == 0 < expert_launches(kept, (wide,))
    assert predict(dropped).compute < predict(kept).compute


@pytest.mark.parametrize(
    "framework, group", [("Alpa (auto)", MASK_GROUP), ("DeepSpeed-MoE", 8192), ("Megatron-LM", None)]
)
def test_products_with_a_mask_send_tokens_to_experts(read, framework, group):
    """In GShard's groups, or one of all tokens; its rows are two copies of each token."""
    run = read(model="GShard (8 experts)", framework=framework, params_B="0.01")
    there, back = mask_kernels(run, 8192).get("forward", (None, None))
    assert (there is None) == (group is None)
    if group:
        assert (there.count, there.rows, there.depth) == (8192 // group, 2 * group, group)
        assert (back.rows, back.depth) == (group, 2 * group)


def test_of_what_is_left_open_the_fastest_that_fits_is_taken(read):
    """Recomputation of some of the layers, where memory asks for no more."""
    run = read(recompute="", framework="Megatron-LM", microbatch="")

    def told(taken):
        needed = {"none": 150, "full": 50}[taken.recompute] * taken.microbatch
        return Prediction(10 + 5 * (taken.recompute == "full") - taken.microbatch, *[0.0] * 6, needed, 100)

    taken, prediction = settle(run, told)
    assert (taken.recompute, taken.recomputed, taken.microbatch) == ("full", 0.5, 1)
    assert prediction.seconds == pytest.approx(11.5) and prediction.needed_bytes == pytest.approx(100)


@pytest.mark.parametrize(
    "name, device",
    [("DGX B200", "B200"), ("GB200 NVL72", "GB200"), ("H200 SXM 141GB", "H200"), ("8x H100 SXM5", "H100"),
     ("NVIDIA H100 80GB HBM3", "H100"), ("Trillium", "TPU v6e"), ("A100-SXM4-40GB", "A100-40GB"), ("v5p-128", "TPU v5p"),
     ("TPU v3-512", "TPU v3"), ("AMD MI250X GCD", "MI250X"), ("Instinct MI300X OAM", "MI300X"), ("H100 NVL 94GB", "H100-NVL")],
)  # fmt: skip
def test_devices_of_many_spellings(read, name, device):
    assert model_of(read(gpu_type=name)).device.name == device


@pytest.mark.parametrize("recompute", ["selective", "save_dot", "none", "full"])
def test_no_policy_keeps_less_than_nothing(read, recompute):
    """Of a long sequence scores are more than a compiled program keeps at all."""
    run = read(seq="256k", recompute=recompute, attention="unfused", gpus="1", dp="1", zero="0", global_batch="1")
    assert predict(run).needed_bytes > 0


def test_memory_of_eight_bits_and_of_kept_products(read):
    """Operands of 8 bits wait as such, and where only products' results wait, less does."""
    wide = read(framework="Megatron-LM", recompute="none", seq="4096")
    assert eager_bytes(replace(wide, dtype="float8"), 4096) < 0.9 * eager_bytes(wide, 4096)
    assert state_bytes(replace(wide, framework="NeMo", zero=0)) == 16 < state_bytes(replace(wide, zero=0))
    needed = [predict(read(recompute=name, seq="16k", gpus="1", dp="1", zero="0")).needed_bytes for name in _POLICIES]
    assert needed == sorted(needed) and needed[0] < needed[-1]


_POLICIES = ("full", "save_dot_with_context_except_mlp", "none")


def test_gradients_are_hidden_where_the_row_says_so(read):
    cells = {"zero": "1", "gpus": "64", "dp": "64", "global_batch": "64", "framework": "Megatron-LM"}
    assert 0 < predict(read(**cells, schedule="overlap DP")).data < 0.5 * predict(read(**cells)).data


def test_a_job_has_equal_parts_of_its_domains(read):
    run = replace(read(gpus="8"), device="GB200", network="NVL72 domain", devices=256)
    assert machine_of(run).per_host == 64
    assert machine_of(replace(run, devices=72)).per_host == 72


def test_chips_of_two_devices_are_twice_as_many_replicas(read):
    run = by_devices(replace(read(gpu_type="TPU7x (Ironwood), chips"), microbatch=2))
    assert (run.devices, run.data, run.microbatch, run.tensor) == (16, 16, 1, 1)
    modules = by_devices(read(gpu_type="MI250", gpus_per_node="4"))
    assert (modules.devices, modules.per_host, modules.tensor) == (16, 8, 2)
    assert by_devices(read(gpu_type="MI250X", gpus_per_node="8")).devices == 8
    odd = by_devices(read(gpu_type="TPU v3, chips"))
    assert (odd.devices, odd.data, odd.tensor) == (16, 8, 2)


def test_schedules_that_wait_less(read):
    waiting = {"1F1B": 1, "interleaved 1F1B": 1, "zb-h1": 1 / 3, "ZB-V": 0, "DualPipe": 1 / 3, "": 1}
    assert {name: waiting_part(replace(read(), schedule=name)) for name in waiting} == waiting


def test_no_row_ends_the_others(read, monkeypatch):
    def fails(run):
        raise ZeroDivisionError("of a stranger's row")

    monkeypatch.setattr(published, "settle", fails)
    assert published.predicted(read()) == Left("a stranger", 2, "failed: ZeroDivisionError: of a stranger's row")


def test_a_stranger_s_table_is_gone_through(tmp_path, monkeypatch, capsys):
    """Sizes are tiny; devices, precisions and families are such as no row of ours has."""
    rows = [
        ROW | cells
        for cells in (
            {"gpu_type": "AMD Instinct MI300X", "precision": "fp8"},
            {"gpu_type": "TPU v6e", "precision": "int8"},
            {"gpu_type": "B200", "precision": "nvfp4"},
            {"model": "ViT-tiny", "vocab": "", "seq": "197", "framework": "PyTorch"},
            {"model": "Mixtral 4x1B", "ep": "4", "params_B": ""},
            {"tp": "8", "dp": "1", "kv_heads": "2", "heads": "8", "microbatch": "4"},
            {"cp": "2", "dp": "4", "microbatch": "2"},
            {"pp": "2", "dp": "4", "schedule": "zb-h1", "status": "OOM", "seconds_per_step": ""},
            {"gpu_type": "Abacus 3"},
            {"layers": None},
        )
    ]
    monkeypatch.setattr(sys, "argv", ["published.py", "--data", str(table_of(tmp_path / "x.tsv", *rows))])
    published.main()
    text = " ".join(capsys.readouterr().out.split())
    assert "runs 5" in text and "2 more runs" in text and "left out 2 rows" in text
    assert "no such device. 'Abacus 3'" in text and "failed" not in text

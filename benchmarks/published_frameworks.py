"""What the frameworks of published runs do and autopar's programs do not do.

In:     `Run`, a kernel, a device.
Out:    the layers of a stage, the padded length of the vocabulary, and seconds of products whose rows are not aligned.
Method: each rule is what the framework's own code or manual says; numbers that were fitted say so.
"""

from __future__ import annotations

import math
import re

from published_runs import Run

from autopar.cost import kernel_seconds
from autopar.cost.kernels import Kernel, MemoryPass, Product
from autopar.mesh import Device

EAGER = 2.3
"""Passes over memory that frameworks without a compiler make where a compiled program makes one; fitted, one for all."""
HOST_SECONDS = 1e-5
"""To launch a kernel from Python, framework included, as profiles of such frameworks show; it runs ahead of the device, so
that only small kernels wait for it."""
SLOW_HOST, SLOW_LAUNCHES = "nanotron", 8.9
"""A framework whose launches take so many times as long; fitted to one source."""
LAUNCHES = {"forward": 22, "core": 1, "backward": 33}
"""Of its layer, counted in its code, besides collectives (`models/llama.py`): 4 products, 2 norms, 4 copies, by which queries,
keys and values are put in order and what attention makes of them, 2 rotations, 6 for the lengths of sequences, 2 of the
activation, 2 sums. Backward 8 products, 4 of norms, 4 of the activation, 3 of attention, 2 rotations, 4 copies, 2 sums, and 6
gradients added."""
PROFILED = 1.12
"""Of a launch where a run says that PyTorch's profiler was on: of nanotron's steps that wait for the host, one before it began
took 41.6 s, those after it had recorded 46.8 (nanotron/old_bench, dp-2_tp-2_pp-2_mbz-1)."""
UNTUNED = 1.05
"""Of kernels where a run says that its hosts were improved afterwards: on Jean Zay it was PCI-Express and NUMA, which made runs
"1-5 %" faster (BigScience, chronicles-prequel, 02-25); plans that ran before and afterwards became 4 to 6 % faster."""
OVERLAPPED = 0.75
"""Part of a tensor-parallel collective behind the product it feeds, where a run says so: it is cut in four, one of which
has nothing to hide behind (Transformer Engine's user buffers)."""
FIRST_FLASH = {"Ampere": 0.52, "Hopper": 0.29}
"""Rate of the first FlashAttention's kernels over that of the device's own; fitted. Hopper's own multiply asynchronously."""
SECOND_FLASH = 0.56
"""Rate of the second FlashAttention's kernels over that of the device's own from Hopper on, which it treats as an Ampere: both
passes 333 instead of 590 TFLOP/s (Shah et al., "FlashAttention-3", 2024, figures 5 and 6: causal, heads of 128)."""
BY_ROWS = 0.79
"""Rate of products of 8 bits with a scale for each row over that with one for each tensor: 6,424 tokens/s instead of 7,186, if
they are 0.45 of the step (torchtitan, commit 7a04053: Llama 3 8B on 8 H100)."""
ADAM_BYTES = 34
"""Moved by an update for each parameter, in mixed precision: gradient read twice, once for its norm, weights of both
widths and moments read and written."""
ADDED_BYTES = 6
"""Moved to add gradients of a microbatch to those before it, for each parameter: two reads and a write."""
WIDE_ADDED_BYTES = 10
"""The same where gradients of 16 bits are added to sums of 32 by a kernel of its own, those of the first microbatch to zeros
(nanotron, `FP32GradientAccumulator`). It reduces these sums behind the last backward pass (`get_fp32_accum_hook`)."""
FSDP_BYTES, NARROW_FSDP_BYTES, NARROW_FSDP2_BYTES = 14, 8, 12
"""Moved by PyTorch's FSDP for each gathered parameter and microbatch. Of its first version, gradients of views into the flat
parameter are put together 4, divided 4, and made 32 bits wide 6 if they are reduced so (`_flat_param.py`,
`_post_backward_hook`); of its second, what is gathered is copied into parameters twice 8, and gradients into one array, 6 or
in 16 bits 4 (`_fsdp_collectives.py`)."""
REDUCED_WIDE = ("torchtitan",)
"""Frameworks whose FSDP reduces gradients in 32 bits (torchtitan's `mixed_precision_reduce`). Others do it in the type that
they multiply in, which is what PyTorch takes where nothing is said (`MixedPrecision.reduce_dtype`; llm-foundry's benchmarks
had `mixed_precision` "PURE", fms-fsdp has `bfSixteen`, Hugging Face's Accelerate the same)."""
BROADCAST = re.compile(r"InternLM|InternEvo|ColossalAI|Colossal-AI|fairscale|flash-attention training", re.IGNORECASE)
"""Frameworks in which each replica sends what it has updated to all others, one after the other, instead of gathering it
(InternLM's `broadcast_params`, Colossal-AI's `LowLevelZeroOptimizer` of 2023, fairscale's `OSS`, and PyTorch's
`ZeroRedundancyOptimizer`, which FlashAttention's scripts have)."""
NORM_BYTES = {"forward": (32, 7), "backward": (78, 12)}
"""Of a root mean square norm that is written out in PyTorch, bytes moved for each number besides what goes in and comes out,
and kernels (Hugging Face, `LlamaRMSNorm`; Meta's `RMSNorm`): made 32 bits wide 6, squared 8, mean 4, scaled 8, made narrow 6,
times the weights 4. Backward those of the weights 12, wide 6, of the scaling 24, of mean and square 24, added 12, narrow 6."""
ROTARY_BYTES = {"forward": (16, 5), "backward": (26, 7)}
"""The same of rotary positions, for each number of queries and keys: times cosine 4, halves changed places 6, times sine 4,
added 6. Backward 8, 2, 8, 12 (Hugging Face, `apply_rotary_pos_emb`)."""
COMPLEX_ROTARY_BYTES = {"forward": (14, 1), "backward": (14, 1)}
"""The same of complex numbers of 32 bits, which PyTorch's compiler leaves as they are (IBM and Meta, "Maximizing training
throughput using PyTorch FSDP and torch.compile", 2024): written, multiplied 8, read."""
COMPLEX_ROTARY = ("torchtitan",)
WRITTEN_OUT = re.compile(
    r"PyTorch|\bFSDP|\bDDP\b|Hugging|transformers|Accelerate|Lightning|torchtitan|torchtune|axolotl|TRL\b|Factory|OLMo|\blit-",
    re.IGNORECASE,
)
OWN_KERNELS = re.compile(r"fused|apex|liger|xformers|unsloth|Megatron|NeMo|nanotron|kernel", re.IGNORECASE)
"""Frameworks whose layers are PyTorch's own operations, and words for kernels made for norms and rotary positions."""
LIVE_PARAMETERS = 10**9
"""Of DeepSpeed's third stage: while so many are gathered, none is gathered ahead, and what is used again only after so many
others is let go before (`stage3_max_live_parameters`, `stage3_max_reuse_distance`, `runtime/zero/constants.py`)."""
OMNI_PATH, OMNI_PATH_RING = 0.28, 5.06e9
"""Part of their rate that cards of Omni-Path reach together, which NCCL drives through the host: 6.8 to 7.3 GB/s through two of
each of 16 hosts of Jean Zay, as its users measured. And what one ring has between hosts, of however many devices of each: with
four and with eight both of its channels went through one of the four cards (BigScience, experiments/bandwidth,
n16_32gb_all_reduce_bench, n4_a100_all_reduce_bench, all_reduce_bench-a100-n4)."""
EFA_SECONDS = 7.5e-5
"""From host to host by Amazon's Elastic Fabric Adapter, as its plugin tells NCCL (aws-ofi-nccl, `platform_data_map`: P4d and
P5)."""
ALIGNMENT_BYTES = 16
"""What rows of a product's operands begin at a multiple of, or else it is not multiplied by tensor cores at full rate (NVIDIA,
"Matrix multiplication background user's guide": tensor core requirements). XLA pads operands, frameworks do not."""
UNALIGNED = {"Ampere": 0.7, "Hopper": 2.0}
"""Rate of such products over that of the device's ordinary cores in float32, where they are multiplied then: on Ampere and
before in 32 bits, with the libraries of its time, later two numbers of 16 bits at once. Fitted to heads of 150 and of 450 on
A100, and to a vocabulary of 50,257 on H100."""
SEPARATE = ("torchtitan", "MaxText", "Alpa")
"""Frameworks whose layers multiply by queries', keys' and values' weights one after the other."""
BLOCKING_SECONDS = 1.5e-5
"""To launch a kernel and wait until it is done, which adds to its own time: what BigScience lost by `CUDA_LAUNCH_BLOCKING=1`
on 80 GPUs, 91.04 instead of 97.20 TFLOP/s (chronicles-prequel, "dealing with JZ hanging"), is 3.5 ms for a layer and
microbatch of 230 launches."""
BLOCKING_FROM = 320
"""GPUs from which on they could not do without it: with fewer it hung at times, with so many always."""
SENT_APART = "nanotron"
"""A framework whose stages send one after the other, each waiting for the other, what others send at once there and back."""
SENT_TENSORS, SENT_MESSAGES, READ_NUMBERS = 3, 3, (17 + 4) / 2
"""Of it, what goes over a border for one microbatch: activations, their mask and a gradient; for each two messages of what it
is besides itself; and reads of the device's memory, one number at a time, by who gets it and by who sends it
(`parallel/pipeline_parallel/p2p.py`, `_recv_meta`, `create_empty_storage`, `_send_meta`; `models/llama.py`)."""
ZERO_BUBBLE = ((("zb-h2", "zbh2", "zb-v", "zbv", "zb-2p"), 0.0), (("zb", "zero bubble", "dualpipe"), 1 / 3))
"""Of 1F1B's waiting, what is left of it."""
QUANTIZED = 5 / 3
"""Launches for a product of 8 bits or fewer, over those for a wider one: of an expert's three products with one weight, forward
and backward, what enters and the gradient of what leaves are made narrow first, by a kernel each (Transformer Engine,
`GroupedLinear`)."""
GROUPED_SINCE = (26, 6)
"""Year and month of the first container whose kernels multiply for all experts at once."""
MASK_GROUP = 2048
"""Tokens that share a mask where XLA sends tokens to experts by a product with it (GShard; so many in Alpa's suites);
DeepSpeed's mask is of all tokens of a device (`sharded_moe.py`)."""
LOSS_BYTES, LOSS_BY_PASSES = 52, re.compile(r"Megatron-(LM|DeepSpeed)|NeMo|nanotron")
"""Moved for each logit of 16 bits where the loss is computed in 32 bits and pass by pass, and where it is: made wide 6, its
largest 4, which is subtracted 8, exponential 8, sum 4, divided by it 8; times the gradient 8, made narrow 6 (Megatron-LM,
`core/tensor_parallel/cross_entropy.py`, which nanotron's `functional.py` follows; Megatron-Bridge takes a fused one)."""
VOCABULARY_MULTIPLE = 128
"""To which frameworks pad the vocabulary, on each device; nanotron only to the number of devices (`ModelArgs`)."""


def generation_of(device: Device) -> str:
    """Of its products: those of Hopper and later are asynchronous, and load tiles while they multiply."""
    return "Hopper" if device.achieved.balance > 100 else "Ampere"


def joins_products(run: Run) -> bool:
    """Whether queries, keys and values are one product, as nearly all have it; torchtitan and MaxText have one each."""
    return not any(name in run.framework for name in SEPARATE)


def padded_vocabulary(run: Run) -> int:
    """Rows of the embedding."""
    multiple = run.tensor * (1 if "nanotron" in run.framework else VOCABULARY_MULTIPLE)
    return -(-run.vocabulary // multiple) * multiple


def stage_layers(run: Run) -> list[int]:
    """Layers on each stage; the embedding is on the first one, head and loss are on the last.

    Megatron's stages are equal. DeepSpeed's are too, or embedding and head count as a layer each where the sum then divides
    (`--pp-partition-method type:transformer|embedding`); else the last one has the rest. nanotron counts the head by its
    parameters, and a stage ends with the layer by which it has its part of the sum (`build_model`; parameters of the first
    stages in its public benchmark).
    """
    count, most = run.pipeline, math.ceil(run.layers / run.pipeline)
    if "nanotron" in run.framework:
        weight = run.vocabulary * run.width / (4 * run.width**2 + 3 * run.width * run.hidden)
        ends = [min(run.layers, math.ceil((run.layers + weight) * (k + 1) / count)) for k in range(count - 1)]
        borders = [0, *ends, run.layers]
        return [b - a for a, b in zip(borders, borders[1:], strict=False)]
    if run.layers % count == 0:
        return [most] * count
    if (run.layers + 2) % count == 0 and count > 1:
        most = (run.layers + 2) // count
        return [most - 1, *[most] * (count - 2), most - 1]
    return [*[most] * (count - 1), run.layers - most * (count - 1)]


def gradient_bytes(run: Run) -> float:
    """Bytes that go through memory for the gradient of each parameter with every microbatch, besides those of its product."""
    if adds_wide(run):
        return WIDE_ADDED_BYTES
    added = ADDED_BYTES if run.count > 1 else 0
    if not is_fsdp(run):
        return added
    narrow = NARROW_FSDP2_BYTES if re.search("FSDP2", run.framework, re.IGNORECASE) else NARROW_FSDP_BYTES
    return (FSDP_BYTES if reduces_wide(run) else narrow) + added / run.shards


def adds_wide(run: Run) -> bool:
    """Whether gradients are added up, and reduced, in 32 bits by kernels of their own."""
    return "nanotron" in run.framework and run.dtype != "float32"


def is_fsdp(run: Run) -> bool:
    """Whether PyTorch's FSDP splits the state: frameworks without a program of the whole step have it, but for two."""
    return run.zero > 1 and not run.whole and not re.search("Megatron|DeepSpeed", run.framework)


def reduces_wide(run: Run) -> bool:
    """Whether gradients of 16 bits are reduced in 32."""
    return adds_wide(run) or (is_fsdp(run) and any(name in run.framework for name in REDUCED_WIDE))


def sends_its_part(run: Run) -> bool:
    """Whether replicas send the parameters they have updated one after the other."""
    return run.zero in (1, 2) and BROADCAST.search(run.framework) is not None


def written_out(run: Run) -> dict[str, tuple[Kernel, ...]]:
    """Memory passes, by phase, of the norms and rotary positions of a gated model's layer, beyond those of one kernel each.

    PyTorch has no kernel for either: without a compiler or kernels of the framework's own each operation is one. Layer norms
    and what other models have are single operations.
    """
    if not run.gated or run.whole or not WRITTEN_OUT.search(run.framework) or OWN_KERNELS.search(run.framework):
        return {}
    tokens = run.microbatch * run.tokens / run.context
    rotated = tokens * (run.heads + run.kv_heads) * run.head_size / run.tensor
    normed = 2 * tokens * run.width / (run.tensor if run.sequence else 1)

    def passes(numbers: float, moved: tuple[int, int]) -> tuple[Kernel, ...]:
        num_bytes, kernels = moved
        count = max(1, round(kernels / EAGER))
        return (MemoryPass(numbers * num_bytes / EAGER / count),) * count

    if run.compiled:
        complex_ones = any(name in run.framework for name in COMPLEX_ROTARY)
        return {p: (MemoryPass(rotated * n),) for p, (n, _) in COMPLEX_ROTARY_BYTES.items()} if complex_ones else {}
    return {
        phase: (*passes(normed, NORM_BYTES[phase]), *passes(rotated, ROTARY_BYTES[phase]))
        for phase in ("forward", "backward")
    }


def usual_pipeline(run: Run) -> dict[str, int]:
    """What a framework takes where its user does not say it, of a run in stages.

    torchtitan's microbatches are as many as stages (`build_pipeline_schedule`), and an interleaved schedule has two of them on
    each device (`stages_per_rank`).
    """
    if "torchtitan" not in run.framework or run.pipeline == 1:
        return {}
    per_replica = run.batch // run.data
    several = re.search("interleav|looped", run.schedule, re.IGNORECASE)
    return {"microbatch": max(1, per_replica // run.pipeline), "chunks": 2 if several else 1}


def waiting_part(run: Run) -> float:
    """How long a pipeline waits, over what 1F1B does: schedules that compute gradients of weights late wait less.

    Qi et al., "Zero bubble pipeline parallelism", 2023, table 2, with passes of equal length; DeepSeek-AI, "DeepSeek-V3", 2024,
    table 2, for stages in both directions.
    """
    name = run.schedule.lower()
    return next((part for words, part in ZERO_BUBBLE if any(word in name for word in words)), 1.0)


def hides_tokens(run: Run) -> bool:
    """Whether tokens are on their way to experts while those of another microbatch are computed, as the row says.

    DeepSeek-AI, "DeepSeek-V3", 2024, sec. 3.2.1; Megatron-Core's `--overlap-moe-expert-parallel-comm`.
    """
    return re.search(r"dualpipe|overlap.*(\bEP\b|a2a|all-to-all|experts?)", run.schedule, re.IGNORECASE) is not None


def eager_seconds(kernel: Kernel, device: Device) -> float:
    """Time of a kernel in a framework that runs operation by operation, with what libraries have for its shape."""
    seconds = kernel_seconds(kernel, device)
    match kernel:
        case MemoryPass():
            return EAGER * seconds
        case Product() if not _is_aligned(kernel):
            flops = kernel.work * kernel.count * kernel.rows * kernel.columns * kernel.depth
            rate = device.flops_per_second("float32") * UNALIGNED[generation_of(device)]
            return max(seconds, flops / (rate * device.achieved.product))
        case _:
            return seconds


def _is_narrow(kernel: Product) -> bool:
    return any(name in dtype for dtype in kernel.dtypes for name in ("float8", "float4", "int8"))


def _is_aligned(kernel: Product) -> bool:
    itemsize = 4 if "float32" in kernel.dtypes else 1 if any("float8" in name for name in kernel.dtypes) else 2
    return all(side * itemsize % ALIGNMENT_BYTES == 0 for side in (kernel.rows, kernel.columns, kernel.depth))


def with_launches(run: Run, kernels: tuple[Kernel, ...], seconds: float, collectives: int = 0) -> float:
    """Seconds of kernels that a host launches one by one, with so many collectives between: ahead of the device, or each when
    the one before is done."""
    launching = launch_seconds(run, kernels, collectives)
    return seconds + launching if waits_for_kernels(run) else max(seconds, launching)


def launch_seconds(run: Run, kernels: tuple[Kernel, ...], collectives: int = 0) -> float:
    """Seconds that a host takes to launch kernels one by one, and so many collectives; none where a program has them all."""
    return (collectives + sum(EAGER if isinstance(k, MemoryPass) else 1 for k in kernels)) * one_launch(run)


def one_launch(run: Run) -> float:
    """Seconds of one."""
    if run.compiled:
        return 0.0
    if waits_for_kernels(run):
        return BLOCKING_SECONDS
    return HOST_SECONDS * (SLOW_LAUNCHES if SLOW_HOST in run.framework else 1) * (PROFILED if run.is_profiled else 1)


def expert_launches(run: Run, kernels: tuple[Kernel, ...]) -> float:
    """Seconds in which the device has nothing to do, as the host launches the kernels of a device's experts.

    How many tokens an expert has is not known before the router ran: where none are dropped the host waits for the numbers,
    and nothing runs ahead of it. Libraries launch the products of each expert one by one. Programs of XLA's have one kernel for
    all experts, and where experts have room for so many tokens the host need not wait.
    """
    if not waits_for_tokens(run):
        return 0.0
    launches = sum(k.count * (QUANTIZED if _is_narrow(k) else 1) if isinstance(k, Product) else 1 for k in kernels)
    return launches * HOST_SECONDS


def waits_for_tokens(run: Run) -> bool:
    """Whether the host cannot be ahead of a layer, as it waits for how many tokens go to which expert."""
    return not (run.whole or run.experts is None or run.experts.is_padded or multiplies_at_once(run))


def multiplies_at_once(run: Run) -> bool:
    """Whether one kernel multiplies for all experts of a device, and takes their numbers of tokens from memory.

    On Blackwell in 8 or 4 bits, in NVIDIA's containers since June 2026 (Megatron-Bridge, `cutedsl_fused_grouped_mlp` with
    `cuda_graph_impl="full_iteration"`).
    """
    release = re.search(r"\b(2[5-9])\.(\d\d)(?:\.\d+)?\b", f"{run.framework} {run.source}")
    is_new = release is not None and (int(release[1]), int(release[2])) >= GROUPED_SINCE
    is_blackwell = re.search(r"\bG?B[23]\d\d", run.device) is not None
    return is_new and is_blackwell and run.dtype in ("float8", "float4")


def mask_kernels(run: Run, tokens: int) -> dict[str, tuple[Kernel, ...]]:
    """Products with a mask that send so many tokens to their experts and back, by phase; none where rows are sorted instead.

    Lepikhin et al., "GShard", 2021, algorithm 2: of one-hot vectors [tokens, experts x capacity], as long as the tokens have
    copies. In the backward pass the same two, and one for the gradient of the weights of an expert's result.
    """
    if run.experts is None or not run.experts.is_masked:
        return {}
    group = min(tokens, MASK_GROUP) if run.whole else tokens
    count, slots = math.ceil(tokens / group), group * run.experts.active
    name = "float32" if run.dtype == "float32" else "bfloat16"
    num_bytes = (4 if run.dtype == "float32" else 2) * count * (group * slots + (group + slots) * run.width)

    def product(rows: int, columns: int, depth: int) -> Product:
        return Product(count, rows, columns, depth, num_bytes, (name, name))

    there, back = product(slots, run.width, group), product(group, run.width, slots)
    return {"forward": (there, back), "backward": (there, back, product(group, slots, run.width))}


def border_parts(run: Run) -> tuple[int, int, float]:
    """Of one border of a stage and a microbatch: messages that come one after the other, how often one has an activation's
    size, and seconds in which the host sends or reads."""
    if SENT_APART not in run.framework:
        return 1, 1, 0.0
    messages = SENT_TENSORS * SENT_MESSAGES
    return messages, 2, messages * one_launch(run) + SENT_TENSORS * READ_NUMBERS * BLOCKING_SECONDS


def waits_for_kernels(run: Run) -> bool:
    """Whether kernels ran one by one, host and device in turns: on Jean Zay's network nothing else worked."""
    return "Omni-Path" in run.network and run.devices >= BLOCKING_FROM

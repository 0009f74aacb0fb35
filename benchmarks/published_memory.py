"""Predicts the memory of a published run: what its framework held on the fullest device.

In:     `Run`; what autopar's own program of a layer and of the model's ends would keep (`Held`).
Out:    `Memory`: weights and optimizer, activations, what the runtime takes.
Method: an XLA program holds what the planner predicts. Other frameworks also store values that XLA recomputes where they are
        read. A framework that runs operation by operation keeps every operand that a gradient needs: Korthikanti et
        al., "Reducing activation recomputation in large transformer models", 2022, sec. 4. Bytes per parameter are those
        that Megatron-LM documents (docs, "distributed optimizer": 20 with gradients in 16 bits, 18 with them in 32).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from published_frameworks import adds_wide
from published_layers import NARROW
from published_runs import Run

from autopar.mesh import Device

GIB = 2**30
CONTEXT_BYTES = 0.5 * GIB
"""Of CUDA itself, cuBLAS and the kernels' code, on one device."""
GROUP_BYTES = 0.4 * GIB
"""Buffers of one NCCL communicator: 4 MiB for each neighbour of each channel, both ways, for ring and tree."""
USABLE = 0.988
"""Part of a device's memory that CUDA offers (`total_memory`: 15.78 of 16 GiB on V100, 39.59 of 40 and 79.15 of 80 on A100,
79.11 on H100)."""
CACHED, CACHED_IN_ORDER = 1.18, 1.07
"""Reserved by an allocator that caches blocks, over what is allocated: fitted, for all frameworks on PyTorch. It gives them
back before it fails. Less is left over where nothing is made again: backward passes free blocks that the next forward pass
takes, of the same sizes."""
RESERVED = ("nanotron", "torchtitan")
"""Frameworks whose logs have the counter of PyTorch's allocator, of what it reserved at most, and nothing of what the runtime
takes (nanotron's trainer, "Peak reserved"; torchtitan's metrics, "max_reserved")."""
GATHERED = ("nanotron", "torchtitan")
"""Frameworks that gather a sequence for products split by columns as an operation of its own, whose result those products keep;
Megatron-LM keeps its own part and gathers again (Korthikanti et al., sec. 4.2.2; nanotron, `column_linear`; torchtitan's
`PrepareModuleInput`)."""
MEGATRON = ("Megatron", "NeMo", "nanotron")
NARROW_GRADIENTS = ("NeMo", "Megatron-Bridge")
"""Of them, those that add gradients up in 16 bits (NeMo's `grad_sync_dtype`; `grad_reduce_in_fp32` of Megatron-Bridge's recipes
for performance)."""
FUSED = ("Megatron", "NeMo")
"""Frameworks whose gated activation is one kernel, which keeps what enters it (Megatron-LM's `bias_swiglu_fusion`), and whose
products of 8 bits keep their operands as they multiply them (Transformer Engine)."""
PLANNED = ("OneFlow",)
"""Frameworks that plan the memory of a step ahead, as XLA does, and make gradients of 16 bits into 32 before they are clipped
and used (OneFlow's graphs, and their `enable_amp`). Microbatches add up in an array of their own (`acc_op.cpp`). Stages run
ahead of each other through buffers, so that forward and backward passes have no memory in common: a buffer of two places for
each stage behind every value that a backward pass reads, and one of one place at either end of what stages send, the embedding
that GPT multiplies by at its end among it; the last stage has none (`pipeline_buffer_pass.cpp`)."""
SPLIT_LOSS, SPLIT_LOSS_BYTES = "torchtitan", 16
"""Who computes a loss over a split vocabulary with PyTorch's distributed tensors, and what that holds of each logit: four
tensors in 32 bits, as its gradient is made (`torch.distributed.tensor.parallel.loss`)."""
PYTORCH = (*MEGATRON, "PyTorch", "DeepSpeed", "torchtitan")


class Held(Protocol):
    """What autopar's program of one microbatch holds."""

    kept_bytes: int
    working_bytes: int
    eager_bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device.

    Attributes:
        state: Parameters with their gradients and optimizer.
        activations: What backward passes wait for, and what one of them works with.
        runtime: Of CUDA and NCCL.
        reserved: All of it, with what the allocator keeps back, as published figures have it.
    """

    state: float
    activations: float
    runtime: float
    reserved: float

    @property
    def needed(self) -> float:
        """Without what the allocator only keeps back: with more than that a run fails."""
        return self.state + self.activations + self.runtime


def memory_of(
    run: Run, params: float, experts: float, layers: int, layer: Held, ends: Held, capacity: float, stage: int = 0
) -> Memory:
    """The memory of a run.

    Args:
        run: The run.
        params: On one device, replicas counted whole.
        experts: Parameters of experts there.
        layers: Of a stage.
        layer: Of one layer and microbatch.
        ends: Of embedding and loss.
        capacity: Bytes of a device.
        stage: Which one: the later, the fewer microbatches are in flight.
    """
    groups = sum(degree > 1 for degree in (run.tensor, run.pipeline, run.data, run.context))
    # XLA's allocator takes the memory before the run and states what programs need, without the runtime's own.
    runtime = 0.0 if run.whole else CONTEXT_BYTES + groups * GROUP_BYTES
    state, activations = params * state_bytes(run), activation_bytes(run, params + experts, layers, layer, ends, stage)
    if run.experts:
        # Where tokens go to experts of other devices, fewer devices have the same ones.
        replicas = run.devices // run.pipeline // run.experts.parallel
        state += experts * state_bytes(replace(run, shards=min(run.shards, replicas)))
    cached = (CACHED_IN_ORDER if run.recompute == "none" else CACHED) if _is_of(run, PYTORCH) else 1.0
    counted = 0.0 if _is_of(run, RESERVED) else runtime
    held = state + activations
    reserved = max(held + counted, min(cached * held + counted, capacity))
    return Memory(state, activations, runtime, reserved)


def _is_of(run: Run, frameworks: tuple[str, ...]) -> bool:
    return any(name in run.framework for name in frameworks)


def capacity_of(device: Device) -> float:
    """Bytes of a device that programs may have: vendors sell units of 2^30 as GB, of which drivers keep some."""
    return USABLE * device.memory_bytes / 1e9 * GIB


def state_bytes(run: Run) -> float:
    """Bytes of one parameter with its gradient and its optimizer."""
    if run.dtype == "float32":
        weight, gradient, optimizer = 4, 4, 8
    elif "torchtitan" in run.framework and run.pipeline > 1:
        # What is added up over microbatches, unsplit, has the width that it is reduced in (FSDP2's `to_accumulated_grad`).
        weight, gradient, optimizer = 2, 4, 12
    elif _is_of(run, PLANNED):
        weight, gradient, optimizer = 2, 8 if run.count > 1 else 4, 12
    elif not _is_of(run, MEGATRON):
        weight, gradient, optimizer = 2, 2, 12
    elif run.dtype == "float16":
        weight, gradient, optimizer = 2, 2, 16
    elif "DeepSpeed" in run.framework:
        weight, gradient, optimizer = 2, 6, 12  # gradients in 16 bits, and added up in 32 (`bf16_optimizer.py`)
    elif adds_wide(run):
        # What replicas reduce lies in buckets of 16 bits, too (PyTorch's `DistributedDataParallel`, `gradient_as_bucket_view`).
        weight, gradient, optimizer = 2, 6 if run.data > 1 else 4, 12
    elif _is_of(run, NARROW_GRADIENTS):
        weight, gradient, optimizer = 2, 2, 12
    else:
        weight, gradient, optimizer = 2, 4, 12
    weights, gradients, moments = (run.shards if run.zero >= stage else 1 for stage in (3, 2, 1))
    return weight / weights + gradient / gradients + optimizer / moments


def activation_bytes(run: Run, params: float, layers: int, layer: Held, ends: Held, stage: int) -> float:
    """What the backward passes wait for, of all microbatches in flight, and what one of them works with."""
    tokens = run.microbatch * (run.tokens + run.decoder) // run.context
    residual = 2 * tokens * run.width // (run.tensor if run.sequence else 1)
    is_compiler = run.compiled and not _is_of(run, FUSED)
    whole = layer.kept_bytes + wide_bytes(run, tokens) if is_compiler else eager_bytes(run, tokens)
    if run.recompute == "full":
        kept, again = residual, whole
    elif run.recompute == "selective" and not run.flash:
        again = min(whole, scores_bytes(run, tokens))
        kept = whole - again
    elif run.recompute.startswith("dots"):
        kept = min(whole, product_bytes(run, tokens))
        again = whole - kept
    else:
        kept, again = whole, 0
    flight = run.count if run.schedule.lower() == "gpipe" else min(run.pipeline - stage, run.count)
    chunks = 1 + (run.pipeline - 1) / (run.pipeline * run.chunks) if run.chunks > 1 else 1
    # A stage keeps what it hands on until that has been differentiated.
    borders = residual * flight * run.chunks if run.pipeline > 1 else 0
    if _is_of(run, PLANNED) and 1 < run.count and stage < run.pipeline - 1:
        # What a buffer has, and the next one; a forward pass on its way besides.
        flight, borders = 1 + min(2 * run.pipeline, run.count), whole + buffer_bytes(run, residual, stage)
    gathered = 2 * (4 if run.dtype == "float32" else 2) * params / layers if run.zero == 3 else 0
    waiting = flight * layers * kept * chunks + borders + again
    in_layer = layer.working_bytes if is_planned(run) else layer.eager_bytes
    if stage < run.pipeline - 1:
        return waiting + in_layer + gathered
    return waiting + max(in_layer, ends_bytes(run, tokens, ends)) + gathered


def buffer_bytes(run: Run, residual: float, stage: int) -> float:
    """Places of buffers at a stage's borders: of what comes and goes, both ways, and of a tied embedding and its gradient."""
    tied = run.vocabulary * run.width / run.tensor if stage == 0 and not run.gated else 0.0
    return residual * (4 if stage else 2) + 2 * 4 * tied


def wide_bytes(run: Run, tokens: int) -> float:
    """What PyTorch's compiled products of 8 bits keep more than a program of XLA's: their operands in 16 bits, which the
    backward pass makes narrow again (torchao, `float8_linear.py`)."""
    if run.whole or run.dtype not in NARROW:
        return 0.0
    # Those of tensor parallelism are gathered as they are multiplied (`float8_tensor_parallel.py`).
    return tokens * (2 * run.width + run.heads * run.head_size + run.hidden) / run.tensor


def is_planned(run: Run) -> bool:
    """Whether what it works with lies where a compiler put it, and nothing is kept longer than it is read."""
    return run.whole or _is_of(run, PLANNED)


def ends_bytes(run: Run, tokens: int, ends: Held) -> float:
    """What embedding and loss keep of so many tokens and work with."""
    if SPLIT_LOSS in run.framework and run.tensor > 1:
        return tokens * (2 * run.width + SPLIT_LOSS_BYTES * run.vocabulary / run.tensor)
    return ends.kept_bytes + (ends.working_bytes if is_planned(run) else ends.eager_bytes)


def eager_bytes(run: Run, tokens: int) -> float:
    """What one layer keeps of a microbatch: operands of its norms, products, attention and activation function."""
    wide = run.hidden / run.width
    degree = run.tensor if run.sequence else 1
    is_fused = _is_of(run, FUSED)
    operand = 1 if is_fused and run.dtype in NARROW else 2
    # Of the norms, what enters each and what leaves it, which is what products are made of.
    shared = 4 / degree + 2 * operand / (1 if _is_of(run, GATHERED) else degree)
    part, active = (run.experts.share, run.experts.active) if run.experts else (0.0, 0)
    # Queries, keys, values and the result, which is multiplied next.
    attention = (2 * (1 + 2 * run.kv_heads / run.heads) + 2) * run.heads * run.head_size / run.width
    # What leaves the first product, and what enters the second; between them stands the gate's other half.
    inside = (4 if run.gated else 2) + (2 if run.gated and not is_fused else 0) + operand
    # A decoder's layer attends twice; keys and values of the second time are of the encoder's tokens.
    attention *= 1 + run.output / (run.tokens + run.output) if run.decoder else 1
    split = attention + inside * wide * (1 - part)
    # What is sent to an expert and what comes back, and what the expert keeps of it; sequences are split among all devices.
    split += part * active * (2 + operand + inside * wide)
    return tokens * run.width * (shared + split / run.tensor) + (0 if run.flash else scores_bytes(run, tokens))


def product_bytes(run: Run, tokens: int) -> float:
    """What one layer keeps where products' results are kept, attention's where the policy names it, and what enters it."""
    mixed = run.heads * run.head_size
    columns = mixed * (1 + 2 * run.kv_heads / run.heads) + ("context" in run.recompute) * mixed + run.width
    if "except mlp" not in run.recompute:
        columns += (1 + run.gated) * run.hidden + run.width
    return 2 * tokens * (columns / run.tensor + run.width / (run.tensor if run.sequence else 1))


def scores_bytes(run: Run, tokens: int) -> float:
    """Of attention that is written out: scores after the softmax, in 16 bits, and dropped out, with the mask of that."""
    return 5 * tokens * run.tokens * run.heads / run.tensor

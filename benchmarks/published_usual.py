"""What a run's framework does by default, if the row does not say: compile, overlap collectives, split sequences or the state.

In:     a row, the text of each column.
Out:    yes or no.
Method: the manuals and default configurations of the frameworks, cited at each function.
"""

from __future__ import annotations

from published_cells import JAX, Cells, dtype_of, recompute_of, recomputed_part, says, text_of


def is_compiled(row: Cells) -> bool:
    """Whether a compiler fuses elementwise work.

    torchtitan does where it is told to (`compile.enable`), which collectives behind products and products of 8 bits need; whose
    notes name what is on and not this had it off, but for its comparison of collectives behind products with "vanilla TP", all
    of whose commands have it on (`asyncTP_llama3_h100_2025-06_torchtitan.md`).
    """
    is_usual = dtype_of(row) == "float8" or not text_of(row, "notes")
    is_needed = says(row, "torchtitan", "framework") and is_usual
    said = is_needed or says(row, _COMPILERS, "framework", "notes")
    return said and not says(row, _EAGER, "framework", "notes")


_EAGER = r"\beager|(no|not|without|w/o)[ -](torch[. ])?compile|compile\W*(off|false|no\b|disabled)"
_COMPILERS = (
    r"torch[. ]compile|\bcompile\b(?! time)|inductor|AsyncTP|vanilla TP|"
    r"Alpa|NeMo|Megatron-Bridge|OneFlow|llm\.c|(fused|transformer) kernels"
)


def overlaps(row: Cells) -> bool:
    """Whether collectives of tensor parallelism run behind products.

    NeMo's configurations for these models have it on (`ub_tp_comm_overlap` in NeMo-Framework-Launcher), and Megatron-Bridge's
    recipes for performance (`tp_comm_overlap_cfg`), but with products of 4 bits.
    """
    if says(row, "Megatron-Bridge", "framework"):
        return dtype_of(row) != "float4"
    return says(row, "overlap", "schedule") or says(row, "AsyncTP", "notes") or says(row, "NeMo", "framework")


def is_sequence_parallel(row: Cells) -> bool:
    """Whether tensor-parallel devices split sequences between their products."""
    said = says(row, "sequence parallel|reduce_scatter", "recompute", "schedule", "notes")
    # No other tensor parallelism can hide its collectives behind products. It came before Hopper: on devices from then on it is
    # taken for granted, but where a solver decided.
    newer = says(row, r"\bG?[BH]\d|MI3", "gpu_type") and not says(row, "auto", "framework")
    # MaxText's activations lie split along the width between layers (`activation_embed`), which takes the same collectives.
    return said or newer or overlaps(row) or says(row, "torchtitan|Megatron-Bridge|NeMo|nanotron|MaxText", "framework")


def is_split(row: Cells) -> bool:
    """Whether what is run says that devices have other samples and nothing else: its tensors are not split further."""
    return says(row, "fsdp|sdp|^3", "zero") or says(row, JAX + r"|\bFSDP|\bDDP\b|Composer|fairscale", "framework")


def hides_gradients(row: Cells) -> bool:
    """Whether gradients are reduced behind the last backward pass, and parameters gathered behind the first forward pass.

    As it says; PyTorch's replicas reduce gradients in buckets, as soon as they are there (`DistributedDataParallel`, whose
    wrappers are Lightning, Accelerate and Hugging Face's trainer). Megatron-LM and DeepSpeed do without it.
    """
    if says(row, r"overlap.*\bDP\b|overlap.*grad", "schedule"):
        return True
    replicas = says(row, r"PyTorch|\bDDP\b|Lightning|Hugging|transformers|Accelerate|\blit-", "framework")
    return replicas and not says(row, "Megatron|DeepSpeed|NeMo|FSDP|apex", "framework")


def is_program(row: Cells) -> bool:
    """Whether XLA makes one program of a step, as JAX has it done, and as TPUs take nothing else."""
    return says(row, JAX, "framework") or says(row, r"TPU|\bv\d[ep]?-\d|trillium|ironwood", "gpu_type")


SELECTED = 0.5
"""The part of the layers that is made again where a row says that it is some: torchtitan's default (`apply_ac`)."""


def usual_recompute(row: Cells, is_fused: bool, program: bool) -> tuple[tuple[str, ...], float]:
    """What may be made again, the likeliest first, and of which part of the layers, as the row says or is usual."""
    if recompute_of(row) is None and says(row, r"^\W*(ac\W+)?(selective|sac)\b", "recompute"):
        return ("full",), SELECTED
    several = ("none", *(() if is_fused else ("selective",)), *(("dots",) if program else ()), "full")
    return several, recomputed_part(row)

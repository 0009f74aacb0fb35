"""Reads the cells of a table of published runs, in the spellings that people use.

In:     a row, the text of each column.
Out:    numbers and choices; None if a cell states nothing.
Method: missing columns and cells such as "not stated" or "n/a" state nothing. The first number of a cell counts; it may end in
        "k" or contain commas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Cells = Mapping[str, str | None]

JAX = r"JAX|XLA|MaxText|Pax|praxis|EasyLM|Levanter|T5X|Flax|AXLearn|GSPMD|TensorFlow"
FEWEST_TOKENS = 1 << 17
"""Of a step: a batch of more is in tokens, whatever its column is called."""
_NOTHING = re.compile(
    r"(not (stated|given|known|published|specified)|unknown|n/?a\b|nan\b|tbd\b|see |\?|[-–—.]+$)", re.IGNORECASE
)
_NUMBER = re.compile(
    r"(\d{1,3}(?:[, ]\d{3})+\b(?:\.\d+)?|\d[\d_]*(?:[.,]\d+)?(?:e[+-]?\d+)?)\s*([km]\b)?", re.IGNORECASE
)
_POWER = re.compile(r"(\d+)\s*(?:\^|\*\*)\s*(\d+)")
_PRODUCT = re.compile(
    r"(\d+)\s*(?:(?:node|host|server|machine)s?\s*(?:[x×*]|of|with)|[x×*])\s*(\d+)(?:\s*[x×]?\s*[a-z][-\w]*)*",
    re.IGNORECASE,
)
_DTYPES = (
    (r"fp4|float4|e2m1", "float4"),
    (r"fp8|float8|f8|e4m3", "float8"),
    (r"int8|i8|w8a8", "int8"),
    (r"bf16|bfloat", "bfloat16"),
    (r"fp16|float16|f16|half|^16\b", "float16"),
    (r"fp32|float32|f32|tf32|single|^32\b|^float$", "float32"),
)


def text_of(row: Cells, name: str) -> str:
    """A cell; empty where it says nothing."""
    text = (row.get(name) or "").strip()
    return "" if _NOTHING.match(text) else text


def number_of(row: Cells, name: str, kilo: int = 1000) -> float | None:
    """The number in a cell."""
    text = text_of(row, name)
    product, power = _PRODUCT.fullmatch(text), _POWER.match(text)
    if power:
        return float(int(power[1]) ** int(power[2]))
    if product:
        return float(int(product[1]) * int(product[2]))
    found = _NUMBER.search(text)
    if not found or re.match(r"-\s*\d", text):
        return None
    times = {"k": kilo, "m": kilo**2}.get((found[2] or "").lower(), 1)
    # A comma before three digits parts thousands, else what follows is less than one.
    digits = re.sub(r"[, ](?=\d{3})|_", "", found[1]).replace(",", ".")
    return float(digits) * times


def framework_of(row: Cells) -> str:
    """The framework, known names in it as they are usually written."""
    text = row.get("framework") or ""
    for spelling, name in _FRAMEWORKS:
        text = re.sub(spelling, name, text, flags=re.IGNORECASE)
    return text


_FRAMEWORKS = (
    *((rf"Megatron[-_ ]?{name}", f"Megatron-{name}") for name in ("LM", "DeepSpeed", "Bridge", "Core")),
    *(
        (name, name)
        for name in ("torchtitan", "nanotron", "Megatron", "DeepSpeed", "NeMo", "MaxText", "Alpa", "OneFlow")
    ),
)


def count_of(row: Cells, name: str, kilo: int = 1000) -> int | None:
    """The whole number in a cell, of 1 or more."""
    found = number_of(row, name, kilo)
    return int(found) if found is not None and found >= 1 and found == int(found) else None


def degree_of(row: Cells, name: str) -> int | None:
    """A number of parts, 1 where the cell says that there are none."""
    return 1 if re.match(r"(no|none|off|disabled|false)\b", text_of(row, name), re.IGNORECASE) else count_of(row, name)


def needed(row: Cells, name: str, kilo: int = 1000) -> int:
    """The same where nothing can be said without it.

    Raises:
        ValueError: The cell says nothing.
    """
    found = count_of(row, name, kilo)
    if found is None:
        raise ValueError(f"{name} is not stated")
    return found


def devices_of(row: Cells) -> int:
    """Devices of a run, of which a cell may name the hosts alone.

    Raises:
        ValueError: The cell says nothing.
    """
    found, text = needed(row, "gpus"), text_of(row, "gpus")
    hosts = re.match(r"[\d,]+\s*[x×]?\s*((DGX|HGX)\b|(node|host|server)s?\b)", text, re.IGNORECASE)
    return found * (count_of(row, "gpus_per_node") or 8) if hosts and not _PRODUCT.fullmatch(text) else found


def seconds_of(row: Cells, name: str) -> float | None:
    """Seconds, of milliseconds or minutes too, or of steps in a second."""
    found, text = number_of(row, name), text_of(row, name)
    if not found:
        return None
    if re.match(r"\D*[\d.,]+\s*(it|iter|iteration|step|batche?)s?\s*(/|per)\s*s(ec|\b)", text):
        return 1 / found
    minutes = re.match(r"\D*[\d.,]+\s*m(?:in(?:ute)?s?)?\s*(?:(\d+(?:\.\d+)?)\s*s|\b)", text)
    if minutes:
        return 60 * found + float(minutes[1] or 0)
    return found / 1000 if re.search(r"\d\s*m(illi)?s", text) else found


def rate_of(row: Cells, devices: int) -> float | None:
    """Tokens per second of one device; where the cell says that they are all devices', of one of so many."""
    found, text = number_of(row, "tokens_per_s_per_gpu"), text_of(row, "tokens_per_s_per_gpu")
    return found / devices if found and re.search("total|aggregate|overall|cluster", text, re.IGNORECASE) else found


def teraflops_of(row: Cells) -> float | None:
    """TFLOP/s of one device, of PFLOP/s too; a part of the peak says nothing here."""
    found, text = number_of(row, "tflops_per_gpu"), text_of(row, "tflops_per_gpu")
    if not found or re.match(r"\D*[\d.,]+\s*%", text):
        return None
    return found * (1000 if re.match(r"\D*[\d.,]+\s*P", text, re.IGNORECASE) else 1)


def gib_of(row: Cells, name: str) -> float | None:
    """Memory in GiB; as people write it GB are that too. A part of a device's says nothing here."""
    found, text = number_of(row, name), text_of(row, name)
    if not found or "%" in text:
        return None
    return found / 1024 if re.match(r"\D*[\d.,]+\s*mi?b", text, re.IGNORECASE) else found


def dtype_of(row: Cells) -> str | None:
    """What products are of, of a precision such as "fp8 (hybrid, TE)"."""
    text = text_of(row, "precision").lower()
    return next((dtype for pattern, dtype in _DTYPES if re.search(pattern, text)), None)


def recompute_of(row: Cells) -> str | None:
    """What the backward pass makes again: none, selective (attention), full, or all but products."""
    lower = re.sub(r"^(ac|(activation|gradient) (re)?checkpointing)\W+(?=\w)", "", text_of(row, "recompute").lower())
    if re.match(r"none|no?\b|not (used|on)|off\b|false|disabled|without|w/o|everything_saveable|✗|0$", lower):
        return "none"
    if recomputed_part(row) < 1:
        return "full"
    if re.match(
        r"((selective|sac)\W*(of )?|recompute )?(attention|attn|core|layer_?norm|rms_?norm|moe_act|mla_up)", lower
    ):
        return "selective"
    if re.match(r"selective|sac\b", lower):  # of attention in Megatron-LM; with others of as much as memory asks for
        return "selective" if says(row, "Megatron|NeMo", "framework") else None
    if "dot" in lower or re.match("minimal($|_flash)", lower):  # so MaxText calls it
        with_context = "context" in lower or "flash" in lower
        return "dots" + " with context" * with_context + " except mlp" * ("except_mlp" in lower)
    if re.match(
        r"full|y(es)?\b|true|on\b|enabled|✓|all|every|(per[ -])?(layer|block)|uniform|nothing_saveable|1$"
        r"|(activation |gradient )?checkpoint|remat|ac\b",
        lower,
    ):
        return "full"
    return None


def recomputed_part(row: Cells) -> float:
    """The part of the layers, or of a layer, that full recomputation makes again: all, or what the cell says.

    torchtitan's "selective" is of every second layer, or of every second product of each (`apply_ac`: `mm_count % 2`).
    """
    lower = text_of(row, "recompute").lower()
    part = re.search(r"\b(\d+)\s*(?:/|of|out of)\s*(\d+)\b", lower)
    percent = re.search(r"(\d+(?:\.\d+)?)\s*%", lower)
    if part and 0 < int(part[1]) <= int(part[2]):
        return int(part[1]) / int(part[2])
    if percent and float(percent[1]) <= 100:
        return float(percent[1]) / 100
    halves = r"\bhalf\b|(every|each|all) (other|second|2nd|2\b)|alternat|selective[ _-](layer|op)"
    if re.search(halves, lower) or (lower.startswith("selective") and says(row, "torchtitan", "framework")):
        return 0.5
    return 1.0


def zero_of(row: Cells, data: int, per_host: int = 8) -> tuple[int, int] | None:
    """Stage of ZeRO, and over how many replicas the state is split; None where the cell's words are none of those known here.

    Where the cell is empty the framework's name says it: FSDP splits everything, NeMo's and Megatron-Bridge's recipes have the
    distributed optimizer on.

    Raises:
        ValueError: It is none that there is.
    """
    lower = text_of(row, "zero").lower() or _usual_zero(row)
    if "offload" in lower:
        raise ValueError("its state is on the host")
    fsdp = re.search(r"f?sdp([12]\b)?[ =(]*(?:\d+\s*x\s*(?=\d))?(\d+)?", lower)
    stage = re.match(r"(?:zero|stage|deepspeed|[\s_-])*([0-9])\b", lower) or re.search(r"zero[\s_-]*([0-9])\b", lower)
    group = re.search(r"(?:\bover|\bwithin|\bamong|\bgroups? of|\bsize|=)\s*(\d+)", lower)
    is_hybrid = re.search(r"hsdp|hybrid|zero\+\+|(within|per|inside|in) (a |an |each |one )?(node|host)", lower)
    shards = max(1, min(int(group[1]) if group else per_host if is_hybrid else data, data))
    if stage:
        if int(stage[1]) > 3:
            raise ValueError(f"there is no ZeRO-{stage[1]}")
        return int(stage[1]), shards if int(stage[1]) else 1
    if re.search(r"shard_grad_op|\bp?_?os ?\+ ?g$", lower):
        return 2, shards
    if fsdp or re.search(r"full(y)?.?shard|hybrid.?shard|zero\+\+|\bp?_?os ?\+ ?g ?\+ ?p$", lower):
        return 3, max(1, min(int((fsdp and fsdp[2]) or shards), data))
    is_on = lower in ("yes", "on", "true") and says(row, "Megatron|NeMo", "framework")
    if is_on or re.search(r"opt|^p?_?os$|weight.?update", lower):
        return 1, shards
    return (0, 1) if re.match(r"$|no|off|false|ddp|dp\b|data|replica", lower) else None


def _usual_zero(row: Cells) -> str:
    framework = text_of(row, "framework")
    stated = re.search(r"zero[\s_-]*[0-9]|\bf?sdp[12]?\b", f"{framework} {text_of(row, 'notes')}", re.IGNORECASE)
    if stated and not says(row, r"DDP", "framework"):
        return stated[0].lower()
    return "distributed optimizer" if re.search("NeMo|Megatron-(Bridge|Core)", framework) else ""


def attention_of(row: Cells) -> int | None:
    """The generation of the fused kernel; 0: none.

    The first was of 2022, the second of July 2023: neither uses what newer devices have. The third is what vendors' libraries
    and compilers have for each device. Plain "flash" is the second, where the framework is not one that came with another.
    """
    text = text_of(row, "attention")
    if not text:
        return None
    if re.search(r"unfused|eager|naive|plain|vanilla|math|no flash|none|softmax", text, re.IGNORECASE):
        return 0
    third = r"(flash[-_ ]?(att(entio)?n)?|fa)[-_ ]?v?[34]\b|\bTE\b|transformer ?engine|cudnn|pallas|splash|aiter|\bCK\b"
    if re.search(third, text, re.IGNORECASE):
        return 3
    newer = r"(flash[-_ ]?(att(entio)?n)?|\bfa)[-_ ]?v?2|sdpa|\bv2\b|flex"
    if re.search(newer, text, re.IGNORECASE):
        return 2
    if not re.search(r"flash|fused|xformers|efficient|triton|ring|\bfa\d", text, re.IGNORECASE):
        return usual_attention(row) if re.match(r"yes|on\b|true|mla", text, re.IGNORECASE) else 0
    is_first = re.search(r"flash(attention)?[ -]?v?1|triton", text, re.IGNORECASE) or says(row, "Composer", "framework")
    return 1 if is_first else library_attention(row)


def usual_attention(row: Cells) -> int:
    """What is likely where the cell is empty: on Ampere, who trained in fp16 with scaled losses did so before it was fused.

    Megatron-DeepSpeed and the first two generations of TPUs, which kernels are not written for, are older too.
    """
    if says(row, "A100|A800|A40|A10|A6000|3090", "gpu_type"):
        is_recent = dtype_of(row) != "float16" and not says(row, "Megatron-DeepSpeed", "framework")
    elif says(row, r"TPU[- ]?v?[23]\b|\bv[23]-\d", "gpu_type"):
        is_recent = False
    else:
        newer = r"[HBL]\d|TPU|\bv\d[ep]?-\d|MI[23]|RTX|trillium|ironwood|gaudi|trainium"
        is_recent = says(row, newer, "gpu_type")
    return library_attention(row) if is_recent else 0


def library_attention(row: Cells) -> int:
    """The generation that a framework has: its vendor's, or what PyTorch brings along."""
    is_vendors = says(row, JAX + r"|NeMo|Megatron-(LM|Bridge|Core)|Transformer ?Engine|Neuron|Gaudi|ROCm", "framework")
    return 3 if is_vendors and not says(row, "DeepSpeed", "framework") else 2


def microbatch_of(row: Cells, per_replica: int, shared_by: int) -> int | None:
    """Samples of a microbatch on one replica, whose devices `shared_by` is the number of."""
    text = text_of(row, "microbatch").lower()
    if text.startswith(("whole", "full batch", "all")):
        return per_replica
    found = count_of(row, "microbatch")
    several = re.search(r"\b(\d+) microbatches|microbatches (\d+)", text_of(row, "notes"))
    if several and not found:
        count = int(several[1] or several[2])
        return per_replica // count if per_replica % count == 0 else None
    per_device = re.search("per device|per chip", text) or (says(row, JAX, "framework") and re.search("per gpu", text))
    return found * shared_by if found and per_device else found


def batch_of(row: Cells, tokens: int, replicas: int) -> int:
    """Samples of a step, of so many tokens each; batches in tokens are rounded to what the replicas can share.

    So is every batch where a rate is published: the time is then that of so many samples, whatever the batch was. Where the
    cell says nothing, a rate outside of stages is that of one microbatch on each replica.

    Raises:
        ValueError: The cell says nothing, and no rate is published.
    """
    text, rates = text_of(row, "global_batch"), ("tokens_per_s_per_gpu", "tflops_per_gpu")
    together = replicas * (count_of(row, "microbatch") or 1)
    has_rate = not text_of(row, "seconds_per_step") and number_of(row, "tokens_per_s_per_gpu") is not None
    if not text and not text_of(row, "seconds_per_step") and any(number_of(row, name) is not None for name in rates):
        if count_of(row, "microbatch") and (degree_of(row, "pp") or 1) == 1:
            return together
    batch = needed(row, "global_batch", kilo=_kilo(text))
    sequences = re.match(rf"(\d[\d,]*)\s*(?:seq\w*|samples?)?\s*(?:[x×*]|of)\s*{tokens}\b", text)
    first = r"\D*[\d.,]+(?:e\d+)?\s*[km]?\s*"  # of what stands behind it in brackets nothing is read
    if re.match(first + r"(seq\w*|samples?)?\s*(/|per|on each)\s*(gpu|device|chip|replica|rank)", text, re.IGNORECASE):
        batch *= replicas
    elif sequences:
        batch = int(sequences[1].replace(",", ""))
    elif re.match(first + "tok", text, re.IGNORECASE) or batch >= FEWEST_TOKENS:
        batch = max(1, round(batch / tokens / replicas)) * replicas
    rounded = round(batch / together) * together
    return rounded if has_rate and batch > together else batch


def _kilo(text: str) -> int:
    """Batches of "4M" tokens are of 4 x 2^20, as those of "4.2M" are of millions."""
    whole = re.match(r"(0\.5|1|2|4|8|16|32|64)\s*M\b", text)
    return 1024 if whole else 1000


def decoder_of(row: Cells) -> int | None:
    """Tokens of the decoder: in a column of its own, or in words beside the encoder's."""
    words = "; ".join(text_of(row, name) for name in ("seq", "notes", "model"))
    found = re.search(r"(\d+)\s*(?:tokens?\s*)?(?:in |of |for )?(?:the )?\(?(?:dec|target)", words, re.IGNORECASE)
    found = found or re.search(r"(?:dec(?:oder)?|targets?)\b[^\d,;]{0,24}(\d+)", words, re.IGNORECASE)
    found = found or re.match(r"\d+\s*[/+]\s*(\d+)", words)
    return count_of(row, "decoder_seq", kilo=1024) or (int(found[1]) if found else None)


def says(row: Cells, names: str, *columns: str) -> bool:
    """Whether any of the words is in one of the columns."""
    return bool(re.search(names, " ".join((row.get(c) or "") for c in columns), re.IGNORECASE))


def reached_by(row: Cells) -> float:
    """Bytes per second that an all-reduce over all devices of the job reached, as its notes say; 0: they do not."""
    found = re.search(r"\breached (\d+(?:\.\d+)?) GB/s in an all-reduce", text_of(row, "notes"))
    return float(found[1]) * 1e9 if found else 0.0

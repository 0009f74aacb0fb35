"""The table of published runs: what was trained on what, and how long a step took.

In:     a TSV file whose columns are those of `data/published_runs.tsv`.
Out:    `Run` for each row that says all that decides about its seconds; for each other row, why it is left out.
Method: nothing is guessed: where microbatch, recomputation, the cut into stages or a size is not stated, the row is left
        out. Only what a name says is read off it: a Llama has a gated MLP, RMS norms and no biases.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "published_runs.tsv"


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        source: Who published it.
        line: Its line in the table.
        seconds: Of a step; None where it ran out of memory.
        flops: Model FLOPs of a step: 6 for each parameter and token, and attention.
        memory_gib: Published peak on one device; None where it is not.
        compiled: Whether a compiler fused its elementwise work; frameworks that run operation by operation do not.
        kernel: Which generation of fused attention it ran, 1 or 2; 0: written out.
        overlaps: Whether its tensor-parallel collectives ran behind products, as it or its framework's configuration says.
        ranks_only: Whether the source says that its times are good for ranking and not for more.
        is_profiled: Whether it says that a profiler recorded the run.
    """

    source: str
    framework: str
    line: int
    model: str
    gated: bool
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    tokens: int
    batch: int
    device: str
    devices: int
    per_host: int
    network: str
    tensor: int
    pipeline: int
    data: int
    context: int
    chunks: int
    microbatch: int
    dtype: str
    recompute: str
    zero: int
    shards: int
    sequence: bool
    flash: bool
    kernel: int
    compiled: bool
    overlaps: bool
    ranks_only: bool
    is_profiled: bool
    schedule: str
    seconds: float | None
    memory_gib: float | None

    @property
    def count(self) -> int:
        """Microbatches of one step."""
        return self.batch // (self.microbatch * self.data)

    @property
    def flops(self) -> float:
        """Model FLOPs of one step, recomputation left out and masked attention counted in half."""
        size = self.width // self.heads
        weights = self.width * size * (2 * self.heads + 2 * self.kv_heads) + self.width * self.hidden * (2 + self.gated)
        per_token = (
            6 * (self.layers * weights + self.width * self.vocabulary) + 6 * self.layers * self.tokens * self.width
        )
        return per_token * self.batch * self.tokens


@dataclass(frozen=True)
class Left:
    """A row that is left out, and why."""

    source: str
    line: int
    reason: str


def read_runs(path: Path = DATA) -> tuple[list[Run], list[Left]]:
    """All rows of a table."""
    runs, left = [], []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file, delimiter="\t"), start=2):
            try:
                runs.append(_run(row, line))
            except ValueError as error:
                left.append(Left(row["source"], line, str(error)))
    return runs, left


def _run(row: dict[str, str], line: int) -> Run:
    lower = row["model"].lower()
    if "wide-resnet" in lower or "resnet" in lower:
        raise ValueError("no transformer")
    if row["ep"] not in ("", "1") or "moe" in lower:
        raise ValueError("a mixture of experts, whose number is not in the table")
    layers, width, heads, tokens, batch, devices = (
        _count(row, name) for name in ("layers", "hidden", "heads", "seq", "global_batch", "gpus")
    )
    tensor, pipeline, data = (_count(row, name) for name in ("tp", "pp", "dp"))
    context = int(row["cp"] or 1)
    if tensor * pipeline * data * context != devices:
        raise ValueError("the degrees do not multiply to the devices")
    hidden = _count(row, "ffn")
    microbatch = _microbatch(row, batch // data)
    if batch % (microbatch * data):
        raise ValueError("the batch does not divide")
    zero, shards = _zero(row["zero"], data)
    gated = "llama" in lower or "qwen" in lower or "mistral" in lower
    seconds = row["seconds_per_step"] or row["seconds_derived"]
    if row["status"] == "ok" and not seconds:
        raise ValueError("no time is published")
    return Run(
        source=row["source"],
        framework=row["framework"],
        line=line,
        model=row["model"],
        gated=gated,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=int(row["kv_heads"] or heads),
        hidden=hidden,
        vocabulary=_vocabulary(row["vocab"]),
        tokens=tokens,
        batch=batch,
        device=row["gpu_type"],
        devices=devices,
        per_host=int(row["gpus_per_node"] or 0),
        network=row["interconnect"],
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        chunks=_chunks(row, pipeline),
        microbatch=microbatch,
        dtype=_dtype(row["precision"]),
        recompute=_recompute(row["recompute"]),
        zero=zero,
        shards=shards,
        sequence=_is_sequence_parallel(row),
        flash=_attention(row["attention"]) > 0,
        kernel=_attention(row["attention"]),
        compiled=any(name in row["framework"] + row["notes"] for name in _COMPILERS),
        overlaps=_overlaps(row),
        ranks_only="not for absolute" in row["quality"],
        is_profiled="profiler" in row["quality"],
        schedule=row["schedule"],
        seconds=float(seconds) if row["status"] == "ok" else None,
        memory_gib=float(row["mem_gib"]) if row["mem_gib"] else None,
    )


def _count(row: dict[str, str], name: str) -> int:
    if not row[name].isdigit():
        raise ValueError(f"{name} is not stated")
    return int(row[name])


def _vocabulary(text: str) -> int:
    found = re.search(r"(\d+)(k?)", text)
    if not found:
        raise ValueError("vocab is not stated")
    return int(found[1]) * (1000 if found[2] else 1)


def _microbatch(row: dict[str, str], per_replica: int) -> int:
    text = row["microbatch"]
    if text.startswith("whole batch"):
        return per_replica
    found = re.match(r"(\d+)", text)
    if not found:
        raise ValueError("microbatch is not stated")
    return int(found[1])


def _chunks(row: dict[str, str], pipeline: int) -> int:
    if pipeline == 1:
        return 1
    found = re.match(r"(\d+)", row["vpp"])
    if not found:
        raise ValueError("the number of chunks of a stage is not stated")
    return int(found[1])


def _zero(text: str, data: int) -> tuple[int, int]:
    """Stage, and over how many replicas the state is split."""
    found = re.search(r"FSDP[ =(]*(\d+)?", text)
    if text.startswith("distributed optimizer"):
        return 1, data
    if text[:1].isdigit():
        return int(text[0]), data
    if found:
        return 3, min(int(found[1] or data), data)
    return 0, 1


_DTYPES = (("fp8", "float8"), ("mxfp8", "float8"), ("nvfp4", "float4"), ("int8", "int8"), ("bf16", "bfloat16"))


def _dtype(text: str) -> str:
    lower = text.lower()
    for name, dtype in (*_DTYPES, ("fp16", "float16"), ("fp32", "float32")):
        if name in lower:
            if dtype == "float4":
                raise ValueError("four-bit floats, which JAX does not multiply")
            return dtype
    raise ValueError("precision is not stated")


def _recompute(text: str) -> str:
    lower = text.lower()
    if "not stated" in lower or lower.startswith(("see", "custom")) or not lower:
        raise ValueError("recompute is not stated")
    if lower.startswith(("full", "yes")):
        return "full"
    if lower.startswith("selective"):
        return "selective"
    if lower.startswith("none"):
        return "none"
    if "dot" not in lower and lower != "minimal":  # the latter is what MaxText calls it
        raise ValueError("recompute is none that is known here")
    return "dots" + " with context" * ("context" in lower) + " except mlp" * ("except_mlp" in lower)


_COMPILERS = ("JAX", "XLA", "torch.compile", "torchtitan", "Alpa", "NeMo", "Megatron-Bridge", "OneFlow")


def _attention(text: str) -> int:
    """The generation of the kernel: plain "flash" is the first, which does not use what newer devices have."""
    if "flash" not in text.lower() or "unfused" in text:
        return 0
    return 2 if any(name in text for name in ("flash 2", "TE", "cuDNN", "SDPA", "Pallas")) else 1


def _overlaps(row: dict[str, str]) -> bool:
    """NeMo's configurations for these models have it on (`ub_tp_comm_overlap` in NeMo-Framework-Launcher)."""
    return "overlap" in row["schedule"].lower() or "AsyncTP" in row["notes"] or "NeMo" in row["framework"]


def _is_sequence_parallel(row: dict[str, str]) -> bool:
    said = " ".join((row["recompute"], row["schedule"], row["notes"])).lower()
    modern = any(name in row["framework"] for name in ("torchtitan", "Megatron-Bridge", "NeMo", "nanotron"))
    return "sequence parallel" in said or "reduce_scatter" in said or modern


def tau(a: list[float], b: list[float], least: float = 0.0) -> float:
    """Kendall's rank correlation, ties counting nothing; without pairs of which `a` differs by less than the part `least`."""
    pairs = [(x, y) for x in range(len(a)) for y in range(x) if abs(a[x] - a[y]) >= least * min(a[x], a[y])]
    agree = sum(math.copysign(1, (a[x] - a[y]) * (b[x] - b[y])) for x, y in pairs if a[x] != a[y] and b[x] != b[y])
    return agree / max(1, len(pairs))

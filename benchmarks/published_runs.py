"""Reads the table of published runs: which model was trained on which machine, and how long a step took.

In:     a TSV file whose columns are those of `data/published_runs.tsv`.
Out:    `Run` for each row that is a stack of equal layers with sizes, devices and a time; for each other row, why there is
        none.
Method: `Run.unstated` lists the possible values of what a row leaves open; figures of such rows are never mixed with those of
        complete rows. From a model's name only what it states is used (`published_names.py`).
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_architectures import with_sizes
from published_cells import (
    Cells,
    attention_of,
    batch_of,
    count_of,
    decoder_of,
    degree_of,
    devices_of,
    dtype_of,
    framework_of,
    gib_of,
    microbatch_of,
    needed,
    rate_of,
    reached_by,
    recompute_of,
    says,
    seconds_of,
    teraflops_of,
    text_of,
    usual_attention,
    zero_of,
)
from published_experts import Dense, Experts, experts_of, has_experts
from published_names import check_family, has_decoder, head_size_of, is_encoder, is_gated, sees_images, usual_head_size
from published_nets import Net, as_layers, mesh_of, net_of
from published_usual import (
    hides_gradients,
    is_compiled,
    is_program,
    is_sequence_parallel,
    is_split,
    overlaps,
    usual_recompute,
)

DATA = Path(__file__).parent / "data" / "published_runs.tsv"
MOST_STAGES = 64
MOST_TOKENS = 1 << 15
"""Of a microbatch, where a row does not say how large it was: with more of them nothing gets faster."""


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
        whole: Whether that compiler made one program of the step, as XLA does: no host launches kernels.
        kernel: Which generation of fused attention it ran, 1 to 3, the last made for the device; 0: written out.
        overlaps: Whether its tensor-parallel collectives ran behind products, as it or its framework's configuration says.
        hides_gradients: Whether gradients were reduced behind the last backward pass, and parameters gathered behind the first
            forward pass, as it says.
        ranks_only: Whether the source says that its times are good for ranking and not for more.
        is_profiled: Whether it says that a profiler recorded the run.
        improved_later: Whether it says that something about its hosts was improved afterwards.
        size: Of a head; 0: its part of the width.
        causal: Whether tokens see only those before them.
        decoder: Tokens of a decoder beside an encoder of `tokens`, each `layers` deep; 0: there is none.
        experts: Of a mixture of them.
        net: Of a convolutional one, which has none of the sizes above.
        recomputed: The part of the layers for which `recompute` is full; of the others nothing is made again.
        by_rows: Whether operands of 8 bits have a scale for each row.
        may_split: Whether its row neither says nor denies that replicas split the state among them.
        mesh: On which a solver sharded that, if one did; `()`: all devices in a row.
        apart: With which runs its source says that it is not to be compared; those of which it says the same may be.
        reached: Bytes per second through each host in an all-reduce over all devices, as the same job measured; 0: it did not.
        unstated: What the row does not say, each with what it may be, the likeliest first.
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
    whole: bool
    overlaps: bool
    hides_gradients: bool
    ranks_only: bool
    is_profiled: bool
    improved_later: bool
    schedule: str
    seconds: float | None
    memory_gib: float | None
    size: int = 0
    causal: bool = True
    decoder: int = 0
    experts: Experts | None = None
    net: Net | None = None
    recomputed: float = 1.0
    by_rows: bool = False
    may_split: bool = False
    mesh: tuple[int, ...] | None = None
    apart: tuple[str, ...] = ()
    reached: float = 0.0
    unstated: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.size or self.width // self.heads

    @property
    def attention_weights(self) -> int:
        """Parameters of one layer's attention."""
        return self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def count(self) -> int:
        """Microbatches of one step."""
        return self.batch // (self.microbatch * self.data)

    @property
    def output(self) -> int:
        """Tokens of a sample that a loss is computed of."""
        return self.decoder or self.tokens

    @property
    def flops(self) -> float:
        """Model FLOPs of one step, recomputation left out and masked attention counted in half."""
        active = 1 + self.experts.share * (self.experts.active - 1) if self.experts else 1
        if self.net:
            return 3 * self.batch * self.net.flops()
        weights = self.attention_weights + self.width * self.hidden * (2 + self.gated) * active
        pairs = self.tokens * self.heads * self.head_size * (1 if self.causal else 2)
        per_sample = self.tokens * self.layers * (weights + pairs) + self.output * self.width * self.vocabulary
        if self.decoder:
            mixed = self.heads * self.head_size * (self.decoder + 2 * self.tokens)
            # Its keys and values of the encoder's tokens are as many as those.
            half = self.attention_weights / 2
            per_sample += self.layers * (self.decoder * (weights + half + mixed) + self.tokens * half)
        return 6 * per_sample * self.batch


@dataclass(frozen=True)
class Left:
    """A row that is left out, and why."""

    source: str
    line: int
    reason: str


def read_runs(path: Path = DATA) -> tuple[list[Run], list[Left]]:
    """All rows of a table."""
    runs, left = [], []
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        between = "," if path.suffix == ".csv" else "\t"
        for line, row in enumerate(csv.DictReader(file, delimiter=between), start=2):
            try:
                runs.append(_run(row, line))
            except ValueError as error:
                left.append(Left(row.get("source") or "", line, str(error)))
    return runs, left


def _run(row: Cells, line: int) -> Run:
    row, filled = with_sizes(row)
    lower, net = text_of(row, "model").lower(), net_of(row)
    row = as_layers(row, net) if net else row
    check_family(lower, net is not None)
    status = text_of(row, "status").lower()
    if status not in ("", "ok") and not re.search("oom|memory", status):
        raise ValueError(f"it did not run: {status}")
    filled = tuple(name for name in filled if name in ("layers", "hidden", "heads", "ffn", "vocab"))
    assumed: dict[str, tuple[Any, ...]] = {"sizes": (filled,)} if filled else {}

    def stated(name: str, found: Any, *otherwise: Any) -> Any:
        """What a column says, or else the first of what it may be, all of which is remembered."""
        if found is None:
            assumed[name] = tuple(dict.fromkeys(otherwise))
        return otherwise[0] if found is None else found

    layers, width = needed(row, "layers"), needed(row, "hidden")
    tokens, devices = needed(row, "seq", kilo=1024), devices_of(row)
    degrees = [degree_of(row, name) or 1 for name in ("tp", "pp", "cp")]
    batch = batch_of(row, tokens, degree_of(row, "dp") or max(1, devices // math.prod(degrees)))
    heads = stated("heads", count_of(row, "heads"), max(1, width // 128))
    size = count_of(row, "head_size") or head_size_of(lower)
    size = 0 if size * heads == width else size
    if width % heads and not size:
        size = stated("size", None, usual_head_size(width, heads))
    words, kv_heads = count_of(row, "vocab"), count_of(row, "kv_heads") or heads
    if heads % kv_heads:
        raise ValueError("the heads of keys do not divide those of queries")
    gated = is_gated(lower, row)
    hidden = stated("hidden", count_of(row, "ffn"), 4 * width if not gated else 256 * math.ceil(width * 8 / 3 / 256))
    vocabulary = stated("vocabulary", words, 1000 if sees_images(lower) else 50304)
    is_jax, decoder = is_program(row), 0
    if has_decoder(lower):
        # As T5 (Raffel et al., 2020, sec. 3.1.4).
        decoder = stated("decoder", decoder_of(row), max(1, tokens * 114 // 512))
    if (mesh := mesh_of(row, devices) if net else None) == ():
        stated("mesh", None, (devices,))
    layouts = [(1, 1, devices, 1)] if net else _layouts(row, layers, heads, batch, devices)
    # Who splits the state splits tensors only where there are not samples enough.
    likely = [one for one in layouts if one[0] == min(layouts)[0] or not is_split(row)]
    tensor, pipeline, data, context = stated("layout", layouts[0] if len(layouts) == 1 else None, *likely)
    if batch % data:
        raise ValueError("the batch does not divide")
    if len(layouts) == 1 and heads % tensor:
        raise ValueError("the heads do not divide among tensor-parallel devices")
    per_replica = batch // data
    larger = tuple(n for n in (16, 64, 256) if n * tokens <= MOST_TOKENS)
    tried = (
        ((32,) if mesh is not None else (8, 32)) if net else (*((1, 2, 4) if len(layouts) == 1 else (1, 4)), *larger)
    )
    several = (per_replica,) if is_jax and pipeline == 1 else tuple(n for n in tried if per_replica % n == 0) or (1,)
    microbatch = stated("microbatch", microbatch_of(row, per_replica, devices // data // pipeline), *several)
    if per_replica % microbatch:
        raise ValueError("the batch does not divide")
    zero, shards = stated("zero", zero_of(row, data * context, count_of(row, "gpus_per_node") or 8), (0, 1))
    # torchtitan's stages keep what they have gathered, and gradients, until the last microbatch (`reshard_after_forward`).
    if is_kept := zero == 3 and pipeline > 1 and says(row, "torchtitan", "framework"):
        zero = 1
    if says(row, r"Alpa \(auto", "framework") and not text_of(row, "zero"):
        zero, shards = 2, data  # its solver prefers reduce-scatter (`prefer_reduce_scatter` of Alpa's suites)
    if (is_jax or says(row, r"Alpa \(intra", "framework")) and not text_of(row, "zero"):
        zero, shards = stated("zero", None, 3), data * context  # MaxText's `ici_fsdp_parallelism` is whatever is left
    chunks = degree_of(row, "vpp") if pipeline > 1 else 1
    several = tuple(n for n in range(1, layers // pipeline + 1) if layers // pipeline % n == 0)
    # Megatron-LM sends between stages behind products only where they are interleaved (`overlap_p2p_comm`).
    interleaved = says(row, r"interleav|overlap.*\bPP\b", "vpp", "schedule") and len(several) > 1
    one_is_none = interleaved and chunks == 1 and says(row, "interleav", "schedule")
    chunks = stated("chunks", None if one_is_none else chunks, *(several[1:] if interleaved else (1,)))
    kernel = stated("kernel", attention_of(row), usual_attention(row))
    made_again, part = usual_recompute(row, kernel > 0, is_jax)
    run = Run(
        source=text_of(row, "source"),
        framework=framework_of(row),
        line=line,
        model=text_of(row, "model"),
        gated=gated,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        vocabulary=vocabulary,
        tokens=tokens,
        batch=batch,
        device=text_of(row, "gpu_type"),
        devices=devices,
        per_host=count_of(row, "gpus_per_node") or 0,
        network=row.get("interconnect") or "",
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        chunks=chunks,
        microbatch=microbatch,
        dtype=stated("dtype", dtype_of(row), "float16" if says(row, "V100|T4", "gpu_type") else "bfloat16"),
        recompute=stated("recompute", recompute_of(row), *made_again),
        recomputed=part,
        by_rows=says(row, "row[- ]?wise|per[- ]row", "precision"),
        zero=zero,
        shards=shards,
        sequence=is_sequence_parallel(row),
        flash=kernel > 0,
        kernel=kernel,
        compiled=is_jax or is_compiled(row),
        whole=is_jax or says(row, "Alpa", "framework"),
        overlaps=overlaps(row),
        hides_gradients=is_kept or hides_gradients(row),
        ranks_only=says(row, "not for absolute", "quality"),
        is_profiled=says(row, "profiler", "quality"),
        improved_later=says(row, r"and later: [^;]*\bimproved", "notes"),
        schedule=text_of(row, "schedule"),
        seconds=None,
        memory_gib=gib_of(row, "mem_gib"),
        size=size,
        causal=not (is_encoder(lower) or has_decoder(lower)),
        decoder=decoder,
        net=net,
        may_split=not (zero or net or text_of(row, "zero")),
        mesh=mesh,
        apart=tuple(re.findall(r"not to be compared with ([^;:]+)", text_of(row, "notes"))),
        reached=reached_by(row),
        unstated=tuple(assumed.items()),
    )
    if mesh is not None and run.recompute == "full":
        raise ValueError("a sharded convolutional net that is computed again")
    if has_experts(row):
        parallel = degree_of(row, "ep")
        if parallel and devices // pipeline % parallel:
            raise ValueError("the experts' degree does not divide a stage's devices")
        experts = experts_of(row, _dense(run), parallel or 1)
        run = replace(run, experts=experts, unstated=(*run.unstated, ("experts", (parallel,))))
    return run if re.search("oom|memory", status) else replace(run, **_timed(row, run))


def _layouts(row: Cells, layers: int, heads: int, batch: int, devices: int) -> list[tuple[int, int, int, int]]:
    """Tensor, pipeline, data and context degrees as stated, or all that what is stated leaves.

    Raises:
        ValueError: They do not multiply to the devices.
    """
    context, experts = degree_of(row, "cp") or 1, degree_of(row, "ep") or 1
    within = [n for n in (1, 2, 4, 8) if n <= (count_of(row, "gpus_per_node") or 8)]
    one, other = degree_of(row, "tp"), degree_of(row, "pp")
    tensors = [one] if one else within
    pipelines = [other] if other else [1] if is_split(row) else [1, 2, 4, 8, 16]
    found = []
    for several in (pipelines, [] if other else range(1, min(layers, MOST_STAGES) + 1)):  # the usual ones, or else any
        for tensor, pipeline in itertools.product(tensors, () if found else several):
            data, rest = divmod(devices, tensor * pipeline * context)
            stated = degree_of(row, "dp") or data
            if rest or stated != data or not data:
                continue
            if (heads % tensor and len(tensors) > 1) or (devices // pipeline % experts and len(several) > 1):
                continue
            if pipeline <= layers and (batch % data == 0 or len(tensors) == len(several) == 1):
                found.append((tensor, pipeline, data, context))
    whole = [one for one in found if batch // one[2] % (count_of(row, "microbatch") or 1) == 0]
    found = whole or found
    if not found and (degree_of(row, "pp") or 1) > layers:
        raise ValueError("there are more stages than layers")
    if not found:
        raise ValueError("the degrees do not multiply to the devices")
    return found


def _dense(run: Run) -> Dense:
    scores = 6 * run.layers * run.tokens * run.heads * run.head_size * (1 if run.causal else 2)
    expert = run.width * run.hidden * (2 + run.gated)
    return Dense(run.layers, run.attention_weights, expert, run.width * run.vocabulary, scores)


def _timed(row: Cells, run: Run) -> dict[str, Any]:
    """Seconds of a step, or what they follow from.

    Raises:
        ValueError: None are published.
    """
    seconds = seconds_of(row, "seconds_per_step") or seconds_of(row, "seconds_derived")
    if seconds:
        return {"seconds": seconds}
    rate, flops = rate_of(row, run.devices), teraflops_of(row)
    if rate:
        return {"seconds": run.batch * (run.tokens + run.decoder) / rate / run.devices}
    if not flops or run.net:  # of the FLOPs of a net, people count what they like
        raise ValueError("no time is published")
    # What attention counted for, and what was made again, is seldom said.
    again = 1 + run.recomputed / 3 if says(row, _HARDWARE, "tflops_kind") and run.recompute == "full" else 1
    seconds = again * run.flops / (flops * 1e12 * run.devices)
    return {"seconds": seconds, "unstated": (*run.unstated, ("seconds", (seconds,)))}


_HARDWARE = r"hardware|incl. recompute|\bHFU\b"

"""Predict the step of a published run: one layer and the ends of the model are planned, and the step is put together.

In:     `Run`.
Out:    `Prediction`: seconds, where they go, and memory.
Method: autopar plans one layer, forward and backward, and the embedding with the loss, for one microbatch on its
        tensor-parallel group; costs of kernels and collectives are the planner's own. A model is that many equal layers in
        equal stages: what planning it whole does too, and would take minutes for a thousand devices. What is not the
        planner's is what the frameworks did that autopar's programs do not (`published_frameworks.py`), and what they kept in
        memory (`published_memory.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Any

from published_frameworks import (
    ADAM_BYTES,
    FIRST_FLASH,
    OMNI_PATH,
    OVERLAPPED,
    eager_seconds,
    generation_of,
    joins_products,
    padded_vocabulary,
    stage_layers,
    with_launches,
)
from published_layers import CORE, Sizes, ends_step, layer_step
from published_memory import capacity_of, memory_of
from published_runs import Run

import autopar
from autopar._jax import Var
from autopar.cost import collective_seconds, kernel_seconds
from autopar.cost.kernels import Kernel, Pass, Product
from autopar.errors import AutoparError
from autopar.intra_op.graph import Graph
from autopar.intra_op.held import held_values
from autopar.intra_op.kernels import kernel_of
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.sharded import Collective, Compute, Fused, Move, collectives_of
from autopar.intra_op.traffic import find_reads, find_traffic
from autopar.ir.dataflow import inputs_of
from autopar.ir.source import is_backward
from autopar.mesh import Device, Link, LogicalMesh, find_device

PHASES = ("forward", "core", "backward")


@dataclass(frozen=True)
class Machine:
    """A device and its links: inside a host, and between hosts."""

    device: Device
    per_host: int
    intra: Link
    inter: Link


@dataclass(frozen=True)
class Work:
    """What one device of a tensor-parallel group does for one microbatch, in each phase.

    Attributes:
        kept_bytes: Made or read by the forward pass and read by the backward.
        working_bytes: At the peak, arguments and what is kept left out.
        eager_bytes: The same where each operation is a kernel that leaves its result in memory.
    """

    kernels: dict[str, tuple[Kernel, ...]]
    collectives: dict[str, tuple[Collective, ...]]
    kept_bytes: int
    working_bytes: int
    eager_bytes: int

    def compute(self, phase: str, device: Device, is_compiled: bool) -> float:
        """Seconds of its kernels, in a compiled program or one by one."""
        return sum((kernel_seconds if is_compiled else eager_seconds)(k, device) for k in self.kernels[phase])

    def communication(self, phase: str, mesh: LogicalMesh) -> float:
        """Seconds of its collectives."""
        return sum(collective_seconds(c.kind, c.bytes, c.axes, mesh) for c in self.collectives[phase])


@dataclass(frozen=True)
class Prediction:
    """A step.

    Attributes:
        seconds: Its length.
        compute: Of the fullest stage, all microbatches.
        tensor: Collectives within layers.
        bubble: Waiting for the first microbatch to arrive and the last to come back.
        data: Collectives of gradients and parameters that nothing hides.
        update: The optimizer.
        memory_bytes: On the fullest device, as its framework reserves it.
        needed_bytes: Part of it that the run cannot do without.
        capacity_bytes: Of a device.
    """

    seconds: float
    compute: float
    tensor: float
    bubble: float
    data: float
    update: float
    memory_bytes: float
    needed_bytes: float
    capacity_bytes: float


def machine_of(run: Run) -> Machine:
    """The machine of a run: the catalog's device, the network that the table states.

    Raises:
        AutoparError: The catalog does not have the device, or it is not what the table counts.
    """
    power = re.search(r"(\d+) W\b", run.device)
    limited = f"-{power[1]}w" if power and power[1] != "700" else ""
    name = re.sub(r", chips|\(.*?\)", "", run.device).strip()
    model = find_device(re.sub(r"-\d+GB$", "", name) + limited if limited else name)
    intra, inter = model.intra, model.inter
    links = re.search(r"NVLink (\d+) links", run.network)
    if links:
        share = int(links[1]) * 25e9 / model.intra_peak
        intra = dataclasses.replace(intra, bytes_per_second=intra.bytes_per_second * share)
    per_host = model.devices_per_host if "NVL72" in run.network else run.per_host or model.devices_per_host
    rate = _network_rate(run.network, per_host)
    if rate is not None:
        reached = OMNI_PATH if "Omni-Path" in run.network else inter.bytes_per_second / model.inter_peak
        inter = dataclasses.replace(inter, bytes_per_second=rate * reached)
    device = model.device
    if "chips" in run.device and model.per_chip > 1:
        raise AutoparError(
            "chips of several devices are not predicted.",
            given=run.device,
            wrong=f"JAX makes {model.per_chip} devices of each, and the degrees of parallelism are those of chips.",
            do="state them in devices.",
        )
    if run.kernel == 1:
        fused = device.achieved.fused * FIRST_FLASH[generation_of(device)]
        device = dataclasses.replace(device, achieved=dataclasses.replace(device.achieved, fused=fused))
    return Machine(device, per_host, intra, inter)


def _network_rate(text: str, per_host: int) -> float | None:
    """Bytes per second of one device, out of words like "8x400 Gb/s IB" or "25 Gb/s Ethernet per host"."""
    found = re.search(r"(?:(\d+)\s*(?:x|Omni-Path)\s*)?(\d+) Gb/s(.*)", text)
    if not found:
        return None
    total = int(found[1] or 1) * int(found[2]) / 8 * 1e9
    return total if "per GPU" in found[3] else total / per_host


@functools.cache
def work_of(part: str, sizes: Sizes, device: Device, link: Link) -> Work:
    """Plan a layer, or the ends, of a microbatch on its tensor-parallel group."""
    step = (layer_step if part == "layer" else ends_step)(sizes)
    mesh = LogicalMesh((sizes.tensor,), links=(link,))
    cluster = autopar.Cluster(1, sizes.tensor, device, link, link)
    method = autopar.ShardParallel(mesh_shape=mesh, constraints=step.pins, memory_budget_bytes=1 << 50)
    plan = autopar.parallelize(step.function, cluster=cluster, method=method, batch_argnums=()).plan(*step.arguments)
    return _read(plan.origin.pipeline.stages[0].sharded, mesh)


def _read(sharded: Any, mesh: LogicalMesh) -> Work:
    """Kernels and collectives of a plan by phase."""
    graph = sharded.graph
    traffic, reads = find_traffic(graph), find_reads(graph)
    kernels: dict[str, list[Kernel]] = {phase: [] for phase in PHASES}
    moves: dict[str, list[Collective]] = {phase: [] for phase in PHASES}
    made_in: dict[Any, str] = {var: "forward" for var, _ in sharded.body.inputs}
    kept: dict[Any, int] = {}
    waiting: list[Collective] = []
    phase = "forward"
    for instruction in sharded.body.instructions:
        waiting += collectives_of(type(sharded.body)((), (instruction,), ()), mesh)
        if isinstance(instruction, Compute):
            eqn = instruction.eqn
            core = CORE in str(eqn.source_info.name_stack)
            phase = "backward" if is_backward(eqn) else "core" if core else "forward"
            node = graph.nodes[graph.op_node[eqn]]
            kernel = kernel_of(node, instruction.strategy, traffic[node.index], mesh)
            if kernel.num_bytes or not isinstance(kernel, Pass):
                kernels[phase].append(kernel)
            for var in reads[node.index] if phase == "backward" else ():
                if made_in.get(var) != "backward" and var in graph.produced:
                    made = graph.produced[var]
                    sharding = made.shardings[sharded.choices[made.node]]
                    size = math.prod(var.aval.shape) * var.aval.dtype.itemsize
                    kept[var] = size // sharding.num_shards(mesh)
            made_in.update(dict.fromkeys(eqn.outvars, phase))
            moves[phase] += waiting
            waiting = []
        elif isinstance(instruction, Move | Fused):
            first = instruction.moves[0] if isinstance(instruction, Fused) else instruction
            if first.reader == "result":
                moves[made_in.get(first.var, phase)] += waiting
                waiting = []
    moves[phase] += waiting
    inputs = {var for var, _ in sharded.body.inputs}
    activations = sum(size for var, size in kept.items() if var not in inputs or len(var.aval.shape) == 3)
    working = sharded.liveness.peak_bytes - sharded.liveness.argument_bytes - activations
    eager = measure_liveness(sharded.body, mesh, eagerly_held(graph)).peak_bytes - sharded.liveness.argument_bytes
    return Work(
        {name: tuple(found) for name, found in kernels.items()},
        {name: tuple(found) for name, found in moves.items()},
        activations,
        max(0, working),
        max(0, eager - activations),
    )


def eagerly_held(graph: Graph) -> set[Var]:
    """What stays in memory if nothing is made again: what goes through it anyway, and what several operations read."""
    nodes = [node for node in graph.nodes if node.kind == "op"]
    readers = collections.Counter(var for node in nodes for var in dict.fromkeys(inputs_of(node.eqn)))
    return {*held_values(graph), *(v for node in nodes for v in node.eqn.outvars if readers[v] > 1)}


def sizes_of(run: Run) -> Sizes:
    """What the seconds of one microbatch depend on."""
    return Sizes(
        samples=run.microbatch,
        tokens=run.tokens,
        width=run.width,
        heads=run.heads,
        kv_heads=run.kv_heads,
        hidden=run.hidden,
        vocabulary=padded_vocabulary(run),
        gated=run.gated,
        flash=run.flash,
        dtype=run.dtype if run.dtype in ("float32", "float8") else "bfloat16",
        tensor=run.tensor,
        sequence=run.sequence and run.tensor > 1,
        context=run.context,
        joined=joins_products(run),
    )


def predict(run: Run) -> Prediction:
    """Put the step of a run together."""
    machine = machine_of(run)
    link = (machine.intra if run.tensor <= machine.per_host else machine.inter).within(run.tensor)
    mesh = LogicalMesh((run.tensor,), links=(link,))
    layer, ends = (work_of(part, sizes_of(run), machine.device, link) for part in ("layer", "ends"))
    return compose(run, machine, mesh, layer, ends)


def compose(run: Run, machine: Machine, mesh: LogicalMesh, layer: Work, ends: Work) -> Prediction:
    """The step from its layers: `count` microbatches through the fullest stage, and a bubble of the others."""
    device = machine.device
    again = {"full": ("forward", "core"), "selective": () if run.flash else ("core",)}.get(run.recompute, ())

    def compute(phases: tuple[str, ...]) -> float:
        kernels = tuple(kernel for phase in phases for kernel in layer.kernels[phase])
        return with_launches(run, kernels, sum(layer.compute(phase, device, run.compiled) for phase in phases))

    forward = compute(("forward", "core"))
    work = compute((*PHASES, *again)) + again_between_products(run, layer, device)
    tensor = sum(layer.communication(phase, mesh) for phase in (*PHASES, *again))
    end = sum(ends.compute(phase, device, run.compiled) for phase in PHASES)
    end_tensor = sum(ends.communication(phase, mesh) for phase in PHASES)
    tensor *= 1 - OVERLAPPED if run.overlaps else 1
    layers = stage_layers(run)
    most, params = max(layers), params_of(run, layers[0], 0)
    # Gradients of a microbatch are added to those before it: two reads and a write.
    adding = kernel_seconds(Pass(3 * 2 * params), device) if run.count > 1 else 0.0
    fullest = max((most, 0.0, 0.0), (layers[-1], end, end_tensor), key=lambda s: s[0] * (work + tensor) + s[1] + s[2])
    busy, sending = fullest[0] * work + fullest[1] + adding, fullest[0] * tensor + fullest[2]
    bubble = (run.pipeline - 1) / run.chunks * (most * (work + tensor) + adding)
    once, with_each = data_seconds(run, machine, params, most, forward, work + tensor)
    once += tied_seconds(run, machine)
    update = kernel_seconds(Pass(ADAM_BYTES * params / (run.shards if run.zero else 1)), device)
    capacity = capacity_of(device)
    memory = max(
        (
            memory_of(run, params_of(run, count, stage), count, layer, ends, capacity, stage)
            for stage, count in enumerate(layers[:2])
        ),
        key=lambda found: found.reserved,
    )
    return Prediction(
        run.count * (busy + sending + border_seconds(run, machine, fullest[1] > 0) + with_each)
        + bubble
        + once
        + update,
        run.count * busy,
        run.count * sending,
        bubble,
        once + run.count * with_each,
        update,
        memory.reserved,
        memory.needed,
        capacity,
    )


def again_between_products(run: Run, layer: Work, device: Device) -> float:
    """Seconds of what a layer computes again where the results of products are kept, as compiled programs do.

    That is all elementwise work, and attention in one kernel, which such policies take for no product unless they name it.
    """
    if not run.recompute.startswith("dots"):
        return 0.0
    again: list[Kernel] = [k for k in layer.kernels["forward"] if isinstance(k, Pass)]
    if "context" not in run.recompute:
        again += layer.kernels["core"]
    if "except mlp" in run.recompute:
        columns = run.hidden // run.tensor
        again += [k for k in layer.kernels["forward"] if isinstance(k, Product) and columns in (k.rows, k.columns)]
    return sum(kernel_seconds(k, device) for k in again)


def border_seconds(run: Run, machine: Machine, is_last: bool) -> float:
    """Seconds in which a stage waits for a microbatch at its borders: there and back at once over each.

    Each device of a tensor-parallel group sends its part, which the others then gather. Stages in several chunks receive the
    next one while they compute. The last stage has one border; where it is the slowest, those before it wait for it anyway.
    """
    if run.pipeline == 1 or run.chunks > 1:
        return 0.0
    part = 2 * run.microbatch * run.tokens // run.context * run.width / run.tensor
    near, far = (link.latency_seconds + part / link.bytes_per_second for link in (machine.intra, machine.inter))
    if run.devices <= machine.per_host:
        return near if is_last else 2 * near
    # Several stages in one host: of the two borders of a stage one at most leaves it, of the last one none.
    if run.devices // run.pipeline >= machine.per_host:
        return far if is_last else 2 * far
    return near if is_last else near + far


def tied_seconds(run: Run, machine: Machine) -> float:
    """Seconds in which first and last stage add up their gradients of the embedding, which GPT multiplies by at its end."""
    if run.pipeline == 1 or run.gated:
        return 0.0
    link = machine.intra if run.devices <= machine.per_host else machine.inter
    num_bytes = (4 if run.dtype == "float32" else 2) * run.vocabulary * run.width / run.tensor
    return collective_seconds("all-reduce", num_bytes, ("x",), LogicalMesh((2,), links=(link,)))


def params_of(run: Run, layers: int, stage: int) -> float:
    """Parameters on one device of a stage, replicas counted whole; the first one has the embedding."""
    size = run.width // run.heads
    per_layer = run.width * size * (2 * run.heads + 2 * run.kv_heads) + run.width * run.hidden * (2 + run.gated)
    ends = 2 if run.pipeline == 1 and run.gated else int(stage == 0)
    return (layers * per_layer + ends * run.width * run.vocabulary) / run.tensor


def data_seconds(
    run: Run, machine: Machine, params: float, layers: int, forward: float, whole: float
) -> tuple[float, float]:
    """Seconds of gradients and parameters that nothing hides: once per step, and with each microbatch.

    Gradients are reduced once, after all microbatches. Parameters that are stored split are gathered a layer ahead, and
    their gradients reduced a layer behind, while that is computed; the collectives then take a part of the cores.
    """
    if run.data == 1:
        return 0.0, 0.0
    inside = math.gcd(run.data, max(1, machine.per_host // run.tensor))
    links = machine.inter, machine.intra.within(inside * run.tensor)
    mesh = LogicalMesh((run.data // inside, inside), links=links)
    if "DeepSpeed" in run.framework and run.zero == 3 and run.devices > machine.per_host:
        mesh = LogicalMesh((run.data,), links=(machine.inter,))

    def seconds(kind: str, num_bytes: float) -> float:
        return collective_seconds(kind, num_bytes, mesh.axis_names, mesh)

    width = 4 if run.dtype == "float32" else 2
    if run.dtype == "bfloat16" and "Megatron-DeepSpeed" in run.framework:
        # `bf16_optimizer.py` adds gradients up in 32 bits on every replica, and gathers what each has updated.
        return seconds("all-reduce", params * 4) + seconds("all-gather", params * 2), 0.0
    if run.zero == 0:
        return seconds("all-reduce", params * width), 0.0
    if run.zero < 3:
        return seconds("reduce-scatter", params * width) + seconds("all-gather", params * width), 0.0
    gather, scatter = (seconds(kind, params / layers * width) for kind in ("all-gather", "reduce-scatter"))
    behind = machine.device.achieved.overlap
    exposed = max(gather - forward, (1 - behind) * gather)
    exposed += max(gather + scatter - (whole - forward), (1 - behind) * (gather + scatter))
    return gather + scatter, layers * exposed

"""Predict the step of a published run: one layer and the ends of the model are planned, and the step is put together.

In:     `Run`.
Out:    `Prediction`.
Method: autopar plans one layer, forward and backward, and the embedding with the loss, on the tensor-parallel group of one
        microbatch; costs of kernels and collectives are the planner's own. A model is that many equal layers in that many
        equal stages: what planning it whole does too, which would take minutes for a thousand devices.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from published_layers import CORE, Sizes, Step, ends_step, layer_step
from published_runs import Run

import autopar
from autopar.cost import collective_seconds, kernel_seconds
from autopar.cost.kernels import Kernel, Pass
from autopar.intra_op.kernels import kernel_of
from autopar.intra_op.sharded import Collective, Compute, Fused, Move, collectives_of
from autopar.intra_op.traffic import find_traffic
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
    """What one device of a tensor-parallel group does for one microbatch, in each phase."""

    kernels: dict[str, tuple[Kernel, ...]]
    collectives: dict[str, tuple[Collective, ...]]
    argument_bytes: int
    kept_bytes: int

    def compute(self, phase: str, machine: Machine, passes: float = 1.0) -> float:
        """Seconds of its kernels; elementwise work takes so many passes instead of one."""
        found = 0.0
        for kernel in self.kernels[phase]:
            times = passes if isinstance(kernel, Pass) else 1.0
            found += times * kernel_seconds(kernel, machine.device)
        return found

    def communication(self, phase: str, mesh: LogicalMesh) -> float:
        """Seconds of its collectives."""
        return sum(collective_seconds(c.kind, c.bytes, c.axes, mesh) for c in self.collectives[phase])


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and where they go."""

    seconds: float
    compute: float
    tensor: float
    bubble: float
    data: float
    update: float


def machine_of(run: Run) -> Machine:
    """The machine of a run; the network is what the table says of it, else the catalog's."""
    name = re.sub(r"GPU|, chips|\(.*?\)", "", run.device).strip()
    power = re.search(r"(\d+) W\b", run.device)
    model = find_device(f"{name}-{power[1]}W" if power and power[1] != "700" else name)
    per_host = run.per_host or model.devices_per_host
    rate = _network_rate(run.network, per_host)
    links = re.search(r"NVLink (\d+) links", run.network)
    intra = model.intra
    if links:
        intra = Link(intra.latency_seconds, int(links[1]) * LINK_BYTES * NVLINK_REACHED)
    share = model.inter.bytes_per_second / NETWORK_RATES.get(model.device.name, model.inter.bytes_per_second)
    inter = model.inter if rate is None else Link(model.inter.latency_seconds, rate * share)
    return Machine(model.device, per_host, intra, inter)


LINK_BYTES, NVLINK_REACHED = 25e9, 0.78


NETWORK_RATES: dict[str, float] = {}


def _network_rate(text: str, per_host: int) -> float | None:
    found = re.search(r"(?:(\d+)\s*(?:x|Omni-Path)\s*)?(\d+) Gb/s(.*)", text)
    if not found:
        return None
    total = int(found[1] or 1) * int(found[2]) / 8 * 1e9
    if "per GPU" in found[3]:
        return total
    return total / per_host


@functools.cache
def work_of(step_name: str, sizes: Sizes, device: Device, link: Link) -> Work:
    """Plan a layer, or the ends, of a microbatch on its tensor-parallel group."""
    step = (layer_step if step_name == "layer" else ends_step)(sizes)
    mesh = LogicalMesh((sizes.tensor,), links=(link,))
    cluster = autopar.Cluster(1, sizes.tensor, device, link, link)
    method = autopar.ShardParallel(mesh_shape=mesh, constraints=step.pins, memory_budget_bytes=1 << 50)
    plan = autopar.parallelize(step.function, cluster=cluster, method=method, batch_argnums=()).plan(*step.arguments)
    return _read(plan, mesh)


def _read(plan: Any, mesh: LogicalMesh) -> Work:
    """Kernels and collectives of a plan by phase."""
    sharded = plan.origin.sharded
    traffic = find_traffic(sharded.graph)
    kernels: dict[str, list[Kernel]] = {phase: [] for phase in PHASES}
    moves: dict[str, list[Collective]] = {phase: [] for phase in PHASES}
    phase_of: dict[Any, str] = {}
    waiting: list[Collective] = []
    phase = "forward"
    kept: dict[Any, int] = {}
    for instruction in sharded.body.instructions:
        single = type(sharded.body)((), (instruction,), ())
        waiting += collectives_of(single, mesh)
        if isinstance(instruction, Compute):
            eqn = instruction.eqn
            core = CORE in str(eqn.source_info.name_stack)
            phase = "backward" if is_backward(eqn) else "core" if core else "forward"
            node = sharded.graph.nodes[sharded.graph.op_node[id(eqn)]]
            kernel = kernel_of(node, instruction.strategy, traffic[node.index], mesh)
            if kernel_seconds(kernel, plan.origin.cluster.device) > 0:
                kernels[phase].append(kernel)
            moves[phase] += waiting
            waiting = []
            phase_of.update(dict.fromkeys(eqn.outvars, phase))
        elif isinstance(instruction, Move | Fused):
            first = instruction.moves[0] if isinstance(instruction, Fused) else instruction
            if first.reader == "result":
                moves[phase_of.get(first.var, phase)] += waiting
                waiting = []
    moves[phase] += waiting
    return Work(
        {name: tuple(found) for name, found in kernels.items()},
        {name: tuple(found) for name, found in moves.items()},
        plan.cost.argument_bytes,
        sum(kept.values()),
    )


def sizes_of(run: Run) -> Sizes:
    """What the seconds of one microbatch depend on."""
    dtype = run.dtype if run.dtype in ("float32", "float8") else "bfloat16"
    return Sizes(
        run.microbatch, run.tokens, run.width, run.heads, run.kv_heads, run.hidden, run.vocabulary, run.gated, run.flash,
        dtype, run.tensor, run.sequence and run.tensor > 1, run.context,
    )


def predict(run: Run, machine: Machine | None = None) -> Prediction:
    """Put the step of a run together."""
    machine = machine or machine_of(run)
    sizes = sizes_of(run)
    mesh = LogicalMesh((run.tensor,), links=(link_of_tensor(run, machine),))
    layer, ends = (work_of(name, sizes, PLANNED_ON, mesh.links[0]) for name in ("layer", "ends"))
    return compose(run, machine, mesh, layer, ends)


EAGER = 1.75
"""Passes over memory that frameworks without a compiler make for one of ours."""
HIDDEN = 0.75
"""Part of a collective that runs behind the product it feeds, where that is cut in four."""
FIRST_FLASH = {"A": 0.32 / 0.55, "H": 0.16 / 0.45}
PLANNED_ON = find_device("h100").device


def link_of_tensor(run: Run, machine: Machine) -> Link:
    """Tensor parallelism takes neighbours."""
    return machine.intra if run.tensor <= machine.per_host else machine.inter


def compose(run: Run, machine: Machine, mesh: LogicalMesh, layer: Work, ends: Work) -> Prediction:
    """The step from its layers."""
    again = {"full": ("forward", "core"), "selective": ("core",)}.get(run.recompute, ())
    again = () if run.flash and run.recompute == "selective" else again
    phases = (*PHASES, *again)
    passes = 1.0 if run.compiled else EAGER
    work = sum(layer.compute(phase, machine, passes) for phase in phases)
    tensor = sum(layer.communication(phase, mesh) for phase in phases)
    if run.overlaps:
        tensor *= 1 - HIDDEN
    end = sum(ends.compute(phase, machine, passes) for phase in PHASES)
    end_tensor = sum(ends.communication(phase, mesh) for phase in PHASES)
    layers = math.ceil(run.layers / run.pipeline)
    # Parameters of a device, those of the fullest stage.
    size = run.width // run.heads
    per_layer = run.width * size * (2 * run.heads + 2 * run.kv_heads) + run.width * run.hidden * (2 + run.gated)
    params = (layers * per_layer + run.width * run.vocabulary * (2 if run.pipeline == 1 else 1)) / run.tensor
    accumulate = kernel_seconds(Pass(params * 2 * 3), machine.device) if run.count > 1 else 0.0
    stage = layers * (work + tensor) + end + end_tensor + accumulate
    middle = layers * (work + tensor) + accumulate
    bubble = (run.pipeline - 1) / run.chunks * middle
    data, stage_more = data_parallel(run, machine, layers, params, stage, work, tensor, layer)
    parts = run.data if run.zero else 1
    update = kernel_seconds(Pass(params / min(parts, run.shards if run.zero else 1) * 34), machine.device)
    seconds = run.count * (stage + stage_more) + bubble + data + update
    compute = run.count * (layers * work + end + accumulate)
    return Prediction(seconds, compute, run.count * (layers * tensor + end_tensor), bubble, data + run.count * stage_more, update)


def data_mesh(run: Run, machine: Machine) -> LogicalMesh:
    """Replicas: those inside a host, and over hosts."""
    inside = min(run.data, max(1, machine.per_host // run.tensor))
    inside = math.gcd(inside, run.data)
    return LogicalMesh((run.data // inside, inside), links=(machine.inter, machine.intra))


def data_parallel(run, machine, layers, params, stage, work, tensor, layer) -> tuple[float, float]:
    """Exposed seconds of gradients and parameters: once per step, and with each microbatch."""
    if run.data == 1:
        return 0.0, 0.0
    mesh = data_mesh(run, machine)
    axes = mesh.axis_names
    width = 4 if run.dtype == "float32" else 2
    if run.zero < 3:
        if run.zero == 0:
            total = collective_seconds("all-reduce", params * width, axes, mesh)
        else:
            total = collective_seconds("reduce-scatter", params * width, axes, mesh)
            total += collective_seconds("all-gather", params * width, axes, mesh)
        return total, 0.0
    per = params / layers
    gather = collective_seconds("all-gather", per * width, axes, mesh)
    scatter = collective_seconds("reduce-scatter", per * width, axes, mesh)
    times = 2
    busy = work + tensor
    third = busy / (4 if run.recompute == "full" else 3)
    exposed = max(0.0, gather - third) + max(0.0, gather + scatter - (busy - third))
    return gather + scatter, layers * exposed

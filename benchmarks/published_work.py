"""The work of one device for one microbatch of a published run, as autopar plans it.

In:     the sizes of a layer, of its experts or of the model's ends (`published_layers.py`); a device, a link.
Out:    `Work`: kernels and collectives by phase, and what is kept for the backward pass; for a run, its `Layer`.
Method: autopar plans the part on its tensor-parallel group; kernels and collectives are read off the plan.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from published_frameworks import (
    LAUNCHES,
    SLOW_HOST,
    UNTUNED,
    eager_seconds,
    expert_launches,
    joins_products,
    launch_seconds,
    mask_kernels,
    one_launch,
    padded_vocabulary,
    waits_for_kernels,
    waits_for_tokens,
    with_launches,
    written_out,
)
from published_layers import CORE, NARROW, Sizes, Step, ends_step, experts_step, layer_step
from published_machines import Machine
from published_runs import Run

import autopar
from autopar._jax import Var
from autopar.cost import collective_seconds, kernel_seconds
from autopar.cost.kernels import Kernel, MemoryPass
from autopar.intra_op.graph import Graph
from autopar.intra_op.held import held_values
from autopar.intra_op.kernels import kernel_of
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.sharded import Collective, Compute, Fused, Move, collectives_of
from autopar.intra_op.traffic import find_reads, find_traffic
from autopar.ir.dataflow import inputs_of
from autopar.ir.gradient import is_backward
from autopar.mesh import Device, Link, LogicalMesh

PHASES = ("forward", "core", "backward")


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

    def busy(self, phases: tuple[str, ...], device: Device, run: Run) -> float:
        """Seconds of its kernels, in a compiled program or one by one."""
        of_kernel = kernel_seconds if run.compiled else eager_seconds
        return (UNTUNED if run.improved_later else 1) * sum(
            sum(of_kernel(kernel, device) for kernel in self.kernels[phase]) for phase in phases
        )

    def compute(self, phases: tuple[str, ...], device: Device, run: Run) -> float:
        """The same with what launching them takes."""
        kernels = tuple(kernel for phase in phases for kernel in self.kernels[phase])
        moves = sum(len(self.collectives[phase]) for phase in phases)
        return with_launches(run, kernels, self.busy(phases, device, run), moves)

    def launching(self, phases: tuple[str, ...], run: Run) -> float:
        """Seconds that the host takes to launch its kernels and collectives ahead of the device."""
        if waits_for_kernels(run):
            return 0.0
        moves = sum(len(self.collectives[phase]) for phase in phases)
        if SLOW_HOST in run.framework and self.kernels["core"]:
            return (sum(LAUNCHES[phase] for phase in phases) + moves) * one_launch(run)
        return launch_seconds(run, tuple(kernel for phase in phases for kernel in self.kernels[phase]), moves)

    def communication(self, phase: str, mesh: LogicalMesh) -> float:
        """Seconds of its collectives."""
        return sum(collective_seconds(c.kind, c.bytes, c.axes, mesh) for c in self.collectives[phase])


@dataclass(frozen=True)
class Layer:
    """One layer of a run: the parts that it consists of, each with the part of the layers that has it."""

    parts: tuple[tuple[float, Work], ...]

    def compute(self, phases: tuple[str, ...], device: Device, run: Run) -> float:
        """Seconds of its kernels, and of the host where the device cannot go on without it."""
        waiting = 0.0
        if run.experts:
            share, work = self.parts[1]
            waiting = share * expert_launches(run, tuple(k for phase in phases for k in work.kernels[phase]))
        own = Work.compute if waits_for_kernels(run) or waits_for_tokens(run) else Work.busy
        return waiting + sum(share * own(work, phases, device, run) for share, work in self.parts)

    def launching(self, phases: tuple[str, ...], run: Run) -> float:
        """Seconds that the host takes to launch all that, which it does ahead of the device."""
        return sum(share * work.launching(phases, run) for share, work in self.parts)

    def communication(self, phases: tuple[str, ...], mesh: LogicalMesh) -> float:
        """Seconds of its tensor-parallel collectives."""
        return sum(share * work.communication(phase, mesh) for share, work in self.parts for phase in phases)

    def kernels(self, phase: str) -> list[tuple[float, Kernel]]:
        """Its kernels, each with its share."""
        return [(share, kernel) for share, work in self.parts for kernel in work.kernels[phase]]

    @property
    def kept_bytes(self) -> float:
        """Made or read by the forward pass and read by the backward."""
        return sum(share * work.kept_bytes for share, work in self.parts)

    @property
    def working_bytes(self) -> float:
        """Of the part that works with most."""
        return max(work.working_bytes for _, work in self.parts)

    @property
    def eager_bytes(self) -> float:
        """The same where each operation leaves its result in memory."""
        return max(work.eager_bytes for _, work in self.parts)


def layer_of(run: Run, machine: Machine, link: Link) -> Layer:
    """Plan a layer of a run: attention and MLP, experts where there are some, and the decoder's layer beside an encoder's."""
    sizes = sizes_of(run)
    if run.experts is None:
        parts = [(1.0, with_kernels(work_of("layer", sizes, machine.device, link), written_out(run)))]
        if run.decoder:
            blocks = ("attention", "cross", "mlp")
            tokens = tokens_of(run, run.decoder)
            decoder = dataclasses.replace(sizes, tokens=tokens, memory=sizes.tokens, blocks=blocks, causal=True)
            parts.append((1.0, work_of("layer", decoder, machine.device, link)))
        return Layer(tuple(parts))
    mine = run.experts.number // run.experts.parallel or 1
    # Those that share a tensor-parallel group send a part of its tokens each.
    tokens = max(1, run.microbatch * run.tokens // run.context // run.tensor)
    rows = max(1, tokens * run.experts.active // mine)
    of_experts = dataclasses.replace(sizes, tensor=1, sequence=False, experts=mine, rows=rows, senders=tokens)
    # Attention has nothing to do with the sizes of the MLP: plans are shared.
    attention = dataclasses.replace(sizes, blocks=("attention",), hidden=sizes.width)
    parts = [
        (1.0, with_kernels(work_of("layer", attention, machine.device, link), written_out(run))),
        (
            run.experts.share,
            with_kernels(work_of("experts", of_experts, machine.device, link), mask_kernels(run, tokens)),
        ),
    ]
    if run.experts.share < 1:
        mlp = dataclasses.replace(sizes, blocks=("mlp",))
        parts.append((1 - run.experts.share, work_of("layer", mlp, machine.device, link)))
    return Layer(tuple(parts))


def sizes_of(run: Run) -> Sizes:
    """What the seconds of one microbatch depend on."""
    return Sizes(
        samples=run.microbatch,
        tokens=tokens_of(run, run.tokens),
        width=run.width,
        heads=run.heads,
        # Where there are fewer heads of keys than devices, each has one.
        kv_heads=run.kv_heads if run.kv_heads % run.tensor == 0 or run.heads % run.tensor else run.tensor,
        hidden=run.hidden,
        vocabulary=padded_vocabulary(run),
        gated=run.gated,
        flash=run.flash,
        dtype=run.dtype if run.dtype == "float32" or run.dtype in NARROW else "bfloat16",
        tensor=run.tensor,
        sequence=run.sequence and run.tensor > 1,
        context=run.context,
        joined=joins_products(run),
        size=run.size,
        causal=run.causal,
    )


def tokens_of(run: Run, tokens: int) -> int:
    """So many of a sample, padded to what can be split: by context parallelism, and by sequence parallelism within that."""
    parts = run.context * (run.tensor if run.sequence else 1)
    return -(-tokens // parts) * parts


def with_kernels(work: Work, more: dict[str, tuple[Kernel, ...]]) -> Work:
    """The same with more kernels."""
    kernels = {phase: (*found, *more.get(phase, ())) for phase, found in work.kernels.items()}
    return dataclasses.replace(work, kernels=kernels)


@functools.cache
def work_of(part: str, sizes: Sizes, device: Device, link: Link) -> Work:
    """Plan a layer, or the ends, of a microbatch on its tensor-parallel group."""
    return planned(
        {"layer": layer_step, "experts": experts_step, "ends": ends_step}[part](sizes), sizes.tensor, device, link
    )


def planned(step: Step, devices: int, device: Device, link: Link) -> Work:
    """Plan a step on so many devices."""
    mesh = LogicalMesh((devices,), links=(link,))
    cluster = autopar.Cluster(1, devices, device, link, link)
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
            if kernel.num_bytes or not isinstance(kernel, MemoryPass):
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
            first = instruction.moves[0]
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


def eagerly_held(graph: Graph) -> dict[Var, int]:
    """What stays in memory if nothing is made again, each in its own type: what goes through it anyway, and what several
    operations read."""
    nodes = [node for node in graph.nodes if node.kind == "op"]
    readers = collections.Counter(var for node in nodes for var in dict.fromkeys(inputs_of(node.eqn)))
    read_often = (v for node in nodes for v in node.eqn.outvars if readers[v] > 1)
    return dict.fromkeys((*held_values(graph), *read_often), 1)

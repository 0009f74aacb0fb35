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

import math
from dataclasses import dataclass, replace

from published_frameworks import ADAM_BYTES, OVERLAPPED, stage_layers, waiting_part
from published_machines import Machine, by_devices, machine_of
from published_memory import capacity_of, memory_of
from published_runs import Run
from published_work import PHASES, Layer, Work, layer_of, sizes_of, work_of

from autopar.cost import collective_seconds, kernel_seconds
from autopar.cost.kernels import Pass, Product
from autopar.mesh import Device, Link, LogicalMesh


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


def predict(run: Run) -> Prediction:
    """Put the step of a run together."""
    run = by_devices(run)
    machine = machine_of(run)
    link = (machine.intra if run.tensor <= machine.per_host else machine.inter).within(run.tensor)
    mesh = LogicalMesh((run.tensor,), links=(link,))
    ends = work_of("ends", sizes_of(run), machine.device, link)
    return compose(run, machine, mesh, layer_of(run, machine, link), ends)


def compose(run: Run, machine: Machine, mesh: LogicalMesh, layer: Layer, ends: Work) -> Prediction:
    """The step from its layers: `count` microbatches through the fullest stage, and a bubble of the others."""
    device = machine.device
    again = {"full": ("forward", "core"), "selective": () if run.flash else ("core",)}.get(run.recompute, ())
    forward = layer.compute(("forward", "core"), device, run)
    work = layer.compute((*PHASES, *again), device, run) + again_between_products(run, layer, device)
    tensor = layer.communication((*PHASES, *again), mesh)
    tensor *= 1 - OVERLAPPED if run.overlaps else 1
    # Tokens go to their experts and back, and so do their gradients.
    tensor += (6 if "forward" in again else 4) * to_experts_seconds(run, machine)
    end, end_tensor = ends.busy(PHASES, device, run), sum(ends.communication(phase, mesh) for phase in PHASES)
    layers = stage_layers(run)
    most, params, experts = max(layers), params_of(run, layers[0], 0), expert_params_of(run, layers[0])
    # Gradients of a microbatch are added to those before it: two reads and a write.
    adding = kernel_seconds(Pass(3 * 2 * (params + experts)), device) if run.count > 1 else 0.0
    fullest = max((most, 0.0, 0.0), (layers[-1], end, end_tensor), key=lambda s: s[0] * (work + tensor) + s[1] + s[2])
    busy, sending = fullest[0] * work + fullest[1] + adding, fullest[0] * tensor + fullest[2]
    bubble = waiting_part(run) * (run.pipeline - 1) / run.chunks * (most * (work + tensor) + adding)
    once, with_each = data_seconds(run, machine, params, most, forward, work + tensor)
    update = kernel_seconds(Pass(ADAM_BYTES * params / (run.shards if run.zero else 1)), device)
    if experts:
        apart = experts_apart(run)
        for_experts = data_seconds(apart, machine, experts, most, forward, work + tensor)
        once, with_each = once + for_experts[0], with_each + for_experts[1]
        update += kernel_seconds(Pass(ADAM_BYTES * experts / (apart.shards if run.zero else 1)), device)
    once += tied_seconds(run, machine)
    capacity = capacity_of(device)
    memory = max(
        (
            memory_of(
                run, params_of(run, count, stage), expert_params_of(run, count), count, layer, ends, capacity, stage
            )
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


def again_between_products(run: Run, layer: Layer, device: Device) -> float:
    """Seconds of what a layer computes again where the results of products are kept, as compiled programs do.

    That is all elementwise work, and attention in one kernel, which such policies take for no product unless they name it.
    """
    if not run.recompute.startswith("dots"):
        return 0.0
    again = [(share, k) for share, k in layer.kernels("forward") if isinstance(k, Pass)]
    if "context" not in run.recompute:
        again += layer.kernels("core")
    if "except mlp" in run.recompute:
        columns = run.hidden // run.tensor
        products = [(share, k) for share, k in layer.kernels("forward") if isinstance(k, Product)]
        again += [(share, k) for share, k in products if columns in (k.rows, k.columns)]
    return sum(share * kernel_seconds(k, device) for share, k in again)


def to_experts_seconds(run: Run, machine: Machine) -> float:
    """Seconds in which the tokens of a microbatch go to their experts, or back, of one layer on average."""
    if run.experts is None or run.experts.parallel == 1:
        return 0.0
    tokens, degree = run.microbatch * run.tokens / run.context / run.tensor, run.experts.parallel
    inside = degree if degree <= machine.per_host else math.gcd(degree, machine.per_host)
    hosts = degree // inside
    # A token goes once to each host that has experts of its own, and from there to them (DeepSeek-AI, DeepEP).
    reached = hosts * (1 - (1 - 1 / hosts) ** run.experts.active)

    def seconds(copies: float, size: int, link: Link) -> float:
        return collective_seconds(
            "all-to-all", 2 * tokens * copies * run.width, ("x",), LogicalMesh((size,), links=(link,))
        )

    between = seconds(reached, hosts, machine.inter) if hosts > 1 else 0.0
    within = seconds(run.experts.active, inside, machine.intra.within(inside)) if inside > 1 else 0.0
    return run.experts.share * (between + within)


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
    """Parameters on one device of a stage but experts, replicas counted whole; the first one has the embedding."""
    dense = 1 - run.experts.share if run.experts else 1
    per_layer = run.attention_weights + dense * run.width * run.hidden * (2 + run.gated)
    ends = 2 if run.pipeline == 1 and run.gated else int(stage == 0)
    return (layers * per_layer + ends * run.width * run.vocabulary) / run.tensor


def expert_params_of(run: Run, layers: int) -> float:
    """Parameters of experts on one device of a stage."""
    if run.experts is None:
        return 0.0
    expert = run.width * run.hidden * (2 + run.gated)
    return layers * run.experts.share * run.experts.number / run.experts.parallel * expert


def experts_apart(run: Run) -> Run:
    """A run of the experts alone: they are dealt out within a stage, and as often there as its other devices allow."""
    assert run.experts is not None
    replicas = run.devices // run.pipeline // run.experts.parallel
    return replace(run, tensor=run.experts.parallel, data=replicas, context=1, shards=min(run.shards, replicas))


def data_seconds(
    run: Run, machine: Machine, params: float, layers: int, forward: float, whole: float
) -> tuple[float, float]:
    """Seconds of gradients and parameters that nothing hides: once per step, and with each microbatch.

    Gradients are reduced once, after all microbatches, over all that see other tokens. Parameters that are stored split are
    gathered a layer ahead, and their gradients reduced a layer behind, while that is computed; the collectives then take a
    part of the cores.
    """
    replicas = run.data * run.context
    if replicas == 1:
        return 0.0, 0.0
    inside = math.gcd(replicas, max(1, machine.per_host // run.tensor))
    links = machine.inter, machine.intra.within(inside * run.tensor)
    mesh = LogicalMesh((replicas // inside, inside), links=links)
    if "DeepSpeed" in run.framework and run.zero == 3 and run.devices > machine.per_host:
        mesh = LogicalMesh((replicas,), links=(machine.inter,))

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

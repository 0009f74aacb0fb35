"""Predicts the step of a published run: plans one layer and the ends of the model, and composes the step of them.

In:     `Run`.
Out:    `Prediction`: seconds, where they go, and memory.
Method: autopar plans one layer, forward and backward, and the embedding with the loss, for one microbatch on its
        tensor-parallel group; costs of kernels and collectives are the planner's own. A model is so many equal layers in
        equal stages; planning it as a whole would give the same, and take minutes for a thousand devices. Not from the planner
        are what only the frameworks do (`published_frameworks.py`), and what they keep in memory (`published_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from published_frameworks import (
    ADAM_BYTES,
    LOSS_BY_PASSES,
    LOSS_BYTES,
    OVERLAPPED,
    gradient_bytes,
    hides_tokens,
    padded_vocabulary,
    stage_layers,
    waiting_part,
)
from published_images import net_parts
from published_machines import Machine, by_devices, machine_of
from published_memory import capacity_of, memory_of
from published_runs import Run
from published_sending import (
    border_seconds,
    data_seconds,
    expert_params_of,
    experts_apart,
    params_of,
    tied_seconds,
    to_experts_seconds,
)
from published_work import PHASES, Layer, Work, layer_of, sizes_of, tokens_of, work_of

from autopar.cost import kernel_seconds
from autopar.cost.kernels import MemoryPass, Product
from autopar.mesh import Device, LogicalMesh


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
    if run.net:
        compute, data, update, needed = net_parts(run, machine)
        whole, capacity = compute + data + update, capacity_of(machine.device)
        return Prediction(whole, compute, 0.0, 0.0, data, update, min(needed, capacity), needed, capacity)
    link = machine.link_of(run.tensor)
    mesh = LogicalMesh((run.tensor,), links=(link,))
    ends = work_of("ends", replace(sizes_of(run), tokens=tokens_of(run, run.output)), machine.device, link)
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
    sent = (6 if "forward" in again else 4) * to_experts_seconds(run, machine)
    tensor += max(sent - work, (1 - device.achieved.overlap) * sent) if hides_tokens(run) else sent
    end, end_tensor = ends.busy(PHASES, device, run), sum(ends.communication(phase, mesh) for phase in PHASES)
    end += loss_seconds(run, ends, device)
    layers = stage_layers(run)
    most, params, experts = max(layers), params_of(run, layers[0], 0), expert_params_of(run, layers[0])
    adding = kernel_seconds(MemoryPass(gradient_bytes(run) * (params + experts)), device)
    launching, end_launching = layer.launching((*PHASES, *again), run), ends.launching(PHASES, run)
    # With each microbatch a host begins anew, when its samples or activations are there.
    first = forward + layer.communication(("forward", "core"), mesh) * (1 - OVERLAPPED if run.overlaps else 1)
    late = max(0.0, layer.launching(("forward", "core"), run) - first)

    def stage(count: int, is_last: bool) -> tuple[float, float, bool]:
        """Its seconds for one microbatch, how many of them it sends, and whether it has the model's end."""
        sending = count * tensor + is_last * end_tensor
        alone = count * work + is_last * end + adding
        return max(alone + sending + count * late, count * launching + is_last * end_launching), sending, is_last

    stages = [stage(count, k == len(layers) - 1) for k, count in enumerate(layers)]
    longest, sending, is_last = max(stages, key=lambda stage: stage[0])
    busy = longest - sending
    bubble = waiting_part(run) / run.chunks * (sum(length for length, *_ in stages) - longest)
    once, with_each = data_seconds(run, machine, params, most, forward, work + tensor)
    update = kernel_seconds(MemoryPass(ADAM_BYTES * params / (run.shards if run.zero else 1)), device)
    if experts:
        apart = experts_apart(run)
        for_experts = data_seconds(apart, machine, experts, most, forward, work + tensor)
        once, with_each = once + for_experts[0], with_each + for_experts[1]
        update += kernel_seconds(MemoryPass(ADAM_BYTES * experts / (apart.shards if run.zero else 1)), device)
    once += tied_seconds(run, machine)
    capacity = capacity_of(device)
    memory = max(
        (
            memory_of(
                run, params_of(run, count, stage), expert_params_of(run, count), count, layer, ends, capacity, stage
            )
            for stage, count in {**dict(enumerate(layers[:2])), run.pipeline - 1: layers[-1]}.items()
        ),
        key=lambda found: found.reserved,
    )
    return Prediction(
        run.count * (busy + sending + border_seconds(run, machine, is_last) + with_each) + bubble + once + update,
        run.count * busy,
        run.count * sending,
        bubble,
        once + run.count * with_each,
        update,
        memory.reserved,
        memory.needed,
        capacity,
    )


def loss_seconds(run: Run, ends: Work, device: Device) -> float:
    """Seconds by which the loss takes longer than the planned kernels, where it is computed pass by pass."""
    if not LOSS_BY_PASSES.search(run.framework):
        return 0.0
    logits = run.microbatch * run.output / run.context * padded_vocabulary(run) / run.tensor
    planned = replace(
        ends, kernels={phase: tuple(k for k in ends.kernels[phase] if isinstance(k, MemoryPass)) for phase in PHASES}
    )
    return max(0.0, kernel_seconds(MemoryPass(LOSS_BYTES * logits), device) - planned.busy(PHASES, device, run))


def again_between_products(run: Run, layer: Layer, device: Device) -> float:
    """Seconds of what a layer computes again where the results of products are kept, as compiled programs do.

    That is all elementwise work, and attention in one kernel, which such policies take for no product unless they name it.
    """
    if not run.recompute.startswith("dots"):
        return 0.0
    again = [(share, k) for share, k in layer.kernels("forward") if isinstance(k, MemoryPass)]
    if "context" not in run.recompute:
        again += layer.kernels("core")
    if "except mlp" in run.recompute:
        columns = run.hidden // run.tensor
        products = [(share, k) for share, k in layer.kernels("forward") if isinstance(k, Product)]
        again += [(share, k) for share, k in products if columns in (k.rows, k.columns)]
    return sum(share * kernel_seconds(k, device) for share, k in again)

"""Predicts what the devices of a published run send each other, besides the collectives within a layer.

In:     `Run`, `Machine`; parameters on one device.
Out:    seconds: of tokens sent to experts, of activations sent between stages, of gradients and of parameters.
Method: collectives are priced as in the planner (`autopar.cost.collective_seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from published_frameworks import LIVE_PARAMETERS, adds_wide, border_parts, reduces_wide, sends_its_part
from published_machines import Machine
from published_runs import Run

from autopar.cost import collective_seconds
from autopar.cost.steps import CollectiveKind
from autopar.mesh import Link, LogicalMesh


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
    messages, rounds, host = border_parts(run)
    # Each host sends to the next at about the same time, as in a ring through all.
    near, far = (
        messages * link.latency_seconds + rounds * part / min(link.bytes_per_second, most) + host
        for link, most in ((machine.intra, math.inf), (machine.inter, machine.together))
    )
    is_last = is_last or run.pipeline == 2  # each of two has one border
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
    """Parameters on one device of a stage but experts, replicas counted whole; the first one and the last have an embedding."""
    dense = 1 - run.experts.share if run.experts else 1
    per_layer = run.attention_weights + dense * run.width * run.hidden * (2 + run.gated)
    if run.decoder:
        per_layer = 3 * run.attention_weights + 2 * run.width * run.hidden * (2 + run.gated)
    ends = 2 if run.pipeline == 1 and run.gated else int(stage in (0, run.pipeline - 1))
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
    every, group, others = _meshes(run, machine)

    def seconds(kind: CollectiveKind, num_bytes: float, mesh: LogicalMesh = group) -> float:
        return collective_seconds(kind, num_bytes, mesh.axis_names, mesh)

    width = 4 if run.dtype == "float32" else 2
    if run.dtype == "bfloat16" and "Megatron-DeepSpeed" in run.framework:
        # `bf16_optimizer.py` adds gradients up in 32 bits on every replica, and gathers what each has updated.
        return seconds("all-reduce", params * 4, every) + seconds("all-gather", params * 2, every), 0.0
    behind = machine.device.achieved.overlap

    def exposed(length: float, meanwhile: float) -> float:
        """What nothing hides of a collective: it goes on for longer, or takes a part of the cores."""
        return max(length - meanwhile, (1 - behind) * length)

    # Parameters that are stored split are gathered, and their gradients reduced, by layers.
    num_bytes = params * width / (layers if run.zero == 3 else 1)
    wide = num_bytes * (4 / width if reduces_wide(run) else 1)
    if run.zero == 0:
        reduced, gathered = seconds("all-reduce", wide, every), 0.0
    elif run.zero == 1 and "DeepSpeed" in run.framework:
        # Each replica gets all of the sum, of which its first stage needs a part (`buffered_reduce_fallback`).
        reduced, gathered = seconds("all-reduce", num_bytes, every), seconds("all-gather", num_bytes)
    else:
        # Who has the same part of the state adds up that part of the gradients.
        between = seconds("all-reduce", wide / math.prod(group.shape), others)
        reduced, gathered = seconds("reduce-scatter", wide) + between, seconds("all-gather", num_bytes)
    if sends_its_part(run):
        gathered = broadcasts_seconds(num_bytes, group)
    if run.zero == 3 and "DeepSpeed" in run.framework:
        alone = _by_arrays(run, params / layers, partial(seconds, "all-gather"), reduced, forward, whole, exposed)
        return gathered + reduced, layers * alone
    if run.zero == 3:
        alone = exposed(gathered, forward) + exposed(gathered + reduced, whole - forward)
        return gathered + reduced, layers * alone
    if adds_wide(run):
        return exposed(reduced, layers * (whole - forward)) + gathered, 0.0
    if run.hides_gradients:
        reduced, gathered = exposed(reduced, layers * (whole - forward)), exposed(gathered, layers * forward)
    return reduced + gathered, 0.0


def broadcasts_seconds(num_bytes: float, group: LogicalMesh) -> float:
    """Time in which each of a group sends its part of so many bytes to all others, one after the other.

    Along rings through all of them, as many as a host has devices, each piece one hop behind the other (NCCL's broadcast).
    """
    (hosts, near), (inter, intra) = group.shape, group.links
    hops = (hosts - 1) * inter.latency_seconds + hosts * (near - 1) * intra.latency_seconds
    rate = min([near * inter.bytes_per_second] * (hosts > 1) + [intra.bytes_per_second] * (near > 1), default=math.inf)
    return hosts * near * hops + num_bytes / rate


def _by_arrays(
    run: Run,
    params: float,
    gather: Callable[[float], float],
    reduced: float,
    forward: float,
    whole: float,
    exposed: Callable[[float, float], float],
) -> float:
    """Seconds that nothing hides of a layer's collectives, where each array is gathered for itself, as by DeepSpeed.

    One is gathered ahead, while the array before it is multiplied by, unless that one alone is as much as may be there. Where
    a layer is computed again it is gathered again for that; its gradients then need it once more, and what has been let go in
    between is gathered a third time (`stage3.py`: `prefetch_next_sub_modules`, `release_sub_module`).
    """
    heads = run.heads + 2 * run.kv_heads
    weights = (run.width * run.head_size * heads, run.width * run.head_size * run.heads)
    weights += (run.width * run.hidden * (1 + run.gated), run.width * run.hidden)
    parts = [each / sum(weights) for each in weights]
    sent = [gather(part * params * (4 if run.dtype == "float32" else 2)) for part in parts]
    before = [(part * params, part * forward) for part in (parts[-1], *parts[:-1])]
    waiting = sum(
        exposed(length, 0.0 if live >= LIVE_PARAMETERS else meanwhile)
        for length, (live, meanwhile) in zip(sent, before, strict=True)
    )
    if run.recompute != "full":
        return waiting + exposed(sum(sent) + reduced, whole - forward)
    behind = [sum(parts[k + 1 :]) * params for k in range(len(parts))]
    again = sum(length for length, distance in zip(sent, behind, strict=True) if distance > LIVE_PARAMETERS)
    return 2 * waiting + exposed(again + reduced, whole - 2 * forward)


def _meshes(run: Run, machine: Machine) -> tuple[LogicalMesh, LogicalMesh, LogicalMesh]:
    """All that see other tokens, those that the state is split over, and those that have the same part of it.

    Of each axis between hosts and inside, the state is split inside first.
    """
    replicas = run.data * run.context
    if "DeepSpeed" in run.framework and run.zero == 3 and run.devices > machine.per_host:
        flat = LogicalMesh((replicas,), links=(machine.inter,))
        return flat, flat, LogicalMesh((1,), links=(machine.inter,))
    within = math.gcd(replicas, max(1, machine.per_host // run.tensor))
    shards = run.shards if run.zero and replicas % run.shards == 0 else replicas

    def mesh(size: int, inside: int, reach: int) -> LogicalMesh:
        most = min(machine.inter.bytes_per_second, machine.ring / reach, machine.together)
        inter = replace(machine.inter, bytes_per_second=most)
        links = inter, machine.intra.within(reach * run.tensor)
        return LogicalMesh((size // inside, inside), links=links)

    near = math.gcd(shards, within)
    far = math.gcd(replicas // shards, within // near)
    return mesh(replicas, within, within), mesh(shards, near, near), mesh(replicas // shards, far, within)

"""What the devices of a published run send each other besides the collectives within a layer.

In:     `Run`, `Machine`; parameters on one device.
Out:    seconds: of tokens on their way to experts, at the borders of stages, of gradients and of parameters.
Method: collectives cost what they cost the planner (`autopar.cost.collective_seconds`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from published_machines import Machine
from published_runs import Run

from autopar.cost import collective_seconds
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
    if run.decoder:
        per_layer = 3 * run.attention_weights + 2 * run.width * run.hidden * (2 + run.gated)
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
    behind = machine.device.achieved.overlap

    def exposed(length: float, meanwhile: float) -> float:
        """What nothing hides of a collective: it goes on for longer, or takes a part of the cores."""
        return max(length - meanwhile, (1 - behind) * length)

    if run.zero < 3:
        sums, parts = ("all-reduce", 0) if run.zero == 0 else ("reduce-scatter", 1)
        reduced, gathered = seconds(sums, params * width), parts * seconds("all-gather", params * width)
        if run.hides_gradients:
            reduced, gathered = exposed(reduced, layers * (whole - forward)), exposed(gathered, layers * forward)
        return reduced + gathered, 0.0
    gather, scatter = (seconds(kind, params / layers * width) for kind in ("all-gather", "reduce-scatter"))
    alone = exposed(gather, forward) + exposed(gather + scatter, whole - forward)
    return gather + scatter, layers * alone

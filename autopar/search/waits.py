"""Warns of pipelines that run in another order than the schedule's, and of devices that do the same work.

In:     a planned pipeline, or a sharded step; the request.
Out:    warnings that name the user's operation, or the batch; "": there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar._jax import JaxprEqn, Var
from autopar.inter_op.cut import CutStep
from autopar.intra_op.batch import factors_of
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.hand_plans import is_idle
from autopar.intra_op.kernels import is_contraction
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.sharded import computed, describe
from autopar.ir.dataflow import ancestors, inputs_of, makers
from autopar.mesh import Device
from autopar.search.methods import DataParallel, Method, ThreeD
from autopar.search.request import Request
from autopar.streams.assemble import PipelinePlan, steps_in_order
from autopar.tuning import TUNING


def waits_text(planned: PipelinePlan) -> str:
    """A warning that steps are ordered differently than the schedule says, and why; "": they are not."""
    num_meshes, cut = len(planned.streams.instructions), planned.cut
    asked = planned.schedule.order(num_meshes, planned.num_microbatches)
    if steps_in_order(cut, num_meshes, planned.schedule) == [list(steps) for steps in asked]:
        return ""
    found = []
    waited = next((eqn for eqn in cut.split.between if cut.after_pass[eqn.outvars[0]] % 2 == 0), None)
    if waited is not None:
        found.append(
            "backward passes depend on a value computed from all microbatches "
            f"({describe(_joined(cut, waited))}), so all forward passes run first, as under 'gpipe', with all their residuals "
            "in memory; "
            f'schedule={planned.schedule.name!r} orders the rest. With microbatch_semantics="per_microbatch" each microbatch '
            "computes its own value, which changes what the step computes."
        )
    if cut.chain.num_rounds > 1:
        led = next((eqn for eqn in cut.split.between if cut.after_pass[eqn.outvars[0]] % 2), None)
        where = "" if led is None else f" (from {describe(_joined(cut, led))} on)"
        forwards, backwards = (sum(number % 2 == way for number in set(cut.chain.passes)) for way in (0, 1))
        found.append(
            f"a step goes through the stages {forwards} times forwards and {backwards} backwards, since gradients, "
            f"or what is measured, depend on earlier gradients of all microbatches{where}: each of these passes begins "
            "when all microbatches have finished the one before."
        )
    return " ".join(found)


def shared_text(request: Request, method: Method, stages: Sequence[Sharded], count: int) -> str:
    """A warning that devices over which a method splits samples alone do much of the work alike; "": little of it.

    `stages`: in `count` microbatches.
    """
    device = request.cluster.device
    match method:
        case DataParallel():
            return _alike_text(stages, device)
        case ThreeD(data=data) if data > 1:
            return _undivided_text(request, count, data) or _alike_text(stages, device, "data")
    return ""


def _alike_text(stages: Sequence[Sharded], device: Device, axis: str | None = None) -> str:
    """A warning that devices which may only split samples do much of the work alike; "": little of it.

    `axis`: the axis of devices that split samples alone; None: all.
    """
    of_each: dict[JaxprEqn, float] = {}
    alike: dict[JaxprEqn, tuple[Mapping[str, int], tuple[str, ...]]] = {}
    for sharded in stages:
        graph, axes = sharded.graph, sharded.mesh.axis_names
        seconds = OperationSeconds(graph, sharded.choices, device)
        on = [k for k, name in enumerate(axes) if axis in (name, None)]
        for eqn, times in computed(sharded.body):
            of_each[eqn] = of_each.get(eqn, 0.0) + times * seconds.of(eqn)
            index = graph.op_node.get(eqn)
            if index is not None:
                node = graph.nodes[index]
                factors = factors_of(eqn, node.rule, graph.batch)
                choice = node.strategies[sharded.choices[index]].choice
                # Elementwise updates of state are meant to be done alike.
                is_work = factors or is_contraction(node.rule)
                if is_work and all(is_idle(choice[k]) for k in on):
                    alike[eqn] = node.rule.sizes, factors
    share = sum(of_each[eqn] for eqn in alike) / max(sum(of_each.values()), 1e-30)
    mesh = stages[0].mesh
    num_devices = mesh.num_devices if axis is None else mesh.axis_sizes[axis]
    if share <= TUNING.alike_work or num_devices == 1:
        return ""
    largest = max(alike, key=of_each.__getitem__)
    sizes, factors = alike[largest]
    rows = " x ".join(str(sizes[factor]) for factor in factors)
    has, more = (f"{rows} parts along the samples", "larger chunks, or ") if factors else ("no samples", "")
    devices, method = f"{num_devices} devices", "DataParallel"
    if axis is not None:
        devices, method = f'{devices} of the axis "{axis}"', "this axis"
    return (
        f"{share:.0%} of each device's time is work that all {devices} do alike, most of it {describe(largest)}: it has {has}. "
        f"Of all work, {method} splits only samples; {more}Auto(), which splits other dims too, may be faster."
    )


def _joined(cut: CutStep, eqn: JaxprEqn) -> JaxprEqn:
    """The equation of the loop that makes what an equation between passes waits for; the latter may only copy it."""
    maker, of_loop = makers(cut.split.between), makers(cut.split.loop.eqns)
    results = zip(cut.split.results, cut.split.loop.outvars, strict=True)
    made = {result.var: of_loop[out] for result, out in results if isinstance(out, Var) and out in of_loop}
    needed = ancestors(inputs_of(eqn), lambda var: inputs_of(maker[var]) if var in maker else ())
    return next((made[var] for var in needed if var in made), eqn)


def _undivided_text(request: Request, count: int, data: int) -> str:
    """A warning that samples of a microbatch do not divide over the data axis; "": they do."""
    undivided = request.undivided(count, data)
    if undivided is None:
        return ""
    path, size, wanted = undivided
    return (
        f"{path} has {size} samples, no multiple of {wanted} ({count} microbatches, each on {data} devices of the axis "
        f'"data"): the {data} devices cannot share the samples of a microbatch, and mostly do the same work. Use '
        f"{'fewer microbatches, ' if count > 1 else ''}a larger batch, or more tensor parallelism instead."
    )

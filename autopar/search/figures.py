"""Computes a plan's figures: model and hardware FLOPs, samples, bytes per level of the machine, watts and price.

In:     the step as the user wrote it, the planned step, the cluster.
Out:    `Figures`.
Method: MFU counts the products that the step needs, HFU those that devices run: Chowdhery et al., "PaLM", 2022, appendix B.
        Matrix products count, and kernels that state their FLOPs; elementwise work does not, as is customary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import Aval, JaxprEqn, resized
from autopar.cost.collectives import sent_bytes
from autopar.intra_op.kernels import is_contraction
from autopar.intra_op.sharded import Body, Collective, Compute, instructions_within
from autopar.ir.gradient import is_recomputed
from autopar.ir.program import Program
from autopar.ir.region import bodies_of, is_region, trip_count
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.signature import equation_signature
from autopar.mesh import Cluster, LogicalMesh
from autopar.plan.decision import Figures
from autopar.plan.profile import Crossing
from autopar.search.request import Request
from autopar.streams.assemble import StepPlan
from autopar.streams.clock import level_between

LEVELS = "within a host", "between hosts", "between pods"


def figures_of(
    request: Request, planned: StepPlan, collectives: Sequence[Collective], crossings: Sequence[Crossing]
) -> Figures:
    """The figures of a planned step; `collectives` and `crossings`: all its communication."""
    step, cluster = request.program, request.cluster
    samples = [(step.in_avals[k], max(dims)) for k, dims in request.roles.dims.items()]
    amount, unit = amount_of([_of_all_steps(aval, dim) for aval, dim in samples])
    groups = cluster.groups or (cluster,)
    tasks = [task for stage in planned.stages for task in stage.tasks]
    return Figures(
        least_seconds(step, cluster),
        sum(planned.times(task) * _seconds_computed(task.body, cluster) for task in tasks),
        amount,
        unit,
        _link_bytes(cluster, planned, collectives, crossings),
        sum_stated([None if g.device.watts is None else g.num_devices * g.device.watts for g in groups]),
        sum_stated([None if g.price_per_hour is None else g.num_devices * g.price_per_hour for g in groups]),
    )


def _of_all_steps(aval: Aval, dim: int) -> Aval:
    """The type of a batch whose samples lie along `dim`, with the steps and microbatches of the dims before it in one."""
    return resized(aval, (math.prod(aval.shape[: dim + 1]), *aval.shape[dim + 1 :]))


def amount_of(batch: Any) -> tuple[int, str]:
    """The size of a batch of arrays or types, and its unit: tokens if it has a matrix of integers, else samples."""
    leaves = jax.tree.leaves(batch)
    for leaf in leaves:
        if np.ndim(leaf) == 2 and np.issubdtype(getattr(leaf, "dtype", object), np.integer):
            return int(np.size(leaf)), "tokens"
    rows = list(dict.fromkeys(np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)))
    return (rows[0] if len(rows) == 1 else 0), "samples"


def least_seconds(program: Program, cluster: Cluster) -> float:
    """Seconds of a step's products on all devices at the peak for their dtypes, without recomputation."""
    counts: dict[object, int] = {}
    first: dict[object, JaxprEqn] = {}
    for eqn, times in _needed(program.jaxpr.eqns):
        same = equation_signature(eqn)
        first.setdefault(same, eqn)
        counts[same] = counts.get(same, 0) + times
    return sum(times * _seconds_at_peak(first[same], rule_for(first[same]), cluster) for same, times in counts.items())


def _seconds_computed(body: Body, cluster: Cluster) -> float:
    """Seconds of all products of a program, recomputed ones too, on all devices of the cluster at their peak."""
    counts: dict[int, int] = {}
    first: dict[int, Compute] = {}
    for instruction, times in instructions_within(body):
        if isinstance(instruction, Compute):
            same = id(instruction.rule)  # equal operations share their rule
            first.setdefault(same, instruction)
            counts[same] = counts.get(same, 0) + times
    return sum(times * _seconds_at_peak(first[same].eqn, first[same].rule, cluster) for same, times in counts.items())


def _seconds_at_peak(eqn: JaxprEqn, rule: ShardingRule, cluster: Cluster) -> float:
    if not is_contraction(rule):
        return 0.0
    dtypes = [v.aval.dtype for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    dtypes = dtypes or [v.aval.dtype for v in eqn.outvars]
    groups = cluster.groups or (cluster,)
    return rule.flops / sum(g.num_devices * g.device.product_flops_per_second(dtypes) for g in groups)


def _needed(eqns: Sequence[JaxprEqn], times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    for eqn in eqns:
        if is_recomputed(eqn):
            continue
        if is_region(eqn):
            for body in bodies_of(eqn):
                yield from _needed(body.eqns, times * trip_count(eqn))
        else:
            yield eqn, times


def _link_bytes(
    cluster: Cluster, planned: StepPlan, collectives: Sequence[Collective], crossings: Sequence[Crossing]
) -> tuple[tuple[str, int], ...]:
    """Bytes that one device sends over each level of the machine in a step, averaged over all devices."""
    totals = dict.fromkeys(LEVELS, 0.0)
    for crossing in crossings:
        level = level_between(planned.first_device, planned.stages, crossing.source, crossing.target, cluster)
        totals[LEVELS[level]] += crossing.bytes / cluster.num_devices
    for c in collectives:
        mesh = planned.stages[c.stage].mesh
        level_of = {axis: cluster.level_over(reach) for axis, reach in _reaches(mesh)}
        for axis, num_bytes in sent_bytes(c.kind, c.bytes, c.axes, mesh):
            totals[LEVELS[level_of[axis]]] += c.times * num_bytes * mesh.num_devices / cluster.num_devices
    return tuple((level, round(total)) for level, total in totals.items() if total)


def _reaches(mesh: LogicalMesh) -> Iterator[tuple[str, int]]:
    """(axis, number of neighbouring devices that a group along it spans)."""
    reach = 1
    for axis, size in reversed(tuple(mesh.axis_sizes.items())):
        reach *= size
        yield axis, reach


def sum_stated(values: Sequence[float | None]) -> float | None:
    """The sum of values; None: one of them is not stated."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None

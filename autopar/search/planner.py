"""Planning: from a traced step and a machine to a plan.

In:     `Program`, its roles, cluster, method.
Out:    `Plan`, and the sharded program that carries it out.
Method: every logical mesh that the method allows is solved; the cheapest wins, ties go to fewer axes. The thin order of
        the passes can be read here; each lives in a file of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Iterator

from autopar.debug import dump
from autopar.errors import (
    BatchError,
    DeviceCountError,
    NotBuiltYetError,
)
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, LogicalMesh, logical_mesh, logical_meshes, more_devices_text
from autopar.report.plan import Plan
from autopar.search.accumulation import search_accumulation
from autopar.search.describe import describe_plan
from autopar.search.dumped import dump_plan
from autopar.search.followed import pipeline_behind
from autopar.search.meshes import Searched, search_meshes, shared_seconds, untie_best
from autopar.search.methods import (
    Auto,
    DataParallel,
    Follow,
    Inference,
    Method,
    PipelineParallel,
    ShardParallel,
    ThreeD,
)
from autopar.search.one_mesh import count_of, in_microbatches
from autopar.search.pins import find_pins
from autopar.search.progress import Report, part_of, silent
from autopar.search.stage_planner import pipeline_of
from autopar.search.stage_search import search_pipelines
from autopar.streams.assemble import StepPlan, assemble_step

SHARE_OF_MESHES = 0.4
"""Part of the time to plan everything that meshes without stages take, for progress."""
WORTH_STAGES, WORTH_SECONDS = 0.1, 1e-2
"""Within one host, stages are tried if this part of the best plan without them, and so many seconds, can be won: less is
eaten up by their bubble, and to search for it takes many steps' time. Calls that follow each other are short and many."""


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No search for garbage in circles: planning makes millions of small objects, and that takes a sixth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collection()
def make_plan(program: Program, roles: Roles, cluster: Cluster, method: Method, report: Report = silent) -> Plan:
    """Plan one step.

    Args:
        program: The traced step.
        roles: Which inputs are state, batch, donated.
        cluster: The machine.
        method: What was asked for.
        report: Called with a line of progress before each mesh is tried.

    Raises:
        AutoparError: No mesh allows a plan; the message of the last one tried says why.
        BatchError: The batch has no rows.
        ConstraintError: A constraint names no argument, or cannot be kept.
        NotBuiltYetError: The cluster has several kinds of devices.
    """
    started = time.perf_counter()
    dump("program", str(program))
    _check_one_kind(cluster)
    _check_rows(program, roles)
    find_pins(
        program.in_paths, method.options().constraints, program.out_paths
    )  # a mistake in them is told before any work
    planned, tried = _planned(program, roles, cluster, method, report)
    dump_plan(planned)
    plan = describe_plan(program, roles, cluster, method, planned, time.perf_counter() - started)
    return dataclasses.replace(plan, alternatives=tuple(tried))


def _planned(
    program: Program, roles: Roles, cluster: Cluster, method: Method, report: Report
) -> tuple[StepPlan, list[tuple[str, str]]]:
    """The step planned as the method wants it, and what else was tried."""
    match method:
        case PipelineParallel() | ThreeD():
            return pipeline_of(program, roles, cluster, method, report), []
        case Follow():
            return pipeline_behind(program, roles, cluster, method, report), []
    return _search(program, roles, cluster, method, report)


def _search(
    program: Program, roles: Roles, cluster: Cluster, method: Method, report: Report
) -> tuple[StepPlan, list[tuple[str, str]]]:
    """The best of the meshes that a method allows; `Auto()` looks for microbatches and pipelines too."""
    step, count = program, count_of(method)
    program = in_microbatches(step, roles, count, method.options().microbatch_semantics)
    meshes = candidate_meshes(cluster, method)
    searches = isinstance(method, Auto | Inference) and cluster.hosts > 1
    if searches:
        # Stages are there to take what a third axis would, at a fraction of the time it takes to plan that.
        meshes = [mesh for mesh in meshes if len(mesh.shape) <= 2] or meshes
    part = SHARE_OF_MESHES if isinstance(method, Auto | Inference) else 1.0
    searched = search_meshes(program, roles, cluster, method, meshes, part_of(report, 0.0, part))
    accumulated = None
    if isinstance(method, Auto):
        silently = part_of(report, part, part)
        accumulated = search_accumulation(step, roles, cluster, method, meshes, searched, silently)
        if accumulated is not None:
            accumulated.searched.tried = searched.tried
            count, program, searched = accumulated.count, accumulated.program, accumulated.searched
    tried = searched.tried
    if searches or (isinstance(method, Auto | Inference) and _can_gain(method, searched)):
        least = min((sharded.step_seconds for _, sharded in searched.results), default=math.inf)
        found, outcomes = search_pipelines(step, roles, cluster, method.options(), part_of(report, part, 1.0), least)
        tried = [*tried, *outcomes]
        if found is not None:
            return found, tried
    if not searched.results:
        assert searched.failure is not None, "there is always one mesh to try"
        raise searched.failure
    mesh, best = untie_best(program, roles, cluster, method, searched)
    chosen = str(mesh) if accumulated is None else f"{mesh}, {count} microbatches"
    return assemble_step(program, roles, count, mesh, best), [pair for pair in tried if pair[0] != chosen]


def _can_gain(method: Method, searched: Searched) -> bool:
    """Whether stages can be worth their bubble: nothing else fits, or the best that does falls short of even shares."""
    if not searched.results:
        return True
    _, best = searched.best
    least = WORTH_SECONDS if method.options().goal == "step" else 0.0
    return best.step_seconds - shared_seconds(best) > max(WORTH_STAGES * best.step_seconds, least)


def _check_one_kind(cluster: Cluster) -> None:
    if cluster.groups:
        raise NotBuiltYetError(
            "planning for several kinds of devices at once is not built yet.",
            given=str(cluster),
            wrong="one mesh is made of equal devices, and this version gives every stage devices of one kind.",
            do="plan for one of the kinds: " + ", ".join(f'Cluster.of("{group}")' for group in cluster.groups) + ".",
            feature="heterogeneous clusters",
        )


def _check_rows(program: Program, roles: Roles) -> None:
    for leaf in roles.batch:
        if not program.in_avals[leaf].shape[0]:
            raise BatchError(
                "the batch has no rows.",
                given=f"{program.in_paths[leaf]}: {program.in_avals[leaf].str_short()}",
                wrong="there is no sample in it to split.",
                do="pass one sample or more; if this argument is not the batch, name those that are in batch_argnums.",
                size=0,
            )


def candidate_meshes(cluster: Cluster, method: Method) -> list[LogicalMesh]:
    """Logical meshes to try.

    Raises:
        DeviceCountError: The method's mesh has another number of devices than the cluster.
    """
    match method:
        case ShardParallel(mesh_shape=LogicalMesh() as mesh):
            chosen = [mesh]
        case ShardParallel(mesh_shape=tuple() as shape):
            chosen = [logical_mesh(cluster, shape)]
        case DataParallel():
            # Hosts and devices in a host: the slow links then carry what the fast ones have added up.
            both = cluster.hosts > 1 and cluster.devices_per_host > 1
            chosen = [
                logical_mesh(cluster, (cluster.hosts, cluster.devices_per_host) if both else (cluster.num_devices,))
            ]
        case ShardParallel() | Auto() | Inference():
            chosen = logical_meshes(cluster)
    for mesh in chosen:
        if mesh.num_devices != cluster.num_devices:
            raise DeviceCountError(
                "the mesh does not fit the cluster.",
                given=f"{mesh} for {cluster.num_devices} devices",
                wrong=f"it has {mesh.num_devices} places.",
                do=f"choose a shape whose product is {cluster.num_devices}, or pass cluster=Cluster.local(devices=...)."
                + more_devices_text(cluster, mesh.num_devices),
                wanted=mesh.num_devices,
                available=cluster.num_devices,
            )
    return chosen

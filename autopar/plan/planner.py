"""Planning: from a traced step and a machine to a plan.

In:     `Program`, its roles, cluster, method.
Out:    `Plan`, and the sharded program that carries it out.
Method: every logical mesh that the method allows is solved; the cheapest wins, ties go to fewer axes. The thin order of
        the passes can be read here; each lives in a file of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar._jax import Literal
from autopar.debug import dump
from autopar.errors import (
    AutoparError,
    BatchError,
    ConstraintError,
    DeviceCountError,
    InfeasibleError,
    NotBuiltYetError,
    PlanFileError,
)
from autopar.intra_op.costs import build_problem, stored_values
from autopar.intra_op.graph import Graph, build_graph
from autopar.intra_op.problem import Solution
from autopar.intra_op.restrict import (
    Allowed,
    Restrict,
    keep_keys_whole,
    pin_constraints,
    pin_inputs,
    restrict_to_data_parallel,
)
from autopar.intra_op.shard import Sharded, read_off, shard
from autopar.intra_op.sharded import Body, Collective, Compute, Region
from autopar.intra_op.tying import tie_nodes
from autopar.ir.accumulate import accumulate
from autopar.ir.microbatch import split_microbatches
from autopar.ir.state import Roles
from autopar.ir.trace import Program
from autopar.mesh import Cluster, LogicalMesh, Sharding, logical_mesh, logical_meshes
from autopar.plan.fingerprint import cluster_fingerprint, program_fingerprint
from autopar.plan.followed import pipeline_behind
from autopar.plan.methods import Auto, DataParallel, Follow, Method, PipelineParallel, ShardParallel, ThreeD
from autopar.plan.page import machine_text, mesh_text
from autopar.plan.pipeline import PipelinePlan
from autopar.plan.plan import Cost, Plan, Run, Stage, Submesh, Value
from autopar.plan.search import search_pipelines
from autopar.plan.stage_planner import describe_pipeline, pipeline_of, restore_pipeline
from autopar.plan.uses import describe_phase

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a plan came from: kept beside it in memory, for `explain` and for compiling."""

    program: Program
    roles: Roles
    cluster: Cluster
    method: Method
    sharded: Sharded


def make_plan(
    program: Program, roles: Roles, cluster: Cluster, method: Method, report: Report = lambda text: None
) -> Plan:
    """Plan one step.

    Args:
        program: The traced step.
        roles: Which inputs are state, batch, donated.
        cluster: The machine.
        method: What was asked for.
        report: Called with a line of progress before each mesh is tried.

    Raises:
        AutoparError: No mesh allows a plan; the message of the last one tried says why.
    """
    started = time.perf_counter()
    dump("program", str(program))
    if isinstance(method, PipelineParallel | ThreeD):
        pipeline = pipeline_of(program, roles, cluster, method, report)
        return _plan_of_pipeline(program, roles, cluster, method, pipeline, started, ())
    if isinstance(method, Follow):
        pipeline = pipeline_behind(program, roles, cluster, method, report)
        return _plan_of_pipeline(program, roles, cluster, method, pipeline, started, ())
    step, program = program, in_microbatches(program, roles, count_of(method), method.options().microbatch_semantics)
    results: list[tuple[LogicalMesh, Sharded]] = []
    tried: list[tuple[str, str]] = []
    failure: AutoparError | None = None
    meshes = candidate_meshes(cluster, method)
    searches = isinstance(method, Auto) and cluster.hosts > 1
    if searches:
        # Stages are there to take what a third axis would, at a fraction of the time it takes to plan that.
        meshes = [mesh for mesh in meshes if len(mesh.shape) <= 2] or meshes
    for mesh in meshes:
        report(f"sharding {program.name} on mesh {mesh}")
        try:
            # Data parallelism over all axes is the same on every mesh: compared with once.
            beat = min((sharded.solution.objective for _, sharded in results), default=math.inf)
            sharded = shard_on(program, roles, cluster, method, mesh, compare=not results, beat=beat)
            if sharded.solution.status == "beaten":
                tried.append((str(mesh), f"at least {sharded.solution.bound:.3e} s"))
                continue
            results.append((mesh, sharded))
            tried.append((str(mesh), f"{sharded.step_seconds:.3e} s"))
        except AutoparError as error:
            failure = error
            tried.append((str(mesh), error.summary))
    if searches or (isinstance(method, Auto) and not results):
        # Within one host stages are not worth their bubble, unless nothing else fits.
        found, outcomes = search_pipelines(step, roles, cluster, method.options(), report)
        tried += outcomes
        least = min((sharded.step_seconds for _, sharded in results), default=math.inf)
        if found is not None and found.seconds < least:
            return _plan_of_pipeline(step, roles, cluster, method, found, started, tried)
    if not results:
        assert failure is not None, "there is always one mesh to try"
        raise failure
    mesh, best = min(results, key=lambda pair: (pair[1].step_seconds, len(pair[0].shape)))
    dump("sharded", body_text(best.body))
    plan = _describe(step, program, roles, cluster, method, mesh, best, time.perf_counter() - started)
    return dataclasses.replace(plan, alternatives=tuple(pair for pair in tried if pair[0] != str(mesh)))


def _plan_of_pipeline(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    pipeline: PipelinePlan,
    started: float,
    tried: Sequence[tuple[str, str]],
) -> Plan:
    plan = describe_pipeline(
        program,
        roles,
        cluster,
        method,
        pipeline,
        started,
        method_text(method),
        machine_text(cluster),
        _fingerprints(program, cluster),
    )
    return dataclasses.replace(plan, alternatives=tuple(tried))


def count_of(method: Method) -> int:
    """Number of microbatches that a method asks for."""
    return getattr(method, "num_microbatches", None) or 1


def in_microbatches(program: Program, roles: Roles, count: int, semantics: str) -> Program:
    """The program that works through its batch in `count` microbatches, one after the other.

    Raises:
        BatchError: The batch does not divide.
        MicrobatchError: That would compute something else.
    """
    if count == 1:
        return program
    names = ", ".join(dict.fromkeys(program.in_paths[k].split("/")[0] for k in roles.batch))
    split = split_microbatches(program.jaxpr, count, roles.batch, semantics == "per_microbatch", names)
    accumulated = dataclasses.replace(program, jaxpr=accumulate(program.jaxpr, split))
    dump("microbatches", str(accumulated))
    return accumulated


def shard_on(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    mesh: LogicalMesh,
    compare: bool = True,
    beat: float = math.inf,
) -> Sharded:
    """Shard the program on one mesh under the method's restrictions; `compare` with data parallelism too.

    `beat` is the objective of the best plan known on other meshes.
    """
    _pins(program, method)  # a mistake in them is told before any work

    def restrict(graph: Graph, allowed: Allowed) -> None:
        restrict_plan(program, roles, method, mesh, graph, allowed)

    return shard(
        program.jaxpr,
        roles.aliases,
        mesh,
        cluster.device,
        method.options(),
        restrict,
        roles.donated,
        roles.batch,
        _known_plans(program, roles, mesh) if compare and not isinstance(method, DataParallel) else (),
        beat,
    )


def _known_plans(program: Program, roles: Roles, mesh: LogicalMesh) -> list[Restrict]:
    """Data parallelism of every ZeRO stage, where the batch divides."""
    try:
        check_batch(program, roles, mesh)
    except BatchError:
        return []
    return [
        partial(restrict_to_data_parallel, program.jaxpr, batch_inputs=roles.batch, state_inputs=roles.state, zero=zero)
        for zero in (0, 1, 3)
    ]


def restrict_plan(
    program: Program, roles: Roles, method: Method, mesh: LogicalMesh, graph: Graph, allowed: Allowed
) -> None:
    """Forbid what the method, its constraints and the program's keys forbid."""
    into, out_of = ([k for k, key in enumerate(of) if key] for of in (program.key_inputs, program.key_outputs))
    keep_keys_whole(graph, into, out_of, allowed)
    if isinstance(method, DataParallel):
        check_batch(program, roles, mesh)
        restrict_to_data_parallel(program.jaxpr, graph, allowed, roles.batch, roles.state, method.zero)
    for pins in _pins(program, method):
        pin_inputs(graph, pins, program.in_paths, allowed)
    _check_pinned(program, method, mesh, graph, allowed)


def candidate_meshes(cluster: Cluster, method: Method) -> list[LogicalMesh]:
    """Logical meshes to try.

    Raises:
        DeviceCountError: The method's mesh has another number of devices than the cluster.
    """
    if cluster.groups:
        raise NotBuiltYetError(
            "a cluster of several kinds of devices needs pipeline stages.",
            given=str(cluster),
            wrong="one mesh is made of equal devices, and this version plans one mesh.",
            do="plan for one of the kinds: " + ", ".join(f'Cluster.of("{group}")' for group in cluster.groups) + ".",
            feature="heterogeneous clusters",
        )
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
        case ShardParallel() | Auto():
            chosen = logical_meshes(cluster)
    for mesh in chosen:
        if mesh.num_devices != cluster.num_devices:
            raise DeviceCountError(
                "the mesh does not fit the cluster.",
                given=f"{mesh} for {cluster.num_devices} devices",
                wrong=f"it has {mesh.num_devices} places.",
                do=f"choose a shape whose product is {cluster.num_devices}, or pass cluster=Cluster.local(devices=...).",
                wanted=mesh.num_devices,
                available=cluster.num_devices,
            )
    return chosen


def check_batch(program: Program, roles: Roles, mesh: LogicalMesh) -> None:
    """The batch must divide over the devices of a data-parallel mesh.

    Raises:
        BatchError: It does not, or there is none.
    """
    if not roles.batch:
        raise BatchError(
            "there is no batch to split.",
            given=", ".join(program.in_paths[:8]),
            wrong="every argument is state, or has no dims.",
            do="pass batch_argnums=....",
            candidates={},
        )
    for leaf in roles.batch:
        size = program.in_avals[leaf].shape[0]
        if size % mesh.num_devices:
            raise BatchError(
                "the batch does not divide over the devices.",
                given=f"{program.in_paths[leaf]} with {size} samples, {mesh.num_devices} devices",
                wrong=f"{size} is no multiple of {mesh.num_devices}.",
                do="change the batch size, or use Auto(), which splits other dims where the batch does not divide.",
                size=size,
            )


def _pins(program: Program, method: Method) -> list[dict[int, tuple[str, object]]]:
    """Per constraint, the inputs it pins: position -> (what the user wrote, spec)."""
    pins = []
    for glob, spec in method.options().constraints.items():
        _check_spec(glob, spec)
        found = [k for k, path in enumerate(program.in_paths) if fnmatch.fnmatchcase(path, glob)]
        if not found:
            near = difflib.get_close_matches(glob, program.in_paths, n=6, cutoff=0.5) or program.in_paths[:6]
            raise ConstraintError(
                "a constraint names no argument.",
                given=f"constraints={{{glob!r}: {spec}}}",
                wrong=f"none of the {len(program.in_paths)} arguments has a path that matches; there are {', '.join(near)}"
                + (", ..." if len(near) < len(program.in_paths) else "")
                + ".",
                do="use one of the paths (print(step.plan(...)) without the constraint lists them), or a glob over them.",
                path=glob,
                spec=spec,
            )
        pins.append({k: (glob, spec) for k in found})
    return pins


def _check_spec(glob: str, spec: object) -> None:
    problem = ""
    if not isinstance(spec, PartitionSpec | tuple | list):
        problem = f"{spec!r} is of type {type(spec).__name__}, not PartitionSpec."
    else:
        named = [
            axis
            for entry in spec
            if isinstance(entry, str | tuple | list)
            for axis in ((entry,) if isinstance(entry, str) else entry)
        ]
        twice = [axis for k, axis in enumerate(named) if axis in named[:k]]
        if twice:
            problem = f"it names axis {twice[0]!r} twice; an axis can split one dim."
    if problem:
        raise ConstraintError(
            "a constraint is no way to split an array.",
            given=f"constraints={{{glob!r}: {spec!r}}}",
            wrong=problem,
            do="pass jax.sharding.PartitionSpec, one entry per dim: None, an axis, or a tuple of axes.",
            path=glob,
            spec=spec,
        )


def _check_pinned(program: Program, method: Method, mesh: LogicalMesh, graph: Graph, allowed: Allowed) -> None:
    """Every argument must have a sharding left.

    Raises:
        InfeasibleError: Names the pins on one argument that contradict each other or the method.
    """
    for k, path in enumerate(program.in_paths):
        mask = allowed.masks.get(graph.inputs[k])
        if mask is not None and not mask.any():
            reasons = list(allowed.reasons.get(graph.inputs[k], ()))
            if isinstance(method, DataParallel):
                reasons.append(f"method=DataParallel(zero={method.zero})")
            raise InfeasibleError(
                "the pins on an argument contradict each other or the method.",
                given="\n".join(reasons),
                wrong=f"no sharding of {path}, of shape {tuple(program.in_avals[k].shape)} on the mesh "
                f"{mesh_text(mesh)}, keeps all of them.",
                do="drop one of them, or choose another method or mesh.",
                constraint=reasons[0],
                path=path,
            )


def restore(program: Program, roles: Roles, cluster: Cluster, method: Method, plan: Plan) -> Plan:
    """Attach a plan read from a file to the program it was made for: lower its choices, solve nothing.

    Args:
        program: The traced step; its fingerprint is the plan's (`stale.py`).
        roles: Which inputs are state, batch, donated.
        cluster: The machine.
        method: The step's method. The plan's choices hold; the method says what `explain` calls forbidden, if the plan
            was made by it.
        plan: From `load_plan`.

    Raises:
        PlanFileError: The plan's choices do not give what the plan says: the file was edited.
    """
    if plan.schedule != "none":
        return _restore_stages(program, roles, cluster, method, plan)
    mesh = plan.mesh
    step, program = program, in_microbatches(program, roles, plan.num_microbatches, plan.microbatch_semantics)
    graph = build_graph(program.jaxpr, mesh, roles.aliases, roles.batch)
    if len(graph.nodes) != len(plan.choices) or any(
        k >= node.num_choices for k, node in zip(plan.choices, graph.nodes, strict=True)
    ):
        raise _not_these_choices(
            plan, f"{len(plan.choices)} choices for {len(graph.nodes)} decisions, or one out of range"
        )
    allowed = Allowed()
    if method_text(method) == plan.method:
        pin_constraints(program.jaxpr, graph, allowed)
        restrict_plan(program, roles, method, mesh, graph, allowed)
    class_of = tie_nodes(graph, allowed.keys)
    by_class = dict(zip(class_of, plan.choices, strict=True))
    if any(by_class[c] != k for c, k in zip(class_of, plan.choices, strict=True)):
        class_of = list(range(len(graph.nodes)))  # made under other ties, such as other pins
        by_class = dict(enumerate(plan.choices))
    problem = build_problem(graph, cluster.device, class_of, allowed.masks)
    seconds = plan.cost.step_seconds
    solution = Solution(
        tuple(by_class[c] for c in range(len(by_class))),
        seconds,
        seconds * (1 - plan.cost.optimality_gap),
        plan.cost.solver_status,
        "file",
    )
    try:
        sharded = read_off(
            program.jaxpr, graph, plan.choices, class_of, problem, solution, allowed, cluster.device, roles.donated
        )
    except AssertionError as error:
        raise _not_these_choices(plan, f"they fit no program: {error}") from error
    fresh = _describe(step, program, roles, cluster, method, mesh, sharded, plan.cost.planning_seconds)
    for what, now, was in (
        ("shardings", fresh.values, plan.values),
        ("collectives", fresh.cost.collectives, plan.cost.collectives),
    ):
        if _unnamed(now) != _unnamed(was):
            raise _not_these_choices(plan, f"they give other {what} than it lists")
    # Names hold source lines, which may have moved since; everything else is as it was planned.
    return dataclasses.replace(
        plan,
        shardings=fresh.shardings,
        values=fresh.values,
        origin=fresh.origin,
        cost=dataclasses.replace(plan.cost, collectives=fresh.cost.collectives),
    )


def _restore_stages(program: Program, roles: Roles, cluster: Cluster, method: Method, plan: Plan) -> Plan:
    try:
        pipeline = restore_pipeline(program, roles, cluster, method, plan)
    except AssertionError as error:
        raise _not_these_choices(plan, f"they fit no program: {error}") from error
    fresh = describe_pipeline(
        program, roles, cluster, method, pipeline, 0.0, plan.method, plan.machine, dict(plan.fingerprints)
    )
    for what, now, was in (
        ("shardings", _unnamed(fresh.values), _unnamed(plan.values)),
        ("collectives", _unnamed(fresh.cost.collectives), _unnamed(plan.cost.collectives)),
        ("instructions", list(fresh.streams.items()), list(plan.streams.items())),
    ):
        if now != was:
            raise _not_these_choices(plan, f"they give other {what} than it lists")
    return dataclasses.replace(plan, shardings=fresh.shardings, values=fresh.values, origin=fresh.origin)


def plan_of_choices(
    step: Program,
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    graph: Graph,
    choices: Sequence[int],
) -> Plan:
    """The plan of given choices, one per node of `graph`; nothing is solved, and nothing is known of its optimality.

    The graph is that of `program`, the step in the method's number of microbatches (`in_microbatches`).
    """
    class_of = list(range(len(graph.nodes)))
    problem = build_problem(graph, cluster.device, class_of)
    solution = Solution(tuple(choices), problem.cost(choices), 0.0, "feasible", "given")
    sharded = read_off(
        program.jaxpr, graph, choices, class_of, problem, solution, Allowed(), cluster.device, roles.donated
    )
    return _describe(step, program, roles, cluster, method, graph.mesh, sharded, 0.0)


def _unnamed(entries: Sequence[Value | Collective]) -> list[Value | Collective]:
    return [
        dataclasses.replace(e, name="") if isinstance(e, Value) else dataclasses.replace(e, operation="")
        for e in entries
    ]


def _not_these_choices(plan: Plan, wrong: str) -> PlanFileError:
    return PlanFileError(
        "the plan's choices are not those of its step.",
        given=f"a plan of `{plan.name}` on {plan.mesh}",
        wrong=f"{wrong}: its file was edited, or written by another autopar.",
        do="plan again, step.plan(...), and save that.",
        path="",
    )


def method_text(method: Method) -> str:
    """The method as one writes it: what is left at its default is left out."""
    if isinstance(method, Follow):
        return f"follow `{method.plan.name}`, {method.plan.method}"
    stated = []
    for setting in dataclasses.fields(method):
        value = getattr(method, setting.name)
        default = {} if setting.default is dataclasses.MISSING else setting.default
        if value != default:
            stated.append(f"{setting.name}={_setting_text(value)}")
    return f"{type(method).__name__}({', '.join(stated)})"


def _setting_text(value: object) -> str:
    if isinstance(value, LogicalMesh):
        return f"LogicalMesh({value.shape}, {value.axis_names})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in value.items()) + "}"
    return repr(value)


def _describe(
    step: Program,
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    mesh: LogicalMesh,
    sharded: Sharded,
    seconds: float,
) -> Plan:
    body = sharded.body
    specs = [s.partition_spec() for _, s in body.inputs[: program.num_args]]
    cost = Cost(
        sharded.step_seconds,
        sharded.compute_seconds,
        sharded.communication_seconds,
        0.0,
        (sharded.liveness.peak_bytes,),
        sharded.liveness.argument_bytes,
        sharded.collectives,
        sharded.solution.gap,
        sharded.solution.status,
        seconds,
    )
    return Plan(
        name=program.name,
        method=method_text(method),
        stages=(Stage(Submesh(mesh.num_devices), mesh, (0,)),),
        num_microbatches=count_of(method),
        microbatch_semantics=method.options().microbatch_semantics,
        schedule="none",
        shardings=jax.tree.unflatten(program.in_tree, specs),
        cost=cost,
        values=tuple(_values(program, roles, sharded)),
        streams={0: (Run(program.name, 0, 0),)},
        alternatives=(),
        choices=sharded.choices,
        fingerprints=_fingerprints(step, cluster),
        machine=machine_text(cluster),
        budget_bytes=method.options().memory_budget_bytes or cluster.device.memory_bytes,
        origin=Origin(program, roles, cluster, method, sharded),
    )


def _fingerprints(program: Program, cluster: Cluster) -> dict[str, str]:
    return {
        "program": program_fingerprint(program),
        "cluster": cluster_fingerprint(cluster),
        "jax": jax.__version__,
    }


def _values(program: Program, roles: Roles, sharded: Sharded) -> Iterator[Value]:
    def value(name: str, role: str, atom: Any, sharding: Sharding) -> Value:
        return Value(name, role, tuple(atom.aval.shape), str(atom.aval.dtype), sharding)

    for k, (var, sharding) in enumerate(sharded.body.inputs):
        role = (
            "constant"
            if k >= program.num_args
            else "state"
            if k in roles.state
            else "batch"
            if k in roles.batch
            else "argument"
        )
        yield value(
            program.in_paths[k] if k < program.num_args else f"constant {k - program.num_args}", role, var, sharding
        )
    for k, (atom, sharding) in enumerate(sharded.body.outputs):
        if k not in roles.aliases:
            yield value(program.out_paths[k], "result", atom, sharding)
    stored = stored_values(sharded.graph)
    for name, var, sharding in _activations(sharded.body):
        if var in stored:
            yield value(name, "activation", var, sharding)


def _activations(body: Body) -> Iterator[tuple[str, object, Sharding]]:
    for instruction in body.instructions:
        match instruction:
            case Compute(eqn, rule, strategy) if not rule.whole or rule.summed:
                for var, sharding in zip(eqn.outvars, strategy.results, strict=True):
                    if len(var.aval.shape) > 1 and not isinstance(var, Literal):
                        yield describe_phase(eqn), var, sharding
            case Region(bodies=bodies):
                for inner in bodies:
                    yield from _activations(inner)


def body_text(body: Body, indent: str = "") -> str:
    """The sharded program as text, one instruction a line."""
    lines: list[str] = []
    for instruction in body.instructions:
        lines.append(f"{indent}{instruction}")
        if isinstance(instruction, Region):
            lines += [body_text(inner, indent + "    ") for inner in instruction.bodies]
    return "\n".join(lines)


__all__: Sequence[str] = ["Origin", "body_text", "candidate_meshes", "make_plan", "restore"]

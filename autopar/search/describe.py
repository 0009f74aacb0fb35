"""A sharded step as a plan: what the user is told of it.

In:     `Sharded`, and what it was made for.
Out:    `Plan`.
Method: names come from the argument's paths and the user's lines, costs from the sharded program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar._jax import Literal
from autopar.intra_op.costs import stored_values
from autopar.intra_op.shard import Sharded
from autopar.intra_op.sharded import Body, Compute, Region
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, LogicalMesh, Sharding
from autopar.plan.decision import Cost, Run, Stage, Submesh, Value
from autopar.plan.fingerprint import fingerprints
from autopar.plan.words import machine_text
from autopar.report.plan import Plan
from autopar.report.uses import describe_phase
from autopar.search.figures import figures_of
from autopar.search.methods import Method, method_text
from autopar.search.profile import profile_of_mesh


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What a plan came from: kept beside it in memory, for `explain` and for compiling."""

    program: Program
    roles: Roles
    cluster: Cluster
    method: Method
    sharded: Sharded


def describe(
    step: Program,
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    mesh: LogicalMesh,
    sharded: Sharded,
    seconds: float,
    num_microbatches: int,
) -> Plan:
    """The plan of a step on one mesh.

    Args:
        step: The step.
        program: The step in microbatches, which was sharded.
        roles: Which inputs are state, batch, donated.
        cluster: The machine.
        method: What was asked for.
        mesh: The logical mesh.
        sharded: The solution.
        seconds: How long planning took.
        num_microbatches: Of `program`.
    """
    body = sharded.body
    specs = [program.spec_of(k, s.partition_spec()) for k, (_, s) in enumerate(body.inputs[: program.num_args])]
    cost = Cost(
        sharded.step_seconds,
        sharded.compute_seconds,
        sharded.communication_seconds,
        0.0,
        (sharded.liveness.peak_bytes,),
        sharded.liveness.argument_bytes,
        sharded.collectives,
        sharded.gap,
        sharded.solution.status,
        seconds,
        sharded.exposed_seconds,
        figures_of(step, roles, cluster, [(body, 1)], [(c, mesh) for c in sharded.collectives]),
    )
    return Plan(
        name=program.name,
        method=method_text(method),
        stages=(Stage(Submesh(mesh.num_devices), mesh, (0,)),),
        num_microbatches=num_microbatches,
        microbatch_semantics=method.options().microbatch_semantics,
        schedule="none",
        shardings=program.in_containers(specs),
        cost=cost,
        values=tuple(_values(program, roles, sharded)),
        streams={0: (Run(program.name, 0, 0),)},
        alternatives=(),
        choices=sharded.choices,
        fingerprints=fingerprints(step, cluster),
        machine=machine_text(cluster),
        budget_bytes=method.options().memory_budget_bytes or cluster.device.memory_bytes,
        profile=profile_of_mesh(program, roles, cluster.device, sharded),
        origin=Origin(program, roles, cluster, method, sharded),
    )


def _values(program: Program, roles: Roles, sharded: Sharded) -> Iterator[Value]:
    def value(name: str, role: str, atom: Any, sharding: Sharding) -> Value:
        return Value(name, role, tuple(atom.aval.shape), str(atom.aval.dtype), sharding)

    for k, (var, sharding) in enumerate(sharded.body.inputs):
        name = program.in_paths[k] if k < program.num_args else f"constant {k - program.num_args}"
        yield value(name, role_of(program, roles, k), var, sharding)
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


def role_of(program: Program, roles: Roles, k: int) -> str:
    """What an input of the flat program is to the user: state, batch, another argument, or a constant."""
    if k >= program.num_args:
        return "constant"
    return "state" if k in roles.state else "batch" if k in roles.batch else "argument"

"""From a plan to a step on a Ray cluster.

In:     a planned step, the cluster.
Out:    `RayStep`.
Method: pipelines and steps without stages both become a `Job`; new state stays on the workers, save random keys, which are
        small and which only this process knows as keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar._jax import JaxprEqn
from autopar.errors import NotBuiltYetError
from autopar.intra_op.sharded import Body, Compute, Region, describe
from autopar.ir.state import Roles
from autopar.ir.trace import Program
from autopar.ir.unstack import whole_stacks
from autopar.mesh import Cluster
from autopar.plan.describe_stages import PipelineOrigin
from autopar.plan.plan import Plan
from autopar.runtime.ray.driver import Interface, RayStep
from autopar.runtime.ray.job import pipeline_job, step_job


def make_ray_step(cluster: Cluster, program: Program, roles: Roles, plan: Plan) -> RayStep:
    """Start workers and let them compile.

    Args:
        cluster: Whose `machine` is a Ray cluster.
        program: The traced step.
        roles: Its roles.
        plan: Its plan.

    Raises:
        ClusterError: Ray has no room for the workers.
        WorkerError: A worker failed.
        NotBuiltYetError: The step calls back into this process.
    """
    assert cluster.machine is not None, "the cluster is no Ray cluster"
    platform = "cpu" if cluster.machine.accelerator is None else "cuda"
    origin = plan.origin
    _check_bodies(plan)
    if isinstance(origin, PipelineOrigin):
        cut = origin.pipeline.cut
        stacks, jaxpr, roles = cut.stacks, cut.program.jaxpr, cut.roles
        job = pipeline_job(origin.pipeline, platform)
    else:
        jaxpr = program.jaxpr
        stacks = whole_stacks(jaxpr)
        body = origin.sharded.body
        job = step_job(body, plan.mesh, jaxpr.invars, roles, program.name, platform, cluster.num_devices)
    keys = {at for k, key in enumerate(program.key_outputs) if key for at in stacks.outputs[k]}
    state = frozenset(roles.aliases) - keys
    return RayStep(cluster.machine, job, Interface(stacks, state, tuple(jaxpr.outvars)), platform)


def _check_bodies(plan: Plan) -> None:
    """Workers are other processes, to which functions of the user's are not sent."""
    origin = plan.origin
    if isinstance(origin, PipelineOrigin):
        bodies = [task.body for stage in origin.pipeline.stages for task in stage.tasks]
    else:
        bodies = [origin.sharded.body]
    found = next((eqn for body in bodies for eqn in _host_calls(body)), None)
    if found is not None:
        raise NotBuiltYetError(
            "calls into Python are not built on a Ray cluster yet.",
            given=describe(found),
            wrong="the step runs on workers, which do not have this process's functions.",
            do="return the value as a metric and look at it here, or use Cluster.local().",
            feature="callbacks on Ray",
        )


def _host_calls(body: Body) -> Iterator[JaxprEqn]:
    for instruction in body.instructions:
        match instruction:
            case Compute(eqn) if eqn.effects or "callback" in eqn.params:
                yield eqn
            case Region(bodies=bodies):
                for inner in bodies:
                    yield from _host_calls(inner)

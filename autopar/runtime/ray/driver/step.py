"""From a plan to a step on a Ray cluster.

In:     a planned step, the cluster.
Out:    `RayStep`.
Method: pipelines and steps without stages both become a `Job`; new state stays on the workers, save random keys, which are
        small and which only this process knows as keys.
"""

from __future__ import annotations

from autopar.ir.program import Program
from autopar.ir.split.layers import whole_stacks
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster
from autopar.report.plan import Plan
from autopar.runtime.ray.driver.driver import Interface, RayStep
from autopar.runtime.ray.functions import check_calls
from autopar.runtime.ray.job import pipeline_job, step_job
from autopar.streams.assemble import PipelinePlan
from autopar.streams.emit import Streams


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
        NotBuiltYetError: The step calls Python in a way that workers cannot.
    """
    assert cluster.machine is not None, "the cluster is no Ray cluster"
    platform = "cpu" if cluster.machine.accelerator is None else "cuda"
    pipeline = plan.attached.pipeline
    if isinstance(pipeline, PipelinePlan):
        cut = pipeline.cut
        stacks, jaxpr, roles = cut.stacks, cut.program.jaxpr, cut.roles
        streams: Streams | None = pipeline.streams
        check_calls([task.body for stage in pipeline.stages for task in stage.tasks])
        job = pipeline_job(pipeline, platform)
    else:
        jaxpr = program.jaxpr
        stacks = whole_stacks(jaxpr)
        streams, body = None, pipeline.stages[0].sharded.body
        check_calls([body])
        job = step_job(body, plan.mesh, jaxpr.invars, roles, program.name, platform, cluster.num_devices)
    keys = {at for k, key in enumerate(program.key_outputs) if key for at in stacks.outputs[k]}
    state = frozenset(roles.aliases) - keys
    interface = Interface(stacks, state, tuple(jaxpr.outvars), program.name, streams)
    return RayStep(cluster.machine, job, interface, platform)

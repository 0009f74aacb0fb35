"""From a plan to a step on a Ray cluster.

In:     a planned step, the cluster.
Out:    `RayStep`.
Method: new state stays on the workers, save random keys, which are small and which only this process knows as keys.
"""

from __future__ import annotations

from autopar.ir.program import Program
from autopar.mesh.ray_nodes import RayMachine
from autopar.runtime.ray.driver.driver import Interface, RayStep
from autopar.runtime.ray.functions import check_calls
from autopar.runtime.ray.job import make_job
from autopar.streams.assemble import StepPlan


def make_ray_step(machine: RayMachine, program: Program, planned: StepPlan) -> RayStep:
    """Start workers and let them compile.

    Args:
        machine: The Ray cluster.
        program: The traced step.
        planned: Its plan.

    Raises:
        ClusterError: Ray has no room for the workers.
        WorkerError: A worker failed.
        NotBuiltYetError: The step calls Python in a way that workers cannot.
    """
    platform = "cpu" if machine.accelerator is None else "cuda"
    check_calls([task.body for stage in planned.stages for task in stage.tasks])
    stacks, results = planned.stacks, tuple(planned.program.jaxpr.outvars)
    keys = {at for k, key in enumerate(program.key_outputs) if key for at in stacks.outputs[k]}
    state = frozenset(planned.roles.aliases) - keys
    interface = Interface(stacks, state, results, program.name, planned.streams)
    return RayStep(machine, make_job(planned, platform), interface, platform)

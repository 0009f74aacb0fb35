"""A step planned and compiled for one set of shapes.

In:     a traced program, its plan and runtime; the adapter for objects among its arguments.
Out:    `CompiledStep`, called like the step itself.
Method: the runtime takes flat arrays; around it, arguments are checked and results put into the user's pytrees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar._jax import Direct, as_key, key_data, weakly_typed, without_mesh
from autopar.calibrate.steps import one_program, pipeline, whole_steps
from autopar.direct import DirectCalls, Failure
from autopar.errors import PipelineError, StepError, StructureChangedError, check_number
from autopar.frameworks import Adapter, Apart
from autopar.ir.program import Program
from autopar.ir.trace.constants import has_constants, without_constants
from autopar.ir.trace.trace import check_not_traced
from autopar.mesh import Cluster
from autopar.plan.arguments import check_arguments
from autopar.report.measured import MeasuredStep
from autopar.report.plan import Plan
from autopar.runtime.compile import compile_step
from autopar.runtime.local import Executable
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.runtime import Runtime


class CompiledStep:
    """A step planned and compiled for one set of shapes.

    Attributes:
        plan: The plan it carries out.
        programs: XLA's executables by name; on a Ray cluster, what its workers compile.
        executable: The runtime that carries the plan out.
        functions: The functions that `programs` were compiled from, by name.
        in_shardings: Sharding per argument leaf, in the arguments' tree `(args, kwargs)`.
    """

    def __init__(
        self, program: Program, plan: Plan, executable: Runtime, adapter: Adapter | None = None, static: Any = None
    ):
        self.program, self.plan, self.executable = program, plan, executable
        self._adapter, self._static = adapter, static
        self.programs: dict[str, Any] = dict(executable.programs)
        self.functions = executable.functions
        shardings = [
            jax.sharding.NamedSharding(sharding.mesh, program.spec_of(k, sharding.spec)) if key else sharding
            for k, (sharding, key) in enumerate(zip(executable.in_shardings, program.key_inputs, strict=False))
        ]
        self.in_shardings = program.in_containers(shardings)
        self._has_keys = any(program.key_inputs) or any(program.key_outputs)
        self._has_constants = has_constants(program.out_tree)
        self._weak = [k for k, aval in enumerate(program.out_avals) if aval.weak_type]
        self._calls = DirectCalls(program.name, self._checked, self._failed)

    def __repr__(self) -> str:
        return f"<compiled step; {self.plan!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Static arguments are left out, as with `jax.stages.Compiled`.

        Raises:
            StructureChangedError: These are not arguments it was compiled for.
        """
        return self._calls(*args, **kwargs)

    def _checked(self, *args: Any, **kwargs: Any) -> tuple[Any, Direct | None]:
        """A call with all checks: its result, and the data to dispatch equal calls without them."""
        apart, leaves = self._arguments(args, kwargs)
        returned, direct = self.run_and_tell(leaves)
        return self._put_together(apart, returned), None if apart is not None else direct

    def _failed(self, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Failure:
        return self.failed(error, jax.tree.leaves((args, kwargs)))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Apart | None, list[Any]]:
        """The objects among the arguments, separated into arrays and the rest, and the flat leaves."""
        if self._adapter is None:
            return None, check_arguments(self.program, args, kwargs)
        apart = self._adapter.take_apart(args, kwargs)
        leaves = check_arguments(self.program, apart.args, apart.kwargs)
        if apart.static != self._static:
            raise StructureChangedError(
                f"the objects are not those `{self.program.name}` was compiled for.",
                given="objects with the same arrays",
                wrong="what is no array in them (a flag, a function, who is shared with whom) has changed.",
                do="call the step itself, which plans and compiles for new ones.",
            )
        return apart, leaves

    def _put_together(self, apart: Apart | None, returned: Any) -> Any:
        return returned if apart is None or self._adapter is None else self._adapter.put_together(apart, returned)

    @functools.cached_property
    def _consts(self) -> Sequence[Any]:
        """The program's constants on their devices; placed at the first call, as devices compiled for may not be attached."""
        return self.executable.hold(list(self.program.consts), self.program.num_args)

    @property
    def has_ended(self) -> bool:
        """Whether the workers that would run it have ended."""
        return self.executable.closed

    def run(self, leaves: list[Any]) -> Any:
        """Run one step on flat argument leaves; objects are not rebuilt."""
        with without_mesh():
            return self._as_returned(self._carry_out(self.executable, leaves))

    def run_and_tell(self, leaves: list[Any]) -> tuple[Any, Direct | None]:
        """As `run`, and the data to dispatch equal calls in C++; None: they need Python."""
        returned = self.run(leaves)
        # C++ dispatch passes captured constants before the arguments, our programs take them after.
        if not isinstance(self.executable, Executable) or self.program.consts:
            return returned, None
        return returned, self.executable.direct(returned)

    def failed(self, error: BaseException, leaves: Sequence[Any]) -> Failure:
        """The error to raise if a call dispatched in C++, on these leaves, fails."""
        assert isinstance(self.executable, Executable), "only this runtime is dispatched in C++"
        return self.executable.failed(error, leaves)

    def _carry_out(self, how: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
        """Call the executable on flat argument leaves; the results that an error carries get the step's structure too."""
        if self._has_keys:
            leaves = self.program.flatten_inputs(leaves)[: self.program.num_args]
        try:
            return how([*leaves, *self._consts])
        except StepError as error:
            if error.results is not None:
                error.facts["results"] = error.results = self._as_returned(error.results)
            raise
        except TypeError:
            for leaf, path in zip(leaves, self.program.in_paths, strict=False):
                check_not_traced(leaf, path, self.program.name)
            raise

    def _as_returned(self, results: list[Any]) -> Any:
        """Flat results in the structure that the step returns, weakly typed where `jax.jit` would return them so."""
        for k in self._weak:
            results[k] = weakly_typed(results[k])
        if self._has_keys:
            returned = self.program.unflatten_outputs(results)
        else:
            returned = jax.tree.unflatten(self.program.out_tree, results)
        return without_constants(returned) if self._has_constants else returned

    def create(self, first: int, stop: int, init: Callable[..., list[Any]], args: Sequence[Any]) -> list[Any]:
        """Create the argument leaves from `first` to `stop` in their shardings; `init(*args)` returns them, flat."""
        keys = self.program.key_inputs[first:stop]

        def of_integers(*args: Any) -> list[Any]:
            return [key_data(x) if k else x for x, k in zip(init(*args), keys, strict=True)]

        made = self.executable.create(of_integers, args, first, stop - first)
        return [as_key(x, key) if key else x for x, key in zip(made, keys, strict=True)]

    def measure(self, *args: Any, steps: int = 5, **kwargs: Any) -> tuple[Any, MeasuredStep]:
        """Run one step, time it, and compare it with the prediction, lane by lane.

        In one process, `steps` whole steps are timed one after another, as in training, beginning with copies of the donated
        arguments (so memory must hold the state twice), after two that are not counted; their results are dropped, but
        callbacks of the step run each time. The
        results returned are those of one step on the arguments themselves, which are donated as in any call. For a
        pipeline, each program and message of that step is timed by itself, and the timeline is the schedule with these
        times, as `plan.timeline()` is with the predicted ones; for one program, its collectives are timed by themselves.

        On a Ray cluster, where meshes are processes, one step is run, in which each program is waited for, and the timeline
        is the step as it ran, by the clocks of the hosts, which are aligned to within half of a call's round trip.

        Args:
            args: As in a call.
            steps: How many whole steps are timed, in one process.
            kwargs: As in a call.

        Returns:
            The step's result, and the measurements: print them, or pass them to `plan.diff`.

        Raises:
            PipelineError: On a Ray cluster, the plan has no stages: one program is the whole step.
            AutoparError: `steps` is below 1.
        """
        check_number("measure", "steps", steps, least=1, is_whole=True)
        executable, is_one = self.executable, self.plan.is_one_program
        if executable.is_remote and is_one:
            raise PipelineError(
                "there is no timeline of a step without stages.",
                given=f"the plan of `{self.plan.name}` by {self.plan.method}, on a Ray cluster",
                wrong="its only program is the whole step, and its workers do not time it.",
                do="time calls of the step, or plan with PipelineParallel(...).",
                num_stages=1,
            )
        apart, leaves = self._arguments(args, kwargs)
        seconds = None
        if not executable.is_remote:
            seconds = whole_steps(self.run, leaves, self.plan.attached.roles, steps)
        with without_mesh():
            results, timeline = self._carry_out(executable.measure, leaves)
            if is_one and seconds is not None:
                measured = one_program(self.plan, executable.devices, seconds, steps)
            else:
                cluster, count = self.plan.attached.cluster, 1 if seconds is None else steps
                measured = pipeline(self.plan, cluster, timeline, seconds, count)
            return self._put_together(apart, self._as_returned(results)), measured


def compile_plan(cluster: Cluster, plan: Plan) -> Runtime:
    """Compile a plan; the runtime that carries it out on the cluster."""
    planned = plan.attached.pipeline
    if cluster.machine is not None:
        return RayStep(cluster.machine, planned)
    compiled = compile_step(planned, cluster.devices or jax.devices())
    return Executable(planned, compiled) if plan.is_one_program else Pipeline(planned, compiled)

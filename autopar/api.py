"""`autopar.parallelize`: one line that makes a training step run on many devices.

In:     the user's step, and perhaps a cluster and a method.
Out:    `ParallelStep`, called like the step itself.
Method: `_prepare` reads as one page: trace, tell state from batch, plan, compile; each at first call for these shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from autopar.errors import AutoparError, ClusterError, NotBuiltYetError, PipelineError, StepError, StructureChangedError
from autopar.ir.state import Roles, find_roles
from autopar.ir.trace import Program, trace_step
from autopar.mesh import Cluster
from autopar.plan.arguments import check_arguments
from autopar.plan.clock import measured
from autopar.plan.describe_stages import PipelineOrigin
from autopar.plan.methods import Auto, Method
from autopar.plan.plan import Plan
from autopar.plan.planner import make_plan
from autopar.plan.progress import planning_progress
from autopar.plan.restore import restore
from autopar.plan.stage_planner import stage_devices
from autopar.plan.stale import check_fresh
from autopar.plan.timeline import Timeline
from autopar.runtime.local import Executable, compile_program
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.ray.driver import RayStep
from autopar.runtime.ray.step import make_ray_step
from autopar.runtime.stacks import StackedArray


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | None = None,
    method: Method | None = None,
    batch_argnums: Any = "auto",
    donate_argnums: Any = "auto",
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    runtime: Any = None,
) -> Any:
    """Run a training step, written for one device, on many.

    Args:
        fn: The step: arrays and pytrees in, pytrees out, differentiated by plain `jax.grad`. Absent: a decorator.
        cluster: The machine; None: all devices of this process.
        method: How to split; None: `Auto()`, decide everything.
        batch_argnums: Positions of the arguments that hold samples. `"auto"`: what is not state and shares its leading
            dim; state is what comes back in the outputs with the same structure and shapes.
        donate_argnums: Positions of the arguments whose memory is reused. `"auto"`: state.
        static_argnums: As in `jax.jit`.
        static_argnames: As in `jax.jit`.
        runtime: `"local"` or `"ray"`; None: what the cluster is.

    Returns:
        `ParallelStep`: called like `fn`, plans and compiles at first call.
    """
    if fn is None:
        return functools.partial(
            parallelize,
            cluster=cluster,
            method=method,
            batch_argnums=batch_argnums,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            runtime=runtime,
        )
    _check_method(method, cluster)
    _check_runtime(runtime, cluster)
    return ParallelStep(fn, cluster, method or Auto(), batch_argnums, donate_argnums, static_argnums, static_argnames)


class CompiledStep:
    """A step planned and compiled for one set of shapes.

    Attributes:
        plan: The plan it carries out.
        programs: XLA's executables by name; on a Ray cluster, what its workers compile.
        executable: What carries the plan out.
        functions: Of a pipeline, what its programs were compiled from, by name.
        in_shardings: Sharding per argument leaf, in the arguments' tree `(args, kwargs)`.
    """

    def __init__(self, program: Program, plan: Plan, executable: Executable | Pipeline | RayStep):
        self.program, self.plan, self.executable = program, plan, executable
        self.programs: dict[str, Any] = (
            {program.name: executable.compiled} if isinstance(executable, Executable) else dict(executable.programs)
        )
        self.functions = executable.functions if isinstance(executable, Pipeline) else {}
        self.in_shardings = jax.tree.unflatten(program.in_tree, executable.in_shardings[: program.num_args])
        self._consts = (
            executable.hold(program.consts, program.num_args)
            if isinstance(executable, RayStep)
            else jax.device_put(list(program.consts), list(executable.in_shardings[program.num_args :]))
        )
        self._has_keys = any(program.key_inputs) or any(program.key_outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Static arguments are left out, as with `jax.stages.Compiled`.

        Raises:
            StructureChangedError: These are not arguments it was compiled for.
        """
        return self.run(check_arguments(self.program, args, kwargs))

    @property
    def has_ended(self) -> bool:
        """Whether the workers that would run it have ended."""
        return isinstance(self.executable, RayStep) and self.executable.closed

    def run(self, leaves: list[Any]) -> Any:
        """Run one step on flat argument leaves."""
        return self._as_returned(self._carry_out(self.executable, leaves))

    def _carry_out(self, how: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
        """What the executable makes of flat argument leaves; results that an error carries are as the step returns them."""
        if self._has_keys:
            leaves = self.program.flatten_inputs(leaves)[: self.program.num_args]
        try:
            return how([*leaves, *self._consts])
        except StepError as error:
            if error.results is not None:
                error.facts["results"] = error.results = self._as_returned(error.results)
            raise

    def _as_returned(self, results: list[Any]) -> Any:
        """Flat results in the structure that the step returns."""
        if self._has_keys:
            return self.program.unflatten_outputs(results)
        return jax.tree.unflatten(self.program.out_tree, results)

    def measure(self, *args: Any, **kwargs: Any) -> tuple[Any, Timeline]:
        """Run one step of a pipeline, each program by itself, and see how long each takes.

        Returns:
            The step's result, and the timeline of the schedule with the measured times, as `plan.timeline()` is that of
            the schedule with the predicted ones.

        Raises:
            PipelineError: The plan has no stages: one program is the whole step.
        """
        if isinstance(self.executable, RayStep):
            raise NotBuiltYetError(
                "measuring a step on a Ray cluster is not built yet.",
                given=f"the compiled step `{self.plan.name}`",
                wrong="its workers do not send times home.",
                do="measure on Cluster.local(), or time calls of the step.",
                feature="measure on Ray",
            )
        if not isinstance(self.executable, Pipeline):
            raise PipelineError(
                "there is no timeline of a step without stages.",
                given=f"the plan of `{self.plan.name}` by {self.plan.method}",
                wrong="its only program is the whole step.",
                do="time calls of the step, or plan with PipelineParallel(...).",
                num_stages=1,
            )
        leaves = check_arguments(self.program, args, kwargs)
        results, seconds = self._carry_out(self.executable.measure, leaves)
        pipeline = self.plan.origin.pipeline
        timeline = measured(pipeline.streams, pipeline.stages, seconds)
        return self._as_returned(results), timeline


class ParallelStep:
    """A step that runs on many devices; call it like the function it was made from."""

    def __init__(
        self,
        fn: Callable[..., Any],
        cluster: Cluster | None,
        method: Method,
        batch_argnums: Any,
        donate_argnums: Any,
        static_argnums: Any,
        static_argnames: Any,
    ):
        functools.update_wrapper(self, fn)
        self._fn, self._given_cluster, self._cluster, self._method = fn, cluster, cluster, method
        self._batch_argnums, self._donate_argnums = batch_argnums, donate_argnums
        self._static_argnums = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self._static_argnames = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self._planned: dict[Any, tuple[Program, Roles, Plan]] = {}
        self._compiled: dict[Any, CompiledStep] = {}
        self._latest: CompiledStep | None = None

    @property
    def cluster(self) -> Cluster:
        """The machine planned for."""
        if self._cluster is None:
            self._cluster = Cluster.local()
        return self._cluster

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; plan and compile at the first call for these shapes."""
        key, leaves = self._key(args, kwargs)
        compiled = self._compiled.get(key)
        if compiled is None or compiled.has_ended:
            compiled = self.compile(*args, **kwargs)
        return compiled.run(leaves)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, which may be `jax.ShapeDtypeStruct`s; touches no device."""
        return self._plan(args, kwargs)[2]

    def compile(self, *args: Any, plan: Plan | None = None, **kwargs: Any) -> CompiledStep:
        """Plan (or take `plan`) and compile.

        Args:
            *args: As the step takes them, or their types.
            plan: A plan for this step and cluster, such as `Plan.load` returns; calls of the step itself keep to its own.
            **kwargs: The same, by name.

        Raises:
            StalePlanError: `plan` was made for another program or cluster; says what changed.
            PlanFileError: The choices in `plan` are not those of this step.
        """
        given = plan
        if given is None:
            program, roles, plan = self._plan(args, kwargs)
        else:
            program, roles = self._trace(args, kwargs)
            plan = self._attach(program, roles, given)
        self._latest = CompiledStep(program, plan, _compile(self.cluster, program, roles, plan))
        if given is None:
            self._compiled[self._key(args, kwargs)[0]] = self._latest
        return self._latest

    def attach(self, *args: Any, plan: Plan, **kwargs: Any) -> Plan:
        """A plan read from a file, attached to this step: it can `explain`, and its shardings are a pytree. Runs nothing.

        Raises:
            StalePlanError: `plan` was made for another program or cluster; says what changed.
            PlanFileError: The choices in `plan` are not those of this step.
        """
        program, roles = self._trace(args, kwargs)
        return self._attach(program, roles, plan)

    def create_state(self, init_fn: Callable[..., Any], *args: Any, example: tuple[Any, ...] | None = None) -> Any:
        """Run `init_fn(*args)` so that every array is born in the sharding the plan wants.

        Args:
            init_fn: Makes the step's state: its result is one of the step's state arguments.
            *args: Arguments of `init_fn`.
            example: The step's arguments after the state (arrays or types), to plan with; None: for the step as it was
                compiled last.

        Raises:
            StructureChangedError: The result is no state argument of the step.
        """
        made = jax.eval_shape(init_fn, *args)
        compiled: CompiledStep | None
        if example is not None:
            compiled = self.compiled(made, *example)
        else:
            compiled = self.latest()
        if compiled is None:
            raise StructureChangedError(
                "the step has no plan yet.",
                given=f"create_state({getattr(init_fn, '__name__', init_fn)}, ...)",
                wrong="without the rest of the step's arguments there is nothing to plan.",
                do="pass example=(batch, ...), the arguments after the state, or call the step once before.",
                path="",
            )
        positional = compiled.in_shardings[0]
        trees = [jax.tree.structure(a) for a in positional]
        tree = jax.tree.structure(made)
        if tree not in trees:
            raise StructureChangedError(
                "the new state does not fit the step.",
                given=str(tree),
                wrong="no argument of the step has this structure.",
                do="let init_fn return exactly what the step takes.",
                path="",
            )
        number = trees.index(tree)
        if isinstance(compiled.executable, Pipeline | RayStep):
            first = sum(t.num_leaves for t in trees[:number])
            leaves = compiled.executable.create(lambda *a: jax.tree.leaves(init_fn(*a)), args, first, tree.num_leaves)
            return jax.tree.unflatten(tree, leaves)
        return jax.jit(init_fn, out_shardings=positional[number])(*args)

    def compiled(self, *args: Any) -> CompiledStep:
        """What a call with these arguments runs; compiled now if it is not. They may be types."""
        key, _ = self._key(args, {})
        if key not in self._compiled or self._compiled[key].has_ended:
            return self.compile(*args)
        return self._compiled[key]

    def replan(self, cluster: Cluster | None = None) -> ParallelStep:
        """The same step, to be planned anew.

        Args:
            cluster: The machine as it is now; None: the one that the step was made for, and if it was made for none in
                particular, the devices that this process has now.
        """
        return ParallelStep(
            self._fn,
            cluster or self._given_cluster,
            self._method,
            self._batch_argnums,
            self._donate_argnums,
            self._static_argnums,
            self._static_argnames,
        )

    def latest(self) -> CompiledStep | None:
        """The step as it was last compiled; None: it has not been."""
        return self._latest

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The traced step, flat; plans nothing."""
        return self._trace(args, kwargs)[0]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What a plan depends on, and the leaves of the dynamic arguments."""
        dynamic, static = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        try:
            return (tree, static, tuple([(x.shape, x.dtype) for x in leaves])), leaves
        except AttributeError:  # Python numbers among the leaves
            return (tree, static, tuple([_type_of(x) for x in leaves])), leaves

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Roles, Plan]:
        """Trace and plan, once for these shapes."""
        key, _ = self._key(args, kwargs)
        if key not in self._planned:
            program, roles = self._trace(args, kwargs)
            with planning_progress(program.name) as report:
                self._planned[key] = program, roles, make_plan(program, roles, self.cluster, self._method, report)
        return self._planned[key]

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, dict[str, Any]], Any]:
        """Dynamic arguments, and a key for the static ones."""
        if not self._static_argnums and not self._static_argnames:
            return (args, kwargs), ()
        import inspect

        names = [p for p in inspect.signature(self._fn).parameters]
        static = {i % len(args) for i in self._static_argnums} | {
            i for i, name in enumerate(names[: len(args)]) if name in self._static_argnames
        }
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        by_name = {k: v for k, v in kwargs.items() if k not in self._static_argnames}
        key = (
            tuple((i, args[i]) for i in sorted(static)),
            tuple(sorted((k, v) for k, v in kwargs.items() if k in self._static_argnames)),
        )
        return (dynamic, by_name), key

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Roles]:
        args, kwargs = jax.tree.map(_abstract_stack, (args, kwargs))
        program = trace_step(self._fn, args, kwargs, self._static_argnums, self._static_argnames)
        return program, find_roles(program, self._batch_argnums, self._donate_argnums)

    def _attach(self, program: Program, roles: Roles, plan: Plan) -> Plan:
        """A plan made elsewhere, checked against the step as it is now."""
        check_fresh(program, self.cluster, plan)
        if plan.origin is None:
            return restore(program, roles, self.cluster, self._method, plan)
        return plan


def _compile(cluster: Cluster, program: Program, roles: Roles, plan: Plan) -> Executable | Pipeline | RayStep:
    """What carries a plan out on a cluster."""
    if cluster.machine is not None:
        return make_ray_step(cluster, program, roles, plan)
    devices = cluster.devices or jax.devices()
    if isinstance(plan.origin, PipelineOrigin):
        return compile_pipeline(plan.origin, devices)
    avals = [var.aval for var in program.jaxpr.invars]
    return compile_program(
        plan.origin.sharded.body, plan.mesh, devices, avals, roles.donated, program.name, program.in_paths
    )


def compile_pipeline(origin: PipelineOrigin, devices: Sequence[Any]) -> Pipeline:
    """Compile all programs of a pipeline for real devices."""
    pipeline = origin.pipeline
    cut = pipeline.cut
    return Pipeline(
        pipeline.stages,
        pipeline.streams,
        stage_devices(pipeline, devices),
        cut.program.jaxpr,
        cut.roles,
        cut.stacks,
        pipeline.tasks.update.home,
        origin.program.name,
        cut.program.in_paths,
    )


def _type_of(leaf: Any) -> Any:
    """What of a leaf the compiled step depends on; of a leaf that is no array its class, tracing then says what is wrong."""
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)  # weakly typed: not the same program as for an array
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return (shape, dtype) if dtype is not None else type(leaf)


def _abstract_stack(leaf: Any) -> Any:
    """Tracing needs no more of a `StackedArray` than its type, and cannot read it."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, StackedArray) else leaf


def _check_method(method: Any, cluster: Any) -> None:
    if method is not None and not isinstance(method, Method):
        name = getattr(method, "__name__", None)
        raise AutoparError(
            "unknown method.",
            given=f"method={name or repr(method)}",
            wrong=f"it is of type {type(method).__name__}, no method of autopar.",
            do=f"pass {name}(...), an instance."
            if isinstance(method, type) and issubclass(method, Method)
            else "pass Auto(), ShardParallel(...) or DataParallel(...).",
        )
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ClusterError(
            "unknown cluster.",
            given=f"cluster={cluster!r}",
            wrong=f"it is of type {type(cluster).__name__}, not Cluster.",
            do='pass Cluster.local(), Cluster.of("8x8 h100") or Cluster(hosts=, devices_per_host=, ...).',
        )


def _check_runtime(runtime: Any, cluster: Cluster | None) -> None:
    of_cluster = "local" if cluster is None or cluster.machine is None else "ray"
    if runtime not in (None, of_cluster):
        raise ClusterError(
            "this runtime does not run on this cluster.",
            given=f"runtime={runtime!r}, cluster={'this process' if cluster is None else cluster}",
            wrong=f"the runtime of this cluster is {of_cluster!r}.",
            do="leave `runtime` out, and pass cluster=Cluster.ray(...) to run on a Ray cluster.",
        )

"""A parallel step: traced, planned and compiled at the first call for arguments of some shapes.

In:     the user's step, the cluster and method, which arguments are static, batch, donated.
Out:    `ParallelStep`: called like the step; or asked for its plan, its compiled programs, its state.
Method: trace, tell state from batch, plan, compile (`_compile`). Plans and compiled steps are cached by what they depend on:
        structure, shapes and dtypes of the arguments, static arguments, JAX's settings.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax

from autopar._jax import Direct, shaped, trace_context, with_cudnn_of, without_mesh
from autopar.compiled import CompiledStep, compile_plan
from autopar.create import NewState
from autopar.direct import DirectCalls, Failure
from autopar.errors import BatchError, StructureChangedError
from autopar.frameworks import Adapter, Apart, Shell, StaticKey, adapter_of, on_arrays
from autopar.ir.program import Program
from autopar.ir.rewrite.state_on_host import return_to_host
from autopar.ir.trace.parameters import check_hashable, chosen, parameters_of, static_of
from autopar.ir.trace.state import Roles, find_roles
from autopar.ir.trace.trace import name_of, trace_step
from autopar.ir.trace.untrained import check_trains
from autopar.markup import facts
from autopar.mesh import Cluster
from autopar.mesh.find_device import compute_capability
from autopar.plan.stale import check_fresh
from autopar.report.plan import Plan
from autopar.search.methods import Method, method_text
from autopar.search.planner import make_plan
from autopar.search.progress import planning_progress
from autopar.search.restore import restore
from autopar.verify import plan_that_fits, verify_plan

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The last call, if all its arguments were arrays: a fast path for calls like it.

    Attributes:
        tree: Structure of its arguments.
        types: Types of their leaves, JAX's own objects: arrays of one step share them with those of the next.
        context: JAX's settings at the time.
        compiled: The step that it ran.
    """

    tree: Any
    types: list[Any]
    context: Any
    compiled: CompiledStep


@dataclass(slots=True, eq=False)
class _Made:
    """A step's plans and compiled steps so far; for a method of a class, shared by all its objects."""

    cluster: Cluster | None
    planned: dict[Any, Plan] = field(default_factory=dict)
    compiled: dict[Any, CompiledStep] = field(default_factory=dict)
    latest: CompiledStep | None = None
    adapter: Adapter | None = None
    last: _Call | None = None
    calls: DirectCalls | None = None


class ParallelStep(Generic[P, R]):
    """A step that runs on many devices; call it like the function it was made from."""

    __name__: str

    def __init__(
        self,
        fn: Callable[P, R],
        cluster: Cluster | None,
        method: Method,
        batch_argnums: Any,
        donate_argnums: Any,
        static_argnums: Any,
        static_argnames: Any,
    ):
        functools.update_wrapper(self, fn, updated=())  # the function's own attributes must not hide the step's
        self._fn, self._given_cluster, self._method = fn, cluster, method
        self._static = static_of(parameters_of(fn), static_argnums, static_argnames)
        self._batch_argnums = chosen("batch_argnums", batch_argnums, self._static)
        self._donate_argnums = chosen("donate_argnums", donate_argnums, self._static)
        self._bound: tuple[Any, ...] = ()
        self._made = _Made(cluster)

    def __repr__(self) -> str:
        return f"<parallel step {'; '.join(words for _, words in self._told())}>"

    def _repr_html_(self) -> str:
        return facts("Parallel step", self._told())

    def _told(self) -> Iterator[tuple[str, str]]:
        """The step and its plans as (name, text)."""
        yield "function", name_of(self._fn)
        yield "method", method_text(self._method)
        yield "cluster", str(self._made.cluster or "all devices of this process")
        for plan in self._made.planned.values():
            yield "planned", f"{plan.cost!r}"
        if not self._made.planned:
            yield "plan", "not planned yet"

    @overload
    def __get__(self, instance: None, owner: Any = None) -> ParallelStep[P, R]: ...

    @overload
    def __get__(self: ParallelStep[Concatenate[S, Q], R], instance: S, owner: Any = None) -> ParallelStep[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind as a method: the object is argument 0, as in `jax.jit`, and static unless it is a pytree."""
        if instance is None:
            return self
        bound = copy.copy(self)
        bound._bound = (instance,)
        if jax.tree_util.all_leaves([instance]):
            bound._static = self._static.with_first()
        return bound

    @property
    def method(self) -> Method:
        """The method to split the step by."""
        return self._method

    @property
    def cluster(self) -> Cluster:
        """The machine that the step is planned for."""
        if self._made.cluster is None:
            self._made.cluster = Cluster.local()
        return self._made.cluster

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step; plan and compile at the first call for these shapes."""
        if self._bound:
            return self._checked(*args, **kwargs)[0]
        if self._made.calls is None:
            static = self._static.numbers, self._static.names
            self._made.calls = DirectCalls(name_of(self._fn), self._checked, self._failed, *static)
        return self._made.calls(*args, **kwargs)

    def _checked(self, *args: Any, **kwargs: Any) -> tuple[Any, Direct | None]:
        """A call with all checks: its result, and the data to dispatch equal calls without them."""
        last = self._made.last
        if last is not None and (again := self._again(last, args, kwargs)) is not None:
            return last.compiled.run_and_tell(again)
        key, leaves, apart = self._key(args, kwargs)
        compiled = self._made.compiled.get(key)
        if compiled is None or compiled.has_ended:
            compiled = self._compile(args, kwargs, None)
        returned, direct = compiled.run_and_tell(leaves)
        if apart is not None:
            return apart.adapter.put_together(apart, returned), None
        self._made.last = self._call(args, kwargs, leaves, compiled)
        return returned, direct if all(n >= 0 for n in self._static.numbers) else None

    def _failed(self, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Failure:
        key, leaves, _ = self._key(args, kwargs)
        return self._made.compiled[key].failed(error, leaves)

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], compiled: CompiledStep
    ) -> _Call | None:
        """The record of a call for `_again`; None: some argument is no array, or the step is bound or has static arguments."""
        is_plain = not (self._bound or self._static.names or self._static.numbers)
        if not is_plain or not all(isinstance(x, jax.Array) for x in leaves):
            return None
        return _Call(jax.tree.structure((args, kwargs)), [x.aval for x in leaves], trace_context(), compiled)

    def _again(self, last: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The leaves of a call, if it is like the last one, so that it runs the same compiled step; else None."""
        if self._bound:
            return None
        try:
            leaves, tree = jax.tree.flatten((args, kwargs))
            types = [x.aval for x in leaves]
        except (AttributeError, TypeError, ValueError):
            return None
        is_same = tree == last.tree and types == last.types and trace_context() == last.context
        return leaves if is_same and not last.compiled.has_ended else None

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for these arguments, which may be `jax.ShapeDtypeStruct`s; touches no device."""
        key, _, _ = self._key(args, kwargs)
        planned = self._made.planned
        if key not in planned:
            planned[key] = self._planned(*self._roles(args, kwargs))
        return planned[key]

    def compile(self, *args: Any, plan: Plan | None = None, **kwargs: Any) -> CompiledStep:
        """Plan (or take `plan`) and compile.

        Args:
            *args: As the step takes them, or their types.
            plan: A plan for this step and cluster, such as `Plan.load` returns; calls of the step itself use its own plan.
            **kwargs: The same, by name.

        Raises:
            StalePlanError: `plan` was made for another program or cluster; says what changed.
            PlanFileError: The choices in `plan` are not those of this step.
        """
        return self._compile(args, kwargs, plan)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Plan | None) -> CompiledStep:
        if given is None:
            plan = self.plan(*args, **kwargs)
            program = plan.attached.program
        else:
            program, roles = self._roles(args, kwargs)  # this step's own constants, wherever the plan comes from
            plan = self._attach(program, roles, given)
        key, _, apart = self._key(args, kwargs)
        objects = (None, None) if apart is None else (apart.adapter, apart.static)
        with without_mesh():
            latest = CompiledStep(program, plan, compile_plan(self.cluster, plan), *objects)
        self._made.latest = latest
        if given is None:
            self._made.compiled[key] = latest
        return latest

    def attach(self, *args: Any, plan: Plan, **kwargs: Any) -> Plan:
        """Attach a plan read from a file to this step: it can then `explain`, and its shardings are a pytree. Runs nothing.

        Raises:
            StalePlanError: `plan` was made for another program or cluster; says what changed.
            PlanFileError: The choices in `plan` are not those of this step.
        """
        return self._attach(*self._roles(args, kwargs), plan)

    def create_state(self, init_fn: Callable[..., Any], *args: Any, example: tuple[Any, ...] | None = None) -> Any:
        """Run `init_fn(*args)` so that every array is created in the plan's sharding.

        Args:
            init_fn: Creates the step's state: its result is one of the step's state arguments, or a tuple of the first ones.
            *args: Arguments of `init_fn`.
            example: The step's arguments after the state (arrays or types), to plan with; None: use the plan of the step as
                it was compiled last.

        Raises:
            StructureChangedError: The result is no argument of the step: another structure, shape or dtype.
        """
        new = NewState(init_fn, args, None if example is None else len(example), self._static.parameters)
        compiled = self.latest() if example is None else self.compiled(*new.arguments(), *example)
        if compiled is None:
            raise StructureChangedError(
                "the step has no plan yet.",
                given=f"create_state({getattr(init_fn, '__name__', init_fn)}, ...)",
                wrong="without the rest of the step's arguments there is nothing to plan.",
                do="pass example=(batch, ...), the arguments after the state, or call the step once before.",
            )
        with without_mesh():
            return new.create(compiled)

    def compiled(self, *args: Any) -> CompiledStep:
        """The compiled step for these arguments, which may be types; compiled now if it is not yet."""
        key, _, _ = self._key(args, {})
        compiled = self._made.compiled.get(key)
        return self.compile(*args) if compiled is None or compiled.has_ended else compiled

    def replan(self, cluster: Cluster | None = None, method: Method | None = None) -> ParallelStep[P, R]:
        """The same step, to be planned anew.

        Args:
            cluster: The machine as it is now; None: the step's own, or the devices that this process has now if the step has
                none.
            method: How to split; None: as before.
        """
        anew = copy.copy(self)
        anew._method = method or self._method
        anew._given_cluster = cluster or self._given_cluster
        anew._made = _Made(anew._given_cluster)
        return anew

    def on_arrays(self, state: Shell, *, updates: bool) -> ParallelStep[..., Any]:
        """The same step on the arrays of its first argument's objects; `updates` as in `Shell.of_step`."""
        anew: ParallelStep[..., Any] = copy.copy(self)
        anew._fn, anew._made = state.of_step(self._fn, updates=updates), _Made(self._given_cluster)
        return anew

    def latest(self) -> CompiledStep | None:
        """The step as it was last compiled; None: it has not been."""
        return self._made.latest

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any], Apart | None]:
        """The cache key of a call, the leaves of its dynamic arguments, and the objects among these as an `Apart`."""
        dynamic, static = self._split(args, kwargs)
        adapter = self._made.adapter
        if adapter is None:
            try:
                key, leaves = _key_of(dynamic, static)
                if key in self._made.planned:
                    return key, leaves, None
            except (TypeError, ValueError):  # objects that are no pytrees, or have no hash
                pass
        if adapter is None or not adapter.claims(*dynamic):
            adapter = self._made.adapter = adapter_of(*dynamic)
        if adapter is None:
            return *_key_of(dynamic, static), None
        apart = adapter.take_apart(*dynamic)
        return *_key_of((apart.args, apart.kwargs), (static, StaticKey(apart.static, name_of(self._fn)))), apart

    def _planned(self, program: Program, roles: Roles) -> Plan:
        """Make a plan by the step's method."""

        def make(method: Method) -> Plan:
            with without_mesh(), planning_progress(program.name) as report:
                plan = make_plan(program, roles, self.cluster, method, report)
            return dataclasses.replace(plan, verifier=verify_plan)

        return plan_that_fits(make, self._method) if self._method.memory == "compiler" else make(self._method)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, dict[str, Any]], Any]:
        """Dynamic arguments, and a key for the static ones: equal values of different types differ, as in `jax.jit`."""
        args = (*self._bound, *args)
        if not self._static.names and not self._static.numbers:
            return (args, kwargs), ()
        call = self._static.split(args, kwargs)
        check_hashable(call.static, name_of(self._fn))
        return (call.args, call.kwargs), tuple((name, type(value), value) for name, value in call.static)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The traced step, flat; plans nothing."""
        args = (*self._bound, *args)
        call = self._static.split(args, kwargs)
        adapter = adapter_of(call.args, call.kwargs)
        with with_cudnn_of(self._capability()):
            if adapter is None:
                return trace_step(self._fn, args, kwargs, static=self._static)
            apart = adapter.take_apart(call.args, call.kwargs)
            args, kwargs = call.joined(apart.args, apart.kwargs)
            return trace_step(on_arrays(self._fn, self._static, apart), args, kwargs, static=self._static)

    def _capability(self) -> tuple[int, int] | None:
        """The least compute capability of a described cluster's GPUs; None: real devices, or none by NVIDIA."""
        cluster = self._made.cluster
        if cluster is None or cluster.devices is not None:
            return None
        found = [compute_capability(each.device) for each in cluster.groups or (cluster,)]
        return min((each for each in found if each is not None), default=None)

    def _roles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, Roles]:
        """Trace, and tell state from batch."""
        program = self.program(*args, **kwargs)
        try:
            roles = find_roles(program, self._batch_argnums, self._donate_argnums)
        except BatchError:
            self._check_trains(program, ())  # forgotten state makes the batch ambiguous: report that instead
            raise
        self._check_trains(program, roles.batch)
        return dataclasses.replace(program, jaxpr=return_to_host(program.jaxpr, roles.aliases)), roles

    def _check_trains(self, program: Program, batch: tuple[int, ...]) -> None:
        if self._donate_argnums == "auto":
            check_trains(program, batch)

    def _attach(self, program: Program, roles: Roles, plan: Plan) -> Plan:
        """A plan made elsewhere, after a check against the step as it is now."""
        check_fresh(program, self.cluster, plan)
        if plan.origin is None:
            with without_mesh():
                plan = restore(program, roles, self.cluster, self._method, plan)
        return plan if plan.verifier else dataclasses.replace(plan, verifier=verify_plan)


def _key_of(dynamic: Any, static: Any) -> tuple[Any, list[Any]]:
    leaves, tree = jax.tree.flatten(dynamic)
    try:
        types = tuple([(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves])
    except AttributeError:  # Python numbers among the leaves
        types = tuple([_type_of(x) for x in leaves])
    return (tree, static, types, trace_context()), leaves


def _type_of(leaf: Any) -> Any:
    """The type of a leaf for the cache key; for a leaf that is no array its class, tracing then raises the error."""
    try:
        aval = shaped(leaf)
    except (TypeError, ValueError, OverflowError):
        return type(leaf)
    return aval.shape, aval.dtype, aval.weak_type

"""`autopar.follow`: a step that uses another step's state in its sharding: evaluation after training, prefill before decode.

In:     the user's step, and the `ParallelStep` that it follows, which has the same parameters.
Out:    a step called like the user's; arguments that are (part of) the followed step's state keep their sharding.
Method: arguments are matched by structure and types, as state is (`ir/trace/state.py`); each matched array is pinned to its
        sharding in the followed step's plan, on the same mesh, and so are results that are its state (the cache that a
        prefill makes for a decode step); everything else is planned as usual. The batch is the arguments with the sample
        types of the followed step's batch, else those that are not state. If the followed step is a pipeline, the step is
        cut into the same stages (`search/followed.py`).
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from autopar._jax import Aval
from autopar.compiled import CompiledStep
from autopar.errors import AutoparError, StructureChangedError
from autopar.frameworks import Shell
from autopar.ir.program import Program
from autopar.ir.trace.state import alike, arguments_of, find_batch, subtrees
from autopar.ir.trace.trace import name_of
from autopar.mesh import Cluster
from autopar.search.methods import Follow, FollowMesh, Method, ShardParallel
from autopar.step import ParallelStep


def follow(
    eval_step: Callable[..., Any],
    step: ParallelStep,
    *,
    batch_argnums: Any = "auto",
    donate_argnums: Any = (),
    static_argnums: int | Iterable[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
) -> Following:
    """Make a step that runs where another one keeps its state.

    Args:
        eval_step: Takes parameters, or the whole state, as `step` has them, and a batch: it evaluates, or makes the cache
            that `step` decodes with.
        step: The step to follow, made by `parallelize`: a train step, or one that decodes. It must have been called or
            compiled before the first call of this one.
        batch_argnums: As in `parallelize`. `"auto"`: the arguments like the batch of `step`, if there are any; else the
            only argument that is not its state, or those that share their leading dim.
        donate_argnums: As in `parallelize`, but nothing is donated unless it is named.
        static_argnums: As in `parallelize`.
        static_argnames: As in `parallelize`.

    Returns:
        A step called like `eval_step`.

    Raises:
        AutoparError: `step` is not made by `parallelize`.
    """
    if not isinstance(step, ParallelStep):
        raise AutoparError(
            "there is no step to follow.",
            given=f"follow({getattr(eval_step, '__name__', eval_step)}, {step!r})",
            wrong=f"it is of type {type(step).__name__}, not made by autopar.parallelize.",
            do="pass the step whose state it takes, made by autopar.parallelize.",
        )
    return Following(eval_step, step, batch_argnums, donate_argnums, static_argnums, static_argnames)


class Following:
    """A step that takes another step's state in its sharding; call it like the function it was made from."""

    def __init__(self, fn: Callable[..., Any], step: ParallelStep, *settings: Any):
        """A follower of `step`; `settings`: batch, donated and static arguments, in the order of `follow`."""
        self._fn, self._step, self._settings = fn, step, settings
        self._traced = ParallelStep(fn, None, ShardParallel(), *settings)
        self._parallel: ParallelStep | None = None

    def __repr__(self) -> str:
        return f"<parallel step {name_of(self._fn)}; follows {name_of(self._step)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; plan and compile at the first call."""
        return self.parallel(*args, **kwargs)(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The plan for these arguments."""
        return self.parallel(*args, **kwargs).plan(*args, **kwargs)

    def behind(self, step: ParallelStep) -> Following:
        """The same step, following another one, such as its step planned anew."""
        return Following(self._fn, step, *self._settings)

    def on_arrays(self, state: Shell, step: ParallelStep) -> Following:
        """The same step on the arrays of its first argument's objects, following a step on these."""
        return Following(state.of_step(self._fn, updates=False), step, *self._settings)

    @property
    def cluster(self) -> Cluster:
        """The machine of the followed step."""
        return self._step.cluster

    def compiled(self, *args: Any) -> CompiledStep:
        """The compiled step for these arguments, which may be types; compiled now if it is not yet."""
        return self.parallel(*args).compiled(*args)

    @property
    def _names(self) -> str:
        return f"{name_of(self._fn)}, {name_of(self._step)}"

    def parallel(self, *args: Any, **kwargs: Any) -> ParallelStep:
        """The parallel step, made for the first arguments.

        Raises:
            StructureChangedError: No argument is a part of the followed step's state, or that step has no plan yet.
        """
        if self._parallel is None:
            method, batch = self._follow(args, kwargs)
            self._parallel = ParallelStep(self._fn, self._step.cluster, method, batch, *self._settings[1:])
        return self._parallel

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Method, Any]:
        """The method to plan the step by, and its batch."""
        compiled = self._step.latest()
        if compiled is None:
            raise StructureChangedError(
                "the step that is followed has no plan yet.",
                given=f"follow({self._names}), called before `{name_of(self._step)}`",
                wrong="where its state lies is decided when it is first called.",
                do=f"call `{name_of(self._step)}`, or its compile(...), before.",
            )
        # Every subtree of an argument -> its first leaf, of equal ones the first in breadth order.
        trees = subtrees(compiled.program.in_tree, compiled.program.in_avals)[3:]  # not the whole, and its halves
        held: dict[Any, int] = {kind: start for kind, start, _ in reversed(trees)}
        program = self._traced.program(*args, **kwargs)
        found: dict[int, int] = {}
        others = []
        for number, (tree, first, last) in enumerate(arguments_of(program)):
            start = held.get(alike(tree, program.in_avals[first:last]))
            if start is not None and last > first and start not in compiled.plan.attached.roles.batch:
                found.update(zip(range(first, last), range(start, start + last - first), strict=True))
            elif last > first:
                others.append(number)
        if not found:
            raise StructureChangedError(
                "no argument of the step is state of the one that it follows.",
                given=f"follow({self._names}), with {', '.join(program.in_paths[:6])}",
                wrong=f"none of its arguments has the structure and types of `{name_of(self._step)}`'s state, or of a part "
                "of it.",
                do="pass that state, or a subtree of it such as the parameters.",
            )
        batch = self._settings[0]
        if isinstance(batch, str):
            batch = _batch(program, others, compiled)
        if not compiled.plan.is_one_program:
            there = compiled.program.in_paths
            return Follow(compiled.plan, {program.in_paths[k]: there[at] for k, at in found.items()}), batch
        shardings = jax.tree.leaves(compiled.in_shardings)
        pins = {glob.escape(program.in_paths[k]): shardings[at].spec for k, at in found.items()}
        state = set(compiled.plan.attached.roles.state)
        for k, at in _returned(program, held).items():
            if at in state:
                pins[glob.escape(program.out_paths[k])] = shardings[at].spec
        kept, names = set(compiled.plan.offloaded), compiled.program.in_paths
        on_host = tuple(program.in_paths[k] for k, at in found.items() if names[at] in kept)
        if on_host:
            return FollowMesh(mesh_shape=compiled.plan.mesh, constraints=pins, on_host=on_host), batch
        return ShardParallel(mesh_shape=compiled.plan.mesh, constraints=pins), batch


def _returned(program: Program, held: dict[Any, int]) -> dict[int, int]:
    """Results that the followed step takes as (part of) an argument, such as a cache: result -> that argument's leaf."""
    found: dict[int, int] = {}
    for kind, first, last in subtrees(program.out_tree, program.out_avals):
        at = held.get(kind)
        if at is not None and first not in found and any(aval.shape for aval in program.out_avals[first:last]):
            found.update(zip(range(first, last), range(at, at + last - first), strict=True))
    return found


def _batch(program: Program, others: Sequence[int], compiled: CompiledStep) -> Any:
    """Numbers of the parameters that hold samples; `others`: the arguments that are not the followed step's state."""
    followed = compiled.program
    samples = {
        alike(tree, followed.in_avals[first:last], _sample_type)
        for tree, first, last in arguments_of(followed)
        if not set(range(first, last)).isdisjoint(compiled.plan.attached.roles.batch)
    }
    ranges = arguments_of(program)
    chosen: Sequence[int] = [
        n for n in others for tree, a, b in [ranges[n]] if alike(tree, program.in_avals[a:b], _sample_type) in samples
    ]
    if not chosen:
        chosen = others if len(others) == 1 else find_batch(program, set(range(len(ranges))).difference(others))
    numbers = [program.arguments[n].number for n in chosen]
    return "auto" if None in numbers else numbers


def _sample_type(aval: Aval) -> tuple[object, ...]:
    return tuple(aval.shape[1:]), aval.dtype

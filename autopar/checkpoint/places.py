"""Determines where each restored array goes.

In:     the wanted pytree, and perhaps a compiled step that takes it as an argument.
Out:    for each leaf a sharding; a `Stack` of parts on several meshes; `OnWorkers`, if workers read it; `HOST`, a NumPy array;
        or `UNCOMMITTED`, an uncommitted array on the default device.
Method: an argument of a step is recognized by its structure and the types of its leaves.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from autopar._jax import is_key, key_data
from autopar.compiled import CompiledStep
from autopar.errors import CheckpointError
from autopar.plan.arguments import arguments_like
from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.stacks import Stack, StackedArray
from autopar.step import ParallelStep


class Nowhere(enum.Enum):
    """Places other than a sharding."""

    HOST = enum.auto()
    UNCOMMITTED = enum.auto()


HOST, UNCOMMITTED = Nowhere.HOST, Nowhere.UNCOMMITTED


@dataclass(frozen=True, slots=True)
class OnWorkers:
    """The workers that hold an argument of a step on a Ray cluster; `argument`: its position."""

    step: RayStep
    argument: int


Place: TypeAlias = jax.sharding.Sharding | Stack | OnWorkers | Nowhere


def place_by_like(leaf: Any) -> Place:
    """The place of a leaf: where it is, or the sharding of its type."""
    if isinstance(leaf, StackedArray):
        return Stack([part.shape for part in leaf.parts], [part.sharding for part in leaf.parts], leaf.dim)
    if isinstance(leaf, np.ndarray | np.generic):
        return HOST
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            leaf = key_data(leaf)
        return leaf.sharding if getattr(leaf, "committed", True) else UNCOMMITTED
    sharding = getattr(leaf, "sharding", None)
    return _reachable(sharding) if isinstance(sharding, jax.sharding.Sharding) else UNCOMMITTED


def _reachable(sharding: jax.sharding.Sharding) -> Place:
    """A sharding; or `HOST`, if its mesh is abstract: the devices of other processes get their arrays from the host."""
    mesh = getattr(sharding, "mesh", None)
    return HOST if isinstance(mesh, jax.sharding.AbstractMesh) else sharding


def places_by_plan(like: Any, step: CompiledStep | ParallelStep) -> list[Place]:
    """The places in which a plan wants the leaves of an argument.

    Raises `CheckpointError`: `step` is not a step, is not compiled, or has no such argument.
    """
    if not isinstance(step, CompiledStep | ParallelStep):
        raise CheckpointError(
            "this is no compiled step.",
            given=f"restore(..., compiled={step!r})",
            wrong=f"it is of type {type(step).__name__}.",
            do="pass what step.compile(state, batch) returns, or leave `compiled` out.",
        )
    compiled = step.latest() if isinstance(step, ParallelStep) else step
    if compiled is None:
        raise CheckpointError(
            "the step has no plan yet.",
            given=f"restore(..., compiled={getattr(step, '__name__', 'step')})",
            wrong="where its arrays belong is decided when it is compiled.",
            do="pass what step.compile(state, batch) returns; types do for arguments.",
        )
    found = _argument(like, compiled) or _several_arguments(like, compiled)
    if found is None:
        raise CheckpointError(
            "the state does not fit the step.",
            given=str(jax.tree.structure(like)),
            wrong=f"no argument of `{compiled.program.name}` has this structure and these types.",
            do="pass `like` as the step takes it, or leave `compiled` out.",
        )
    return [_place(compiled, k) for k in found]


def _place(compiled: CompiledStep, argument: int) -> Place:
    executable = compiled.executable
    if isinstance(executable, RayStep):
        return OnWorkers(executable, argument)
    stack = executable.stack(argument)
    if stack is not None and stack.sharding is None:
        return stack
    return _reachable(executable.in_shardings[argument])


def _argument(like: Any, compiled: CompiledStep) -> list[int] | None:
    """The flat inputs of the step's argument of the type of `like`; None: there is none."""
    return next((list(range(*span)) for span in arguments_like(compiled.program, like)), None)


def _several_arguments(like: Any, compiled: CompiledStep) -> list[int] | None:
    """The flat inputs for a container of arguments, such as {"params": params} or (params, cache); None: it is not one."""
    if not isinstance(like, tuple | list | dict):
        return None
    children = jax.tree.leaves(like, is_leaf=lambda node: node is not like)  # of a dict in the order of its leaves
    found: list[int] = []
    for child in children:
        own = _argument(child, compiled)
        if own is None:
            return None
        found += own
    return found

"""Results that are no arrays, such as names and functions: constants of the program, returned as they are.

In:     a step whose result has leaves that JAX cannot return.
Out:    the step with `Constant` in place of them, a pytree without leaves; after a run, the result with the values in it.
Method: as `eqx.filter_jit` does. Only text, enumerations, classes and functions are taken: any other object may hold traced
        values, which have none after the trace, and is refused as by `jax.jit`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import PyTreeDef


@jax.tree_util.register_static
class Constant:
    """One leaf of a result that is no array. Two are equal if they are the same."""

    def __init__(self, value: object):
        self.value = value


def is_constant(leaf: object) -> bool:
    """Whether a leaf of a result is returned as it is."""
    return isinstance(leaf, str | bytes | enum.Enum) or callable(leaf)


def with_constants(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with `Constant` in place of those leaves of its result."""

    @functools.wraps(fn, updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda leaf: Constant(leaf) if is_constant(leaf) else leaf, fn(*args, **kwargs))

    return step


def has_constants(tree: PyTreeDef) -> bool:
    """Whether the structure of a result has a `Constant`."""
    data = tree.node_data()
    return data is not None and (data[0] is Constant or any(map(has_constants, tree.children())))


def without_constants(result: Any) -> Any:
    """A result with the values in place of each `Constant`."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Constant) else leaf,
        result,
        is_leaf=lambda x: isinstance(x, Constant),
    )

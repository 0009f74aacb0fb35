"""Steps on Equinox modules with functions, flags and other leaves that are no arrays, as under `eqx.filter_jit`.

In:     a call that passes such a module.
Out:    arrays, where all else is None, as `eqx.partition` has it; what is no array is part of the program.
Method: Equinox's own: everything in the call that is no array is static, numbers too, and so is what the step returns. A
        call whose modules hold nothing but arrays is one of pytrees, and goes as under `jax.jit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

from autopar.frameworks import Apart
from autopar.ir.trace.returned import Objects, Returned


@dataclass(frozen=True, slots=True)
class _Static:
    """What is no array.

    Attributes:
        tree: Structure of the whole.
        leaves: Those that are no array; None for one.
        kinds: Classes of the same: 1, 1.0 and True are equal, and three programs.
    """

    tree: Any
    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]

    def joined(self, arrays: Any) -> Any:
        """The whole with these arrays."""
        given = self.tree.flatten_up_to(arrays)
        return self.tree.unflatten([x if x is not None else y for x, y in zip(given, self.leaves, strict=True)])


class EquinoxAdapter:
    """The adapter of `equinox`."""

    updates_in_place = False

    def claims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is a module with a leaf that is no array."""
        modules = filter(_is_module, jax.tree.leaves((args, kwargs), is_leaf=_is_module))
        return any(not _is_array(leaf) for module in modules for leaf in jax.tree.leaves(module))

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Apart:
        """The arrays of a call."""
        static, (dynamic_args, dynamic_kwargs) = _partition((args, kwargs))
        return Apart(self, dynamic_args, dynamic_kwargs, static)

    def rebuild(self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments with these arrays."""
        return static.joined((args, kwargs))

    def run(self, fn: Callable[..., Any], static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        """Call the function on modules with these tracers."""
        args, kwargs = static.joined((args, kwargs))
        after, result = _partition(fn(*args, **kwargs))
        return Returned((), result, Objects(static=after))

    def put_together(self, apart: Apart, returned: Returned) -> Any:
        """The result, with what is no array in it."""
        return returned.objects.static.joined(returned.result)


@functools.cache
def _is_module_type(kind: type) -> bool:
    return issubclass(kind, eqx.Module)


def _is_module(value: object) -> bool:
    kind: Any = type(value)
    return _is_module_type(kind)


def _is_array(leaf: Any) -> bool:
    """NumPy's too, types of arrays, and handles of arrays elsewhere; but no class, such as `np.float32`, which has both."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _partition(value: Any) -> tuple[_Static, Any]:
    leaves, tree = jax.tree.flatten(value)
    arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
    static = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    return _Static(tree, static, tuple(map(type, static))), tree.unflatten(arrays)

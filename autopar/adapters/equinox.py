"""Supports steps on Equinox modules with functions, flags and other leaves that are not arrays, as `eqx.filter_jit` does.

In:     a call that passes such a module.
Out:    the call with None for leaves that are not arrays, as `eqx.partition` returns it; these leaves are part of the program.
Method: as in Equinox, everything in the call that is not an array is static, numbers too, and so it is in the result. A call
        whose modules have only arrays is a call with pytrees, as under `jax.jit`.
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
    """The static part of a pytree.

    Attributes:
        tree: The structure of the pytree.
        leaves: Its leaves, with None for arrays.
        kinds: The classes of these leaves: 1, 1.0 and True are equal, but give three programs.
    """

    tree: Any
    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]

    def joined(self, arrays: Any) -> Any:
        """The whole pytree, with these arrays."""
        given = self.tree.flatten_up_to(arrays)
        return self.tree.unflatten([x if x is not None else y for x, y in zip(given, self.leaves, strict=True)])


class EquinoxAdapter:
    """The adapter of `equinox`."""

    updates_in_place = False

    def claims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has a module with a leaf that is not an array."""
        modules = filter(_is_module, jax.tree.leaves((args, kwargs), is_leaf=_is_module))
        return any(not _is_array(leaf) for module in modules for leaf in jax.tree.leaves(module))

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Apart:
        """Take a call apart into arrays and static leaves."""
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
        """The result, including its static leaves."""
        return returned.objects.static.joined(returned.result)


@functools.cache
def _is_module_type(kind: type) -> bool:
    return issubclass(kind, eqx.Module)


def _is_module(value: object) -> bool:
    kind: Any = type(value)
    return _is_module_type(kind)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX or NumPy, the type of one, or a remote array; not a class such as `np.float32`."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _partition(value: Any) -> tuple[_Static, Any]:
    leaves, tree = jax.tree.flatten(value)
    arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
    static = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    return _Static(tree, static, tuple(map(type, static))), tree.unflatten(arrays)

"""The interface to frameworks whose steps take objects: adapters separate a call into arrays and the rest, and rebuild results.

In:     the arguments of a call.
Out:    the `Adapter` that claims them; None if they are pytrees of arrays, as `jax.jit` takes them.
Method: this layer must not import the adapters, so these register themselves (`adapters/__init__.py`, at import) under the
        name of the framework's module. If that module is not loaded, no object can be its, and the adapter is not loaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.errors import StructureChangedError, TraceError
from autopar.ir.trace.parameters import Static
from autopar.ir.trace.returned import Returned
from autopar.ir.trace.trace import name_of


@dataclass(frozen=True, slots=True)
class Apart:
    """The arguments of a call, separated into arrays and the rest.

    Attributes:
        adapter: The adapter that did it.
        args: Positional arguments, with arrays in place of objects.
        kwargs: Keyword arguments, likewise.
        static: All data that is no array, which the program depends on; hashable.
        objects: What the adapter needs to update the objects.
    """

    adapter: Adapter
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: Hashable
    objects: Any = None


class StaticKey:
    """The data of a call that is no array, as a key; its hash is computed once.

    Raises `TraceError`: it cannot be hashed.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any, step: str):
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError as error:
            raise TraceError(
                f"what is no array in the arguments of `{step}` cannot be hashed.",
                given=f"{value!r:.200}",
                wrong=f"a program is made for each value of it, and found again by its hash: {error}.",
                do="keep tuples for lists and frozen dataclasses for mutable ones in what you pass, or arrays.",
            ) from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticKey) and self.value == other.value


class Adapter(Protocol):
    """Converts a framework's objects for a step that is traced, planned and run on arrays.

    Attributes:
        updates_in_place: Whether a step updates the objects it is passed; if not, they are pytrees, and it returns new ones.
    """

    updates_in_place: bool

    def claims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call passes objects that `jax.jit` could not take."""

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Apart:
        """Separate a call's arrays, or their types, in containers whose paths are the user's, from the rest."""

    def rebuild(self, static: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments as the user passes them: new objects with these arrays (or types, or tracers)."""

    def run(self, fn: Callable[..., Any], static: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        """Call the user's function on objects with these tracers; their new arrays, and its result."""

    def put_together(self, apart: Apart, returned: Returned) -> Any:
        """The user's result; also update the passed objects in place, if the framework's own `jit` does so."""


_ADAPTERS: dict[str, Callable[[], Adapter]] = {}  # written at import only


def register(module: str, load: Callable[[], Adapter]) -> None:
    """Register the adapter that `load()` imports, for objects that exist only if `module` is loaded."""
    if module in _ADAPTERS:
        raise ValueError(f"`{module}` already has an adapter.")
    _ADAPTERS[module] = load


def on_arrays(fn: Callable[..., Any], static: Static, apart: Apart) -> Callable[..., Returned]:
    """The user's function as one that takes arrays in place of objects; static arguments are passed as they are.

    `apart`: a call of the function, with the objects that the arrays will be those of.
    """

    @functools.wraps(fn, updated=())
    def step(*args: Any, **kwargs: Any) -> Returned:
        call = static.split(args, kwargs)

        def on_objects(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = call.joined(args, kwargs)
            return fn(*args, **kwargs)

        return apart.adapter.run(on_objects, apart.static, call.args, call.kwargs)

    step.__name__ = name_of(fn)
    return step


def adapter_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Adapter | None:
    """The adapter that claims a call; None: it passes pytrees of arrays."""
    for module, load in _ADAPTERS.items():
        if module in sys.modules:
            adapter = load()
            if adapter.claims(args, kwargs):
                return adapter
    return None


@dataclass(frozen=True, slots=True)
class Shell:
    """The part of a state of objects that is no array."""

    adapter: Adapter
    static: Hashable

    def around(self, arrays: Any) -> Any:
        """The state with these arrays."""
        return self.adapter.rebuild(self.static, (arrays,), {})[0][0]

    def arrays_of(self, state: Any) -> Any:
        """The arrays of a state, whose other data must be that of this one.

        Raises `StructureChangedError`: it has changed.
        """
        apart = self.adapter.take_apart((state,), {})
        if apart.static != self.static:
            raise StructureChangedError(
                "the step changes what is no array in the state.",
                given="a flag, a function, a new variable, or who is shared with whom",
                wrong="a run keeps the arrays of its state, and makes the objects of them as they were when it began.",
                do="do it before the run, or in the step on a copy.",
            )
        return apart.args[0]

    def of_step(self, fn: Callable[..., Any], *, updates: bool) -> Callable[..., Any]:
        """Convert a step on a state's objects to one on its arrays.

        Args:
            fn: `(state, ...)` to metrics if states are updated in place, else to the state, or a tuple of it and metrics.
            updates: Whether to return the new state, as `(arrays, metrics)`; else `fn` only reads the state.
        """

        @functools.wraps(fn, updated=())
        def step(arrays: Any, *args: Any, **kwargs: Any) -> Any:
            state = self.around(arrays)
            result = fn(state, *args, **kwargs)
            if not updates:
                return result
            first, rest = result, None
            if type(result) is tuple and len(result) > 1 and self.adapter.claims((result[0],), {}):
                first, rest = result[0], result[1] if len(result) == 2 else result[1:]
            elif self.adapter.updates_in_place and not self.adapter.claims((result,), {}):
                first, rest = state, result
            return self.arrays_of(state if self.adapter.updates_in_place else first), rest

        step.__name__ = name_of(fn)
        return step


def without_arrays(state: Any) -> tuple[Any, Shell | None]:
    """A state's arrays, and its other data; None: it is a pytree of arrays."""
    adapter = adapter_of((state,), {})
    if adapter is None:
        return state, None
    apart = adapter.take_apart((state,), {})
    return apart.args[0], Shell(adapter, apart.static)

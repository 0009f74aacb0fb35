"""The seam to frameworks whose steps take objects: who takes a call apart into arrays, and puts its result together.

In:     the arguments of a call.
Out:    the `Adapter` that claims them; None where they are pytrees of arrays, as `jax.jit` takes them.
Method: adapters stand to the right of what calls them, so they are registered, by the name of the module that a program
        imports to have such objects (`adapters/__init__.py`, at import): where that module is not loaded there are none of
        its objects, and the adapter's file is not loaded either.
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
    """A call taken apart.

    Attributes:
        adapter: By whom.
        args: By position, arrays in the place of objects.
        kwargs: By name.
        static: What is no array in them, which the program depends on; has a hash.
        objects: What the adapter needs to update them.
    """

    adapter: Adapter
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: Hashable
    objects: Any = None


class StaticKey:
    """What is no array in a call, to be looked up by; its hash is computed once.

    Raises:
        TraceError: It has none.
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
    """What objects of a framework are to a step that is traced, planned, and run on arrays.

    Attributes:
        updates_in_place: Whether objects that are passed are what comes back; if not, they are pytrees, and are returned.
    """

    updates_in_place: bool

    def claims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call passes objects that `jax.jit` would not know what to do with."""

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Apart:
        """The arrays of a call, or their types, in containers whose paths are the user's."""

    def rebuild(self, static: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments as the user passes them, new objects around these arrays (or types, or tracers)."""

    def run(self, fn: Callable[..., Any], static: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        """Call the user's function on objects around these tracers; what has become of them, and what it returns."""

    def put_together(self, apart: Apart, returned: Returned) -> Any:
        """The user's result; objects that were passed are updated in place, if the framework's own `jit` does so."""


_ADAPTERS: dict[str, Callable[[], Adapter]] = {}  # written at import only


def register(module: str, load: Callable[[], Adapter]) -> None:
    """Make `load()`, which imports it, the adapter of objects that there are only where `module` is loaded."""
    if module in _ADAPTERS:
        raise ValueError(f"`{module}` already has an adapter.")
    _ADAPTERS[module] = load


def on_arrays(fn: Callable[..., Any], static: Static, apart: Apart) -> Callable[..., Returned]:
    """The user's function as one that is passed arrays for objects.

    Static arguments are passed as they are; `apart` is a call of it, of whose objects the arrays will be.
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
    """Who takes a call apart; None: it passes pytrees of arrays."""
    for module, load in _ADAPTERS.items():
        if module in sys.modules:
            adapter = load()
            if adapter.claims(args, kwargs):
                return adapter
    return None


@dataclass(frozen=True, slots=True)
class Shell:
    """What of a state of objects is no array, as its adapter left it."""

    adapter: Adapter
    static: Hashable

    def around(self, arrays: Any) -> Any:
        """A state with these arrays."""
        return self.adapter.rebuild(self.static, (arrays,), {})[0][0]

    def arrays_of(self, state: Any) -> Any:
        """The arrays of a state like this one.

        Raises:
            StructureChangedError: What is no array in it has changed.
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
        """A step on a state's objects as one on its arrays.

        Args:
            fn: `(state, ...)` to metrics if states are updated in place, else to the state, or a tuple of it and metrics.
            updates: Whether the new state is to come back: `(arrays, metrics)`; else `fn` only reads it.
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
    """A state's arrays, and what else there is to it; None: it is a pytree of arrays."""
    adapter = adapter_of((state,), {})
    if adapter is None:
        return state, None
    apart = adapter.take_apart((state,), {})
    return apart.args[0], Shell(adapter, apart.static)

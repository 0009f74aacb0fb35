"""`create_state`: runs the user's initializer so that every array is created in the plan's sharding.

In:     the user's initializer and its arguments; the step, compiled for its results.
Out:    the initializer's result, each array in the plan's sharding.
Method: the initializer is traced for types, then compiled with the plan's shardings for its results. Its result is one
        argument of the step; a tuple is the step's first arguments if the step takes as many. Objects (a model) are
        flattened to arrays inside the trace, and rebuilt from the arrays that come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.compiled import CompiledStep
from autopar.errors import StructureChangedError
from autopar.frameworks import Adapter, adapter_of
from autopar.ir.trace.containers import accepts
from autopar.ir.trace.parameters import Parameters
from autopar.ir.trace.trace import name_of
from autopar.plan.arguments import find_argument


class NewState:
    """The state that an initializer will create."""

    def __init__(
        self, init_fn: Callable[..., Any], args: tuple[Any, ...], num_others: int | None, parameters: Parameters
    ):
        """Trace the initializer.

        `num_others`: how many arguments the step takes besides the initializer's result; None: unknown.

        Raises `StructureChangedError`: a class in the result takes nothing but arrays, and there are none yet.
        """
        self._init, self._args, self._num_others, self._parameters = init_fn, args, num_others, parameters
        self._adapter: Adapter | None = None
        self._static: Any = None
        self._is_tuple = False
        self._tree: Any = None
        self._types = jax.eval_shape(self._flat, *args)
        if not accepts(self._tree, self._types):
            raise StructureChangedError(
                "a class in the new state takes nothing but arrays.",
                given=f"create_state({name_of(init_fn)}, ...), which makes {self._tree}",
                wrong="to plan before there are arrays, it is to hold `jax.ShapeDtypeStruct`s, and it does not take them.",
                do=f"call the step with what {name_of(init_fn)}() makes: it is put in its place. Or check arrays elsewhere.",
            )

    def arguments(self) -> tuple[Any, ...]:
        """The result as arguments of the step, with types in place of arrays."""
        return self._objects(self._tree.unflatten(self._types))

    def create(self, compiled: CompiledStep) -> Any:
        """Run the initializer; its result, each array in the plan's sharding.

        Raises `StructureChangedError`: the result is no argument of the step.
        """
        made: list[Any] = []
        for first, stop in self._leaves_of(compiled):
            span = slice(len(made), len(made) + stop - first)
            made += compiled.create(first, stop, lambda *args, span=span: self._flat(*args)[span], self._args)
        objects = self._objects(self._tree.unflatten(made))
        return objects if self._is_tuple else objects[0]

    def _leaves_of(self, compiled: CompiledStep) -> list[tuple[int, int]]:
        """The leaves of the step's arguments that the result is, as ranges; adjacent arguments share one."""
        found: list[tuple[int, int]] = []
        for at, part in enumerate(self._tree.unflatten(self._types)):
            first, stop = find_argument(compiled.program, part, at if self._is_tuple else 0)
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, stop))
        return found

    def _flat(self, *args: Any) -> list[Any]:
        """The initializer's result as flat arrays."""
        value = self._init(*args)
        self._is_tuple = self._is_several(value)
        values = value if self._is_tuple else (value,)
        self._adapter = adapter_of(values, {})
        if self._adapter is not None:
            apart = self._adapter.take_apart(values, {})
            values = apart.args
            if self._static is None:  # keep the first trace's: later ones may differ, a new optimizer has new functions
                self._static = apart.static
        leaves, self._tree = jax.tree.flatten(values)
        return leaves

    def _is_several(self, value: Any) -> bool:
        """Whether the initializer's result is a tuple of several arguments of the step, and not one argument."""
        if type(value) is not tuple or len(value) < 2:
            return False
        least = len(self._parameters.names) - len(self._parameters.optional)
        if self._num_others is None:
            return False
        return 1 + self._num_others < least <= len(value) + self._num_others

    def _objects(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._adapter is None:
            return values
        return self._adapter.rebuild(self._static, values, {})[0]

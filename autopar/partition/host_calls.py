"""Collects exceptions of host callbacks, so that the program runs to its end; ships callbacks to another process.

In:     a sharded program, the (traced) index of the microbatch.
Out:    the same program, whose callbacks record exceptions in a `Watch` and then return zeros; or calls by index, which
        `jax.export` can serialize, and in the other process the program compiled with these functions.
Method: one device calls the host for all (`program.py`). An exception there would end that device's program, and leave
        the others waiting for it in a collective; so none leaves the callback, and the runtime checks the watch before it
        overwrites anything. Not watched are prints, which are JAX's own and do not raise, and callbacks inside an opaque
        function (`sharding_rule`), whose exceptions JAX raises. JAX compiles a program with a list of host functions, which
        the program calls by index: the list is taken from JAX in this process (`Shipment`), and given back to it in the
        other (`with_callbacks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from autopar._jax import JaxprEqn, Primitive, bind_eqn, host_callbacks
from autopar.intra_op.sharded import Body, Compute, Instruction, describe, with_bodies
from autopar.ir.rules.rule import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Raised:
    """An exception that a callback raised.

    Attributes:
        program: The program that it was raised in.
        microbatch: Index of the microbatch; -1: the program runs once per step.
        operation: The callback and the user's source line.
        makes_nothing: Whether the callback has no results, so that those of the step are still right.
        error: The exception.
    """

    program: str
    microbatch: int
    operation: str
    makes_nothing: bool
    error: BaseException


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """Collects exceptions of callbacks until they are taken."""

    raised: list[Raised] = field(default_factory=list)

    def take(self) -> list[Raised]:
        """Return and clear the exceptions collected since the last call."""
        taken = list(self.raised)
        self.raised.clear()
        return taken


Bind = Callable[[JaxprEqn, Sequence[jax.Array], Mapping[str, Any]], Sequence[jax.Array]]
"""Binds an equation that calls the host to operands, with these parameters."""


def bind_here(eqn: JaxprEqn, operands: Sequence[jax.Array], params: Mapping[str, Any]) -> Sequence[jax.Array]:
    """Bind an equation as it is, for a program that this process runs."""
    return bind_eqn(eqn, *operands, params=params)


def watched(body: Body, watch: Watch, program: str, number: jax.Array | None, bind: Bind = bind_here) -> Body:
    """The program with every callback watched.

    `number`: the traced index of the microbatch; None: the program runs once per step.
    `bind`: binds equations that call the host, prints included: `Shipment.bind` for a program of another process.
    """

    def call(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        if "callback" not in eqn.params:
            return bind(eqn, operands, eqn.params)
        at = jnp.int32(-1) if number is None else number
        return bind(eqn, (at, *operands), {**eqn.params, "callback": _Watched(eqn, watch, program)})

    def watch_instruction(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Compute) and instruction.rule.host_call:
            return dataclasses.replace(instruction, rule=dataclasses.replace(instruction.rule, local=call))
        return with_bodies(instruction, lambda inner: watched(inner, watch, program, number, bind))

    return dataclasses.replace(body, instructions=tuple(map(watch_instruction, body.instructions)))


class _Watched:
    """A callback that does not raise; its first operand is the index of the microbatch."""

    def __init__(self, eqn: JaxprEqn, watch: Watch, program: str):
        self._callback, self._operation = eqn.params["callback"], describe(eqn)
        self._results = [(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        self._watch, self._program = watch, program

    def __call__(self, number: Any, *operands: Any) -> Sequence[Any]:
        try:
            return self._checked(self._callback(*operands))
        except BaseException as error:
            makes_nothing = not self._results
            self._watch.raised.append(Raised(self._program, int(number), self._operation, makes_nothing, error))
            return [np.zeros(shape, dtype) for shape, dtype in self._results]

    def _checked(self, made: Any) -> list[np.ndarray]:
        """The results as arrays, after the checks that JAX would otherwise fail outside of the watch."""
        arrays = [np.asarray(array) for array in jax.tree.leaves(made)] if self._results else []
        for array, (shape, dtype) in zip(arrays, self._results, strict=True):
            if array.shape != shape or jax.dtypes.canonicalize_dtype(array.dtype) != dtype:
                raise ValueError(f"the callback returned {array.dtype}{array.shape}, not {np.dtype(dtype)}{shape}")
        return arrays


@dataclass(frozen=True, slots=True, eq=False)
class Shipment:
    """The calls into the host of one program.

    Attributes:
        platform: Platform of its devices.
        callbacks: The functions called, by index, each with the user's source line.
    """

    platform: str
    callbacks: list[tuple[str, Callable[..., Any]]] = field(default_factory=list)

    def bind(self, eqn: JaxprEqn, operands: Sequence[jax.Array], params: Mapping[str, Any]) -> list[jax.Array]:
        """Record the function that an equation calls, and bind a call to it by index."""
        (callback,) = host_callbacks(lambda *arrays: bind_eqn(eqn, *arrays, params=params), operands)
        number = np.uint64(len(self.callbacks))
        self.callbacks.append((describe(eqn), callback))
        name = f"xla_ffi_python_{'cpu' if self.platform == 'cpu' else 'gpu'}_callback"
        types = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        return list(jax.ffi.ffi_call(name, types, has_side_effect=bool(eqn.effects))(*operands, index=number))


def with_callbacks(call: Callable[..., Any], callbacks: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """A function whose compiled program calls these host functions, and no others, by index."""
    return lambda *arrays: with_callbacks_p.bind(*arrays, calls=_WithCallbacks(call, tuple(callbacks)))


class _WithCallbacks:
    """Compares by identity: the user's functions may not be hashable."""

    def __init__(self, call: Callable[..., Any], callbacks: tuple[Callable[..., Any], ...]):
        self.call, self.callbacks = call, callbacks


def _types(*avals: Any, calls: _WithCallbacks) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(calls.call, *avals)]


def _lower(ctx: Any, *operands: Any, calls: _WithCallbacks) -> Any:
    for callback in calls.callbacks:
        ctx.module_context.add_host_callback(callback)
    return mlir.lower_fun(calls.call, multiple_results=True)(ctx, *operands)


with_callbacks_p = Primitive("with_callbacks")
with_callbacks_p.multiple_results = True
with_callbacks_p.def_abstract_eval(_types)
mlir.register_lowering(with_callbacks_p, _lower)

"""Ships host callbacks in a program that another process compiles and runs.

In:     in this process, equations that call the host, while the program is traced; in the other, the functions they call.
Out:    calls by index, which `jax.export` can serialize; in the other process, the program compiled with these functions.
Method: JAX compiles a program with a list of host functions, which the program calls by index. The list is taken from JAX
        in this process (`Shipment`), and given back to it in the other (`with_callbacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from autopar._jax import JaxprEqn, Primitive, bind_eqn, host_callbacks
from autopar.intra_op.sharded import describe


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

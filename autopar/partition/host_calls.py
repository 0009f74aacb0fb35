"""Collects exceptions of host callbacks, so that the program runs to its end.

In:     a sharded program, the (traced) index of the microbatch.
Out:    the same program, whose callbacks record exceptions in a `Watch` and then return zeros.
Method: one device calls the host for all (`equation.py`). An exception there would end that device's program, and leave
        the others waiting for it in a collective; so none leaves the callback, and the runtime checks the watch before it
        overwrites anything. Not watched are prints, which are JAX's own and do not raise, and callbacks inside an opaque
        function (`sharding_rule`), whose exceptions JAX raises. In a program for another process, functions are called by
        index (`shipped.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import JaxprEqn, bind_eqn
from autopar.intra_op.sharded import Body, Compute, Instruction, Region, describe
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
        match instruction:
            case Compute(rule=rule) if rule.once:
                return dataclasses.replace(instruction, rule=dataclasses.replace(rule, local=call))
            case Region(bodies=bodies):
                inner = tuple(watched(b, watch, program, number, bind) for b in bodies)
                return dataclasses.replace(instruction, bodies=inner)
        return instruction

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

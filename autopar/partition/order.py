"""Enforces program order where the backend would not: of collectives, and of recomputation.

In:     operands of instructions and earlier results, as the per-device program is traced.
Out:    the same operands, made to depend on the earlier results.
Method: XLA:CPU matches collectives by the order in which devices reach them, and may run a loop that communicates beside
        a collective outside of it, in different orders on different devices (seen with jaxlib 0.10: wrong partners, then a
        crash). Compilers for CPU and GPU drop optimization barriers before they schedule, so the dependence has to be real:
        a select whose predicate is never true, which the compiler cannot know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import on_host
from autopar.cost.steps import step_kind
from autopar.intra_op.host_order import copies_host, host_waits
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Gate, Instruction, Move, Region


@dataclass(frozen=True, slots=True)
class Delay:
    """Before the instruction at `position`, `copies` are made to wait for `awaited`.

    Unless it `lasts`, later instructions read the undelayed copies. `whole`: even one array is awaited behind a barrier.
    """

    position: int
    copies: tuple[Copy, ...]
    awaited: tuple[Copy, ...]
    lasts: bool = True
    whole: bool = False
    of_hosts: bool = False


def host_delays(body: Body, num_bytes: Callable[[Copy], int], is_program: bool) -> list[Delay]:
    """The delays that order copies to and from host memory (`intra_op/host_order.py`)."""
    found = []
    for position, awaited in host_waits(body, num_bytes, is_program).items():
        read, fetches = body.instructions[position].reads, copies_host(body.instructions[position])
        among = [copy for copy in read if fetches or not on_host(copy[0].aval)]
        if among and awaited:
            found.append(Delay(position, (min(among, key=num_bytes),), awaited, fetches, whole=True, of_hosts=True))
    return found


def communicates(instruction: Instruction) -> bool:
    """Whether an instruction is or contains a collective."""
    match instruction:
        case Move(step=step):
            return step_kind(step) is not None
        case Fused():
            return True
        case Compute(strategy=strategy):
            return bool(strategy.reductions or strategy.exchanged_over)
        case Region(bodies=bodies):
            return any(communicates(inner) for body in bodies for inner in body.instructions)
        case Gate():
            return False


def needs_order(body: Body) -> bool:
    """Whether a body has a loop or branch that communicates beside other communication."""
    found = [instruction for instruction in body.instructions if communicates(instruction)]
    return len(found) > 1 and any(isinstance(instruction, Region) for instruction in found)


def after(operand: jax.Array, *earlier: jax.Array | None) -> jax.Array:
    """Make `operand` depend on all `earlier` arrays; no-op for arrays in host memory, where nothing is computed."""
    awaited = [array for array in earlier if array is not None and array.size and not on_host(jax.typeof(array))]
    if not awaited or operand.size == 0 or on_host(jax.typeof(operand)):
        return operand
    # A scalar of its own: a kernel that reads an earlier array would keep that alive until it runs. Several arrays go
    # through barriers first: XLA would recompute a single element of a sum, and postpone the sum.
    signs = map(never, map(lax.optimization_barrier, awaited) if len(awaited) > 1 else awaited)
    sign = lax.optimization_barrier(functools.reduce(jnp.logical_or, signs))
    if jnp.issubdtype(operand.dtype, jnp.floating) and operand.dtype.itemsize == 1:
        # XLA for GPUs negates 8-bit floats as 16-bit ones, in a kernel of its own.
        bits = lax.bitcast_convert_type(operand, jnp.uint8)
        return lax.bitcast_convert_type(bits ^ sign.astype(jnp.uint8), operand.dtype)
    # The alternative is computed from the operand: XLA for GPUs would merge zeros of its shape with zeros that a much later
    # addition reads, and keep them until then.
    return jnp.where(sign, ~operand if operand.dtype == bool else -operand, operand)


def first_element(array: jax.Array) -> jax.Array:
    """An element of an array, in device memory: it exists once the array does."""
    found = lax.dynamic_slice(array, (0,) * array.ndim, (1,) * array.ndim)
    return jax.device_put(found, jax.memory.Space.Device) if on_host(jax.typeof(array)) else found


def after_on_host(operand: jax.Array, *earlier: jax.Array) -> jax.Array:
    """Make an array in host memory depend on earlier arrays: one of its elements is written again, in place."""
    operand = lax.optimization_barrier(operand)  # XLA would take what is copied there for the target of the write
    waits = jax.device_put(after(first_element(operand), *earlier), jax.memory.Space.Host)
    return lax.dynamic_update_slice(operand, waits, (0,) * operand.ndim)


def never(earlier: jax.Array) -> jax.Array:
    """A boolean that is always false, which compilers cannot know before the array is computed."""
    witness = lax.squeeze(lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim), range(earlier.ndim))
    if jnp.iscomplexobj(witness):
        witness = witness.real
    if witness.dtype == bool:
        witness = witness.astype(jnp.int8)
    return (witness < 1) & (witness > 1)

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
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import empty_in_host_memory, on_host
from autopar.intra_op.host_order import copies_host, host_waits
from autopar.intra_op.sharded import Body, Copy, Instruction, Region, communicates
from autopar.ir.region import kind_of


@dataclass(frozen=True, slots=True)
class Delay:
    """Before the instruction at `position`, `copies` are made to wait for `awaited`.

    Unless it `lasts`, later instructions read the undelayed copies. `whole`: even one array is awaited behind a barrier.
    Without `awaited`, the copies pass a barrier.
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


def through_barrier(instruction: Instruction) -> Iterator[tuple[Copy, Copy]]:
    """What a barrier reads in host memory, and the result that it is: nothing there waits for kernels."""
    if isinstance(instruction, Region) and kind_of(instruction.eqn) == "barrier":
        eqn = instruction.eqn
        reads = zip(eqn.invars, instruction.operands, strict=True)
        for read, made in zip(reads, zip(eqn.outvars, instruction.results, strict=True), strict=True):
            if on_host(made[0].aval):
                yield read, made


def in_buffers(body: Body, delays: Iterable[Delay]) -> set[Copy]:
    """The copies in host memory that are fetched behind a delay; and what they were before barriers."""
    found = {copy for delay in delays for copy in delay.copies if on_host(copy[0].aval)}
    for instruction in reversed(body.instructions):
        found.update(read for read, made in through_barrier(instruction) if made in found)
    return found


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
    sign = lax.optimization_barrier(never_of(map(lax.optimization_barrier, awaited) if len(awaited) > 1 else awaited))
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


def end_of(buffer: jax.Array) -> jax.Array:
    """The last two elements of a `host_buffer`, in device memory: they exist once its array does.

    The array's own would be taken, by XLA, from another copy on the host.
    """
    found = lax.dynamic_slice(buffer, (buffer.size - 2,), (2,))
    return jax.device_put(found, jax.memory.Space.Device)


def after_on_host(operand: jax.Array, *earlier: jax.Array) -> jax.Array:
    """Make an array in host memory depend on earlier arrays: one of its elements is written again, in place."""
    operand = lax.optimization_barrier(operand)  # XLA would take what is copied there for the target of the write
    waits = jax.device_put(after(first_element(operand), *earlier), jax.memory.Space.Host)
    return lax.dynamic_update_slice(operand, waits, (0,) * operand.ndim)


def host_buffer(array: jax.Array) -> jax.Array:
    """A buffer in host memory that holds an array, flat, and one element more, which is never read."""
    return lax.dynamic_update_slice(
        empty_in_host_memory(array.size + 1, array.dtype), lax.reshape(array, (array.size,)), (0,)
    )


def after_in_buffer(buffer: jax.Array, shape: Sequence[int], *earlier: jax.Array) -> jax.Array:
    """What a `host_buffer` holds, made to depend on earlier arrays: it begins where they say, which is always 0.

    XLA for GPUs fetches such a part as it does a row of a loop's stack. (Written in place, as by `after_on_host`, what the
    program itself has copied to the host would be computed there, or refused by the XLA of JAX 0.11.)
    """
    begin = never_of(earlier).astype(jnp.int32)
    return lax.reshape(lax.dynamic_slice(buffer, (begin,), (math.prod(shape),)), shape)


def never_of(arrays: Iterable[jax.Array]) -> jax.Array:
    """A boolean as from `never`, which compilers cannot know before all arrays are computed."""
    return functools.reduce(jnp.logical_or, map(never, arrays))


def never(earlier: jax.Array) -> jax.Array:
    """A boolean that is always false, which compilers cannot know before the array is computed."""
    witness = lax.squeeze(lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim), range(earlier.ndim))
    if jnp.iscomplexobj(witness):
        witness = witness.real
    if witness.dtype == bool:
        witness = witness.astype(jnp.int8)
    return (witness < 1) & (witness > 1)

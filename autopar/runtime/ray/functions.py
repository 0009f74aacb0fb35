"""The user's functions on their way to workers.

In:     callbacks of the programs of a mesh (`partition/host_calls.py`).
Out:    `HostCalls` as bytes, for `Share`, and back; or an error that says which function cannot be sent, and why.
Method: Ray's own pickler, which sends functions that cannot be imported by what they are made of. A mesh's callbacks go in
        one piece: what two of them share stays one object there, and so does the watch that they leave exceptions in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar._jax import JaxprEqn, all_equations, open_jaxpr
from autopar.errors import NotBuiltYetError
from autopar.intra_op.sharded import Body, computed, describe
from autopar.ir.rules.opaque import opaque_p
from autopar.ir.rules.replicated import SIDE_EFFECTS
from autopar.partition.host_calls import Watch

SENT = ("debug_callback", "debug_print", "io_callback", "pure_callback")
"""Calls into the host that workers can make."""


@dataclass(frozen=True, slots=True, eq=False)
class HostCalls:
    """The callbacks of a worker's programs, by number in each; and where they leave what they raise."""

    watch: Watch
    of: Mapping[str, tuple[Callable[..., Any], ...]]


def packed_calls(watch: Watch, callbacks: Mapping[str, Sequence[tuple[str, Callable[..., Any]]]]) -> bytes:
    """Callbacks of programs as bytes, each with its operation and line; b"": there are none. `watch` takes what they raise.

    Raises:
        NotBuiltYetError: One cannot be sent.
    """
    own = {name: found for name, found in callbacks.items() if found}
    for found in own.values():
        for operation, callback in found:
            _sendable(callback, "a callback", operation, "at its first call", "callbacks")
    return _dumped(HostCalls(watch, {n: tuple(call for _, call in found) for n, found in own.items()})) if own else b""


def packed(reader: Any, name: str) -> bytes:
    """What workers read their parts of batches with, as bytes.

    Raises:
        NotBuiltYetError: It cannot be sent.
    """
    return _sendable(reader, "a function of batches", f"`{name}(host, hosts)`", "when it is called", "batches")


def unpacked_calls(data: bytes) -> HostCalls:
    """The callbacks on the worker."""
    return pickle.loads(data) if data else HostCalls(Watch(), {})


def portable(error: BaseException) -> BaseException:
    """An exception that another process can read: itself, or what it says."""
    try:
        pickle.loads(_dumped(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _dumped(value: Any) -> bytes:
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _sendable(value: Any, what: str, given: str, when: str, feature: str) -> bytes:
    """What runs on the workers, as bytes; an error says what it is, and when it may make what cannot be sent."""
    try:
        return _dumped(value)
    except Exception as error:
        raise NotBuiltYetError(
            f"{what} cannot be sent to the workers.",
            given=given,
            wrong=f"it would run there, and it holds what cannot be pickled: {type(error).__name__}: {error}",
            do=f"make it of plain functions and data: open files, locks and connections inside it, {when}.",
            feature=f"{feature} on Ray that cannot be pickled",
        ) from error


def check_calls(bodies: Sequence[Body]) -> None:
    """Workers must be able to make all calls into the host that these programs make.

    Raises:
        NotBuiltYetError: They cannot make one of them.
    """
    for eqn in (eqn for body in bodies for eqn, _ in computed(body)):
        name = eqn.primitive.name
        hidden = eqn.params["call"].host_call if eqn.primitive is opaque_p else None
        if hidden or name in SIDE_EFFECTS and (name not in SENT or _is_ordered(eqn)):
            raise NotBuiltYetError(
                "this call into Python is not built on a Ray cluster.",
                given=describe(eqn),
                wrong=f"`{hidden}` inside a function with a sharding rule runs on many devices, and has no place of its own."
                if hidden
                else "calls in a fixed order (ordered=True) have no order between processes."
                if name in SENT
                else f"workers call functions for {', '.join(SENT)} alone.",
                do="call it outside that function, or use Cluster.local()."
                if hidden
                else "leave it out there, or use Cluster.local().",
                feature="callbacks on Ray",
            )


def check_no_calls(program: Any) -> None:
    """A program that makes state, which workers run without callbacks, must have none.

    Raises:
        NotBuiltYetError: It has.
    """
    name = next(
        (eqn.primitive.name for eqn in all_equations(open_jaxpr(program)[0]) if eqn.primitive.name in SIDE_EFFECTS),
        None,
    )
    if name is not None:
        raise NotBuiltYetError(
            "calls into Python are not built for what makes state on a Ray cluster.",
            given="create_state(...)",
            wrong=f"it calls `{name}`.",
            do="leave it out, or make the state in this process and pass it to the step.",
            feature="callbacks in create_state on Ray",
        )


def _is_ordered(eqn: JaxprEqn) -> bool:
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)

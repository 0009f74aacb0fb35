"""Pickles the user's functions for workers.

In:     callbacks of the programs of a mesh (`partition/host_calls.py`); functions that read batches.
Out:    `HostCalls` as bytes, for `Share`, and back; or an error that says which function cannot be sent, and why.
Method: Ray's own pickler, which sends functions that cannot be imported by value. The callbacks of a mesh are pickled
        together: objects that two of them share stay shared on the worker, and so does the watch for their exceptions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar._jax import JaxprEqn, open_jaxpr
from autopar.errors import NotBuiltYetError
from autopar.intra_op.sharded import Body, computed, describe
from autopar.ir.rules.opaque import host_call_in, opaque_p
from autopar.ir.rules.replicated import SIDE_EFFECTS
from autopar.partition.host_calls import Watch

SENT = ("debug_callback", "debug_print", "io_callback", "pure_callback")
"""The host callbacks that workers support."""


@dataclass(frozen=True, slots=True, eq=False)
class HostCalls:
    """The callbacks of a worker's programs, by index in each, and the watch that collects what they raise."""

    watch: Watch
    of: Mapping[str, tuple[Callable[..., Any], ...]]


def packed_calls(watch: Watch, callbacks: Mapping[str, Sequence[tuple[str, Callable[..., Any]]]]) -> bytes:
    """The callbacks of programs as bytes; b"": there are none.

    `callbacks`: of each program, (operation and line, function). `watch`: collects what they raise.

    Raises `NotBuiltYetError`: one cannot be sent.
    """
    own = {name: found for name, found in callbacks.items() if found}
    for found in own.values():
        for operation, callback in found:
            _sendable(callback, "a callback", operation, "at its first call", "callbacks")
    return _dumped(HostCalls(watch, {n: tuple(call for _, call in found) for n, found in own.items()})) if own else b""


def packed(reader: Any, name: str) -> bytes:
    """The function with which workers read their portions of batches, as bytes; `name`: for errors.

    Raises `NotBuiltYetError`: it cannot be pickled.
    """
    return _sendable(reader, "a function of batches", f"`{name}(host, hosts)`", "when it is called", "batches")


def unpacked_calls(data: bytes) -> HostCalls:
    """The callbacks, unpickled on the worker."""
    return pickle.loads(data) if data else HostCalls(Watch(), {})


def portable(error: BaseException) -> BaseException:
    """An exception that another process can unpickle: itself, or a `RuntimeError` with its text."""
    try:
        pickle.loads(_dumped(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _dumped(value: Any) -> bytes:
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _sendable(value: Any, what: str, given: str, when: str, feature: str) -> bytes:
    """A function as bytes; the other arguments are texts for the error: what it is, and when to open what cannot be sent."""
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
    """Check that workers support all host callbacks of these programs.

    Raises `NotBuiltYetError`: they do not support one.
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
    """Check that a program that creates state has no host callbacks, which workers do not support there.

    Raises `NotBuiltYetError`: it has one.
    """
    name = host_call_in(open_jaxpr(program)[0])
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

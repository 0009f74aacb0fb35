"""What one thread does at each instruction of a pipeline's streams: calls on the buffers that are there.

In:     compiled programs, transfers, buffers by number.
Out:    `Call`s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.partition.host_calls import Watch
from autopar.runtime.failure import CallbacksRaised
from autopar.runtime.nans import check_results
from autopar.runtime.transfer import Transfer

Call = Callable[[dict[int, Any]], None]
"""Carries out one instruction on the buffers that are there."""


def end_of(number: int) -> int:
    """The buffer that is there when a program that calls the host has ended: of instruction 0, 1, ... -1, -2, ..."""
    return -1 - number


def then_look(call: Call, ends: Sequence[int], watch: Watch) -> Call:
    """A call, after which all of these programs have ended and no callback has raised."""

    def look(held: dict[int, Any]) -> None:
        call(held)
        for at in ends:
            held[at].block_until_ready()
        raised = watch.take()
        if raised:
            raise CallbacksRaised(raised)

    return look


def run_program(compiled: jax.stages.Compiled, inputs: Sequence[int], outputs: Sequence[int]) -> Call:
    """Run a program on buffers; it does not wait for what it makes."""

    def call(held: dict[int, Any]) -> None:
        results = compiled(*[held[at] for at in inputs])
        check_results(results)
        held.update(zip(outputs, results, strict=True))

    return call


def send_buffers(moves: Sequence[Transfer], sent: Sequence[int], buffers: Sequence[int]) -> Call:
    """Sending begins the copy: it goes on while both meshes work, and the sender may let go of its buffer."""

    def call(held: dict[int, Any]) -> None:
        for move, source, target in zip(moves, sent, buffers, strict=True):
            held[target] = move(held[source])

    return call


def nothing(held: dict[int, Any]) -> None:
    """The value is there, or on its way: programs wait for it."""


def free_buffers(buffers: Sequence[int]) -> Call:
    """Let go of buffers."""

    def call(held: dict[int, Any]) -> None:
        for at in buffers:
            held.pop(at, None)

    return call

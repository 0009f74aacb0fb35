"""What carries a planned step out, whichever it is: one program, a pipeline in this process, workers on a Ray cluster.

In:     (a protocol only.)
Out:    `Runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from autopar.partition.task import DeviceProgram
from autopar.runtime.stacks import Stack
from autopar.streams.timeline import Timeline


class Runtime(Protocol):
    """A step, ready to be called with flat arrays."""

    @property
    def programs(self) -> Mapping[str, Any]:
        """XLA's executables by name; on a Ray cluster, what its workers compile."""

    @property
    def functions(self) -> Mapping[str, DeviceProgram[Any]]:
        """What they are compiled from."""

    @property
    def in_shardings(self) -> Sequence[Any]:
        """For each argument of the step how it lies where it lives."""

    @property
    def devices(self) -> Sequence[jax.Device]:
        """Those of this process on which it runs."""

    @property
    def closed(self) -> bool:
        """Whether the processes that would run it have ended."""

    @property
    def is_remote(self) -> bool:
        """Whether other processes hold the arrays: what is not there is handed to them by this one."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step on the user's flat arguments.

        Raises:
            StepError: It failed; says where.
            DonatedError: An argument's memory was taken over before.
        """

    def measure(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Run one step; the timeline says how long each of its programs took."""

    def hold(self, arrays: Sequence[Any], first: int) -> list[Any]:
        """Put arguments that are the same in every step where they are read; the user's from `first` on."""

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """State that is born in its place: `init(*args)` makes the user's argument leaves from `first` on, so many."""

    def stack(self, argument: int) -> Stack | None:
        """How an argument of the user's comes apart in this process; None: it is whole, or elsewhere."""

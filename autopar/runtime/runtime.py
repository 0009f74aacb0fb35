"""The interface of all runtimes: of one program, of a pipeline in this process, of workers on a Ray cluster.

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
    """A compiled step, to be called with flat arrays."""

    @property
    def programs(self) -> Mapping[str, Any]:
        """XLA's executables by name; on a Ray cluster, the programs that its workers compile."""

    @property
    def functions(self) -> Mapping[str, DeviceProgram[Any]]:
        """The functions that the programs are compiled from."""

    @property
    def in_shardings(self) -> Sequence[Any]:
        """The sharding of each argument of the step, on the stage that holds it."""

    @property
    def devices(self) -> Sequence[jax.Device]:
        """The devices of this process on which the step runs."""

    @property
    def closed(self) -> bool:
        """Whether the worker processes have ended."""

    @property
    def is_remote(self) -> bool:
        """Whether other processes hold the arrays; this process sends them the others."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step on the user's flat arguments.

        Raises:
            StepError: It failed; says where.
            DonatedError: An argument was donated before.
        """

    def measure(self, arrays: Sequence[Any]) -> tuple[list[Any], Timeline]:
        """Run one step; the timeline has the measured time of each program."""

    def hold(self, arrays: Sequence[Any], first: int) -> list[Any]:
        """Place arguments that stay the same in all steps: the user's from number `first` on."""

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """Create state in its shardings: `init(*args)` returns `count` leaves of the arguments, from number `first` on."""

    def stack(self, argument: int) -> Stack | None:
        """How an argument of the user's is split into parts in this process; None: it is whole, or held by other processes."""

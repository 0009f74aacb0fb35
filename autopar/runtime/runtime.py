"""The interface of all runtimes; and the runtime of a step that is one program of this process, whose calls are short.

In:     a `StepPlan` of one program, compiled.
Out:    `Runtime`, which a pipeline in this process (`pipeline.py`) and workers on a Ray cluster (`ray/driver/driver.py`) have,
        too; `Executable`, called with flat arrays.
Method: arguments are placed (`placing.py`) and the program is called. A step that calls the host is waited for, so that what
        a callback raises is raised by the call of its own step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from autopar._jax import Direct, direct_call
from autopar.errors import StepError
from autopar.intra_op.sharded import Compute, Region
from autopar.partition.task import DeviceProgram
from autopar.runtime.compile import Compiled
from autopar.runtime.failure import CallbacksRaised, Place, cause_of, check_results, is_gone, lines_of, step_error
from autopar.runtime.memory import let_go
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.stacks import Stack
from autopar.streams.assemble import StepPlan
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


class Executable(Pipeline):
    """A step that is one program: a pipeline of one stage, called without its acts and buffers."""

    def __init__(self, planned: StepPlan, compiled: Compiled):
        """Prepare for calls."""
        super().__init__(planned, compiled)
        (stage,), (function,), (self._compiled,) = planned.stages, self.functions.values(), self.programs.values()
        # With callbacks, the last result of the program is its completion token.
        self._calls_host = function.calls_host
        self._lines = lines_of([i.eqn for i in stage.sharded.body.instructions if isinstance(i, Compute | Region)])

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Run one step.

        Raises:
            StepError: It failed; says where.
            DonatedError: An argument was donated before.
        """
        placed = self._placing.place(arrays)
        try:
            results = self._compiled(*placed)
            self._placing.set_results(results)
            check_results(results)
            return self._watched(results) if self._calls_host else results
        except Exception as error:
            failure, cause = self.failed(error, arrays)
            raise failure from cause
        finally:
            if len(self.devices) > 1:
                let_go(placed, self._is_donated)

    def _watched(self, results: list[jax.Array]) -> list[jax.Array]:
        *results, end = results
        end.block_until_ready()
        raised = self._watch.take()
        if raised:
            raise CallbacksRaised(raised, results)
        return results

    def direct(self, returned: Any) -> Direct | None:
        """The direct call through JAX's dispatch for calls like the last one, which returned this; None: not possible.

        Not possible on several devices: there, passing donated memory again would crash the process, or hang one device.
        """
        if len(self.devices) > 1 or self._calls_host or not self._placing.was_as_passed:
            return None
        return direct_call(self._compiled, returned)

    def failed(self, error: BaseException, arrays: Sequence[Any]) -> tuple[StepError, BaseException]:
        """The error to raise for an error of the program, and its cause."""
        lost = any(map(is_gone, arrays))
        if isinstance(error, CallbacksRaised):
            first = error.raised[0]
            results = error.results if all(r.makes_nothing for r in error.raised) else None
            place = Place(None, "step", None, f"`{first.operation}`")
            return step_error(self._name, place, first.error, lost, results), first.error
        cause = cause_of(error)
        return step_error(self._name, Place(None, "step", None, self._lines), cause, lost), cause

"""The local runtime of a step that is one program.

In:     a `StepPlan` of one program, compiled.
Out:    `Executable`, called with flat arrays.
Method: arguments are placed (`placing.py`) and the program is called. A step that calls the host is waited for, so that what
        a callback raises is raised by the call of its own step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar._jax import Direct, direct_call
from autopar.errors import StepError
from autopar.intra_op.sharded import Compute, Region
from autopar.partition.host_calls import Watch
from autopar.runtime.compile import Compiled
from autopar.runtime.failure import CallbacksRaised, Place, cause_of, check_results, is_gone, lines_of, step_error
from autopar.runtime.memory import let_go
from autopar.runtime.placing import Placing
from autopar.runtime.stacks import Stack
from autopar.streams.assemble import StepPlan
from autopar.streams.clock import measured
from autopar.streams.timeline import Timeline


class Executable:
    """A step that is one program, on the devices of this process; attributes as in `Runtime`."""

    closed = False
    is_remote = False

    def __init__(self, planned: StepPlan, compiled: Compiled):
        """Prepare for calls."""
        (places,), (stage,) = compiled.places, planned.stages
        (function,), (self._compiled,) = compiled.functions.values(), compiled.programs.values()
        self._planned, self.programs, self.functions = planned, compiled.programs, compiled.functions
        self._name, self._donated = function.name, function.donated
        types = [kind.struct(places) for kind in function.inputs]
        self._placing = Placing(self._name, planned.program.in_paths, types, self._donated)
        self.in_shardings = self._placing.shardings
        # Collects exceptions of callbacks; with callbacks, the last result of the program is its completion token.
        self._watch = compiled.watch if function.calls_host else None
        self._lines = lines_of([i.eqn for i in stage.sharded.body.instructions if isinstance(i, Compute | Region)])
        self.devices = tuple(places.devices.flat)

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
            return results if self._watch is None else self._watched(results, self._watch)
        except Exception as error:
            failure, cause = self.failed(error, arrays)
            raise failure from cause
        finally:
            if len(self.devices) > 1:
                let_go(placed, self._donated)

    def measure(self, arrays: Sequence[Any]) -> tuple[list[jax.Array], Timeline]:
        """Run one step as a call does, and time it."""
        started = time.perf_counter()
        results = jax.block_until_ready(self(arrays))
        seconds = {(0, 0): time.perf_counter() - started}
        return results, measured(self._planned.streams, self._planned.stages, seconds)

    def hold(self, arrays: Sequence[Any], first: int) -> list[Any]:
        """Place arguments that stay the same in all steps; as in `Runtime`."""
        return jax.device_put(list(arrays), self.in_shardings[first:])

    def stack(self, argument: int) -> Stack | None:
        """None: no argument is split into parts."""
        return None

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """Create state in its shardings; as in `Runtime`."""
        return jax.jit(init, out_shardings=self.in_shardings[first : first + count])(*args)

    def _watched(self, results: list[jax.Array], watch: Watch) -> list[jax.Array]:
        *results, end = results
        end.block_until_ready()
        raised = watch.take()
        if raised:
            raise CallbacksRaised(raised, results)
        return results

    def direct(self, returned: Any) -> Direct | None:
        """The direct call through JAX's dispatch for calls like the last one, which returned this; None: not possible.

        Not possible on several devices: there, passing donated memory again would crash the process, or hang one device.
        """
        if len(self.devices) > 1 or self._watch is not None or not self._placing.was_as_passed:
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

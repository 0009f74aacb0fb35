"""The local runtime of a step that is one program: a pipeline of one stage whose calls are short.

In:     a `StepPlan` of one program, compiled.
Out:    `Executable`, called with flat arrays.
Method: arguments are placed (`placing.py`) and the program is called. A step that calls the host is waited for, so that what
        a callback raises is raised by the call of its own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from autopar._jax import Direct, direct_call
from autopar.errors import StepError
from autopar.intra_op.sharded import Compute, Region
from autopar.runtime.compile import Compiled
from autopar.runtime.failure import CallbacksRaised, Place, cause_of, check_results, is_gone, lines_of, step_error
from autopar.runtime.memory import let_go
from autopar.runtime.pipeline import Pipeline
from autopar.streams.assemble import StepPlan


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

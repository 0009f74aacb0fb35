"""The local runtime of a step that is one program: it is called with flat arrays.

In:     a `StepPlan` of one program, compiled.
Out:    `Executable`.
Method: state is donated. Arrays that are not where the plan wants them are moved in one batched `device_put`; what is donated
        and passed twice is copied (`memory.py`). A step that calls the host is waited for: what a callback raises is raised
        by the call of the step in which it did.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import Direct, direct_call
from autopar.errors import StepError
from autopar.intra_op.sharded import Compute, Region
from autopar.partition.host_calls import Watch
from autopar.runtime.compile import Compiled
from autopar.runtime.failure import CallbacksRaised, Place, cause_of, donated_error, is_gone, lines_of, step_error
from autopar.runtime.memory import Ownership, let_go
from autopar.runtime.nans import check_results
from autopar.runtime.stacks import Stack
from autopar.streams.assemble import StepPlan
from autopar.streams.clock import measured
from autopar.streams.timeline import Timeline

_IS_DELETED = operator.methodcaller("is_deleted")


class Executable:
    """A step that is one program, on the devices of this process.

    Attributes:
        programs: XLA's executable by name.
        functions: What it was compiled from.
        in_shardings: Where each argument must be.
        devices: It runs on.
    """

    closed = False
    is_remote = False

    def __init__(self, planned: StepPlan, compiled: Compiled):
        """Get ready for calls."""
        (places,), (stage,) = compiled.places, planned.stages
        (function,), (self._compiled,) = compiled.functions.values(), compiled.programs.values()
        self._planned, self.programs, self.functions = planned, compiled.programs, compiled.functions
        self._name, self._paths, self._donated = function.name, planned.program.in_paths, function.donated
        self.in_shardings = [kind.on(places) for kind in function.inputs]
        # For each input, the sharding object last found equal to what is wanted: comparing takes longer than looking.
        self._seen: list[Any] = list(self.in_shardings)
        # Where callbacks leave what they raise; if there are any, the last result tells that the step has ended.
        self._watch = compiled.watch if function.calls_host else None
        self._lines = lines_of([i.eqn for i in stage.sharded.body.instructions if isinstance(i, Compute | Region)])
        types = [(s.shard_shape(k.shape), k.dtype) for k, s in zip(function.inputs, self.in_shardings, strict=True)]
        self._ownership = Ownership(types, self._donated)
        self.devices = tuple(places.devices.flat)
        self._was_as_passed = False

    def place(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Put arrays where the program wants them; those that are there already are passed on as they are."""
        placed = list(arrays)
        away = [] if self._are_there(placed) else self._away(placed)
        self._move(placed, away)
        shared = self._ownership.shared(arrays, placed, [k for k in away if self._donated[k]])
        self._move(placed, shared)
        # What is only read and no array of JAX, JAX itself puts in its place in each call.
        by_jax = (not self._donated[k] and not isinstance(arrays[k], jax.Array) for k in away)
        self._was_as_passed = not shared and all(by_jax)
        return placed

    def _away(self, arrays: Sequence[Any]) -> list[int]:
        """Positions of arrays that are not where the program wants them.

        Raises:
            DonatedError: One is no more.
        """
        seen, away = self._seen, []
        for k, array in enumerate(arrays):
            if isinstance(array, jax.Array):
                if array.is_deleted():  # JAX crashes on it where it has several devices
                    gone = [path for path, a in zip(self._paths, arrays, strict=False) if is_gone(a)]
                    raise donated_error(self._name, gone)
                sharding = array.sharding
                if sharding is seen[k]:
                    continue
                wanted = self.in_shardings[k]
                # An equivalent sharding by another name will do, but not for what is donated: it may be the user's own.
                if sharding == wanted or (not self._donated[k] and sharding.is_equivalent_to(wanted, array.ndim)):
                    seen[k] = sharding
                    continue
            away.append(k)
        return away

    def _are_there(self, arrays: list[Any]) -> bool:
        """Whether each array is where it was found in its place before, as in nearly all steps but the first."""
        try:
            return [array.sharding for array in arrays] == self._seen and not any(map(_IS_DELETED, arrays))
        except AttributeError:  # it is no array of JAX
            return False

    def _move(self, placed: list[Any], away: Sequence[int]) -> None:
        if away:
            # The user's own array must survive the donation of its placed copy. `device_put` shares memory with it where
            # it can, also when told not to (a replica on the same device; NumPy memory on CPU): copy first.
            moved = jax.device_put(
                [copied(placed[k]) if self._donated[k] else placed[k] for k in away],
                [self.in_shardings[k] for k in away],
            )
            for k, array in zip(away, moved, strict=True):
                placed[k] = array

    def __call__(self, arrays: Sequence[Any]) -> list[jax.Array]:
        """Run one step.

        Raises:
            StepError: It failed; says where.
            DonatedError: An argument's memory was taken over before.
        """
        placed = self.place(arrays)
        try:
            results = self._compiled(*placed)
            self._ownership.set_results(results)
            check_results(results)
            return results if self._watch is None else self._watched(results, self._watch)
        except Exception as error:
            failure, cause = self.failed(error, arrays)
            raise failure from cause
        finally:
            if len(self.devices) > 1:
                let_go(placed, self._donated)

    def measure(self, arrays: Sequence[Any]) -> tuple[list[jax.Array], Timeline]:
        """Run one step and wait for it; as of a call, and how long it took."""
        started = time.perf_counter()
        results = jax.block_until_ready(self(arrays))
        seconds = {(0, 0): time.perf_counter() - started}
        return results, measured(self._planned.streams, self._planned.stages, seconds)

    def hold(self, arrays: Sequence[Any], first: int) -> list[Any]:
        """Put arguments that are the same in every step where they are read; as of `Runtime`."""
        return jax.device_put(list(arrays), self.in_shardings[first:])

    def stack(self, argument: int) -> Stack | None:
        """How an argument comes apart: it does not."""
        return None

    def create(self, init: Callable[..., list[Any]], args: Sequence[Any], first: int, count: int) -> list[Any]:
        """State that is born in its place; as of `Runtime`."""
        return jax.jit(init, out_shardings=self.in_shardings[first : first + count])(*args)

    def _watched(self, results: list[jax.Array], watch: Watch) -> list[jax.Array]:
        *results, end = results
        end.block_until_ready()
        raised = watch.take()
        if raised:
            raise CallbacksRaised(raised, results)
        return results

    def direct(self, returned: Any) -> Direct | None:
        """How JAX's dispatch carries out calls like the last one, which returned this; None: they need more than that.

        Of several devices they do: donated memory that is passed again ends the process, or one device waits for others.
        """
        if len(self.devices) > 1 or self._watch is not None or not self._was_as_passed:
            return None
        return direct_call(self._compiled, returned)

    def failed(self, error: BaseException, arrays: Sequence[Any]) -> tuple[StepError, BaseException]:
        """What is raised of an error of the program, and its cause."""
        lost = any(map(is_gone, arrays))
        if isinstance(error, CallbacksRaised):
            first = error.raised[0]
            results = error.results if all(r.makes_nothing for r in error.raised) else None
            place = Place(None, "step", None, f"`{first.operation}`")
            return step_error(self._name, place, first.error, lost, results), first.error
        cause = cause_of(error)
        return step_error(self._name, Place(None, "step", None, self._lines), cause, lost), cause


def copied(array: Any) -> Any:
    """The same values in memory of their own."""
    return jnp.array(array, copy=True) if isinstance(array, jax.Array) else np.array(array)

"""Finds the program of a step that failed while it ran, and makes the error.

In:     an exception; the instructions that ran; the exceptions of callbacks (`partition/host_calls.py`).
Out:    `StepError` with stage, microbatch, task and the user's line, and the exception as its cause; `DonatedError`.
Method: XLA raises at the call (out of memory, a NaN under `jax_debug_nans`), or, since programs run asynchronously, when
        somebody waits for a result. So results are waited for in the order in which programs were started: the first that
        raises is from the program that failed; later ones only read its results. This costs nothing until a step fails.
        A task that failed under `jax_debug_nans` is run again, one equation at a time, as JAX does for a jitted function,
        and the results of each are checked. The task's program is over whole values, so its operands are assembled on the
        default device: partial sums are added up, and the rows of the microbatch are cut out; sums over microbatches,
        whose memory was donated, begin with zeros. A task that calls the host is not run again: it would repeat effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import JaxprEqn, Literal, bind_eqn, nan_error
from autopar.errors import DonatedError, StepError, listed
from autopar.inter_op.stage import TASKS, Task, TaskKind
from autopar.inter_op.stage_plan import Placed, TaskPlan
from autopar.intra_op.sharded import calls_host, describe
from autopar.ir.source import UNKNOWN, source_line
from autopar.partition.host_calls import Raised
from autopar.streams.instructions import Instruction, Run


class CallbacksRaised(Exception):
    """Callbacks have raised; internal, turned into the step's error. `results`: those of the step, if it ran to its end."""

    def __init__(self, raised: Sequence[Raised], results: list[Any] | None = None):
        super().__init__()
        self.raised, self.results = tuple(raised), results


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a step something failed: stage, kind of task, microbatch (None: of no single one), and the user's line."""

    stage: int | None
    task: TaskKind
    microbatch: int | None
    source: str

    def __str__(self) -> str:
        parts = [] if self.stage is None else [f"stage {self.stage}"]
        if self.task != "step":
            what = TASKS[self.task]
            parts.append(what if self.microbatch is None else f"{what} of microbatch {self.microbatch}")
        return ", ".join([*parts, self.source])


def place_in(task: Task, microbatch: int, source: str) -> Place:
    """The place of a task that works on a microbatch; of a step that is one program, no stage and no microbatch.

    `source`: the operation that failed; "": all lines that the task covers.
    """
    source = source or lines_of(task.jaxpr.eqns)
    if task.kind == "step":
        return Place(None, task.kind, None, source)
    return Place(task.stage, task.kind, microbatch if task.is_in_loop else None, source)


def first_raised(
    raised: Iterable[Raised], order: Iterable[Instruction], programs: Mapping[str, TaskPlan]
) -> tuple[Place, BaseException]:
    """The exception of the callback that comes first in the order of the programs, and where it was raised."""
    runs = [(i.program, i.microbatch) for i in order if isinstance(i, Run)]
    first = min(raised, key=lambda r: runs.index((r.program, max(r.microbatch, 0))))
    return place_in(programs[first.program].task, first.microbatch, f"`{first.operation}`"), first.error


def step_error(step: str, place: Place, error: BaseException, state_lost: bool, results: Any = None) -> StepError:
    """The error of a step that failed at a place; `results`: those of the step, if they are right all the same."""
    left = "the step's arguments are as they were: the next call may take them again."
    if results is not None:
        left = "the step itself was carried out: its results are in this error's `results`."
    elif state_lost:
        left = (
            "its donated arguments were overwritten: go on from a checkpoint; with donate_argnums=() a failed step keeps "
            "them, for the memory of a second copy."
        )
    return StepError(
        f"`{step}` failed while it ran.",
        given=str(place),
        wrong=f"{type(error).__name__}: {_first_lines(str(error))}",
        do=f"{_advice(error)} {left}",
        stage=place.stage,
        microbatch=place.microbatch,
        task=TASKS[place.task],
        source=place.source,
        state_lost=state_lost and results is None,
        results=results,
    )


def _advice(error: BaseException) -> str:
    if isinstance(error, FloatingPointError):
        return "turn jax_debug_nans off to let the step run on, or mend what makes the number."
    if "RESOURCE_EXHAUSTED" in str(error):
        return "plan with a smaller memory_budget_bytes than what was there, or with more microbatches or devices."
    return "mend what raised it, see the cause above."


def _first_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()] or ["(it says nothing)"]
    return "\n".join(lines[:3]) + (" ..." if len(lines) > 3 else "")


def cause_of(error: BaseException) -> BaseException:
    """The exception as JAX shows it to users."""
    return nan_error(error) or error


def lines_of(eqns: Sequence[JaxprEqn]) -> str:
    """The user's lines that a program covers, as text."""
    known = [eqn for eqn in eqns if source_line(eqn) != UNKNOWN]
    if not known:
        return "no line of the user's"
    first, last = describe(known[0]), describe(known[-1])
    return f"`{first}`" if first == last else f"from `{first}` to `{last}`"


def first_failed(groups: Iterable[tuple[Any, Sequence[Any]]]) -> Any:
    """The first key with an array that raises when it is waited for; None: none does. Deleted arrays are skipped."""
    for key, arrays in groups:
        for array in arrays:
            if isinstance(array, jax.Array) and not array.is_deleted():
                try:
                    array.block_until_ready()
                except Exception:
                    return key
    return None


def is_gone(array: Any) -> bool:
    """Whether an array was donated, or deleted otherwise."""
    return isinstance(array, jax.Array) and array.is_deleted()


def donated_error(step: str, paths: Sequence[str]) -> DonatedError:
    """The error for arguments that were donated before."""
    return DonatedError(
        f"an argument of `{step}` is no more.",
        given=listed(paths, 4),
        wrong="an earlier call was given the same array and has taken its memory over for its results.",
        do="pass what the last call returned; or keep the arguments, with donate_argnums=().",
        paths=tuple(paths),
    )


def check_results(results: Sequence[jax.Array]) -> None:
    """Check results for NaN and infinity under `jax_debug_nans` and `jax_debug_infs`: JAX does so for jitted functions only.

    Raises `FloatingPointError`: a result has one.
    """
    for flag, what, is_such in (("jax_debug_nans", "nan", np.isnan), ("jax_debug_infs", "inf", np.isinf)):
        if getattr(jax.config, flag):
            for array in results:
                if jnp.issubdtype(array.dtype, jnp.inexact) and is_such(np.asarray(array).astype(np.complex128)).any():
                    raise FloatingPointError(f"invalid value ({what}) encountered")


def find_nan(plan: TaskPlan, arrays: Sequence[Any], microbatch: int) -> str | None:
    """The first operation of a task that makes a NaN (under `jax_debug_infs`, an infinity) of its operands; None: unknown."""
    if calls_host(plan.body) or plan.task.kind in ("M", "U"):
        return None
    jaxpr = plan.task.jaxpr
    values = [_whole(value, array, microbatch) for value, array in zip(plan.inputs, arrays, strict=False)]
    value_of = dict(zip(jaxpr.invars, values, strict=True))
    for eqn in jaxpr.eqns:
        operands = [jnp.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else value_of[a] for a in eqn.invars]
        try:
            results = bind_eqn(eqn, *operands)
        except Exception as error:  # another error: the task is too large for one device, say
            return describe(eqn) if isinstance(cause_of(error), FloatingPointError) else None
        value_of.update(zip(eqn.outvars, results, strict=True))
    return None


def _whole(value: Placed, array: Any, microbatch: int) -> jax.Array:
    """The whole value of an operand, of which `array` is one microbatch's or all of it; zeros if it was donated."""
    if array.is_deleted():
        return jnp.zeros(value.type.shape, value.type.dtype)
    whole = np.asarray(array)
    if value.type.sharding.partial:
        whole = whole.reshape(value.type.num_partial, *value.type.shape).sum(0, dtype=whole.dtype)
    return jnp.asarray(whole[microbatch] if value.kind == "piece" else whole)

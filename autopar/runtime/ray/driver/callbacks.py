"""What a callback raised on a worker, as the one error of the step.

In:     what workers report, what the programs are.
Out:    `StepError`, as in one process (`runtime/failure.py`), the exception its cause.
Method: of several exceptions the first in the order in which one process would run the programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import StepError
from autopar.partition.host_calls import Raised
from autopar.runtime.failure import Place, step_error
from autopar.runtime.order import merged
from autopar.streams.emit import Streams
from autopar.streams.instructions import Run


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """What the programs of a step are to the user.

    Attributes:
        step: Its name.
        place: Of each program its stage, the kind of its task, and whether it runs for each microbatch.
        runs: (program, microbatch), in an order in which they can run.
    """

    step: str
    place: Mapping[str, tuple[int, str, bool]]
    runs: tuple[tuple[str, int], ...]


def programs_of(step: str, streams: Streams | None) -> Programs:
    """The programs of a pipeline, or of a step that is one (None)."""
    if streams is None:
        return Programs(step, {}, ())
    updates = {name for name, plan in streams.programs.items() if plan.task.kind == "U"}
    order = merged(streams.instructions, updates)
    return Programs(
        step,
        {name: (plan.task.stage, plan.task.kind, plan.task.is_in_loop) for name, plan in streams.programs.items()},
        tuple((i.program, i.microbatch) for _, i in order if isinstance(i, Run)),
    )


def callback_error(programs: Programs, raised: Sequence[Raised], state_lost: bool, results: Any = None) -> StepError:
    """The error of a step whose callbacks raised; its cause is set.

    Args:
        programs: Of the step.
        raised: By callbacks, in any order.
        state_lost: Whether the step has overwritten its arguments.
        results: Of the step, if they are as they should be.
    """
    first = min(raised, key=lambda r: _turn(programs, r))
    stage, kind, is_in_loop = programs.place.get(first.program, (None, "", False))
    place = Place(stage, kind, first.microbatch if is_in_loop else None, f"`{first.operation}`")
    error = step_error(programs.step, place, first.error, state_lost, results)
    error.__cause__ = first.error
    return error


def _turn(programs: Programs, raised: Raised) -> int:
    run = raised.program, max(raised.microbatch, 0)
    return programs.runs.index(run) if run in programs.runs else len(programs.runs)

"""What a callback raised on a worker, as the one error of the step.

In:     what workers report, what the meshes do.
Out:    `StepError`, as in one process (`runtime/failure.py`), the exception its cause.
Method: of several exceptions the first in the order in which one process would run the programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import StepError
from autopar.partition.host_calls import Raised
from autopar.runtime.failure import place_in, step_error
from autopar.runtime.order import merged
from autopar.runtime.ray.share import Report
from autopar.streams.instructions import Run
from autopar.streams.streams import Streams


def all_raised(made: Mapping[int, tuple[Any, Report | None]]) -> list[Raised]:
    """What callbacks raised in a step, of what all workers tell of it."""
    return [r for _, report in made.values() if report is not None for r in report.raised]


def callback_error(
    step: str, streams: Streams, raised: Sequence[Raised], state_lost: bool, results: Any = None
) -> StepError:
    """The error of a step whose callbacks raised, in any order; its cause is set, the rest as of `step_error`."""
    updates = {name for name, plan in streams.programs.items() if plan.task.kind == "U"}
    runs = [(i.program, i.microbatch) for _, i in merged(streams.instructions, updates) if isinstance(i, Run)]
    first = min(raised, key=lambda r: runs.index((r.program, max(r.microbatch, 0))))
    place = place_in(streams.programs[first.program].task, first.microbatch, f"`{first.operation}`")
    error = step_error(step, place, first.error, state_lost, results)
    error.__cause__ = first.error
    return error

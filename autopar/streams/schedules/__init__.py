"""Pipeline schedules: the order in which stages process microbatches.

`SCHEDULES` names them. A user's own schedule is a class with the two members of `Schedule`.
"""

from __future__ import annotations

from autopar.errors import AutoparError, check_choice
from autopar.streams.schedules.orders import GPipe, Inference, Interleaved, OneFOneB, ZeroBubbleH1
from autopar.streams.schedules.schedule import Schedule, Step, in_flight, in_rounds, num_chunks, splits_backward

SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        GPipe(),
        OneFOneB(),
        Interleaved(),
        Interleaved(4),
        ZeroBubbleH1(),
        ZeroBubbleH1(whole_loops=True),
        Inference(),
    )
}
AUTOMATIC = "auto"
"""The name by which a method leaves the choice to the planner."""


def find_schedule(schedule: str | Schedule) -> Schedule:
    """The schedule of a name; the user's own schedule is returned as it is.

    Raises `AutoparError`: there is none of this name, or the object is no schedule.
    """
    if isinstance(schedule, str):
        own = "an object with `name` and `order(num_stages, num_microbatches)`"
        do = f"name one of them, or {AUTOMATIC!r} in a method, or pass {own}."
        check_choice("", "schedule", schedule, SCHEDULES, do=do)
        return SCHEDULES[schedule]
    if isinstance(schedule, type) or not hasattr(schedule, "name") or not hasattr(schedule, "order"):
        raise AutoparError(
            "this is no schedule.",
            given=f"schedule={schedule!r}",
            wrong="it is a class, not an object of it."
            if isinstance(schedule, type)
            else f"a {type(schedule).__name__} has no `name` and `order(num_stages, num_microbatches)`.",
            do=f"name one of {', '.join(map(repr, SCHEDULES))}, or pass an object that has both.",
        )
    return schedule


__all__ = [
    "AUTOMATIC",
    "SCHEDULES",
    "GPipe",
    "Inference",
    "Interleaved",
    "OneFOneB",
    "Schedule",
    "Step",
    "ZeroBubbleH1",
    "find_schedule",
    "in_rounds",
    "in_flight",
    "num_chunks",
    "splits_backward",
]

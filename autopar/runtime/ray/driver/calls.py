"""Waits for calls of actors, and watches the actors meanwhile.

In:     calls in progress.
Out:    their results, or one `FailedError`: which actor failed, and how.
Method: actors that have not answered are asked for their position. Waiting ends if one has died, has raised, does not answer
        for too long, or stays at one position for too long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from autopar.runtime.ray.driver.faults import Failure
from autopar.runtime.ray.share import Position

POLL_SECONDS = 1.0
"""Seconds between two questions for the position of a busy worker."""
GRACE_SECONDS = 2.0
"""Time beyond the limit for a worker that waits for a message to report that itself."""


class FailedError(Exception):
    """A call failed."""

    def __init__(self, failure: Failure):
        super().__init__(failure)
        self.failure = failure


def where(actor: Any) -> Any:
    """Start to ask an actor for its position."""
    return actor.where.options(concurrency_group="control").remote()


def wait_for(
    refs: Mapping[int, Any], ask: Callable[[int], Any], silence_seconds: float, standing_seconds: float
) -> dict[int, Any]:
    """Wait for one call of each of several actors, by worker; `ask` starts to ask one for its position.

    Raises:
        FailedError: One failed, has not answered for `silence_seconds`, or stays at one position for `standing_seconds`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    begun = time.monotonic()
    heard = dict.fromkeys(refs, begun)
    asked: dict[int, Any] = {}
    while True:
        try:
            return dict(zip(refs, ray.get(list(refs.values()), timeout=POLL_SECONDS), strict=True))
        except GetTimeoutError:
            pass
        except RayError as error:
            raise FailedError(_first_failed(refs, error)) from error
        standing: dict[int, Position] = {}
        for number, ref in refs.items():
            if ray.wait([ref], timeout=0)[0]:
                heard[number] = time.monotonic()
            elif number not in asked:
                asked[number] = ask(number)
            elif ray.wait([asked[number]], timeout=0)[0]:
                heard[number] = time.monotonic()
                with contextlib.suppress(RayError):  # it ended, and its own call will raise
                    standing[number] = ray.get(asked[number])
                del asked[number]
            elif time.monotonic() - heard[number] > silence_seconds:
                raise FailedError(Failure(number, "silent", None, silence_seconds))
        number, position = max(standing.items(), key=lambda one: one[1].seconds, default=(-1, Position(0, None)))
        if min(position.seconds, time.monotonic() - begun) > standing_seconds + GRACE_SECONDS:
            raise FailedError(Failure(number, "stuck", None, position.seconds, position=position))


def settle(refs: Mapping[int, Any], seconds: float) -> None:
    """Wait until calls have ended, successfully or not, for at most so many seconds."""
    import ray

    ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)


def positions(actors: Mapping[int, Any]) -> dict[int, Position]:
    """The positions of the actors that answer."""
    import ray

    asked = {where(actor): number for number, actor in actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS) if asked else ([], [])
    found = {}
    for ref in done:
        with contextlib.suppress(ray.exceptions.RayError):  # it ended too; the first failure is reported
            found[asked[ref]] = ray.get(ref)
    return found


def _first_failed(refs: Mapping[int, Any], error: BaseException) -> Failure:
    """The first of these calls that failed, and how; `error`: raised when waiting for all of them."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    for number, ref in refs.items():
        if ray.wait([ref], timeout=0)[0]:
            try:
                ray.get(ref)
            except RayTaskError as raised:
                return Failure(number, "raised", raised.cause or raised)
            except RayError as died:  # the actor died, or the node that held its answer
                return Failure(number, "died", died)
    return Failure(next(iter(refs)), "died", error)

"""Waiting for calls of actors, which are watched meanwhile.

In:     calls that are on their way.
Out:    their results, or one `FailedError`: which actor, and how.
Method: actors that have not answered are asked where they stand; one that is dead, silent for too long, too long at one
        place, or has raised ends the waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from autopar.runtime.ray.driver.faults import Failure
from autopar.runtime.ray.share import Position

POLL_SECONDS = 1.0
"""How often workers that are busy are asked where they stand."""
GRACE_SECONDS = 2.0
"""Who waits too long for a message says so itself, and has this long to, before one that stands too long is ended."""


class FailedError(Exception):
    """A call that did not end well."""

    def __init__(self, failure: Failure):
        super().__init__(failure)
        self.failure = failure


def where(actor: Any) -> Any:
    """Begin to ask an actor where it stands."""
    return actor.where.options(concurrency_group="control").remote()


def wait_for(
    refs: Mapping[int, Any], ask: Callable[[int], Any], silence_seconds: float, standing_seconds: float
) -> dict[int, Any]:
    """Wait for one call of each of several actors, by worker; `ask` begins to ask one where it stands.

    Raises:
        FailedError: One failed, has not answered to anything for `silence_seconds`, or stands at one place for too long.
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
                with contextlib.suppress(RayError):  # it ended, and its own call tells so
                    standing[number] = ray.get(asked[number])
                del asked[number]
            elif time.monotonic() - heard[number] > silence_seconds:
                raise FailedError(Failure(number, "silent", None, silence_seconds))
        number, position = max(standing.items(), key=lambda one: one[1].seconds, default=(-1, Position(0, None)))
        if min(position.seconds, time.monotonic() - begun) > standing_seconds + GRACE_SECONDS:
            raise FailedError(Failure(number, "stuck", None, position.seconds, position=position))


def settle(refs: Mapping[int, Any], seconds: float) -> None:
    """Wait until calls have ended, however, but not longer than this."""
    import ray

    ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)


def positions(actors: Mapping[int, Any]) -> dict[int, Position]:
    """Where those of them stand that can say so."""
    import ray

    asked = {where(actor): number for number, actor in actors.items()}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS) if asked else ([], [])
    found = {}
    for ref in done:
        with contextlib.suppress(ray.exceptions.RayError):  # it ended too; the first failure is the one that is told
            found[asked[ref]] = ray.get(ref)
    return found


def _first_failed(refs: Mapping[int, Any], error: BaseException) -> Failure:
    """Which of these calls ended in an error of Ray's, and how; `error` is what waiting for all of them raised."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    for number, ref in refs.items():
        if ray.wait([ref], timeout=0)[0]:
            try:
                ray.get(ref)
            except RayTaskError as raised:
                return Failure(number, "raised", raised.cause or raised)
            except RayError as died:  # of the actor, or of the node that had its answer
                return Failure(number, "died", died)
    return Failure(next(iter(refs)), "died", error)

"""Dispatches repeated calls of a step in JAX's C++, without Python and without checks.

In:     a call with all checks, which returns the data to dispatch equal calls without; the error for one that fails.
Out:    `DirectCalls`.
Method: JAX's C++ compares structure, types, shardings and settings (`_jax/compiled.py`), and refuses, before anything runs,
        arguments that were donated earlier or are passed twice. A refused call is made again with all checks, which raise the
        proper error, or copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from autopar._jax import Checked, dispatched, has_refused, is_from_dispatch, looks_at_numbers

Failure: TypeAlias = tuple[BaseException, BaseException]
"""The error to raise for a call that failed, and its cause."""


class DirectCalls:
    """Calls of a step on the devices of this process."""

    def __init__(
        self,
        name: str,
        checked: Checked,
        failed: Callable[[BaseException, tuple[Any, ...], dict[str, Any]], Failure],
        static_numbers: Sequence[int] = (),
        static_names: Sequence[str] = (),
    ):
        """Calls of the step `name`.

        `checked`: a call with all checks. `failed`: turns an error of the program that ran, and the call's arguments, into
        the error to raise. `static_numbers`: positions of static arguments; none is negative.
        """
        self._checked, self._failed = checked, failed
        self._as_told = name, checked, static_numbers, static_names
        self._known: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step; its result."""
        known = self._known
        if known is None or looks_at_numbers():
            returned, direct = self._checked(*args, **kwargs)
            if direct is not None and known is None:
                self._known = dispatched(*self._as_told)
            return returned
        try:
            return known(*args, **kwargs)
        except Exception as error:
            self._known = None  # JAX's dispatch would not retry a call that has failed
            if not is_from_dispatch(error):
                raise
            if not has_refused(error):
                failure, cause = self._failed(error, args, kwargs)
                raise failure from cause
        return self._checked(*args, **kwargs)[0]

"""Repeated calls go through JAX's own dispatch: a step that has been called with such arguments is not looked up again.

In:     a call with all checks, which says how others like it may do without; what to raise where one fails.
Out:    `DirectCalls`.
Method: JAX's C++ looks at structure, types, places and settings (`_jax/compiled.py`), and refuses memory that was donated
        before or is passed twice when nothing has run yet. A call that it refuses is checked: that says what is wrong, or
        copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from autopar._jax import Checked, dispatched, has_refused, is_from_dispatch, looks_at_numbers

Failure: TypeAlias = tuple[BaseException, BaseException]
"""What is raised of a call that failed, and its cause."""


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
        """Calls of a step of this name, none of which has been made yet.

        `checked` is a call with all checks, and `failed` what becomes of an error of the program that ran, and the
        call's arguments. Positions of static arguments are none below zero.
        """
        self._checked, self._failed = checked, failed
        self._as_told = name, checked, static_numbers, static_names
        self._known: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's result."""
        known = self._known
        if known is None or looks_at_numbers():
            returned, direct = self._checked(*args, **kwargs)
            if direct is not None and known is None:
                self._known = dispatched(*self._as_told)
            return returned
        try:
            return known(*args, **kwargs)
        except Exception as error:
            self._known = None  # it would not try again what has failed once
            if not is_from_dispatch(error):
                raise
            if not has_refused(error):
                failure, cause = self._failed(error, args, kwargs)
                raise failure from cause
        return self._checked(*args, **kwargs)[0]

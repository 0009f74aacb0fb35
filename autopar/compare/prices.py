"""What devices cost, which the user says: no price is built in.

In:     a mapping by name of a device, or a TOML file.
Out:    `Price` by the name that the catalog has for the device.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.mesh.find_device import known_device


@dataclass(frozen=True, slots=True)
class Price:
    """Of one device: money per hour, and power; None: not stated."""

    per_hour: float | None = None
    watts: float | None = None


def read_prices(given: Mapping[str, Any] | str | PathLike | None) -> tuple[dict[str, Price], str]:
    """Prices as `compare` takes them, by the catalog's name of a device or the user's own; and the currency.

    Raises:
        AutoparError: It is no such table.
    """
    if given is None:
        return {}, ""
    if not isinstance(given, Mapping):
        try:
            given = tomllib.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise _no_prices(str(given), f"{getattr(error, 'strerror', None) or error}") from error
    found = {}
    for name, figures in given.items():
        if name == "currency":
            continue
        if not isinstance(figures, Mapping) or not set(figures) <= {"per_hour", "watts"}:
            raise _no_prices(f"{name} = {figures!r}", "a device has `per_hour` and `watts`, or one of them.")
        for what, value in figures.items():
            if not isinstance(value, int | float) or not value >= 0:
                raise _no_prices(f"{name}.{what} = {value!r}", "it is no number, 0 or more.")
        model = known_device(name)
        key = name if model is None else model.device.name  # a name that the catalog lacks is of a device of the user's
        found[key] = Price(figures.get("per_hour"), figures.get("watts"))
    return found, str(given.get("currency", ""))


def _no_prices(given: str, wrong: str) -> AutoparError:
    return AutoparError(
        "the prices cannot be read.",
        given=given,
        wrong=wrong,
        do='write one table for each device: currency = "EUR", then [h100] with per_hour = 2.5 and watts = 700, of one.',
    )

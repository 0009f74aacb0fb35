"""Groups and sums values by key."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeVar, cast

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Numbers = TypeVar("_Numbers", bound=tuple[float, ...])


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Key -> its values, in order; keys in order of first appearance."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def summed(pairs: Iterable[tuple[_Key, _Numbers]]) -> dict[_Key, _Numbers]:
    """Key -> the sums of its values, place by place, added in order; keys in order of first appearance."""
    found: dict[_Key, _Numbers] = {}
    for key, value in pairs:
        found[key] = cast("_Numbers", tuple(map(operator.add, found[key], value))) if key in found else value
    return found

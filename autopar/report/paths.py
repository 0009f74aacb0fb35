"""Merges paths that differ in a number: `layers/{0..23}/kernel`.

In:     (path, key) pairs.
Out:    the same, those with equal keys merged, each with the number of paths that it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Numbers:
    prefix: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.prefix}{{{numbers_text(self.numbers)}}}"


_Parts = tuple[str | _Numbers, ...]


def collapse_paths(entries: Iterable[tuple[str, _Key]]) -> list[tuple[str, _Key, int]]:
    """Merge (path, key) entries whose paths differ in numbers only and whose keys are equal.

    Returns (path with number ranges, key, number of paths) in order of first appearance.
    """
    merged: list[tuple[_Parts, _Key, int]] = [(tuple(path.split("/")), key, 1) for path, key in entries]
    while True:
        longest = max((len(parts) for parts, _, _ in merged), default=0)
        groups, position = min(
            ((_groups(merged, p), p) for p in range(longest)), key=lambda pair: len(pair[0]), default=([], 0)
        )
        if len(groups) == len(merged):
            return [("/".join(map(str, parts)), key, count) for parts, key, count in merged]
        merged = [_merge([merged[k] for k in members], position) for members in groups]


def _groups(entries: Sequence[tuple[_Parts, _Key, int]], position: int) -> list[list[int]]:
    """Groups of entries that differ only in the number at `position`."""
    groups: dict[object, list[int]] = {}
    for k, (parts, key, _) in enumerate(entries):
        number = _number(parts[position]) if position < len(parts) else None
        rest = (parts[:position], number[0], parts[position + 1 :], key) if number else k
        groups.setdefault(rest, []).append(k)
    return list(groups.values())


def _merge(entries: Sequence[tuple[_Parts, _Key, int]], position: int) -> tuple[_Parts, _Key, int]:
    if len(entries) == 1:
        return entries[0]
    parts, key, _ = entries[0]
    found = [number for number in (_number(entry[0][position]) for entry in entries) if number]
    numbers = _Numbers(found[0][0], tuple(n for _, n in found))
    return (*parts[:position], numbers, *parts[position + 1 :]), key, sum(count for _, _, count in entries)


def _number(part: object) -> tuple[str, int] | None:
    match = re.fullmatch(r"(|.*[^0-9])(0|[1-9][0-9]{0,8})", part) if isinstance(part, str) else None
    return (match[1], int(match[2])) if match else None


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers as ranges: "0..3,7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)

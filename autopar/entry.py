"""Reads JSON files that may be damaged: each entry checks its own type, and names itself in errors.

In:     a path, and the format and version that the file must have.
Out:    `Entry`: `entry["cost"]["step_seconds"].number()`; a bad entry is a `DamageError` that names it.
Method: accepted values are safe to compute with: numbers are bounded, text can be printed. Files are written beside the
        target and renamed, so that a reader never sees half a file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from autopar.errors import AutoparError

LARGEST = 2**62
"""Upper bound of counts, and of an array's elements."""
LONGEST = 1e30
"""Upper bound of numbers, such as seconds and rates."""
_T = TypeVar("_T")
_U = TypeVar("_U")


class DamageError(Exception):
    """An entry of the file is missing or malformed."""


def write_whole(path: str | Path, text: str, what: str, kind: type[AutoparError] = AutoparError) -> None:
    """Write a file atomically, so that a reader never sees half of it; `what`: the file's name in errors.

    Raises `AutoparError`: it cannot be written; of class `kind`.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise kind(
            f"the {what} cannot be written.",
            given=str(path),
            wrong=f"{error.strerror or error}.",
            do="name a file in a directory that exists and may be written to.",
            path=str(path),
        ) from error


def read_versioned(path: str | Path, form: str, version: int) -> Entry:
    """Read the object in a JSON file, whose "format" and "version" must be these.

    Raises `DamageError`: the file is missing, damaged, or of another format or version.
    """
    try:
        record = read_json(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DamageError("it is not text.") from error
    except OSError as error:
        raise DamageError(f"{error.strerror or error}.") from error
    if not isinstance(record, dict) or record.get("format") != form:
        raise DamageError(f'it is JSON, but no {form}: "format" is not "{form}".')
    found = record.get("version")
    if isinstance(found, bool) or found != version:
        raise DamageError(f"it is of version {found!r}; this autopar reads version {version}.")
    return Entry(record, "")


def plain(value: Any) -> Any:
    """Convert a value for JSON: dataclasses become objects; infinity, which JSON does not have, becomes "inf"."""
    if dataclasses.is_dataclass(value):
        return {part.name: plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return "inf" if value == math.inf else value


def read_json(text: str) -> Any:
    """Parse strict JSON: without NaN, and without a name twice in one object.

    Raises `DamageError`: the text is not strict JSON.
    """
    try:
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"it is not whole JSON: {error}.") from error


def _no_number(name: str) -> NoReturn:
    raise DamageError(f"it is not whole JSON: {name} is no number.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for k, name in enumerate(names) if name in names[:k])
        raise DamageError(f"{_short(twice)} stands twice in one object.")
    return found


class Entry:
    """A value in the file and its path there; each method checks the value's type and returns it."""

    def __init__(self, value: Any, where: str):
        self.value, self.where = value, where

    def __getitem__(self, key: str) -> Entry:
        where = f"{self.where}.{key}" if self.where else key
        if not isinstance(self.value, dict):
            raise DamageError(f'"{self.where}" is {_short(self.value)}, not an object.')
        if key not in self.value:
            raise DamageError(f'"{where}" is missing.')
        return Entry(self.value[key], where)

    def wrong(self, wanted: str) -> DamageError:
        """The error to raise if the value is not what is `wanted`."""
        return DamageError(f'"{self.where}" is {_short(self.value)}, not {wanted}.')

    def text(self) -> str:
        """Text that can be printed."""
        try:
            self.value.encode()
        except (AttributeError, UnicodeEncodeError):
            raise self.wrong("text") from None
        return self.value

    def count(self, least: int = 0) -> int:
        """A whole number, not below `least`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise self.wrong(f"a whole number of {least} or more")
        return value

    def below(self, end: int, wanted: str) -> int:
        """A whole number from 0 to `end` - 1; `wanted`: its description in the error."""
        if self.count() >= end:
            raise self.wrong(wanted)
        return self.value

    def number(self, or_infinite: bool = False) -> float:
        """A number of 0 or more."""
        if or_infinite and self.value == "inf":
            return math.inf
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not 0 <= self.value <= LONGEST:
            raise self.wrong("a number of 0 or more")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def one_of(self, known: tuple[_T, ...]) -> _T:
        """One of the `known` values."""
        if self.value not in known:
            raise self.wrong(f"one of {', '.join(map(str, known))}")
        return self.value

    def pair(self, first: Callable[[Entry], _T], second: Callable[[Entry], _U]) -> tuple[_T, _U]:
        """A list of two, each read by its function."""
        if not isinstance(self.value, list) or len(self.value) != 2:
            raise self.wrong("a list of 2")
        one, other = (Entry(value, f"{self.where}[{k}]") for k, value in enumerate(self.value))
        return first(one), second(other)

    def mapping(self, read: Callable[[Entry], _T]) -> dict[str, _T]:
        """An object, whose values are read by `read`."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return {name: read(self[name]) for name in self.value}

    def items(self, read: Callable[[Entry], _T], length: int | None = None) -> tuple[_T, ...]:
        """A list, whose items are read by `read`."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            raise self.wrong("a list" if length is None else f"a list of {length}")
        return tuple([read(Entry(value, f"{self.where}[{k}]")) for k, value in enumerate(self.value)])


_PLAIN: dict[Any, Callable[[Entry], Any]] = {int: Entry.count, float: Entry.number, str: Entry.text, bool: Entry.flag}


def reader_of(
    kind: Callable[..., _T],
    *,
    known: Mapping[str, Any] | None = None,
    later: Collection[str] = (),
    infinite: Collection[str] = (),
    **others: Callable[[Entry], Any],
) -> Callable[[Entry], _T]:
    """A function that reads an object as a dataclass: each field from the entry of its name, by its type.

    Args:
        kind: The dataclass.
        known: Values of fields that are not in the file.
        later: Fields that older files lack.
        infinite: Numbers that may be infinite.
        others: Readers of fields whose type does not say enough.
    """
    known = known or {}
    or_infinite: Callable[[Entry], Any] = functools.partial(Entry.number, or_infinite=True)
    readers = {**_readers(kind), **dict.fromkeys(infinite, or_infinite), **others}
    readers = {name: own for name, own in readers.items() if name not in known}

    def read(entry: Entry) -> _T:
        return kind(**known, **{n: own(entry[n]) for n, own in readers.items() if n not in later or n in entry.value})

    return read


@functools.cache
def _readers(kind: Any) -> dict[str, Callable[[Entry], Any]]:
    types = get_type_hints(kind)
    return {part.name: _reader(types[part.name]) for part in dataclasses.fields(kind) if part.init}


def _reader(kind: Any) -> Callable[[Entry], Any]:
    """The reader of a type: a plain one, a `Literal`, a dataclass, a tuple or mapping of such, or an optional one."""
    parts = get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if dataclasses.is_dataclass(kind):
        return reader_of(kind)  # type: ignore[arg-type]
    if get_origin(kind) is Literal:
        return lambda entry: entry.one_of(parts)
    inner = [_reader(part) for part in parts if part not in (Ellipsis, NoneType)]
    if get_origin(kind) is UnionType and NoneType in parts:
        return lambda entry: None if entry.value is None else inner[0](entry)
    if get_origin(kind) is Mapping:
        return lambda entry: entry.mapping(inner[1])
    if get_origin(kind) is not tuple:
        return _unread
    if Ellipsis in parts:
        return lambda entry: entry.items(inner[0])
    return lambda entry: entry.pair(*inner)


def _unread(entry: Entry) -> NoReturn:
    raise AssertionError(f'"{entry.where}" is of a type that needs a reader of its own')


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""Parses compiled programs as XLA prints them: computations of instructions, in the order in which they run.

In:     the text of a scheduled HLO module.
Out:    `Module`.
Method: one instruction per line: `%name = type opcode(operands), attributes`. Types and operands have nested brackets, so
        that they end at the matching one. The computations that an instruction calls are in its attributes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopar.ir.region import ASSUMED_TRIPS

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = ")
_CALLS = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([^\s,}]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHAIN = re.compile(r'\bchain_id="(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([^\s,}]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Hlo:
    """One instruction.

    Attributes:
        name: Its name.
        type: Type of its result: `f32[8,128]{1,0}`, or several in parentheses.
        opcode: Its opcode: `fusion`, `all-gather-start`.
        operands: Names of its operands; of a constant its value, of a parameter its number.
        attributes: The rest of its line.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its result."""
        return type_bytes(self.type)

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls."""
        several = [name.strip(" %") for found in _BRANCHES.findall(self.attributes) for name in found.split(",")]
        return tuple(dict.fromkeys([*_CALLS.findall(self.attributes), *filter(None, several)]))

    @property
    def target(self) -> str:
        """Target of a custom call; "" for other instructions."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    @property
    def chain(self) -> str | None:
        """Identifier that XLA for TPUs gives to the parts of one asynchronous collective; None: it is not asynchronous."""
        found = _CHAIN.search(self.attributes)
        return found[1] if found else None

    @property
    def is_synchronous(self) -> bool:
        """Whether the program waits at once for the collective that begins here."""
        return '"is_sync":true' in self.attributes

    def number_list(self, attribute: str) -> list[int]:
        """An attribute that is a list of numbers, in HLO's notation or in JSON; [] if it is absent."""
        found = re.search(rf'"?\b{attribute}"?[=:][\[{{]([\d,"]*)[\]}}]', self.attributes)
        return [int(n) for n in found[1].replace('"', "").split(",") if n] if found else []


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program.

    Attributes:
        entry: Name of the entry computation.
        computations: Name -> its instructions, in order.
    """

    entry: str
    computations: Mapping[str, tuple[Hlo, ...]]

    def trips(self, loop: Hlo) -> int:
        """Return the trip count of a loop; where it depends on data, the plan's assumption.

        XLA for GPUs states it; otherwise it is read off the condition, if that compares a counter with a constant.
        """
        found, condition = _TRIPS.search(loop.attributes), _CONDITION.search(loop.attributes)
        if found or not condition:
            return int(found[1]) if found else ASSUMED_TRIPS
        *_, last = self.computations[condition[1]]
        if last.opcode != "compare" or "direction=LT" not in last.attributes:
            return ASSUMED_TRIPS
        inside = {hlo.name: hlo for hlo in self.computations[condition[1]]}
        counter, limit = (inside.get(name) for name in last.operands)
        index = _INDEX.search(counter.attributes) if counter and counter.opcode == "get-tuple-element" else None
        begin = self._given(loop, int(index[1])) if index else None
        end = _number(limit)
        return ASSUMED_TRIPS if begin is None or end is None else max(0, end - begin)

    def _given(self, loop: Hlo, index: int) -> int | None:
        """Return the initial value of a loop's counter; None: it is no constant."""
        around = next(lines for lines in self.computations.values() if any(hlo is loop for hlo in lines))
        made = {hlo.name: hlo for hlo in around}
        carried = made.get(loop.operands[0])
        found = made.get(carried.operands[index]) if carried is not None and carried.opcode == "tuple" else None
        while found is not None and found.opcode == "copy":
            found = made.get(found.operands[0])
        return _number(found)


def _number(hlo: Hlo | None) -> int | None:
    is_number = hlo is not None and hlo.opcode == "constant" and hlo.operands
    return int(hlo.operands[0]) if hlo is not None and is_number else None


def read_module(text: str) -> Module:
    """Parse the text of a compiled program."""
    computations: dict[str, tuple[Hlo, ...]] = {}
    entry, here = "", None
    lines: list[Hlo] = []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            here, lines = header[2], []
            entry = here if header[1] else entry
        elif line.startswith("}") and here is not None:
            computations[here], here = tuple(lines), None
        elif here is not None and (found := _read_line(line)) is not None:
            lines.append(found)
    return Module(entry, computations)


def _read_line(line: str) -> Hlo | None:
    name = _NAME.match(line)
    if name is None:
        return None
    rest = line[name.end() :]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    begin = rest.index("(")
    end = begin + _closing(rest[begin:])
    operands = tuple(re.findall(r"%([^\s,()]+)", rest[begin:end]))
    if rest[:begin] in ("constant", "parameter"):
        operands = tuple(re.findall(r"^\((-?\d+)\)$", rest[begin:end]))
    return Hlo(name[1], kind, rest[:begin], operands, rest[end:])


def _closing(text: str) -> int:
    """Position after the bracket that matches the first character."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if not depth:
            return at + 1
    raise AssertionError(f"brackets do not close in {text[:80]!r}")


def type_bytes(text: str) -> int:
    """Bytes of a type, all of its arrays together."""
    return sum(
        math.ceil(math.prod(int(n) for n in dims.split(",") if n) * _bits(name) / 8)
        for name, dims in _ARRAY.findall(text)
    )


def _bits(name: str) -> int:
    found = _BITS.get(name) or re.match(r"(?:bf|[suf])(\d+)", name)
    return found if isinstance(found, int) else int(found[1]) if found else 0


def dims_of(text: str) -> tuple[int, ...]:
    """Dims of the first array of a type."""
    found = _ARRAY.search(text)
    return tuple(int(n) for n in found[2].split(",") if n) if found else ()


def dtype_of(text: str) -> str:
    """Element type of the first array of a type."""
    found = _ARRAY.search(text)
    return found[1] if found else ""


def parts_of(text: str) -> Iterator[str]:
    """The elements of a tuple type."""
    depth, begin = 0, 1
    for at, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            yield text[begin:at].strip()
            begin = at + 1


def groups_of(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices in either notation of `replica_groups`; one of all devices if there is none."""
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    if listed:
        return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", listed[1]))
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if not counted:
        return (tuple(range(num_devices)),)
    shape, dims, order = (tuple(map(int, text.split(","))) if text else None for text in counted.groups())
    numbers = np.arange(math.prod(dims or ())).reshape(dims or ())
    return tuple(tuple(map(int, row)) for row in numbers.transpose(order).reshape(shape or ()))

"""Finds collectives that XLA for TPUs runs in another form than the program asks for, and those that it adds.

In:     a compiled program for TPUs.
Out:    `find_rewritten`: for some of its collectives, what the program asked for.
Method: by dataflow. A reduce-scatter becomes an all-reduce of which each device takes its part; in one fusion with it, it
        is still sent as a reduce-scatter, of rows padded to whole tiles, and permutes move the surplus to the neighbours.
        A small all-gather becomes an all-reduce of zeros into which each device has put its part. One all-reduce may stand for
        several collectives, of an operand each. XLA names the operation of the program that an instruction comes from, so a
        permute without a name is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.steps import CollectiveKind
from autopar.verify.hlo import Hlo, Module, groups_of, parts_of, type_bytes

_PERMUTES = ("collective-permute", "collective-permute-start")
_VIEWS = ("bitcast", "copy", "reshape", "transpose")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a program asked for where XLA runs a collective.

    Attributes:
        kind: Kind of collective; None: nothing, XLA added it.
        bytes: Operand bytes on one device; for an all-gather, result bytes.
        sent_as: The kind that is sent.
    """

    kind: CollectiveKind | None
    bytes: int
    sent_as: CollectiveKind


def find_rewritten(module: Module, num_devices: int) -> dict[str, tuple[Asked, ...]]:
    """What the program asked for, by the name of the collective that runs; several if that has several operands."""
    found: dict[str, tuple[Asked, ...]] = {}
    for lines in module.computations.values():
        made = {hlo.name: hlo for hlo in lines}
        for hlo in lines:
            if hlo.opcode == "all-reduce":
                parts = list(_parts(lines, hlo))
                asked = [_asked(module, lines, made, hlo, *part, num_devices) for part in parts]
                if any(asked):
                    pairs = zip(asked, parts, strict=True)
                    found[hlo.name] = tuple(a or Asked("all-reduce", size, "all-reduce") for a, (*_, size) in pairs)
            elif hlo.opcode in _PERMUTES and "op_name=" not in hlo.attributes:
                found[hlo.name] = (Asked(None, 0, "collective-permute"),)
    return found


def _parts(lines: Sequence[Hlo], hlo: Hlo) -> Iterator[tuple[str, str, int]]:
    """The operands of an all-reduce, the name of each one's result, and its bytes."""
    if len(hlo.operands) == 1:
        yield hlo.operands[0], hlo.name, hlo.num_bytes
        return
    elements = [line for line in lines if line.opcode == "get-tuple-element" and hlo.name in line.operands]
    for k, (operand, kind) in enumerate(zip(hlo.operands, parts_of(hlo.type), strict=True)):
        own = (line.name for line in elements if f"index={k}," in f"{line.attributes},")
        yield operand, next(own, ""), type_bytes(kind)


def _asked(
    module: Module,
    lines: Sequence[Hlo],
    made: dict[str, Hlo],
    hlo: Hlo,
    operand_name: str,
    result: str,
    size: int,
    num_devices: int,
) -> Asked | None:
    """What an all-reduce of an operand stands for; None: for itself."""
    operand = made[operand_name]
    part = size // max(map(len, groups_of(hlo.attributes, num_devices)))
    if lines[-1].opcode == "dynamic-slice" and lines[-1].num_bytes == part:
        given = sum(line.num_bytes for line in lines if line.opcode == "parameter")
        return Asked("reduce-scatter", given, "reduce-scatter")
    if _reads_parts(module, lines, result, part):
        return Asked("reduce-scatter", size, "all-reduce")
    if operand.opcode == "dynamic-update-slice" and type_bytes(made[operand.operands[1]].type) == part:
        whole = made[operand.operands[0]]
        if whole.opcode == "broadcast" and made[whole.operands[0]].operands == ("0",):
            return Asked("all-gather", size, "all-reduce")
    return None


def _reads_parts(module: Module, lines: Sequence[Hlo], name: str, part: int) -> bool:
    """Whether each reader of a value takes no more than a part of so many bytes, from a place that it computes."""
    readers = [(line, line.operands.index(name)) for line in lines if name in line.operands]
    return bool(readers) and all(_reads_part(module, lines, line, at, part) for line, at in readers)


def _reads_part(module: Module, lines: Sequence[Hlo], reader: Hlo, at: int, part: int) -> bool:
    if reader.opcode == "dynamic-slice":
        return at == 0 and reader.num_bytes <= part
    if reader.opcode in _VIEWS:
        return _reads_parts(module, lines, reader.name, part)
    if reader.opcode != "fusion":
        return False
    inside = module.computations[reader.called[0]]
    parameter = next(line.name for line in inside if line.opcode == "parameter" and line.operands == (str(at),))
    return _reads_parts(module, inside, parameter, part)

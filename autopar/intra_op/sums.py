"""Finds what loops add up in place.

In:     a loop of a sharded program.
Out:    `sums_in_place`.
Method: XLA gives what a loop begins to carry, what each trip makes of it, and the loop's result one place if a trip writes the
        new value over the old one: if nothing but the elementwise operation that makes the new one reads the old one, and the
        sharding stays. So a sum of gradients over microbatches is in memory once. Of a value that more operations read this is
        not assumed: XLA often keeps the old one beside the new.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from autopar._jax import Literal
from autopar.intra_op.sharded import Body, Compute, Copy, Instruction, Region
from autopar.intra_op.traffic import is_fused
from autopar.ir.dataflow import variables
from autopar.ir.region import kind_of, region_of


class Sum(NamedTuple):
    """What a loop adds up in place: the copy that it begins with, its result, and what each trip makes."""

    begun: Copy
    result: Copy
    new: Copy


def sums_in_place(loop: Region) -> list[Sum]:
    """The values that the trips of a scan write over what the trip before has left; of a loop of another kind none."""
    if kind_of(loop.eqn) != "scan":
        return []
    scan, body = region_of(loop.eqn), loop.bodies[0]
    carried = slice(len(scan.consts), len(scan.consts) + len(scan.carries))
    begun = zip(loop.eqn.invars[carried], loop.operands[carried], strict=True)
    results = zip(loop.eqn.outvars, loop.results, strict=True)
    times, readers = Counter(variables(loop.eqn.invars)), _readers(body, set(body.inputs[carried]))
    found: list[Sum] = []
    for copy, old, new, result in zip(begun, body.inputs[carried], body.outputs, results, strict=False):
        if isinstance(copy[0], Literal) or isinstance(new[0], Literal) or times[copy[0]] > 1:
            continue
        if copy[1] == old[1] == new[1] == result[1] and _writes_over(readers[old], new):
            found.append(Sum(copy, result, new))
    return found


def _readers(body: Body, copies: set[Copy]) -> dict[Copy, list[Instruction]]:
    """The instructions that read each of these copies; of what leaves the body none is the only one."""
    found: dict[Copy, list[Instruction]] = {copy: [] for copy in copies}
    for instruction in body.instructions:
        for copy in instruction.reads:
            if copy in found:
                found[copy].append(instruction)
    for copy in body.results:
        if copy in found:
            found[copy] *= 2
    return found


def _writes_over(readers: list[Instruction], new: Copy) -> bool:
    """Whether one elementwise operation is the only reader, and makes the new copy."""
    if len(readers) != 1:
        return False
    (reader,) = readers
    return isinstance(reader, Compute) and is_fused(reader) and new in reader.makes

"""Finds what loops carry in place: a value that goes from trip to trip has one array, before, in and after the loop.

In:     the versions of a body's copies.
Out:    `begin_where_made`, `overwrites`.
Method: XLA gives what a loop begins with, what each trip makes of it, and the loop's result one place. It copies the first if
        something else reads it, or if it is an argument that stays; and what a trip makes is an array of its own until the
        trip has read the old one, unless an elementwise operation writes it over the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar._jax import Var
from autopar.intra_op.sharded import Body, Compute, Copy, Region
from autopar.intra_op.traffic import is_fused
from autopar.intra_op.versions import Versions
from autopar.ir.region import region_of

Carry = tuple[Copy, Copy]
"""The old value that a trip reads and the new one that it makes; or a loop's operand and its result."""


def carries_in(region: Region, body: Body) -> tuple[Carry, ...]:
    """The old and the new values of a loop's body."""
    parts, number = region_of(region.eqn), region.bodies.index(body)
    entering, leaving = parts.entering(number, parts.bindings), parts.leaving(number, parts.bindings)
    begun = [copy for b, copy in zip(entering, body.inputs, strict=True) if b.role == "carry"]
    ended = [copy for b, copy in zip(leaving, body.outputs, strict=True) if b.role == "carry"]
    pairs = zip(begun, ended, strict=False)  # the test of a `while` makes none
    return tuple((old, (atom, sharding)) for old, (atom, sharding) in pairs if isinstance(atom, Var))


def overwrites(made: Versions, body: Body, carries: Sequence[Carry]) -> frozenset[int]:
    """The versions that a loop's body writes over the old ones; `made`: its versions."""
    number = {copy: k for k, copy in enumerate(made.copies)} if carries else {}
    given = {copy: k for k, copy in enumerate(body.inputs)}
    found: set[int] = set()
    for old, new in carries:
        start, last = made.starts[number[new]], made.ends[given[old]]
        maker = body.instructions[start] if start >= 0 else None
        if last < start or (last == start and isinstance(maker, Compute) and is_fused(maker)):
            found.add(number[new])
    return frozenset(found)


def begin_where_made(made: Versions, body: Body) -> frozenset[int]:
    """Let results of loops begin where that is made which the loops begin with, if nothing else reads it: the versions of this,
    which then take no memory of their own. An argument instead ends where the loop begins."""
    number: dict[Copy, int] = {}
    found: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        if isinstance(instruction, Region):
            number = number or {copy: k for k, copy in enumerate(made.copies)}
            once = Counter(instruction.reads)
            for copy, result in _around(instruction):
                first = number[copy]
                if once[copy] > 1 or made.ends[first] != position:
                    continue
                if made.starts[first] < 0:
                    made.ends[first] = position - 1
                elif made.takes_memory(first):
                    made.starts[number[result]] = made.starts[first]
                    found.add(first)
    return frozenset(found)


def _around(region: Region) -> Iterator[Carry]:
    """What a loop begins to carry, and its results."""
    operands = {a: s for a, s in zip(region.eqn.invars, region.operands, strict=True) if isinstance(a, Var)}
    results = dict(zip(region.eqn.outvars, region.results, strict=True))
    for b in region_of(region.eqn).carries:
        if isinstance(b.operand, Var) and b.result is not None:
            yield (b.operand, operands[b.operand]), (b.result, results[b.result])

"""Counts bytes copied between device and host memory, as planned and as compiled.

In:     the sharded program; the compiled program.
Out:    bytes in one run, loop trips counted, by direction.
Method: in the plan, copies are operations. XLA marks arrays in host memory in their layout, `S(5)`, and makes a copied slice,
        or one written into a stack there, one instruction, which may be wrapped to run asynchronously. A copy of a single
        element is not counted: copies are put in order by such (`partition/order.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from autopar._jax import copies_to_or_from_host, on_host
from autopar.intra_op.sharded import Body, Compute, instructions_within, share_bytes
from autopar.mesh import LogicalMesh
from autopar.verify.hlo import Hlo, Module, dims_of, parts_of, type_bytes

DIRECTIONS = ("to host", "from host")
_ON_HOST = ":S(5)"
_NAMES = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "custom-call", "copy-done", "async-done"}
"""Opcodes that refer to an array in host memory, or allocate it, and copy nothing."""


def planned_copies(body: Body, mesh: LogicalMesh) -> Counter[str]:
    """Planned bytes that a program copies."""
    found: Counter[str] = Counter()
    for i, times in instructions_within(body):
        if isinstance(i, Compute) and copies_to_or_from_host(i.eqn):
            for atom, (var, sharding) in zip(i.eqn.invars, i.makes, strict=True):
                size = share_bytes(var, sharding, mesh)
                if on_host(atom.aval) != on_host(var.aval) and size > var.aval.dtype.itemsize:
                    found[DIRECTIONS[on_host(atom.aval)]] += times * size
    return found


def executed_copies(module: Module) -> Counter[str]:
    """Bytes that a compiled program copies.

    One or two elements are no copy of the plan: waits on values in host memory read so much of them (`partition/order.py`).
    """
    types = {hlo.name: hlo.type for lines in module.computations.values() for hlo in lines}
    return _copies_in(module, module.entry, types)


def _copies_in(module: Module, computation: str, types: Mapping[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for hlo in module.computations[computation]:
        if hlo.opcode in _NAMES or hlo.opcode.endswith("-done"):
            continue
        inner = [_copies_in(module, name, types) for name in hlo.called]
        if hlo.opcode == "conditional":
            found.update(max(inner, key=lambda each: sum(each.values())))
        elif inner:
            times = module.trips(hlo) if hlo.opcode == "while" else 1
            for each in inner:
                found.update(_times(each, times))
        else:
            found.update({way: type_bytes(kind) for way, kind in _copied(hlo, types) if math.prod(dims_of(kind)) > 2})
    return found


def _copied(hlo: Hlo, types: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The direction of an instruction and the type of what it copies, if it does."""
    made = next(parts_of(hlo.type)) if hlo.type.startswith("(") else hlo.type
    read = [types.get(name, "") for name in hlo.operands]
    makes_on_host, reads_on_host = _ON_HOST in made, any(_ON_HOST in kind for kind in read)
    if hlo.opcode == "dynamic-update-slice" and makes_on_host:
        if _ON_HOST not in read[1]:
            yield DIRECTIONS[0], read[1]
    elif makes_on_host != reads_on_host and read:
        yield DIRECTIONS[reads_on_host], made


def _times(found: Counter[str], times: int) -> dict[str, int]:
    return {name: times * count for name, count in found.items()}

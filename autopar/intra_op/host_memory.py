"""Bytes that a sharded program has in the host's memory.

In:     `Body`, the mesh.
Out:    the most bytes of one device that lie there at once.
Method: a copy lives from where it is made to its last reader, under another name behind a barrier too. A row that a loop's
        body makes or reads is a part of the stack outside.
"""

from __future__ import annotations

from autopar._jax import Literal, on_host
from autopar.intra_op.sharded import Body, Copy, Region, copies_made, copies_read, share_bytes
from autopar.ir.region import kind_of
from autopar.mesh import LogicalMesh


def host_peak_bytes(body: Body, mesh: LogicalMesh) -> int:
    """Most bytes of one device that are in its host's memory at once."""
    holder: dict[Copy, Copy] = {}
    made: dict[Copy, int] = {}
    last: dict[Copy, int] = {}
    inside = [0] * len(body.instructions)
    leaving = {(atom, sharding) for atom, sharding in body.outputs if not isinstance(atom, Literal)}
    for position, instruction in enumerate(body.instructions):
        for copy in copies_read(instruction):
            last[holder.get(copy, copy)] = position
        through = isinstance(instruction, Region) and kind_of(instruction.eqn) == "barrier"
        for copy in copies_made(instruction):
            if on_host(copy[0].aval) and copy not in leaving and not through:
                made[copy] = last[copy] = position
        if isinstance(instruction, Region) and through:
            given = tuple(zip(instruction.eqn.invars, instruction.operands, strict=True))
            results = zip(instruction.eqn.outvars, instruction.results, strict=True)
            for (atom, sharding), result in zip(given, results, strict=True):
                if not isinstance(atom, Literal):
                    holder[result] = holder.get((atom, sharding), (atom, sharding))
        elif isinstance(instruction, Region):
            inside[position] = max((host_peak_bytes(inner, mesh) for inner in instruction.bodies), default=0)
    total = most = 0
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    for copy, start in made.items():
        size = share_bytes(*copy, mesh)
        starts[start] = starts.get(start, 0) + size
        ends[last[copy]] = ends.get(last[copy], 0) + size
    for position in range(len(body.instructions)):
        total += starts.get(position, 0)
        most = max(most, total + inside[position])
        total -= ends.get(position, 0)
    return most

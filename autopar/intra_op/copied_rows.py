"""Counts what a loop copies for the rows of its stacks, beside its kernels, in programs for CPUs.

In:     a loop of a sharded program.
Out:    bytes that each trip moves.
Method: a product reads arrays that are contiguous, and makes one; so XLA for CPUs copies the row of a stack before it, and its
        result into the row behind it. Elementwise work reads and writes rows where they are. A stack that is made begins as
        zeros, which are written, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar._jax import Literal, on_host
from autopar.intra_op.sharded import Compute, Copy, Instruction, Region, local_bytes
from autopar.intra_op.traffic import is_fused, is_view
from autopar.ir.region import region_of
from autopar.mesh import LogicalMesh


def row_bytes(loop: Region, mesh: LogicalMesh) -> int:
    """Bytes that each trip of a loop reads and writes to copy rows, on one device."""
    parts = region_of(loop.eqn)
    if parts.kind != "scan":
        return 0
    (body,) = loop.bodies
    entering = zip(parts.entering(0, parts.bindings), body.inputs, strict=True)
    leaving = zip(parts.leaving(0, parts.bindings), body.outputs, strict=True)
    read = [copy for binding, copy in entering if binding.role == "xs"]
    made = [(var, s) for binding, (var, s) in leaving if binding.role == "ys" and not isinstance(var, Literal)]
    by_kernels = _touched(reversed(body.instructions), lambda i: i.reads, lambda i: i.makes)
    of_kernels = _touched(body.instructions, lambda i: i.makes, lambda i: i.reads)
    copied = [*(copy for copy in read if copy in by_kernels), *(copy for copy in made if copy in of_kernels)]
    return sum(local_bytes(*copy, mesh) for copy in (*copied, *copied, *made) if not on_host(copy[0].aval))


_Of = Callable[[Instruction], tuple[Copy, ...]]


def _touched(instructions: Iterable[Instruction], near: _Of, far: _Of) -> set[Copy]:
    """Copies on the near side of more than elementwise work, or of views of these."""
    found: set[Copy] = set()
    for instruction in instructions:
        if isinstance(instruction, Compute) and is_fused(instruction):
            if not is_view(instruction.eqn) or found.isdisjoint(far(instruction)):
                continue
        found.update(near(instruction))
    return found

"""Finds what loops carry from trip to trip.

In:     a loop of a sharded program.
Out:    `carries_in`.
"""

from __future__ import annotations

from autopar._jax import Var
from autopar.intra_op.sharded import Body, Copy, Region
from autopar.ir.region import region_of

Carry = tuple[Copy, Copy]
"""The old value that a trip reads, and the new one that it makes."""


def carries_in(region: Region, body: Body) -> tuple[Carry, ...]:
    """The old and the new values of a loop's body."""
    parts, number = region_of(region.eqn), region.bodies.index(body)
    entering, leaving = parts.entering(number, parts.bindings), parts.leaving(number, parts.bindings)
    begun = [copy for b, copy in zip(entering, body.inputs, strict=True) if b.role == "carry"]
    ended = [copy for b, copy in zip(leaving, body.outputs, strict=True) if b.role == "carry"]
    pairs = zip(begun, ended, strict=False)  # the test of a `while` makes none
    return tuple((old, (atom, sharding)) for old, (atom, sharding) in pairs if isinstance(atom, Var))

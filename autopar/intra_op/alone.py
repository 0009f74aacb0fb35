"""Lets devices leave a loop when their own samples are done, where they need nothing of each other.

In:     a sharded program.
Out:    the same; but a loop that ends for each sample by itself asks only those devices whether a sample goes on to which its
        trips send something.
Method: the condition of such a loop is one `any` over flags of running samples, and further trips leave finished samples as
        they are (`ir/split/carries.py`). So devices that share out the samples may make different numbers of trips, unless
        their trips communicate: over axes along which nothing is sent, the `any` is not reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from autopar._jax import JaxprEqn
from autopar.intra_op.sharded import Body, Compute, Instruction, Region, sent_by
from autopar.mesh import LogicalMesh


def end_alone(body: Body, own_ends: Collection[JaxprEqn], mesh: LogicalMesh) -> Body:
    """Let devices end loops alone, also in loops and branches; `own_ends`: as in `Graph`."""

    def ended(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Region):
            return instruction
        bodies = [end_alone(inner, own_ends, mesh) for inner in instruction.bodies]
        match bodies:
            case [Body(instructions=(Compute(eqn, _, strategy) as goes_on,)) as test, trip] if eqn in own_ends:
                sent_over = {axis for _, sent in sent_by(trip, mesh) for axis in sent.axes}
                asked = [(kind, tuple(a for a in axes if a in sent_over)) for kind, axes in strategy.reductions]
                strategy = dataclasses.replace(strategy, reductions=tuple(pair for pair in asked if pair[1]))
                goes_on = dataclasses.replace(goes_on, strategy=strategy)
                bodies[0] = dataclasses.replace(test, instructions=(goes_on,))
        return dataclasses.replace(instruction, bodies=tuple(bodies))

    return dataclasses.replace(body, instructions=tuple(map(ended, body.instructions))) if own_ends else body

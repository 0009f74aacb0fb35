"""What is done before a loop begins: compilers would leave it for later, and keep all that it reads so long.

In:     a sharded body, the place of a loop in it.
Out:    copies that the loop waits for.
Method: a scheduler that hides latency runs first what others wait for. The gradient of a model's head is needed by the
        update alone, and may come behind the loop of the backward pass, which waits for the other product with the same
        logits: these then live through the loop. So a loop waits for what it does not need, if that reads something large
        which nobody needs afterwards, and makes less of it.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar._jax import Literal
from autopar.intra_op.sharded import Body, Compute, Copy, Instruction, Region, copies_made, copies_read
from autopar.tuning import TUNING


def done_before(body: Body, position: int, num_bytes: Callable[[Copy], int]) -> list[tuple[Copy, int]]:
    """Copies that the loop at this place waits for, and the bytes on one device that are free when each is there."""
    needed = set(copies_read(body.instructions[position]))
    idle: list[Instruction] = []
    for instruction in reversed(body.instructions[:position]):
        if needed.isdisjoint(copies_made(instruction)):
            idle.append(instruction)
        else:
            needed.update(copies_read(instruction))
    stays = {copy for instruction in body.instructions[position:] for copy in copies_read(instruction)}
    stays.update(body.inputs, ((a, s) for a, s in body.outputs if not isinstance(a, Literal)))
    found = []
    for instruction in reversed(idle):
        if isinstance(instruction, Compute | Region):
            freed = max((num_bytes(copy) for copy in copies_read(instruction) if copy not in stays), default=0)
            made = list(copies_made(instruction))
            if made and freed >= TUNING.late_bytes and 2 * sum(map(num_bytes, made)) < freed:
                found.append((made[0], freed))
    return found

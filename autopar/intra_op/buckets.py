"""Finds the messages that keep a program over its memory budget.

In:     the fullest moment of a sharded program.
Out:    the most bytes to send as one message so that less is alive then (`lower.py` takes it), or that messages do not matter.
Method: values that are sent as one message wait for each other, and all results are there together. That is faster, and most
        programs have room for it. Where nothing fits, or what fits is much slower, and values of a message are alive at the
        fullest moment of the last answer, the search begins again with at most a quarter of that message in one (`shard.py`).
"""

from __future__ import annotations

from autopar.intra_op.liveness import Liveness
from autopar.intra_op.sharded import Body, Copy, Fused, move_bytes
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING


def smaller_bucket(moment: Liveness, mesh: LogicalMesh, excess: float = 0.0) -> int | None:
    """The bytes of a message with which less is alive at a moment; None: messages do not matter then.

    A message matters if of all that is alive, `TUNING.bucket_part` waits for it or came with it, and if all of these together
    are more than the `excess`, bytes that are to be saved.
    """
    alive: dict[Body, dict[Copy, int]] = {}
    for each in moment.alive:
        alive.setdefault(each.body, {})[each.copy] = each.num_bytes
    sizes: list[int] = []
    total = 0
    for body, bytes_of in alive.items():
        for sent in body.instructions:
            if isinstance(sent, Fused):
                held = sum(bytes_of.get(copy, 0) for copy in {*sent.reads, *sent.makes})
                if held > TUNING.bucket_part * moment.peak_bytes:
                    sizes.append(sum(move_bytes(move, mesh) for move in sent.moves))
                    total += held
    return max(sizes) // TUNING.bucket_step if total > excess else None

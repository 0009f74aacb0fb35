"""Where the workers of a step with callbacks wait for each other, so that one that raises costs no state.

In:     the streams of a pipeline.
Out:    for each mesh the position of its first update, if all can wait there; else nothing.
Method: what lies before the first updates must need nothing of what lies behind them, and overwrite no argument. Then a step
        can be left there: the next one takes the same arguments. Otherwise it is carried out to its end.
"""

from __future__ import annotations

from autopar.streams.instructions import MeshId, Recv, Run, Send
from autopar.streams.streams import Streams


def find_pauses(streams: Streams) -> dict[MeshId, int]:
    """Position of the first update in each mesh's stream; empty where a mesh could not wait there."""
    updates = {name for name, plan in streams.programs.items() if plan.task.kind in ("U", "step")}
    pauses = {
        mesh: next((k for k, i in enumerate(own) if isinstance(i, Run) and i.program in updates), len(own))
        for mesh, own in streams.instructions.items()
    }
    given = {at for _, at in streams.arguments}
    before = [i for mesh, own in streams.instructions.items() for i in own[: pauses[mesh]]]
    sent = {i.message for i in before if isinstance(i, Send)}
    waits = any(isinstance(i, Recv) and i.message not in sent for i in before)
    overwrites = any(i.inputs[k] in given for i in before if isinstance(i, Run) for k in streams.overwritten[i.program])
    return {} if not before or waits or overwrites else pauses

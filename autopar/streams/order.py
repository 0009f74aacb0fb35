"""One order of the instructions of all meshes: for one dispatching thread, and as the proof that there is one.

In:     the meshes' streams, and which programs are the updates.
Out:    `merged`: (mesh, instruction), in the order in which they are started; or `StreamError`.
Method: meshes take turns, a run each; a message is sent before it is received, so that nothing waits. With sends that do not
        wait the order of turns does not matter: if one comes to the end, all do. Updates come last: what overwrites the state
        is started when everything that can fail before it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.streams.instructions import Instruction, MeshId, Recv, Run, Send


class StreamError(AssertionError):
    """Streams that would go wrong: a mistake of ours, or of a hand that changed them."""


def merged(
    streams: Mapping[MeshId, Sequence[Instruction]], last: Collection[str] = ()
) -> list[tuple[MeshId, Instruction]]:
    """One order of all instructions in which every message is sent before it is received: meshes take turns.

    Args:
        streams: Of each mesh.
        last: Programs that begin when no mesh has anything else to do before its first of them.

    Raises:
        StreamError: The streams wait for each other.
    """
    at = dict.fromkeys(streams, 0)
    sent: set[int] = set()
    found: list[tuple[MeshId, Instruction]] = []
    waiting = bool(last)
    while any(at[mesh] < len(stream) for mesh, stream in streams.items()):
        moved = False
        for mesh, stream in streams.items():
            ran = False
            while at[mesh] < len(stream):
                instruction = stream[at[mesh]]
                if isinstance(instruction, Recv) and instruction.message not in sent:
                    break
                if isinstance(instruction, Run):
                    if ran or (waiting and instruction.program in last):
                        break
                    ran = True
                if isinstance(instruction, Send):
                    sent.add(instruction.message)
                found.append((mesh, instruction))
                at[mesh] += 1
                moved = True
        if not moved and not waiting:
            stuck = [f"mesh {m} for {s[at[m]]}" for m, s in streams.items() if at[m] < len(s)]
            raise StreamError(f"the streams wait for each other: {'; '.join(stuck)}.")
        waiting = waiting and moved
    return found

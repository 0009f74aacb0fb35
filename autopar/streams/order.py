"""Merges the streams of all meshes into one order: for a single dispatching thread, and as the proof of no deadlock.

In:     the meshes' streams, and which programs are the updates.
Out:    `merged`: (mesh, instruction), in the order of dispatch; or `StreamError`.
Method: meshes take turns, one run each; a message is sent in an earlier round of turns than it is received, so that it crosses
        while others run: XLA's CPU client executes programs of several devices one after the other, in the order of dispatch.
        Since sends do not block, the order of turns does not matter: if one order completes, all do. Updates come last:
        programs that overwrite the state start after everything that may fail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.streams.instructions import Instruction, MeshId, Recv, Run, Send


class StreamError(AssertionError):
    """Wrong streams: a bug of ours, or an edit by hand."""


def merged(
    streams: Mapping[MeshId, Sequence[Instruction]], last: Collection[str] = ()
) -> list[tuple[MeshId, Instruction]]:
    """One order of all instructions, in which every message is sent before it is received.

    Args:
        streams: The instructions of each mesh.
        last: Programs that wait until every mesh has reached its first of them, or waits for one that has.

    Raises:
        StreamError: The streams deadlock.
    """
    at = dict.fromkeys(streams, 0)
    sent: set[int] = set()
    found: list[tuple[MeshId, Instruction]] = []
    waiting = bool(last)
    while any(at[mesh] < len(stream) for mesh, stream in streams.items()):
        moved, arrived = False, frozenset(sent)
        for mesh, stream in streams.items():
            ran = False
            while at[mesh] < len(stream):
                instruction = stream[at[mesh]]
                if isinstance(instruction, Recv) and instruction.message not in arrived:
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

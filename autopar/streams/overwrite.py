"""Results take the memory of operands: sums and rows in place, new state that of the old.

In:     `Streams`, whose programs make all results anew; arguments whose memory may be taken.
Out:    the same, telling of each program which operands end in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from autopar._jax import Var
from autopar.streams.instructions import Run, reads
from autopar.streams.streams import Streams


def overwrite(streams: Streams, donated: Collection[Var]) -> Streams:
    """The streams, their programs taking the memory of what nobody reads later."""
    return dataclasses.replace(streams, overwritten=dict(_overwritten(streams, donated)))


def _overwritten(streams: Streams, donated: Collection[Var]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Operands whose memory a result of the same type takes: sums, rows, and in the update the state it replaces."""
    kept = {at for at in streams.results if at is not None}
    for stream in streams.instructions.values():
        last = {at: k for k, instruction in enumerate(stream) for at in reads(instruction)}
        seen = set()
        for k, instruction in enumerate(stream):
            if not isinstance(instruction, Run) or instruction.program in seen:
                continue
            seen.add(instruction.program)
            kind, operands = streams.programs[instruction.program].task.kind, instruction.inputs
            free = [streams.buffers[at].type for at in instruction.outputs]
            found = []
            for position, at in enumerate(operands):
                buffer = streams.buffers[at]
                in_place = kind != "U" and buffer.kind in ("sum", "rows")
                replaced = kind == "U" and buffer.kind == "argument" and buffer.key in donated
                replaced = replaced and last[at] == k and at not in kept
                if (in_place or replaced) and buffer.type in free:
                    free.remove(buffer.type)
                    found.append(position)
            yield instruction.program, tuple(found)

"""What a pipeline holds while it runs, array by array."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autopar.compiled import CompiledStep
from autopar.streams.instructions import Recv


def most_live_bytes(compiled: CompiledStep, arrays: Sequence[Any]) -> list[int]:
    """Of each mesh, most bytes of live arrays on one device, looked at after every instruction of a step.

    What is under way counts where it goes to. `arrays` are the step's flat arguments.
    """
    pipeline: Any = compiled.executable
    held = pipeline._begin(pipeline._split(arrays))
    streams = compiled.plan.attached.pipeline.streams
    mesh_of = [buffer.mesh for buffer in streams.buffers]
    goes_to = {i.message: mesh for mesh, stream in streams.instructions.items() for i in stream if isinstance(i, Recv)}
    most = [0] * len(streams.instructions)
    for act in pipeline._acts:
        act(0, held)
        now: list[Counter[Any]] = [Counter() for _ in most]
        under_way = [
            (goes_to[message], array)
            for (_, message), own in pipeline._under_way.items()
            for parts in own
            for array in parts
        ]
        for mesh, array in (*((mesh_of[at], array) for at, array in held.items()), *under_way):
            if not array.is_deleted():
                now[mesh].update({shard.device: shard.data.nbytes for shard in array.addressable_shards})
        most = [max(before, *of.values()) for before, of in zip(most, now, strict=True)]
    return most

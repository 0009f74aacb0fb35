"""The programs that a worker runs, compiled.

In:     code of programs; where the worker's arrays are.
Out:    executables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.partition.overlap import compile_lowered
from autopar.partition.shipped import with_callbacks
from autopar.partition.task import DeviceProgram
from autopar.runtime.ray.worker.places import Places


def compiled(
    program: DeviceProgram[bytes], places: Places, callbacks: Sequence[Callable[..., Any]] | None = None
) -> jax.stages.Compiled:
    """A program for the devices of a worker, with the host's functions that it calls."""
    call = jax.export.deserialize(bytearray(program.code)).call
    if callbacks:
        call = with_callbacks(call, callbacks)

    def function(*arrays: jax.Array) -> Any:
        return call(*arrays)

    function.__name__ = function.__qualname__ = program.title
    shardings = tuple(places.sharding(kind) for kind in program.inputs)
    jitted = jax.jit(
        function,
        in_shardings=shardings,
        out_shardings=[places.sharding(kind) for kind in program.outputs],
        donate_argnums=tuple(k for k, donated in enumerate(program.donated) if donated),
    )
    structs = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
        for kind, sharding in zip(program.inputs, shardings, strict=True)
    ]
    return compile_lowered(jitted.lower(*structs), dict(program.options), jax.default_backend())

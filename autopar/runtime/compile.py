"""Compiling the programs of stages: equal ones once.

In:     `TaskFunction`s on their meshes.
Out:    XLA's executables.
Method: equal stages on meshes of the same shape have the same program but for its devices. XLA binds an executable to
        devices, so the first of them is compiled and loaded again for the devices of each other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar._jax import load_elsewhere
from autopar.partition.task import TaskFunction
from autopar.runtime.overlap import Options, compile_lowered


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A program that was compiled, and for which devices."""

    compiled: jax.stages.Compiled
    devices: tuple[jax.Device, ...]


class Compiler:
    """Compiles tasks.

    Args:
        options: Of XLA's compiler.

    Attributes:
        num_compiled: How many of them were compiled and not taken over.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._known: dict[str, _Known] = {}
        self._options = dict(options or {})
        self.num_compiled = 0

    def compile(
        self, made: TaskFunction, name: str, places: jax.sharding.Mesh, calls_host: bool, options: Options
    ) -> jax.stages.Compiled:
        """Compile a task.

        Args:
            made: The task.
            name: What the program is called in traces.
            places: Its devices.
            calls_host: It has callbacks: it gets one result more, a number that tells that it has ended.
            options: For XLA, on GPUs.
        """

        def program(*arrays: jax.Array) -> list[jax.Array]:
            return [*made.function(*arrays), *(jnp.int8(0) for _ in ends)]

        ends = [jax.sharding.NamedSharding(places, jax.sharding.PartitionSpec())] if calls_host else []
        program.__name__ = program.__qualname__ = name.replace("/", "_")
        jitted = jax.jit(
            program,
            in_shardings=tuple(t.sharding for t in made.inputs),
            out_shardings=[*(t.sharding for t in made.outputs), *ends],
            donate_argnums=tuple(k for k, d in enumerate(made.donated) if d),
            keep_unused=True,  # programs of equal text then take equal arguments
        )
        lowered = jitted.lower(*(t.struct() for t in made.inputs))
        # Callbacks are bound to the program that was compiled.
        text = "" if calls_host else lowered.as_text().replace(program.__name__, "task")
        taken = self._take_over(text, tuple(places.devices.flat)) if text else None
        if taken is not None:
            return taken
        compiled = compile_lowered(lowered, options, places.devices.flat[0].platform, self._options)
        self.num_compiled += 1
        if text:
            self._known[text] = _Known(compiled, tuple(places.devices.flat))
        return compiled

    def _take_over(self, text: str, devices: tuple[jax.Device, ...]) -> jax.stages.Compiled | None:
        known = self._known.get(text)
        if known is None or known.devices == devices:
            return known.compiled if known is not None else None
        if jax.config.jax_compilation_cache_dir:
            # What XLA for CPU has read from JAX's cache it cannot write again: the copy would lack functions.
            return None
        try:
            return load_elsewhere(known.compiled, known.devices, devices)
        except Exception:  # a platform that cannot move programs: then this one is compiled, too
            return None

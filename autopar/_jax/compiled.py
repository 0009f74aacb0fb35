"""Compiled programs: moved to other devices, and what they call and raise.

In:     what `jax.jit` lowers and compiles.
Out:    the same elsewhere; functions of the host; errors as `jax.jit` raises them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src.api_util import InternalFloatingPointError as _InternalFloatingPointError
from jax.experimental import serialize_executable as _serialize_executable


def load_elsewhere(
    compiled: jax.stages.Compiled, old: Sequence[jax.Device], new: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """A compiled program on other devices of the same kind and process, in the places of the old ones.

    Raises:
        Exception: What JAX or the platform says where it cannot be moved.
    """
    stored = io.BytesIO()
    _serialize_executable._JaxPjrtPickler(stored).dump(compiled._executable._unloaded_executable)
    stored.seek(0)
    assignment = np.array([[device.id for device in new]])
    options = _compiler.get_compile_options(1, len(new), device_assignment=assignment)

    class Unpickler(_serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
            return super().persistent_load(pid)

    unpickler = Unpickler(stored, new[0].client, list(new))
    unpickler.devices_by_id = {a.id: b for a, b in zip(old, new, strict=True)}
    loaded = unpickler.load().load()
    return takes_packed(
        jax.stages.Compiled(loaded, [], compiled.args_info, compiled.out_tree, no_kwargs=compiled._no_kwargs)
    )


def takes_packed(compiled: jax.stages.Compiled) -> jax.stages.Compiled:
    """The program, which now takes arrays of less than a byte per element.

    JAX holds what such an array says of its packing against what the program does, and refuses it on a CPU, where arrays
    say nothing; `jax.jit` takes it. Both lie packed alike.
    """
    executable: Any = getattr(compiled, "_executable", None)
    layouts = getattr(executable, "_xla_in_layouts", ())  # none where it was compiled for devices that are not here
    if any(getattr(layout, "sub_byte_element_size_in_bits", 0) for layout in layouts):
        executable._xla_in_layouts = [
            None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in layouts
        ]
    return compiled


def host_callbacks(function: Callable[..., Any], operands: Sequence[Any]) -> list[Callable[..., Any]]:
    """What JAX would have called in this process by a function that calls the host: functions of arrays to tuples."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cpu",))
    return list(lowered._lowering.compile_args["host_callbacks"])


def nan_error(error: BaseException) -> FloatingPointError | None:
    """What `jax.jit` raises where a compiled program says that a result is a NaN (or infinite); None: it says not that."""
    if not isinstance(error, _InternalFloatingPointError):
        return None
    return FloatingPointError(f"invalid value ({error.ty}) encountered in {error.name}")

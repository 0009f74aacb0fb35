"""Adapters for compiled programs: loading on other devices, host callbacks, errors, and JAX's C++ dispatch.

In:     what `jax.jit` lowers and compiles.
Out:    a program loaded elsewhere; its host callbacks; errors as `jax.jit` raises them; a function that JAX dispatches in C++.
Method: dispatch is that of `jax.jit`, whose C++ cache is keyed by structure, types, shardings, static arguments and settings.
        On a hit it runs the cached executable without Python; on a miss it calls a Python function, which may fill the cache.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import tree_util as _tree_util
from jax._src.api_util import InternalFloatingPointError as _InternalFloatingPointError
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax.experimental import serialize_executable as _serialize_executable


def load_elsewhere(
    compiled: jax.stages.Compiled, old: Sequence[jax.Device], new: Sequence[jax.Device]
) -> jax.stages.Compiled:
    """Load a compiled program on other devices of the same kind and process: `new` in place of `old`.

    Raises `Exception`: the error of JAX or the platform, if it cannot be loaded.
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
    """Let a program take arrays with elements of less than a byte, as `jax.jit` does.

    JAX compares the packing of such an array's layout with the program's, and refuses the array on a CPU, where layouts do
    not state it; the packing is the same.
    """
    executable: Any = getattr(compiled, "_executable", None)
    layouts = getattr(executable, "_xla_in_layouts", ())  # none if compiled for devices that are not attached
    if any(getattr(layout, "sub_byte_element_size_in_bits", 0) for layout in layouts):
        executable._xla_in_layouts = [
            None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in layouts
        ]
    return compiled


def host_callbacks(function: Callable[..., Any], operands: Sequence[Any]) -> list[Callable[..., Any]]:
    """The host callbacks that a function contains: Python functions of arrays, which return tuples."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cpu",))
    return list(lowered._lowering.compile_args["host_callbacks"])


def nan_error(error: BaseException) -> FloatingPointError | None:
    """The error that `jax.jit` raises for a NaN (or infinite) result; None: `error` is another one."""
    if not isinstance(error, _InternalFloatingPointError):
        return None
    return FloatingPointError(f"invalid value ({error.ty}) encountered in {error.name}")


Direct: TypeAlias = _pxla.MeshExecutableFastpathData
"""The data with which C++ dispatches a call without Python."""
Checked: TypeAlias = Callable[..., tuple[Any, Direct | None]]
"""A call with all checks: its result, and the data to dispatch equal calls without them; None: they need the checks."""


def dispatched(
    name: str, checked: Checked, static_numbers: Sequence[int], static_names: Sequence[str]
) -> Callable[..., Any]:
    """A function that calls `checked`, until a call of the same kind has returned data for C++ dispatch.

    Profilers show it as `name`; arguments at the static positions and names are compared by value.
    """

    def first(*args: Any, **kwargs: Any) -> tuple[Any, Direct | None, bool]:
        return *checked(*args, **kwargs), False

    def always(*args: Any, **kwargs: Any) -> Any:  # under `jax.disable_jit`
        return checked(*args, **kwargs)[0]

    settings, trees = _pxla.JitGlobalCppCacheKeys(), _tree_util.dispatch_registry
    numbers, names = list(static_numbers), list(static_names)
    return _jax.pjit(name, always, first, numbers, names, settings, trees, _pxla.cc_shard_arg)


def direct_call(compiled: jax.stages.Compiled, returned: Any) -> Direct | None:
    """The data to dispatch a program in C++ on arguments with its shardings; None: it needs Python.

    The program takes the call's leaves in order, typed keys as their integers; `returned` has its results, in order, in the
    structure that the call returns.
    """
    executable = compiled._executable
    runs = executable.unsafe_call
    if runs.has_unordered_effects or runs.ordered_effects or runs.has_host_callbacks:
        return None
    leaves, tree = _tree_util.dispatch_registry.flatten(returned, None)
    if not all(isinstance(leaf, _ArrayImpl) for leaf in leaves):
        return None
    return Direct(
        xla_executable=executable.xla_executable,
        out_pytree_def=tree,
        in_shardings=executable._in_shardings,
        out_shardings=executable._out_shardings,
        out_avals=[leaf.aval for leaf in leaves],
        out_committed=[leaf._committed for leaf in leaves],
        kept_var_bitvec=[k in executable._kept_var_idx for k in range(len(jax.tree.leaves(compiled.args_info)))],
        in_device_local_layouts=executable._dispatch_in_layouts,
        const_args=[],
    )


def looks_at_numbers() -> bool:
    """Whether `jax_debug_nans` or `jax_debug_infs` is on. JAX's dispatch ignores them in a thread that has called `jnp.std`."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


def is_from_dispatch(error: BaseException) -> bool:
    """Whether an error comes from JAX's C++ dispatch itself, called where it is caught, and not from a callee."""
    trace = error.__traceback__
    return nan_error(error) is not None or (type(error) is ValueError and trace is not None and trace.tb_next is None)


def has_refused(error: BaseException) -> bool:
    """Whether dispatch refused the call before running it: an argument was donated earlier, or is passed twice."""
    return "INVALID_ARGUMENT" in str(error)

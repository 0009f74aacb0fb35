"""JAX's own dispatch, in C++: what it was once told how to do no longer passes through Python.

In:     what is to be done with a call of a new kind; a compiled program, and what it returned.
Out:    a function that is called in its place.
Method: that of `jax.jit`, whose C++ tells calls apart by structure, types, places, static arguments and settings. One that
        it knows it carries out; with any other it calls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax._src import config as _config
from jax._src import tree_util as _tree_util
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax

from autopar._jax.compiled import nan_error

Direct: TypeAlias = _pxla.MeshExecutableFastpathData
"""How a call is carried out without Python."""
Checked: TypeAlias = Callable[..., tuple[Any, Direct | None]]
"""A call with all checks: what it returns, and how others of its kind may do without."""


def dispatched(
    name: str, checked: Checked, static_numbers: Sequence[int], static_names: Sequence[str]
) -> Callable[..., Any]:
    """A function whose calls are `checked`, unless one of the same kind was before, and said how to do without.

    Profilers show it by `name`; the arguments of these positions and names are compared by value.
    """

    def first(*args: Any, **kwargs: Any) -> tuple[Any, Direct | None, bool]:
        return *checked(*args, **kwargs), False

    def always(*args: Any, **kwargs: Any) -> Any:  # under `jax.disable_jit`
        return checked(*args, **kwargs)[0]

    settings, trees = _pxla.JitGlobalCppCacheKeys(), _tree_util.dispatch_registry
    numbers, names = list(static_numbers), list(static_names)
    return _jax.pjit(name, always, first, numbers, names, settings, trees, _pxla.cc_shard_arg)


def direct_call(compiled: jax.stages.Compiled, returned: Any) -> Direct | None:
    """How a program is called without Python on arguments that lie where it wants them; None: it cannot be.

    It takes flat arguments in the order of the call's leaves, typed keys as their integers; `returned` holds its
    results in their order, in the structure of what the call returns.
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
    """Whether `jax_debug_nans` or `jax_debug_infs` is on. JAX's dispatch forgets that in a thread that has called `jnp.std`."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


def is_from_dispatch(error: BaseException) -> bool:
    """Whether JAX's dispatch, which was called where this is caught, has raised it itself, and no function that it called."""
    trace = error.__traceback__
    return nan_error(error) is not None or (type(error) is ValueError and trace is not None and trace.tb_next is None)


def has_refused(error: BaseException) -> bool:
    """Whether it did so before anything was run: of memory that was donated before, or is passed twice."""
    return "INVALID_ARGUMENT" in str(error)

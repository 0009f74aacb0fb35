"""Finds the line of the user's code that an equation comes from.

In:     an equation of any jaxpr.
Out:    `source_line(eqn)`, "train.py:123 (loss_fn)": the innermost line of the user's code; `name_scope(eqn)`.
Method: the innermost frame outside JAX, the Python standard library, installed packages and autopar; if all frames are
        inside, the innermost of an installed package. A jitted library function keeps the traceback of its *first* call,
        so `caller_traceback` tells `flatten.py` when to use the caller's instead.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from typing import Any

import jax

from autopar._jax import Jaxpr, JaxprEqn, function_file, function_name, line_of, raw_frames

UNKNOWN = "unknown line"

_AUTOPAR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_JAX = (os.path.dirname(os.path.abspath(jax.__file__)) + os.sep, os.sep + "jaxlib" + os.sep)
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TYPED = ("<stdin>", "<string>", "<ipython-input", "<doctest", "<python-input")
_STANDARD = tuple(path + os.sep for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} if path)


def source_line(eqn: JaxprEqn) -> str:
    """The user's line that made `eqn`, as "file.py:123 (function)", or "unknown line"."""
    frame = _user_frame(eqn.source_info.traceback)
    if frame is None:
        return UNKNOWN
    code, instruction = frame
    return f"{file_name(code.co_filename)}:{line_of(code, instruction)} ({code.co_qualname.split('.')[-1]})"


def file_name(path: str) -> str:
    """A short name of a source file: its name without folders; for a notebook, "cell" and the number shown beside it."""
    name = os.path.basename(path)
    typed = re.match(r"<ipython-input-(\d+)-", name)
    if typed:
        return f"cell {typed[1]}"
    if not re.search(r"ipykernel_\d+$", os.path.dirname(path)):
        return name
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(path)
    return "a cell" if number is None else f"cell {number}"


def name_scope(eqn: JaxprEqn) -> str:
    """The name stack of `eqn`, outermost first, as "transpose(jvp(layer))/attention"."""
    return str(eqn.source_info.name_stack)


def caller_traceback(body: Jaxpr, inner: object, caller: object, *, is_jit: bool) -> object:
    """The traceback to keep for an equation of `body` when the call of `body` is inlined.

    `inner`, `caller`: tracebacks of the equation and of the call. `is_jit`: whether `body` may come from an earlier call's
    trace.

    Returns:
        `inner` if it passes through the user's code within `body`, else `caller`: a library's jit is traced once, and
        the tracebacks of its equations lead to the first call only.
    """
    if inner is None:
        return caller
    file = function_file(body)
    if file is None or not is_library_file(file):
        return inner
    if _is_jax_file(file):
        if is_jit:
            return caller
        return inner if _passes_user_code_before(inner, file, function_name(body)) else caller
    return inner if _passes_user_code_before(inner, file, None) else caller


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether a source file belongs to JAX, the standard library, an installed package or autopar."""
    return _is_inner_file(path) or any(part in path for part in _INSTALLED)


@functools.cache
def _is_jax_file(path: str) -> bool:
    return path.startswith(_JAX[0]) or _JAX[1] in path


@functools.cache
def _is_inner_file(path: str) -> bool:
    """Whether a file is JAX's, the standard library's, autopar's or generated code; code typed at a prompt is the user's."""
    if path.startswith("<"):
        return not path.startswith(_TYPED)
    is_installed = any(part in path for part in _INSTALLED)
    return _is_jax_file(path) or (path.startswith((_AUTOPAR, *_STANDARD)) and not is_installed)


@functools.lru_cache(maxsize=4096)
def _user_frame(traceback: object) -> tuple[Any, int] | None:
    fallback = None
    for code, instruction in raw_frames(traceback):
        if not is_library_file(code.co_filename):
            return code, instruction
        if fallback is None and not _is_inner_file(code.co_filename):
            fallback = code, instruction
    return fallback


@functools.lru_cache(maxsize=65536)
def _passes_user_code_before(traceback: object, file: str, function: str | None) -> bool:
    for code, _ in raw_frames(traceback):
        if code.co_filename == file and function in (None, code.co_name):
            return False
        if not is_library_file(code.co_filename):
            return True
    return False

"""Where an equation comes from: the user's file, line and function.

In:     jaxprs, tracebacks as JAX keeps them.
Out:    names, files and lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jax._src import source_info_util as _source_info_util

from autopar._jax.types import Jaxpr, NameStack, SourceInfo

_DEFINED_AT = re.compile(r" at (.*):(\d+)$")


def function_file(jaxpr: Jaxpr) -> str | None:
    """The file of the function that `jaxpr` was traced from; None where JAX does not know it."""
    debug = jaxpr.debug_info
    match = _DEFINED_AT.search(debug.func_src_info) if debug and debug.func_src_info else None
    return match.group(1) if match else None


def function_name(jaxpr: Jaxpr) -> str:
    """The name of the function that `jaxpr` was traced from; "" where JAX does not know it."""
    debug = jaxpr.debug_info
    return debug.func_src_info.split(" at ")[0] if debug and debug.func_src_info else ""


def raw_frames(traceback: Any) -> Iterable[tuple[Any, int]]:
    """(code object, instruction) of each Python frame, innermost first."""
    return zip(*traceback.raw_frames(), strict=True) if traceback is not None else ()


def line_of(code: Any, instruction: int) -> int:
    """The source line of a frame of `raw_frames`."""
    return _source_info_util.raw_frame_to_frame(code, instruction).start_line


def new_source_info(traceback: Any, name_stack: NameStack) -> SourceInfo:
    """Where an equation comes from: a traceback (or None) and its name stack."""
    return SourceInfo(traceback, name_stack)

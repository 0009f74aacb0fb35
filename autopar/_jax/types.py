"""The types that a jaxpr is made of, under stable names.

In:     JAX 0.10 or 0.11.
Out:    the classes, and names for annotations.
"""

# ruff: noqa: F401
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import core as _core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.source_info_util import NameStack, SourceInfo

DropVar = _core.DropVar
Atom: TypeAlias = Var | Literal
Aval: TypeAlias = _core.ShapedArray
"""The type of a value: its shape and dtype."""
Constant: TypeAlias = jax.Array | np.ndarray
"""An array that a program captures."""
Params: TypeAlias = Mapping[str, Any]
"""Parameters of an equation; their types depend on its primitive."""
Function: TypeAlias = Callable[..., Any]
"""A function of arrays, to be traced."""

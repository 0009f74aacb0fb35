"""A function as a program: traced, whole, and of the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar._jax import Jaxpr, eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.trace.trace import trace_step


def traced(function: Callable[..., Any], *args: Any, rtol: float = 2e-5, atol: float = 1e-6) -> Jaxpr:
    """The program of a call, which gives what plain `jax.jit` gives."""
    program = trace_step(function, args)
    check_program(program.jaxpr)
    values = eval_jaxpr(program.jaxpr, (), *program.flatten_inputs(jax.tree.leaves(args)))
    actual, expected = program.unflatten_outputs(values), jax.jit(function)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), actual, expected)
    return program.jaxpr

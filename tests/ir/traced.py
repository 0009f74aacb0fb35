"""A function as a program: traced, whole, and of the same values; a program in the phases of one loop over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar._jax import Jaxpr, eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.split.microbatches.microbatch import Microbatches, check_divides, write_phases
from autopar.ir.split.microbatches.phases import find_phases
from autopar.ir.split.microbatches.waiting import SamplesWaitError
from autopar.ir.split.sorted_rows.sorted_parts import sort_in_parts
from autopar.ir.trace.trace import trace_step


def evaluate(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """The results of a program, compiled as a whole: each of its equations alone takes half as long to compile."""
    return jax.jit(lambda *args: eval_jaxpr(jaxpr, (), *args))(*args)


def traced(function: Callable[..., Any], *args: Any, rtol: float = 2e-5, atol: float = 1e-6) -> Jaxpr:
    """The program of a call, which gives what plain `jax.jit` gives."""
    program = trace_step(function, args)
    check_program(program.jaxpr)
    values = evaluate(program.jaxpr, *program.flatten_inputs(jax.tree.leaves(args)))
    actual, expected = program.unflatten_outputs(values), jax.jit(function)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), actual, expected)
    return program.jaxpr


def split_microbatches(jaxpr: Jaxpr, count: int, batch: Sequence[int], per_microbatch: bool = False) -> Microbatches:
    """A step in phases, with one loop over its microbatches and nothing made before."""
    check_divides(jaxpr, count, batch)
    jaxpr = sort_in_parts(jaxpr, 1, count)
    try:
        return write_phases(jaxpr, find_phases(jaxpr, count, batch, per_microbatch))
    except SamplesWaitError as waits:
        raise waits.error from None

"""A step in the same three phases as `microbatch.py`, with the whole batch as its only microbatch.

In:     a flat program and its batch inputs.
Out:    `Microbatches` of count 1: before, what depends on no sample and samples wait for; the loop, forward and backward;
        after, what needs gradients and is no gradient.
Method: data flow and the name stacks of `jax.grad`; a step without a backward pass is all loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar._jax import Jaxpr, Var
from autopar.ir.dataflow import feeds_backward, inputs_of
from autopar.ir.source import is_backward
from autopar.ir.split.microbatch import Microbatches, write_phases
from autopar.ir.split.placement import BY_EACH, Axis, Split
from autopar.ir.split.solution import LoopSolution


def whole_batch(jaxpr: Jaxpr, batch: Sequence[int]) -> Microbatches:
    """The phases of a step that is not split.

    Args:
        jaxpr: Flat program.
        batch: Inputs whose leading dim runs over samples.
    """
    solution = LoopSolution(Axis(1))
    solution.made.update((jaxpr.invars[k], Split(0)) for k in batch)
    behind: dict[Var, None] = {}
    for eqn, matters in zip(jaxpr.eqns, feeds_backward(jaxpr), strict=True):
        operands = inputs_of(eqn)
        solution.phase[eqn] = "before"
        if not matters and any(a in behind for a in operands):
            solution.phase[eqn] = "after"
            behind.update(dict.fromkeys(eqn.outvars))
        elif any(a in solution.made for a in operands):
            solution.phase[eqn] = "loop"
            solution.made.update(dict.fromkeys(eqn.outvars, BY_EACH))
            behind.update(dict.fromkeys(eqn.outvars if is_backward(eqn) else ()))
    return write_phases(jaxpr, solution)

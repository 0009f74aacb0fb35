"""Refuses a step that takes a gradient and returns no new value of any of its arguments.

In:     the traced program, and which of its inputs hold samples.
Out:    nothing, or `StateError` with the paths of the forgotten state.
Method: whether there is a gradient is known from the name stacks before dead code was removed. An argument is returned if all
        of its floating arrays, or a subtree of it with several, are among the results, in any containers and dtype. Of
        single-array arguments only the first counts: others may be samples of which the step returns a reconstruction, or
        a learning rate, a scalar like the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import jax.numpy as jnp

from autopar._jax import Aval
from autopar.errors import StateError, listed
from autopar.ir.program import Program
from autopar.ir.trace.state import argument_slices, subtrees

MAX_PATHS = 4


def check_trains(program: Program, batch: Collection[int]) -> None:
    """Check that a step that takes a gradient returns some new state.

    `batch`: input leaves that hold samples, as far as is known.

    Raises `StateError`: it returns no new value of any argument.
    """
    if not program.gradient:
        return
    spans = [span for span in argument_slices(program) if any(map(_is_floating, program.in_avals[slice(*span)]))]
    spans = [(a, b) for a, b in spans if b - a > 1 or (a == spans[0][0] and program.in_avals[a].ndim)] or spans
    if not spans or any(_comes_back(program, span) for span in spans):
        return
    if spans[0][0] not in batch:  # else it was taken for the batch only because nothing is returned
        spans = [span for span in spans if span[0] not in batch]
    paths = tuple(program.in_paths[k] for a, b in spans for k in range(a, b) if _is_floating(program.in_avals[k]))
    given, returned = listed(paths, MAX_PATHS), listed(program.out_paths, MAX_PATHS) or "nothing"
    raise StateError(
        f"`{program.name}` trains nothing: it takes a gradient, and no argument comes back.",
        given=f"{given} go in; {returned} comes out. The gradient is that of {program.gradient}.",
        wrong="a step changes nothing in place: what it does not return is lost, and the next call begins where this one "
        "did.",
        do="return what was updated, parameters and optimizer state, in the structure in which it was passed. If the "
        "gradient itself is the result and nothing is to be trained, say so with donate_argnums=().",
        paths=paths,
    )


def _is_floating(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _comes_back(program: Program, span: tuple[int, int]) -> bool:
    """Whether an argument, or a subtree of it, is among the results."""
    wanted = _shapes(program.in_avals[slice(*span)])
    if not wanted - _shapes(program.out_avals):
        return True
    returned = {kind for kind, a, b in subtrees(program.out_tree, program.out_avals) if b - a > 1}
    given = subtrees(program.in_tree, program.in_avals)
    return any(kind in returned for kind, a, b in given if b - a > 1 and span[0] <= a and b <= span[1])


def _shapes(avals: Sequence[Aval]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(a.shape) for a in avals if _is_floating(a))

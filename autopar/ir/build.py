"""Writing programs: equations of a program, or of a small function of ours, over other variables.

In:     a flat program, or a function and operands.
Out:    equations, and what the results are.
Method: the walk of `flatten.py`, so that what is known of operands that are literals is computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopar._jax import (
    Atom,
    Aval,
    Function,
    Jaxpr,
    JaxprEqn,
    NameStack,
    SourceInfo,
    make_jaxpr,
    new_var,
    open_jaxpr,
    trace,
)
from autopar.ir.trace.flatten import flatten
from autopar.ir.trace.inline_calls import Block, Walk, append_flat, append_function


def flat_function(function: Function, *avals: Aval | jax.ShapeDtypeStruct) -> Jaxpr:
    """A small function of ours, at these types, as a flat program. It may hold no arrays."""
    flat, consts = flatten(*open_jaxpr(trace(function, *avals)))
    assert not consts, f"{len(consts)} arrays are held by a function of ours"
    return flat


def inline_function(
    function: Function, operands: Sequence[Atom], source: SourceInfo | None = None
) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a small function of ours on these operands, and what its results are."""
    walk = _walk_at(source)
    results = append_function(walk, function, operands)
    assert not walk.block.captured, "arrays are held by a function of ours"
    return walk.block.eqns, results


def inline(
    jaxpr: Jaxpr, operands: Sequence[Atom], source: SourceInfo | None = None
) -> tuple[list[JaxprEqn], list[Atom]]:
    """A copy of a flat program's equations, over fresh variables, with `operands` for its invars.

    Args:
        jaxpr: Flat program.
        operands: One per invar.
        source: Source information that all of the equations get; None: none.

    Returns:
        The equations, and what the program's results are.
    """
    walk = _walk_at(source)
    return walk.block.eqns, append_flat(walk, jaxpr, (), operands)


def substitute(jaxpr: Jaxpr, operands: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The same, where each equation keeps its own source."""
    walk = Walk(Block(), NameStack(), flatten)
    return walk.block.eqns, append_flat(walk, jaxpr, (), operands)


def renamed(jaxpr: Jaxpr) -> Jaxpr:
    """A flat program over variables of its own."""
    invars = [new_var(var.aval) for var in jaxpr.invars]
    eqns, outvars = substitute(jaxpr, invars)
    return make_jaxpr(invars, outvars, eqns)


def _walk_at(source: SourceInfo | None) -> Walk:
    traceback, scope = (source.traceback, source.name_stack) if source is not None else (None, NameStack())
    return Walk(Block(), scope, flatten, lambda _: traceback)

"""Writing programs: equations of a program, or of a small function of ours, over other variables.

In:     a flat program, or a function and operands.
Out:    `Equations`, to which they are added; what the results are.
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
    Var,
    make_jaxpr,
    new_eqn,
    new_var,
    open_jaxpr,
    primitives,
    replace_eqn,
    trace,
)
from autopar.ir.region import Binding, Region, in_bodies
from autopar.ir.trace.flatten import flatten
from autopar.ir.trace.inline_calls import Block, Walk, append_flat, append_function


class Equations(list[JaxprEqn]):
    """Equations of a program that is being written. What is called is written behind them, and what it makes is returned.

    `operands` are one for each argument. `source`: where all of what is written comes from; None: that is not told.
    """

    def call(self, function: Function, operands: Sequence[Atom], source: SourceInfo | None = None) -> list[Atom]:
        """A small function of ours; its results."""
        walk = self._walk(source)
        results = append_function(walk, function, operands)
        assert not walk.block.captured, "arrays are held by a function of ours"
        return results

    def call_one(self, function: Function, operands: Sequence[Atom], source: SourceInfo | None = None) -> Atom:
        """A small function of ours with one result."""
        (result,) = self.call(function, operands, source)
        return result

    def define(
        self, var: Var, function: Function, operands: Sequence[Atom], source: SourceInfo | None = None
    ) -> JaxprEqn:
        """A function of ours that is one operation, which makes this variable."""
        self.call(function, operands, source)
        self[-1] = replace_eqn(self[-1], outvars=[var])
        return self[-1]

    def name(self, var: Var, atom: Atom, source: SourceInfo | None = None) -> JaxprEqn:
        """A copy, which makes this variable of what was made under another name; flattening drops it."""
        self.append(new_eqn(primitives.copy_p, [atom], [var], {}, source_info=source))
        return self[-1]

    def inline(self, jaxpr: Jaxpr, operands: Sequence[Atom], source: SourceInfo | None = None) -> list[Atom]:
        """A copy of a flat program, over fresh variables; its results."""
        return append_flat(self._walk(source), jaxpr, (), operands)

    def substitute(self, jaxpr: Jaxpr, operands: Sequence[Atom]) -> list[Atom]:
        """The same, where each equation keeps its own source."""
        return append_flat(Walk(Block(self), NameStack(), flatten), jaxpr, (), operands)

    def _walk(self, source: SourceInfo | None) -> Walk:
        traceback, scope = (source.traceback, source.name_stack) if source is not None else (None, NameStack())
        return Walk(Block(self), scope, flatten, lambda _: traceback)


def flat_function(function: Function, *avals: Aval | jax.ShapeDtypeStruct) -> Jaxpr:
    """A small function of ours, at these types, as a flat program. It may hold no arrays."""
    flat, consts = flatten(*open_jaxpr(trace(function, *avals)))
    assert not consts, f"{len(consts)} arrays are held by a function of ours"
    return flat


def renamed(jaxpr: Jaxpr) -> Jaxpr:
    """A flat program over variables of its own."""
    eqns, invars = Equations(), [new_var(var.aval) for var in jaxpr.invars]
    return make_jaxpr(invars, eqns.substitute(jaxpr, invars), eqns)


def rebuilt_apart(region: Region, bindings: Sequence[Binding], equations: Sequence[Sequence[JaxprEqn]]) -> JaxprEqn:
    """The region of these bindings and equations, whose bodies have variables of their own."""
    return in_bodies(region.rebuild(bindings, equations), renamed)

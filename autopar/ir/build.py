"""Builds programs: appends the equations of a flat program, or of a small function, over given operands.

In:     a flat program or a Python function, and its operands.
Out:    `Equations`, the list that the new equations are appended to; the atoms that hold the results.
Method: the walk of `flatten.py`, which folds constants: what depends on literals alone is computed at once.
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
    """The equations of a program under construction; each method appends to them.

    `operands`: one per argument. `source`: the source location that all appended equations get; None: they get none.
    """

    def call(self, function: Function, operands: Sequence[Atom], source: SourceInfo | None = None) -> list[Atom]:
        """Trace a function at these operands and append its equations; its results."""
        walk = self._walk(source)
        results = append_function(walk, function, operands)
        assert not walk.block.captured, "a function of ours captures arrays"
        return results

    def call_one(self, function: Function, operands: Sequence[Atom], source: SourceInfo | None = None) -> Atom:
        """As `call`, for a function with one result."""
        (result,) = self.call(function, operands, source)
        return result

    def define(
        self, var: Var, function: Function, operands: Sequence[Atom], source: SourceInfo | None = None
    ) -> JaxprEqn:
        """Append a function that is a single operation, with `var` as its result."""
        self.call(function, operands, source)
        self[-1] = replace_eqn(self[-1], outvars=[var])
        return self[-1]

    def name(self, var: Var, atom: Atom, source: SourceInfo | None = None) -> JaxprEqn:
        """Append a copy of `atom` to `var`; flattening drops such copies."""
        self.append(new_eqn(primitives.copy_p, [atom], [var], {}, source_info=source))
        return self[-1]

    def inline(self, jaxpr: Jaxpr, operands: Sequence[Atom], source: SourceInfo | None = None) -> list[Atom]:
        """Append a copy of a flat program with fresh variables; its results."""
        return append_flat(self._walk(source), jaxpr, (), operands)

    def substitute(self, jaxpr: Jaxpr, operands: Sequence[Atom]) -> list[Atom]:
        """As `inline`, but each equation keeps its own source location."""
        return append_flat(Walk(Block(self), NameStack(), flatten), jaxpr, (), operands)

    def _walk(self, source: SourceInfo | None) -> Walk:
        traceback, scope = (source.traceback, source.name_stack) if source is not None else (None, NameStack())
        return Walk(Block(self), scope, flatten, lambda _: traceback)


def flat_function(function: Function, *avals: Aval | jax.ShapeDtypeStruct) -> Jaxpr:
    """Trace a function at these types to a flat program; it may capture no arrays."""
    flat, consts = flatten(*open_jaxpr(trace(function, *avals)))
    assert not consts, f"a function of ours captures {len(consts)} arrays"
    return flat


def renamed(jaxpr: Jaxpr) -> Jaxpr:
    """A copy of a flat program with fresh variables."""
    eqns, invars = Equations(), [new_var(var.aval) for var in jaxpr.invars]
    return make_jaxpr(invars, eqns.substitute(jaxpr, invars), eqns)


def rebuilt_apart(region: Region, bindings: Sequence[Binding], equations: Sequence[Sequence[JaxprEqn]]) -> JaxprEqn:
    """As `region.rebuild`, with fresh variables in the bodies, so that several regions may be built from one body."""
    return in_bodies(region.rebuild(bindings, equations), renamed)

"""Tells whether two values are computed alike, where some values of one may stand for anything.

In:     pairs of values, the equations that make them, and which of the first values stand for anything.
Out:    for each value that the first one of a pair depends on, the value that stands in its place; None: they differ.
Method: unification, back along the defining equations. Equations are the same operation if their signatures are equal, loops
        and branches if their programs are (`signature.py`). Slices and reshapes are compared by the elements that they take.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from autopar._jax import Atom, JaxprEqn, Literal, Var, make_jaxpr
from autopar.ir.dataflow import inputs_of
from autopar.ir.region import is_region
from autopar.ir.signature import canonical_key, equation_signature


class Piece(NamedTuple):
    """Elements of an array that follow one another, row by row: from `first` on, in the given shape."""

    of: Atom
    first: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def piece_of(atom: Atom, made_by: Mapping[Var, JaxprEqn], rows: Mapping[Var, Piece] | None = None) -> Piece:
    """The elements that a value takes, of the first array from which only slices and reshapes lead to it.

    `rows`: values that are given as pieces.
    """
    shape, first = tuple(atom.aval.shape), 0
    while isinstance(atom, Var):
        if rows is not None and atom in rows:
            first, atom = first + rows[atom].first, rows[atom].of
            continue
        eqn = made_by.get(atom)
        offset = None if eqn is None else _offset(eqn)
        if eqn is None or offset is None:
            break
        first, atom = first + offset, eqn.invars[0]
    return Piece(atom, first, shape)


def _offset(eqn: JaxprEqn) -> int | None:
    """The first element of its operand that an equation takes, if it takes elements that follow one another; else None."""
    match eqn.primitive.name:
        case "squeeze" | "expand_dims":
            return 0
        case "reshape" if eqn.params["dimensions"] is None and len(eqn.invars) == 1:
            return 0
    bounds = slice_bounds(eqn)
    if bounds is None:
        return None
    starts, sizes = bounds
    whole = eqn.invars[0].aval.shape
    first = next((d for d, size in enumerate(sizes) if size > 1), len(sizes))
    if tuple(sizes[first + 1 :]) != tuple(whole[first + 1 :]):
        return None
    return sum(start * math.prod(whole[d + 1 :]) for d, start in enumerate(starts))


def slice_bounds(eqn: JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where a slice with known bounds and no strides begins, and its sizes; None: the equation is none."""
    match eqn.primitive.name:
        case "slice" if set(eqn.params["strides"] or (1,)) == {1}:
            return tuple(eqn.params["start_indices"]), tuple(eqn.outvars[0].aval.shape)
        case "dynamic_slice" if all(isinstance(a, Literal) for a in eqn.invars[1:]):
            starts, sizes = tuple(int(a.val) for a in eqn.invars[1:]), tuple(eqn.params["slice_sizes"])
            within = zip(starts, sizes, eqn.invars[0].aval.shape, strict=True)
            return (starts, sizes) if all(0 <= start <= whole - size for start, size, whole in within) else None
    return None


def unified(
    pairs: Iterable[tuple[Atom, Atom]],
    made_by: Mapping[Var, JaxprEqn],
    any_value: Collection[Var],
    rows: Mapping[Var, Piece],
) -> dict[Var, Atom] | None:
    """What stands for each value that the first ones of the pairs depend on; None: a pair is computed in different ways.

    Args:
        pairs: Values, each with what may stand for it.
        made_by: The equations that make either.
        any_value: First values for which anything may stand, as long as it is one thing.
        rows: First values that are pieces of others.
    """
    stands_for: dict[Var, Atom] = {}
    waiting = list(pairs)
    while waiting:
        value, other = waiting.pop()
        if value is other:
            continue
        if value.aval.shape != other.aval.shape or value.aval.dtype != other.aval.dtype:
            return None
        if isinstance(value, Literal):
            if not isinstance(other, Literal) or str(value.val) != str(other.val):
                return None
            continue
        if value in stands_for:
            if stands_for[value] is not other:
                return None
            continue
        stands_for[value] = other
        if value in any_value:
            continue
        more = _operands(value, other, made_by, rows)
        if more is None:
            return None
        waiting += more
    return stands_for


def _operands(
    value: Var, other: Atom, made_by: Mapping[Var, JaxprEqn], rows: Mapping[Var, Piece]
) -> list[tuple[Atom, Atom]] | None:
    """What must be equal for `value` and `other` to be; None: they are made by different operations."""
    taken, given = piece_of(value, made_by, rows), piece_of(other, made_by)
    if taken.of is not value and given.of is not other:
        return [(taken.of, given.of)] if taken.first == given.first else None
    eqn, match = made_by.get(value), made_by.get(other) if isinstance(other, Var) else None
    if eqn is None or match is None or len(eqn.invars) != len(match.invars):
        return None
    if eqn.outvars.index(value) != match.outvars.index(other):
        return None
    bounds = slice_bounds(eqn)
    if bounds is not None and bounds == slice_bounds(match):
        return [(eqn.invars[0], match.invars[0])]
    return list(zip(eqn.invars, match.invars, strict=True)) if _operation(eqn) == _operation(match) else None


def _operation(eqn: JaxprEqn) -> object:
    """A key, equal for equations that are the same operation."""
    if not is_region(eqn):
        return equation_signature(eqn)
    return canonical_key(make_jaxpr(list(dict.fromkeys(inputs_of(eqn))), eqn.outvars, [eqn]))

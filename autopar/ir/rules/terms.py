"""The small parts from which rules are written: fresh terms, and terms without the factors of length 1.

In:     shapes.
Out:    `Term`s, in which a dim of length 1 is `()`, so that a factor always is something to split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.ir.rules.rule import Factor, Term


def new_term(shape: Sequence[int], fresh: Iterator[Factor]) -> Term:
    """A fresh factor for each dim; a dim of length 1 has none."""
    return tuple(() if size == 1 else (next(fresh),) for size in shape)


def sizes_of(term: Term, shape: Sequence[int]) -> dict[Factor, int]:
    """Length of each factor of a term without compound dims."""
    return {dim[0]: size for dim, size in zip(term, shape, strict=True) if dim}


def drop_units(terms: Sequence[Term], sizes: Mapping[Factor, int]) -> list[Term]:
    """The terms without the factors of length 1."""
    return [tuple(tuple(factor for factor in dim if sizes[factor] != 1) for dim in term) for term in terms]


def factors_of(*terms: Term) -> tuple[Factor, ...]:
    """The factors that stand in any of the terms, in order of appearance."""
    return tuple(dict.fromkeys(factor for term in terms for dim in term for factor in dim))

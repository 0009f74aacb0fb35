"""Helpers for writing rules: fresh terms, terms without factors of length 1, and a rule from terms.

In:     shapes; an equation, and terms for its operands and results.
Out:    `Term`s, in which a dim of length 1 is `()`, so that every factor can be split; `rule_of`, a rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from autopar._jax import JaxprEqn
from autopar.ir.rules.linearity import linear_groups
from autopar.ir.rules.rule import Factor, ShardingRule, Term, factor_names


def new_term(shape: Sequence[int], fresh: Iterator[Factor] | None = None) -> Term:
    """A term with a fresh factor for each dim; a dim of length 1 has none."""
    fresh = factor_names() if fresh is None else fresh
    return tuple(() if size == 1 else (next(fresh),) for size in shape)


def rule_of(
    eqn: JaxprEqn,
    operands: Sequence[Term],
    results: Sequence[Term],
    linear: Sequence[tuple[int, ...]] = (),
    sizes: Mapping[Factor, int] | None = None,
    **facts: Any,
) -> ShardingRule:
    """The rule of an equation with these terms.

    Args:
        operands: Terms of its first operands; the others are scalars.
        results: Terms of its results; a single one is that of all results.
        linear: Groups of operands in which it is mathematically linear, whatever the dtypes.
        sizes: Lengths of all factors; None: each is alone in some dim, whose length it has.
        facts: Other fields of `ShardingRule`.
    """
    operands = (*operands, *((),) * (len(eqn.invars) - len(operands)))
    results = tuple(results) * (len(eqn.outvars) if len(results) == 1 else 1)
    if sizes is None:
        sizes, pairs = {}, zip((*eqn.invars, *eqn.outvars), (*operands, *results), strict=True)
        for atom, term in pairs:
            sizes |= lengths_of(term, atom.aval.shape)
    return ShardingRule(operands, results, sizes, linear=linear_groups(eqn, *linear), **facts)


def lengths_of(term: Term, shape: Sequence[int]) -> dict[Factor, int]:
    """The lengths of the factors that are alone in a dim."""
    return {dim[0]: size for dim, size in zip(term, shape, strict=True) if len(dim) == 1}


def without(term: Term, *dims: Collection[int]) -> Term:
    """The term without these dims."""
    return tuple(dim for d, dim in enumerate(term) if not any(d in some for some in dims))


def drop_units(terms: Sequence[Term], sizes: Mapping[Factor, int]) -> tuple[list[Term], dict[Factor, int]]:
    """The terms without the factors of length 1, and the lengths of the others."""
    kept = {factor: size for factor, size in sizes.items() if size != 1}
    return [tuple(tuple(factor for factor in dim if factor in kept) for dim in term) for term in terms], kept


def factors_of(*terms: Term) -> tuple[Factor, ...]:
    """The factors of the terms, in order of appearance."""
    return tuple(dict.fromkeys(factor for term in terms for dim in term for factor in dim))

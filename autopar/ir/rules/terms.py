"""The small parts from which rules are written: fresh terms, terms without the factors of length 1, and the rule of terms.

In:     shapes; an equation, and terms for its operands and results.
Out:    `Term`s, in which a dim of length 1 is `()`, so that a factor always is something to split; `rule_of` terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar._jax import JaxprEqn
from autopar.ir.rules.linearity import linear_groups
from autopar.ir.rules.rule import Factor, ShardingRule, Term, factor_names


def new_term(shape: Sequence[int], fresh: Iterator[Factor] | None = None) -> Term:
    """A fresh factor for each dim; a dim of length 1 has none."""
    fresh = factor_names() if fresh is None else fresh
    return tuple(() if size == 1 else (next(fresh),) for size in shape)


def sizes_of(term: Term, shape: Sequence[int]) -> dict[Factor, int]:
    """Length of each factor that stands alone in a dim of a term."""
    return {dim[0]: size for dim, size in zip(term, shape, strict=True) if len(dim) == 1}


def rule_of(
    eqn: JaxprEqn,
    operands: Sequence[Term],
    results: Sequence[Term],
    linear: Sequence[tuple[int, ...]] = (),
    sizes: Mapping[Factor, int] | None = None,
    **facts: Any,
) -> ShardingRule:
    """The rule of an equation in these terms.

    Args:
        operands: Terms of its first operands; the others are scalars.
        results: Terms of its results; one stands for all of them.
        linear: Groups of operands in which it is linear, whatever the dtypes.
        sizes: Of all factors; None: each stands alone in some dim, whose length it is.
        facts: What else a `ShardingRule` says.
    """
    operands = (*operands, *((),) * (len(eqn.invars) - len(operands)))
    results = tuple(results) * (len(eqn.outvars) if len(results) == 1 else 1)
    if sizes is None:
        sizes, pairs = {}, zip((*eqn.invars, *eqn.outvars), (*operands, *results), strict=True)
        for atom, term in pairs:
            sizes |= sizes_of(term, atom.aval.shape)
    return ShardingRule(operands, results, sizes, linear=linear_groups(eqn, *linear), **facts)


def drop_units(terms: Sequence[Term], sizes: Mapping[Factor, int]) -> list[Term]:
    """The terms without the factors of length 1."""
    return [tuple(tuple(factor for factor in dim if sizes[factor] != 1) for dim in term) for term in terms]


def factors_of(*terms: Term) -> tuple[Factor, ...]:
    """The factors that stand in any of the terms, in order of appearance."""
    return tuple(dict.fromkeys(factor for term in terms for dim in term for factor in dim))

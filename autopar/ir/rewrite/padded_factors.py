"""Chooses which operations are padded: matrix products over a length that does not divide, and operations between them.

In:     a flat program, and for some lengths of its products' factors the padded lengths.
Out:    for each equation its rule and the factors that are padded.
Method: propagate from the products along factors, to operands and readers, through every operation that tolerates garbage in
        the tail: it works on each index by itself, or reduces what a mask leaves. Then leave out what does not pay: an
        operation keeps the user's length if only its readers are padded (a cast of weights, norms before the first
        product), or if it reads state and leads to no product (the optimizer). An operation without operands (positions,
        random bits, zeros) follows its readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal as Choice

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var
from autopar.grouping import grouped
from autopar.ir.dataflow import inputs_of
from autopar.ir.region import kind_of
from autopar.ir.rewrite.tails import Tail
from autopar.ir.rules.elementwise import passed_through
from autopar.ir.rules.registry import family_of, rule_for
from autopar.ir.rules.rule import Factor, ShardingRule, Term

_FAMILIES = ("elementwise", "indexing", "movement", "reductions", "reshape", "scatter")
"""Rule files whose operations work on arrays of any length."""
_PLACED = ("sharding_constraint", "layout_constraint", "device_put", "dynamic_update_slice")
"""Primitives of those files that do not, or that refer to the user's own shape."""
_Kind = Choice["padded", "as it is", "either"]
_Node = tuple[int, Factor]
"""(number of an equation, one of its factors)."""


@dataclass(frozen=True, slots=True, eq=False)
class PaddedFactors:
    """One equation's rule, None if the equation cannot be padded, and its padded factors with their tails."""

    rule: ShardingRule | None
    tails: Mapping[Factor, Tail]


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product, the work that padding is for."""
    return eqn.primitive.name == "dot_general"


def padded_factors(jaxpr: Jaxpr, lengths: Mapping[int, int]) -> list[PaddedFactors]:
    """For each equation of one body, the factors that are padded.

    `jaxpr`: flat program; its inner bodies are not looked at.
    `lengths`: length of a product's factor -> padded length.
    """
    reach = _Reach(jaxpr)
    for k, eqn in enumerate(jaxpr.eqns):
        if is_product(eqn):
            rule = reach.rules[k]
            assert rule is not None, "products have a rule"
            for factor, size in rule.sizes.items():
                if size in lengths:
                    reach.add(k, factor, Tail(1, size, lengths[size], 1))
    reach.spread()
    return reach.chosen()


@dataclass(slots=True)
class _Reach:
    """The factors that can be padded, propagated from those of the products.

    Attributes:
        found: For each equation, its factors that can be padded.
        places: For each variable, its dims that can be padded.
        waiting: Worklist of (variable, dim) to propagate.
    """

    jaxpr: Jaxpr
    rules: list[ShardingRule | None] = field(init=False)
    made_by: dict[Var, int] = field(init=False)
    readers: dict[Var, list[int]] = field(init=False)
    found: list[dict[Factor, Tail]] = field(init=False)
    places: dict[Var, dict[int, Tail]] = field(default_factory=dict)
    waiting: list[tuple[Var, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        eqns = self.jaxpr.eqns
        self.rules = [_rule_here(eqn) for eqn in eqns]
        self.found = [{} for _ in eqns]
        self.made_by = {var: k for k, eqn in enumerate(eqns) for var in eqn.outvars}
        self.readers = grouped((var, k) for k, eqn in enumerate(eqns) for var in dict.fromkeys(inputs_of(eqn)))

    def add(self, k: int, factor: Factor, tail: Tail) -> None:
        """Pad a factor of an equation, if it can be, and the dims in which the factor occurs."""
        rule = self.rules[k]
        if rule is None or factor in self.found[k] or not _can_be_padded(self.jaxpr.eqns[k], rule, factor, tail):
            return
        eqn = self.jaxpr.eqns[k]
        stands = [*_stands_in(eqn.invars, rule.operands, factor), *_stands_in(eqn.outvars, rule.results, factor)]
        if any(other in dim for _, _, dim in stands for other in self.found[k]):
            return  # a dim has at most one padded factor
        self.found[k][factor] = tail
        for var, place, dim in stands:
            known = self.places.setdefault(var, {})
            if place not in known:
                known[place] = tail.of_dim(dim, factor, rule.sizes)
                self.waiting.append((var, place))

    def spread(self) -> None:
        """Propagate to the equation that defines each padded dim and to its readers, until nothing changes."""
        while self.waiting:
            var, place = self.waiting.pop()
            tail = self.places[var][place]
            around = [*([self.made_by[var]] if var in self.made_by else []), *self.readers.get(var, ())]
            for k in around:
                for term in self._terms(k, var):
                    for factor in term[place]:
                        part = tail.of_factor(term[place], factor, self._sizes(k))
                        if part is not None:
                            self.add(k, factor, part)

    def _terms(self, k: int, var: Var) -> Iterator[Term]:
        rule, eqn = self.rules[k], self.jaxpr.eqns[k]
        if rule is not None:
            pairs = (*zip(eqn.invars, rule.operands, strict=True), *zip(eqn.outvars, rule.results, strict=True))
            yield from (term for atom, term in pairs if atom is var)

    def _sizes(self, k: int) -> Mapping[Factor, int]:
        rule = self.rules[k]
        return {} if rule is None else rule.sizes

    def chosen(self) -> list[PaddedFactors]:
        """For each equation, the factors that are padded: of those that can be, the ones that pay."""
        eqns, (sources, readers) = self.jaxpr.eqns, self._links()
        leads: dict[_Node, bool] = {}
        for node in reversed(sources):
            leads[node] = any(is_product(eqns[reader[0]]) or leads[reader] for reader in readers[node])
        kinds: dict[_Node, _Kind] = {}
        for node in sources:
            given = [kinds[source] if source is not None else "as it is" for source in sources[node]]
            if is_product(eqns[node[0]]):
                kinds[node] = "padded"
            elif all(kind == "either" for kind in given):
                kinds[node] = "either"
            else:
                pays = "padded" in given and (leads[node] or "as it is" not in given)
                kinds[node] = "padded" if pays else "as it is"
        for node in reversed(sources):
            if kinds[node] == "either" and any(kinds[reader] == "padded" for reader in readers[node]):
                kinds[node] = "padded"
        return [
            PaddedFactors(rule, {factor: tail for factor, tail in found.items() if kinds[k, factor] == "padded"})
            for k, (rule, found) in enumerate(zip(self.rules, self.found, strict=True))
        ]

    def _links(self) -> tuple[dict[_Node, list[_Node | None]], dict[_Node, list[_Node]]]:
        """For each factor that can be padded, the factors of the equations that define and that read its dims.

        None among the sources: such a dim comes from an equation that is not padded.
        """
        made_as: dict[tuple[Var, int], _Node] = {}
        sources: dict[_Node, list[_Node | None]] = {}
        readers: dict[_Node, list[_Node]] = {}
        for k, (eqn, rule, found) in enumerate(zip(self.jaxpr.eqns, self.rules, self.found, strict=True)):
            for factor, tail in found.items():
                assert rule is not None, "without a rule nothing is padded"
                node, readers[k, factor] = (k, factor), []
                stands = _stands_in(eqn.invars, rule.operands, factor)
                sources[node] = [made_as.get((var, place)) for var, place, _ in stands]
                for source in dict.fromkeys(sources[node]):
                    if source is not None:
                        readers[source].append(node)
                for var, place, dim in _stands_in(eqn.outvars, rule.results, factor):
                    if self.places[var][place] == tail.of_dim(dim, factor, rule.sizes):
                        made_as[var, place] = node
        return sources, readers


def _rule_here(eqn: JaxprEqn) -> ShardingRule | None:
    if kind_of(eqn) == "barrier":
        return passed_through(eqn)
    known = is_product(eqn) or family_of(eqn.primitive) in _FAMILIES
    return rule_for(eqn) if known and eqn.primitive.name not in _PLACED else None


def _stands_in(
    atoms: Sequence[Atom], terms: Sequence[Term], factor: Factor
) -> Iterator[tuple[Var, int, tuple[Factor, ...]]]:
    """The variables, positions and factors of the dims in which a factor occurs."""
    for atom, term in zip(atoms, terms, strict=True):
        for place, dim in enumerate(term):
            if factor in dim and isinstance(atom, Var):
                yield atom, place, dim


def is_searched(eqn: JaxprEqn, rule: ShardingRule, factor: Factor) -> bool:
    """Whether single elements along a factor are read by index."""
    return factor in rule.one_hot and eqn.primitive.name == "gather"


def _can_be_padded(eqn: JaxprEqn, rule: ShardingRule, factor: Factor, tail: Tail) -> bool:
    """Whether garbage in a factor's tail stays in tails, or a mask can keep it out of a reduction."""
    if factor in rule.whole or factor in rule.accumulators:
        return False
    if is_searched(eqn, rule, factor):
        return tail.outer == 1 == tail.inner
    if factor in rule.summed:
        return eqn.primitive.name in ("dot_general", "reduce_sum")
    if factor in rule.reduced:
        return family_of(eqn.primitive) == "reductions"
    return True

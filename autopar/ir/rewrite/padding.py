"""Pads dims whose length does not divide: a vocabulary of 50257 tokens becomes 50264, which eight devices split.

In:     a flat program, and for some lengths of its products' factors the padded lengths.
Out:    the same function of the same arguments: products and operations between them (`padded_factors.py`) on padded dims.
Method: an operation on padded operands is its rule's local program for a shard longer than the whole. Its result is garbage
        in the tail. Before a sum or a maximum over a padded dim a mask fills the tail with the identity of the reduction,
        unless it is known to be zeros; indices are kept out of the tail; and all other readers get the value cut to the
        user's length. The planner then shards and prices the program like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, SourceInfo, Var, bind_eqn, make_jaxpr, new_var, replace_eqn
from autopar.ir.build import Equations
from autopar.ir.region import in_bodies, kind_of
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rewrite.padded_factors import PaddedFactors, is_searched, padded_factors
from autopar.ir.rewrite.tails import Tail, Tails, cut, fill_tails, lengthen
from autopar.ir.rules.linearity import identity_of
from autopar.ir.rules.locate import signed
from autopar.ir.rules.rule import Factor, Shard, ShardingRule, Term


def pad_dims(jaxpr: Jaxpr, lengths: Mapping[int, int]) -> Jaxpr:
    """Pad dims along the factors of products that have these lengths; over the same inputs.

    `lengths`: length of a product's factor -> padded length.
    """
    return remove_dead_code(_pad_body(jaxpr, lengths))


def _pad_body(jaxpr: Jaxpr, lengths: Mapping[int, int]) -> Jaxpr:
    writer = _Writer()
    for eqn, padded in zip(jaxpr.eqns, padded_factors(jaxpr, lengths), strict=True):
        if padded.tails and padded.rule is not None:
            writer.padded(eqn, padded)
        else:
            writer.as_it_is(eqn, lengths)
    outvars = [writer.form(atom, {}, writer.source_of.get(atom)).atom for atom in jaxpr.outvars]
    if len(writer.eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(writer.eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return make_jaxpr(jaxpr.invars, outvars, writer.eqns)


@dataclass(frozen=True, slots=True)
class _Long(Shard):
    """A shard with all of every factor, and a tail behind some: `lengths`, the padded ones."""

    lengths: Mapping[Factor, int] = field(default_factory=dict)

    def local_size(self, factor: Factor) -> int:
        return self.lengths.get(factor, self.sizes[factor])


@dataclass(frozen=True, slots=True)
class _Form:
    """A padded value: its variable, the tails of its padded dims, and the dims whose tails are zeros."""

    atom: Atom
    tails: Tails
    zeros: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Writer:
    """The padded program under construction, and the forms that exist of each value of the user's program.

    Attributes:
        made: The form in which each value was computed.
        forms: Other forms that were needed: by the value and the tails.
        filled: Masked operands: by the value, the dims and the fill.
        source_of: The source location of each computed value.
    """

    eqns: Equations = field(default_factory=Equations)
    made: dict[Atom, _Form] = field(default_factory=dict)
    forms: dict[tuple[Var, tuple[tuple[int, Tail], ...]], _Form] = field(default_factory=dict)
    filled: dict[tuple[Atom, tuple[int, ...], object], Atom] = field(default_factory=dict)
    source_of: dict[Atom, SourceInfo] = field(default_factory=dict)

    def as_it_is(self, eqn: JaxprEqn, lengths: Mapping[int, int]) -> None:
        """Write an equation on the user's shapes; its bodies are padded by themselves."""
        operands = [self.form(atom, {}, eqn.source_info).atom for atom in eqn.invars]
        eqn = in_bodies(eqn, lambda body: _pad_body(body, lengths))
        same = all(a is b for a, b in zip(operands, eqn.invars, strict=True))
        self.eqns.append(eqn if same else replace_eqn(eqn, invars=operands))

    def padded(self, eqn: JaxprEqn, padded: PaddedFactors) -> None:
        """Write an equation on padded operands."""
        rule, tails = padded.rule, padded.tails
        assert rule is not None, "without a rule nothing is padded"
        wanted = [_of_term(term, rule, tails) for term in rule.operands]
        given = [self.form(a, w, eqn.source_info) for a, w in zip(eqn.invars, wanted, strict=True)]
        operands = [self.masked(form, term, rule, tails, eqn) for form, term in zip(given, rule.operands, strict=True)]
        results = [_of_term(term, rule, tails) for term in rule.results]
        if kind_of(eqn) == "barrier":
            made: list[Atom] = [new_var(atom.aval) for atom in operands]
            self.eqns.append(replace_eqn(eqn, invars=operands, outvars=made))
            zeros = [form.zeros for form in given]
        else:
            made = self.run(eqn, rule, tails, operands)
            zeros = [_zeros_behind(given, rule, term) for term in rule.results]
        for var, atom, where, known in zip(eqn.outvars, made, results, zeros, strict=True):
            self.made[var] = _Form(atom, where, known & frozenset(where))
            self.source_of[var] = eqn.source_info

    def run(
        self, eqn: JaxprEqn, rule: ShardingRule, tails: Mapping[Factor, Tail], operands: Sequence[Atom]
    ) -> list[Atom]:
        """Write the operation on padded operands; its results."""
        shard = _Long({}, {}, rule.sizes, {factor: tail.length for factor, tail in tails.items()})
        searched = {f: tail for f, tail in tails.items() if is_searched(eqn, rule, f)}

        def program(*arrays: jax.Array) -> Sequence[jax.Array]:
            if searched:
                columns = {d: searched[f] for d, dim in enumerate(rule.operands[0]) for f in dim if f in searched}
                arrays = (arrays[0], _kept_out(eqn, arrays[1], columns))
            return bind_eqn(eqn, *arrays) if rule.local is None else list(rule.local(eqn, shard, *arrays))

        return self.eqns.call(program, operands, eqn.source_info)

    def masked(self, form: _Form, term: Term, rule: ShardingRule, tails: Mapping[Factor, Tail], eqn: JaxprEqn) -> Atom:
        """An operand with its tails filled with the identity of the operation's reduction over them."""
        atom = form.atom
        for kind, factors in (("sum", rule.summed), *((kind, (f,)) for f, kind in rule.reduced.items())):
            gone = [f for f in factors if f in tails and not is_searched(eqn, rule, f)]
            where = {
                d: form.tails[d]
                for d, dim in enumerate(term)
                if any(f in dim for f in gone) and not (kind == "sum" and d in form.zeros)
            }
            if where:
                value = identity_of(kind, atom.aval.dtype)
                key = atom, tuple(where), value
                if key not in self.filled:
                    fill = partial(fill_tails, tails=where, value=value)
                    self.filled[key] = self.eqns.call_one(fill, [atom], eqn.source_info)
                atom = self.filled[key]
        return atom

    def form(self, atom: Atom, wanted: Tails, source: SourceInfo | None) -> _Form:
        """A value padded in these dims and no others: cut, and extended with zeros, where the form at hand differs."""
        if isinstance(atom, Literal):
            return _Form(atom, {})
        made = self.made.get(atom) or _Form(atom, {})
        if made.tails == wanted:
            return made
        key = atom, tuple(sorted(wanted.items()))
        if key not in self.forms:
            cuts = {d: tail for d, tail in made.tails.items() if wanted.get(d) != tail}
            pads = {d: tail for d, tail in wanted.items() if made.tails.get(d) != tail}

            def reshaped(array: jax.Array) -> jax.Array:
                for dim, tail in cuts.items():
                    array = cut(array, dim, tail)
                for dim, tail in pads.items():
                    array = lengthen(array, dim, tail)
                return array

            found = self.eqns.call_one(reshaped, [made.atom], source)
            zeros = frozenset(pads) | (made.zeros - frozenset(cuts))
            self.forms[key] = _Form(found, dict(wanted), zeros)
        return self.forms[key]


def _of_term(term: Term, rule: ShardingRule, tails: Mapping[Factor, Tail]) -> dict[int, Tail]:
    """The padded dims of a term whose factors have these tails; a dim holds at most one padded factor."""
    return {
        d: tails[factor].of_dim(dim, factor, rule.sizes)
        for d, dim in enumerate(term)
        for factor in dim
        if factor in tails
    }


def _zeros_behind(given: Sequence[_Form], rule: ShardingRule, result: Term) -> frozenset[int]:
    """Dims of a result whose tails are zeros: the operation only moves elements, and the operand's tails were zeros."""
    if not rule.moves_data or len(given) != 1:
        return frozenset()
    known = {f for d, dim in enumerate(rule.operands[0]) if d in given[0].zeros for f in dim}
    return frozenset(d for d, dim in enumerate(result) if dim and all(f in known for f in dim))


def _kept_out(eqn: JaxprEqn, indices: jax.Array, columns: Tails) -> jax.Array:
    """A gather's indices, kept out of the tails: those out of the user's range stay out of range, or are clamped to it."""
    fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    indices = signed(indices)
    if indices.dtype.itemsize < 4:
        indices = lax.convert_element_type(indices, jnp.int32)
    parts = []
    for k, d in enumerate(eqn.params["dimension_numbers"].start_index_map):
        column = lax.slice_in_dim(indices, k, k + 1, axis=indices.ndim - 1)
        if d in columns:
            last, instead = columns[d].valid - 1, columns[d].padded if fills else columns[d].valid - 1
            column = jnp.where(column > last, jnp.asarray(instead, column.dtype), column)
        parts.append(column)
    return lax.concatenate(parts, indices.ndim - 1) if len(parts) > 1 else parts[0]

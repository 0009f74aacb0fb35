"""Reorders the dims of batched matrix products to the layout of their largest array, so that this one is not transposed.

In:     a flat program.
Out:    the same function. Products with several dims in one group, such as the query and head of `bhgqk` in grouped
        attention, have their operands, batch dims and summed dims in another order, with transposes of small arrays.
Method: compilers hand a product to a library as matrices `batch, rows, columns`, and first make the dims of one group
        adjacent. That copies an array whose layout differs, once per product and beside the original that others
        read: 8.6 GB each in Llama-8B's attention of 8 samples. The layout of an array is the one in which its product
        writes it; elementwise work keeps it, and a transpose moves nothing until a product reads it. The largest of a
        product's three arrays, if larger than both others together, keeps its layout; if it is the result, it takes the
        layout of the first array of known layout that it is combined with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from jax import lax

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr, new_var, primitives, replace_eqn, resized
from autopar.ir.build import Equations
from autopar.ir.dataflow import readers_of
from autopar.ir.region import in_bodies
from autopar.ir.rules.registry import family_of
from autopar.ir.work import EqualRules, num_elements_of

Order = tuple[int, ...]
"""The dims of an array, major to minor, in its layout."""
Index = tuple[str, int]
"""A loop index of a product: `("batch", 0)`, `("sum", 1)`, or a free dim of one operand, `("left", 2)`, `("right", 0)`."""
_OWN = ("left", "right")


def products_in_order(jaxpr: Jaxpr) -> Jaxpr:
    """Reorder products so that large arrays keep their layout; over the same inputs and results."""
    eqns = [in_bodies(eqn, products_in_order) for eqn in jaxpr.eqns]
    if any(map(_joins_dims, eqns)):
        eqns = _Walk(readers_of(eqns)).through(eqns)
    unchanged = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if unchanged else make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns)


def _joins_dims(eqn: JaxprEqn) -> bool:
    """Whether an equation is a batched product that joins several dims of its largest array into one."""
    is_product = eqn.primitive is primitives.dot_general_p and eqn.params["dimension_numbers"][1][0]
    return bool(is_product) and _Product.of(eqn).largest is not None


@dataclass(frozen=True, slots=True)
class _Product:
    """A product, with the loop index of each dim of its operands and its result."""

    eqn: JaxprEqn
    terms: tuple[tuple[Index, ...], tuple[Index, ...], tuple[Index, ...]]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> _Product:
        summed, batch = eqn.params["dimension_numbers"]
        terms = []
        for k, side in enumerate(_OWN):
            term: list[Index] = [(side, d) for d in range(eqn.invars[k].aval.ndim)]
            for name, dims in (("batch", batch[k]), ("sum", summed[k])):
                for number, d in enumerate(dims):
                    term[d] = (name, number)
            terms.append(tuple(term))
        own = [[index for index in term if index[0] in _OWN] for term in terms]
        left, right = terms
        return cls(eqn, (left, right, (*(("batch", k) for k in range(len(batch[0]))), *own[0], *own[1])))

    @property
    def largest(self) -> int | None:
        """The array larger than both others together, if a batched product joins some of its dims: 0, 1; 2, the result."""
        sizes = [num_elements_of(atom) for atom in (*self.eqn.invars, *self.eqn.outvars)]
        number = max(range(3), key=sizes.__getitem__)
        names = [name for name, _ in self.terms[number]]
        joins = "batch" in names and any(names.count(name) > 1 for name in (*_OWN, "sum"))
        is_plain = self.eqn.params.get("out_sharding") is None
        return number if joins and is_plain and 2 * sizes[number] > sum(sizes) else None

    def in_order(self, number: int, order: Order) -> list[JaxprEqn]:
        """The product with array `number` in that order of dims; unchanged if the dims of a group are not adjacent in it."""
        wanted = [self.terms[number][d] for d in order]
        groups = [name for k, (name, _) in enumerate(wanted) if not k or wanted[k - 1][0] != name]
        if groups[0] != "batch" or len(set(groups)) < len(groups):
            return [self.eqn]
        # The library's own order: batch, free, summed of the left operand; batch, summed, free of the right one.
        first = groups[1] == "right" if number == 2 else (groups[1] == "sum") != bool(number)
        sides = (1, 0) if first else (0, 1)
        return self._with_operands(sides, number, wanted)

    def _with_operands(self, sides: Sequence[int], number: int, wanted: Sequence[Index]) -> list[JaxprEqn]:
        """The product of the operands in the order `sides`, array `number` in the wanted order; the result transposed back."""
        eqn, made = self.eqn, Equations()
        operands, terms = [], []
        for side in sides:
            order = self._operand_order(side, number, wanted)
            transpose = partial(lax.transpose, permutation=order)
            operands.append(made.call_one(transpose, [eqn.invars[side]], eqn.source_info))
            terms.append([self.terms[side][d] for d in order])
        along = [[index for index in wanted if index[0] == name] for name in ("sum", "batch")]
        along[0] = along[0] or [index for index in terms[0] if index[0] == "sum"]
        numbers = tuple(tuple(tuple(term.index(index) for index in which) for term in terms) for which in along)
        left = [*along[1], *(index for term in terms for index in term if index[0] in _OWN)]
        back = [left.index(index) for index in self.terms[2]]
        if sides[0] == 0 and not made and numbers == eqn.params["dimension_numbers"]:
            return [eqn]
        params = {**eqn.params, "dimension_numbers": numbers}
        if sides[0] == 1 and isinstance(params["precision"], tuple):
            params["precision"] = params["precision"][::-1]
        (result,) = eqn.outvars
        if back == sorted(back):
            return [*made, replace_eqn(eqn, invars=operands, params=params)]
        shape = [result.aval.shape[self.terms[2].index(index)] for index in left]
        turned = new_var(resized(result.aval, shape))
        made.append(replace_eqn(eqn, invars=operands, outvars=[turned], params=params))
        made.define(result, partial(lax.transpose, permutation=back), [turned], eqn.source_info)
        return made

    def _operand_order(self, side: int, number: int, wanted: Sequence[Index]) -> Order:
        """The order of an operand's dims: as wanted, or its free dims as the result's if that is array `number`."""
        term = self.terms[side]
        if side == number:
            return tuple(term.index(index) for index in wanted)
        if number != 2:
            return tuple(range(len(term)))
        own = iter(sorted((index for index in term if index[0] in _OWN), key=wanted.index))
        return tuple(term.index(next(own) if index[0] in _OWN else index) for index in term)


@dataclass(frozen=True, slots=True)
class _Walk:
    """One body: the readers of each value, the layouts of the values defined so far, and the rules of its equations."""

    readers: Mapping[Var, list[JaxprEqn]]
    order: dict[Var, Order] = field(default_factory=dict)
    rules: EqualRules = field(default_factory=EqualRules)

    def through(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """The equations with products reordered."""
        found: list[JaxprEqn] = []
        for eqn in eqns:
            written = self._product(_Product.of(eqn)) if _joins_dims(eqn) else [eqn]
            for each in written:
                self._follow(each)
            found += written
        return found

    def _product(self, product: _Product) -> list[JaxprEqn]:
        number = product.largest
        assert number is not None, "some of its dims become one"
        atom = (*product.eqn.invars, *product.eqn.outvars)[number]
        order = self._wanted(atom) if number == 2 else self.order.get(atom)
        return product.in_order(number, order or tuple(range(atom.aval.ndim)))

    def _follow(self, eqn: JaxprEqn) -> None:
        """Note the layout of an equation's result, if an operand of known layout determines it."""
        if eqn.primitive is primitives.dot_general_p:
            self.order[eqn.outvars[0]] = tuple(range(eqn.outvars[0].aval.ndim))
        known = [(k, self.order[a]) for k, a in enumerate(eqn.invars) if isinstance(a, Var) and a in self.order]
        if not known or not _keeps_order(eqn):
            return
        rule, (var,) = self.rules.of(eqn), eqn.outvars
        for k, order in sorted(known, key=lambda pair: -num_elements_of(eqn.invars[pair[0]])):
            place = {rule.operands[k][d]: position for position, d in enumerate(order)}
            if all(dim in place for dim in rule.results[0]):
                self.order[var] = tuple(sorted(range(var.aval.ndim), key=lambda d: place[rule.results[0][d]]))  # noqa: B023
                return

    def _wanted(self, made: Var) -> Order | None:
        """The layout for a product's result: that of the first known one it is combined with; None: there is none."""
        dims_of, waiting = {made: tuple(range(made.aval.ndim))}, [made]
        for var in waiting:
            for eqn in filter(_keeps_order, self.readers.get(var, ())):
                rule = self.rules.of(eqn)
                dim_at = dict(zip(rule.operands[eqn.invars.index(var)], dims_of[var], strict=True))
                for atom, term in zip(eqn.invars, rule.operands, strict=True):
                    if isinstance(atom, Var) and atom in self.order and sorted(term) == sorted(dim_at):
                        return tuple(dim_at[term[d]] for d in self.order[atom])
                (result,) = eqn.outvars
                if result not in dims_of and sorted(rule.results[0]) == sorted(dim_at):
                    dims_of[result] = tuple(dim_at[dim] for dim in rule.results[0])
                    waiting.append(result)
        return None


def _keeps_order(eqn: JaxprEqn) -> bool:
    """Whether the result keeps the layout of the operands: elementwise work, sums, and transposes (which are views)."""
    return family_of(eqn.primitive) in ("elementwise", "movement", "reductions") and len(eqn.outvars) == 1

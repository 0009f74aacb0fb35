"""The transfer function for rows that are sorted in equal parts, each part by itself (experts without capacity).

In:     an equation of a program that sorts rows, and the order of its operands' rows.
Out:    `Ordering.transfer`: the order of its results' rows, and what is computed of each part; None: with another order of
        the rows the equation would have another result.
Method: a stable sort by a key permutes rows, and operations row by row commute with permutations. A value in sorted order has
        `Rows` in the order of a key; operations combine only values of one order. Indices of rows (`argsort`, and integers
        computed from it) are indices into the part's own rows if they are for the permutation 0, 1, 2, ...
        (`known_values.py`); gathers and scatters by them bring rows into the order, or back. Counts of rows for each value of
        the key (`counted.py`) are computed for each part as well: they are its group sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, bind_eqn, make_jaxpr
from autopar.ir.known_values import RESHAPES, KnownValues
from autopar.ir.region import equations_within
from autopar.ir.rules import rule_for
from autopar.ir.rules.index_map import OPERATIONS
from autopar.ir.rules.rule import ShardingRule
from autopar.ir.signature import equation_signature
from autopar.ir.split.placement import REPLICATED, Placement, Split
from autopar.ir.split.sorted_rows.counted import summed
from autopar.ir.split.strategy import AxisStrategy, has_program, split_along, strategies

PRODUCTS = ("ragged_dot_general", "grouped_product")
"""Primitives that multiply rows in groups."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A value has rows along a dim, in equal parts.

    Attributes:
        dim: The dim of rows.
        order: The key by which the rows of each part are sorted; None: they are in their original order.
        places: The key whose permutation the value holds as indices: of sorted rows their original positions, or of rows in
            their original order their sorted positions.
        depth: For stacks made by loops, the number of leading dims in front of the rows.
    """

    dim: int
    order: int | None = None
    places: int | None = None
    depth: int = 0

    def moved(self, by: int) -> Rows:
        """The same after `by` leading dims have been added."""
        return replace(self, dim=self.dim + by, depth=self.depth + by)

    @property
    def keys(self) -> list[int]:
        """The keys on whose order the value depends."""
        return [key for key in (self.order, self.places) if key is not None]


@dataclass(frozen=True, slots=True)
class Counts:
    """A value is a sum over the rows of a key of what is computed of each.

    Attributes:
        key: The key.
        depth: As of `Rows`.
        are_groups: Whether it counts the rows of groups that follow each other in the order of the key.
    """

    key: int
    depth: int = 0
    are_groups: bool = True

    def moved(self, by: int) -> Counts:
        """The same after `by` leading dims have been added."""
        return replace(self, depth=self.depth + by)

    @property
    def keys(self) -> list[int]:
        """The key."""
        return [self.key]


RowOrder: TypeAlias = Rows | Counts | None
"""The order of a value's rows; None: it has none, or they are in their original order."""
Known = Sequence[RowOrder]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an equation does to rows in order.

    Attributes:
        results: The order of its results' rows.
        parts: For an operation that works on each part by itself: the dim along which each operand is cut into parts, None
            for whole operands.
        made: The same for its results; None: the result is the sum of those of all parts.
    """

    results: tuple[RowOrder, ...]
    parts: tuple[int | None, ...] | None = None
    made: tuple[int | None, ...] = ()


class Ordering:
    """The sorts of one program.

    Attributes:
        count: Number of parts.
        key_of: Values by which rows are sorted, and the same in sorted order -> numbers of keys.
        blind: Whether an equation under a strategy needs no offset of its shard, cached by signature.
    """

    def __init__(self, jaxpr: Jaxpr, count: int):
        self.count = count
        self.key_of: dict[Var, int] = {}
        self.blind: dict[object, bool] = {}
        sorts = [eqn for eqn, _ in equations_within(jaxpr) if self._is_sort(eqn)]
        self.values = KnownValues(jaxpr if sorts else make_jaxpr([], [], []))
        for eqn in sorts:
            key = self.values.origin(eqn.invars[0])
            if isinstance(key, Var):
                self.key_of.setdefault(key, len(self.key_of))
        for eqn, _ in equations_within(jaxpr) if sorts else ():
            key = self.values.sorted_key(eqn) if eqn.primitive.name in ("sort", "gather") else None
            if key in self.key_of:
                self.key_of[eqn.outvars[0]] = self.key_of[key]

    def _is_sort(self, eqn: JaxprEqn) -> bool:
        shape: tuple[int, ...] = eqn.invars[0].aval.shape if eqn.primitive.name == "sort" else ()
        is_plain = len(shape) == 1 and bool(eqn.params["is_stable"]) and eqn.params["num_keys"] == 1
        return is_plain and shape[0] % self.count == 0

    def transfer(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """What an equation does that reads rows in order, sorts rows, or counts a key.

        None: it does none of these, or its result depends on the order of rows.
        """
        own = [rows for rows in known if isinstance(rows, Rows)]
        name = eqn.primitive.name
        if not own:
            return self._without_order(eqn, known)
        if any(rows.depth for rows in own):
            return self._as_others(eqn, known) if name in ("convert_element_type", "copy") else None
        if name in ("scatter-add", "reduce_sum") and all(rows.places is None for rows in own):
            found = self._sums_up(eqn)
            if found is not None:
                return found
        match name:
            case "sort":
                return self._inverts(eqn, known)
            case "gather" if isinstance(known[1], Rows) and known[1].places is not None:
                return self._takes(eqn, known[0], known[1])
            case "scatter" if self.values.is_count(eqn.invars[2]):
                return self._inverts_by_writing(eqn, known)
            case "scatter" | "scatter-add" if isinstance(known[1], Rows) and known[1].places is not None:
                return self._puts(eqn, known)
            case _ if name in PRODUCTS:
                return self._multiplies(eqn, known)
            case _ if any(rows.places is not None for rows in own) and name not in RESHAPES:
                return self._computes_places(eqn, known)
        return self._as_others(eqn, known)

    def _without_order(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """The transfer of an equation none of whose operands has rows in order."""
        match eqn.primitive.name:
            case "sort" if self._is_sort(eqn):
                return self._sorts(eqn)
            case "scatter-add" | "reduce_sum":
                return self._sums_up(eqn)
            case "convert_element_type" | "copy" if (
                isinstance(known[0], Counts) and eqn.outvars[0].aval.dtype.itemsize >= 4
            ):
                return Transfer((known[0],))
            case _ if any(isinstance(each, Counts) and not each.depth for each in known):
                return self._sums_up(eqn)
        return None

    def _sums_up(self, eqn: JaxprEqn) -> Transfer | None:
        """Sums over rows, as `bincount` makes, and what is computed of them by linear operations."""
        found = summed(eqn, self.values, self.key_of, self.count) if len(eqn.outvars) == 1 else None
        if found is None:
            return None
        return Transfer((Counts(found.key, are_groups=found.are_groups),), found.cuts or None, (None,))

    # Sorting.

    def _sorts(self, eqn: JaxprEqn) -> Transfer | None:
        """`argsort`: the sorted rows of each part, and their original positions in it."""
        key = self.key_of.get(cast(Var, self.values.origin(eqn.invars[0])))
        if key is None:
            return None
        counts = [self.values.is_count(atom) for atom in eqn.invars]
        results = tuple(Rows(0, key, key if number else None) for number in counts)
        return Transfer(results, tuple(None if number else 0 for number in counts), (0,) * len(results))

    def _inverts(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """`argsort(order)`: the sorted position of each row; or the order again, of these positions."""
        order = known[0]
        if not self._is_sort(eqn) or not isinstance(order, Rows) or len(eqn.invars) != 2 or not order.keys:
            return None
        if not self._is_identity(eqn.invars[0]) or not self.values.is_count(eqn.invars[1]):
            return None
        results = Rows(0, places=order.order), Rows(0, places=order.places)
        if order.order is None:
            results = (Rows(0, order.places, order.places),) * 2
        return Transfer(results, (0, None), (0, 0))

    def _inverts_by_writing(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """`zeros.at[order].set(0, 1, 2, ...)`: the sorted position of each row."""
        places = known[1]
        if (
            not isinstance(places, Rows)
            or places.order is None
            or places.places != places.order
            or known[0] is not None
        ):
            return None
        if not self.values.is_order(eqn.outvars[0]):
            return None
        return Transfer((Rows(0, places=places.order),), (0, places.dim, None), (0,))

    # Gathers and scatters of rows.

    def _takes(self, eqn: JaxprEqn, table: RowOrder, at: Rows) -> Transfer | None:
        """`x[order]`, `x[order // k]`, `h[argsort(order)]`."""
        rule, dim = rule_for(eqn), _one(eqn.params["dimension_numbers"].start_index_map)
        factor = _one(rule.operands[1][at.dim])
        if dim is None or factor is None or not self._are_rows(eqn.invars[1], eqn.invars[0].aval.shape[dim]):
            return None
        found = [d for d, names in enumerate(rule.results[0]) if factor in names]
        if len(found) != 1 or not self._is_in_order_for(eqn.invars[0], table, dim, at):
            return None
        return Transfer((_unless_plain(Rows(found[0], at.order)),), (dim, at.dim), (found[0],))

    def _puts(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """`y.at[order].add(h)`: the transposes of such gathers, and another way to put rows back."""
        at, rule = known[1], rule_for(eqn)
        dim = _one(eqn.params["dimension_numbers"].scatter_dims_to_operand_dims)
        assert isinstance(at, Rows) and at.places is not None
        factor = _one(rule.operands[1][at.dim])
        if dim is None or factor is None or not self._are_rows(eqn.invars[1], eqn.invars[0].aval.shape[dim]):
            return None
        if eqn.primitive.name == "scatter" and (not self._is_identity(eqn.invars[1]) or eqn.params["update_jaxpr"]):
            return None
        behind = [d for d, names in enumerate(rule.operands[2]) if factor in names]
        if len(behind) != 1 or not self._is_in_order_for(eqn.invars[0], known[0], dim, at):
            return None
        updates = _unless_plain(Rows(behind[0], at.order))
        if known[2] != updates and (known[2] is not None or not self.values.is_uniform(eqn.invars[2], behind[0])):
            return None
        table = Rows(dim, None if at.order is not None else at.places)
        return Transfer((_unless_plain(table),), (dim, at.dim, behind[0]), (dim,))

    def _is_in_order_for(self, atom: Atom, have: RowOrder, dim: int, at: Rows) -> bool:
        """Whether the rows of an array that is indexed are in the order that the indices are for."""
        assert at.places is not None
        if at.order is not None:
            return have is None and at.order == at.places
        return have == Rows(dim, at.places) or (have is None and self.values.is_uniform(atom, dim))

    def _numbers(self, places: Atom) -> np.ndarray | None:
        """The values of indices if the permutation they are computed from were 0, 1, 2, ...; None: unknown."""
        leaves = {
            atom: None for atom, made in self.values.expression(places, ()) if made is None and isinstance(atom, Var)
        }
        if len(leaves) != 1:
            return None
        (leaf,) = leaves
        if leaf in self.values.rows:  # through the stack of a loop
            stack, _ = self.values.definition(self.values.rows[leaf])
            row = self.values.rows.get(stack) if isinstance(stack, Var) else None
            numbers = None if row is None else self._numbers(row)
        else:
            numbers = np.arange(leaf.aval.size) if self.values.is_order(leaf) else None
        made = None if numbers is None else self.values.evaluate(places, {leaf: numbers.astype(leaf.aval.dtype)})
        return None if made is None or numbers is None else np.broadcast_to(made, numbers.shape)

    def _are_rows(self, places: Atom, length: int) -> bool:
        """Whether the indices of each part stay in that part, with the same offsets in all parts."""
        numbers, count = self._numbers(places), self.count
        if numbers is None or len(numbers) % count or length % count or numbers.min() < 0 or numbers.max() >= length:
            return False
        parts = numbers.reshape(count, -1) - np.arange(count)[:, None] * (length // count)
        return bool((parts == parts[0]).all()) and bool(parts[0].max() < length // count)

    def _is_identity(self, places: Atom) -> bool:
        numbers = self._numbers(places)
        return numbers is not None and np.array_equal(numbers, np.arange(len(numbers)))

    # Groups.

    def _multiplies(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """`ragged_dot` of rows sorted by group."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (ragged,), (_, batch) = numbers.lhs_ragged_dimensions, numbers.dot_dimension_numbers
        lhs, sizes, rule = known[0], known[2], rule_for(eqn)
        if not isinstance(lhs, Rows) or lhs.dim != ragged or lhs.order is None or len(eqn.invars) != 3 or any(batch):
            return None
        factor = _one(rule.operands[0][ragged])
        if sizes != Counts(lhs.order) or factor not in rule.splittable():
            return None
        along = split_along(rule, factor)
        wants = [_rows(want, lhs.order) for want in along.operands[:2]]
        if any(have != want for have, want in zip(known, wants, strict=False)):
            return None
        dims = [want.dim if want else None for want in wants]
        made = [_rows(p, lhs.order) for p in along.results]
        return Transfer(tuple(made), (*dims, 0), tuple(rows.dim if rows else None for rows in made))

    # Other operations.

    def _as_others(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """Operations row by row."""
        own = [rows for rows in known if isinstance(rows, Rows)]
        orders = dict.fromkeys((rows.order, rows.places, rows.depth) for rows in own)
        (order, places, depth), rule = next(iter(orders)), rule_for(eqn)
        if len(orders) > 1 or (places is not None and eqn.primitive.name not in RESHAPES):
            return None
        for strategy in strategies(rule, self.count):
            if strategy.factor is None or REPLICATED in strategy.results or strategy.is_one_hot:
                continue
            operands = zip(eqn.invars, known, strategy.operands, strict=True)
            if not all(self._is_read(*each) for each in operands):
                continue
            if _is_by_rows(rule, strategy) and self._is_blind(eqn, rule, strategy):
                return Transfer(tuple(_rows(p, order, places, depth) for p in strategy.results))
        return None

    def _is_read(self, atom: Atom, have: RowOrder, want: Placement) -> bool:
        """Whether an operand may be read in placement `want` by an operation row by row."""
        if isinstance(have, Rows):
            return want == Split(have.dim)
        return not isinstance(want, Split) or self.values.is_uniform(atom, want.dim)

    def _is_blind(self, eqn: JaxprEqn, rule: ShardingRule, strategy: AxisStrategy) -> bool:
        """Whether an equation needs no offset of its shard."""
        key = equation_signature(eqn), strategy
        if key not in self.blind:
            self.blind[key] = has_program(eqn, rule, replace(strategy, blocks=2), self.count)
        return self.blind[key]

    def _computes_places(self, eqn: JaxprEqn, known: Known) -> Transfer | None:
        """`order // k`, and other integer operations on indices."""
        like = dict.fromkeys(rows for rows in known if rows is not None)
        others = [atom for atom, rows in zip(eqn.invars, known, strict=True) if rows is None]
        is_known = len(like) == 1 and all(self.values.uniform_value(atom) is not None for atom in others)
        return Transfer(tuple(like)) if is_known and eqn.primitive.name in OPERATIONS else None


def _is_by_rows(rule: ShardingRule, strategy: AxisStrategy) -> bool:
    """Whether the split factor is the only one of each of its dims: where rows form pairs, their neighbours matter."""
    dims = [dim for term in (*rule.operands, *rule.results) for dim in term if strategy.factor in dim]
    return all(dim == (strategy.factor,) for dim in dims)


def _one(items: Sequence[Any]) -> Any:
    return items[0] if len(items) == 1 else None


def _unless_plain(rows: Rows) -> Rows | None:
    """The rows; None if they are in their original order and hold no indices."""
    return rows if rows.keys else None


def _rows(placement: Placement, order: int | None, places: int | None = None, depth: int = 0) -> Rows | None:
    return Rows(placement.dim, order, places, depth) if isinstance(placement, Split) else None


def on_one_part(eqn: JaxprEqn, *operands: jax.Array) -> list[jax.Array]:
    """Bind the equation on one part; where it sorts or writes `iota` of all rows, that of the part's rows stands instead."""
    if eqn.primitive.name == "sort" or (
        eqn.primitive.name == "scatter" and operands[2].shape[:1] != operands[1].shape[:1]
    ):
        rows = operands[1 if eqn.primitive.name == "scatter" else 0].shape[0]
        operands = tuple(x if len(x) == rows else lax.iota(x.dtype, rows) for x in operands)
    return bind_eqn(eqn, *operands)

"""Rows in an order of their own: sorted by expert, multiplied in groups, and put back (experts without capacity).

In:     an equation and the placements of its operands, in a program that sorts samples.
Out:    `Ordering.strategies`: those in which each shard sorts its own rows, and works on them in its own order.
Method: a stable sort by a key gives each row a place, and what is by rows does not care for places. So a value in sorted order
        is placed as `Split` with an `Order`, the key by which its rows are sorted; values of one order meet only each other.
        Numbers that say where rows are (`argsort`, and what is computed of them) are tables over the places there are, worked
        out in NumPy: a shard's own numbers are those of its own rows. Rows are taken by them into the order, or out of it.
        How many rows have each key (`bincount`) is a sum over shards of which each uses its own part, as group sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, bind_eqn
from autopar.ir.known_values import RESHAPES, KnownValues
from autopar.ir.region import equations_within
from autopar.ir.rules import rule_for
from autopar.ir.rules.index_map import MAX_STEPS, OPERATIONS
from autopar.ir.rules.rule import LocalProgram, Shard, ShardingRule
from autopar.ir.split.placement import REPLICATED, Order, Partial, Placement, Places, Replicated, Split
from autopar.ir.split.strategy import AxisStrategy, NoPositionError, shard_program, split_along, strategies

_NOWHERE = Places(-1, -1)
"""What is of no use."""
_CHOICES = "max min clamp eq ne lt le gt ge select_n and or not".split()
"""What compares numbers and takes one of them."""
Known = Sequence[Placement | None]


class Ordering:
    """The sorts of one program.

    Attributes:
        key_of: For each value by which rows are sorted, the number of the key.
        tables: Numbers that say where rows are: for each place the number.
    """

    def __init__(self, jaxpr: Jaxpr, count: int):
        self.count = count
        self.values = KnownValues(jaxpr)
        self.key_of: dict[Var, int] = {}
        self.tables: list[np.ndarray] = []
        for eqn, _ in equations_within(jaxpr):
            key = self.values.origin(eqn.invars[0]) if _is_plain_sort(eqn) else None
            if isinstance(key, Var):
                self.key_of.setdefault(key, len(self.key_of))

    def strategies(self, eqn: JaxprEqn, placements: Known) -> list[AxisStrategy] | None:
        """The strategies of an equation that sorts samples, or works on what is sorted; None: it does neither."""
        known = list(placements[: len(eqn.invars)])
        own = [p for p in known if isinstance(p, Split) and (p.order or p.places)]
        if eqn.primitive.name == "sort" and not any(p.order for p in own):
            return self._sorts(eqn, known)
        if eqn.primitive.name == "scatter-add" and not own and isinstance(known[1], Split):
            return self._counts(eqn)
        if (
            eqn.primitive.name == "convert_element_type"
            and isinstance(known[0], Partial)
            and known[0].counts is not None
        ):
            return [dataclasses.replace(s, results=(known[0],)) for s in strategies(rule_for(eqn), self.count)]
        if not own:
            return None
        if any(each is not None and each.depth for p in own for each in (p.order, p.places)):
            return self._as_others(eqn, known) if eqn.primitive.name in ("convert_element_type", "copy") else []
        match eqn.primitive.name:
            case "sort":
                return self._inverts(eqn, known)
            case "gather" if isinstance(known[1], Split) and known[1].places:
                return self._takes(eqn, known)
            case "scatter" | "scatter-add" if isinstance(known[1], Split) and known[1].places:
                return self._puts(eqn, known)
            case "ragged_dot_general" | "grouped_product":
                return self._multiplies(eqn, known)
            case name if any(p.places for p in own) and name not in RESHAPES:
                return self._computes_places(eqn, known)
        return self._as_others(eqn, known)

    # Sorting.

    def _sorts(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy] | None:
        """`argsort`: each shard's own rows, and where among them they were."""
        if not _is_plain_sort(eqn) or known[0] != Split(0):
            return None
        counts = [self.values.is_count(atom) for atom in eqn.invars]
        if any(not number and p != Split(0) for number, p in zip(counts, known, strict=True)):
            return None
        key = self.key_of[cast(Var, self.values.origin(eqn.invars[0]))]
        places = Places(key, self._table(np.arange(eqn.invars[0].aval.shape[0])))
        results = tuple(Split(0, order=Order(key), places=places if number else None) for number in counts)
        return [_own(tuple(REPLICATED if number else Split(0) for number in counts), results, _sort_here)]

    def _inverts(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy]:
        """`argsort(order)`: where in the order each row is."""
        order = known[0]
        if not (_is_plain_sort(eqn) and isinstance(order, Split) and order.order and self._is_identity(order.places)):
            return []
        if len(eqn.invars) != 2 or not self.values.is_count(eqn.invars[1]):
            return []
        results = Split(0, places=_NOWHERE), Split(0, places=order.places)
        return [_own((order, REPLICATED), results, _sort_here)]

    # Taking rows into the order and out of it.

    def _takes(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy]:
        """`x[order]`, `x[order // k]`, `h[argsort(order)]`."""
        at, rule, dim = known[1], rule_for(eqn), _one(eqn.params["dimension_numbers"].start_index_map)
        assert isinstance(at, Split)
        factor = _one(rule.operands[1][at.dim])
        if dim is None or factor is None or not self._are_rows(at.places, eqn.invars[0].aval.shape[dim]):
            return []
        rows = self._rows(eqn.invars[0], known[0], dim, at)
        places = [d for d, names in enumerate(rule.results[0]) if factor in names]
        return [_own((rows, at), (Split(places[0], order=at.order),), _as_it_is)] if rows and len(places) == 1 else []

    def _puts(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy]:
        """`y.at[order].add(h)`: the gradients of these, and another way to put rows back."""
        at, rule = known[1], rule_for(eqn)
        dim = _one(eqn.params["dimension_numbers"].scatter_dims_to_operand_dims)
        assert isinstance(at, Split)
        factor = _one(rule.operands[1][at.dim])
        if dim is None or factor is None or not self._are_rows(at.places, eqn.invars[0].aval.shape[dim]):
            return []
        if eqn.primitive.name == "scatter" and (not self._is_identity(at.places) or eqn.params["update_jaxpr"]):
            return []
        table = self._rows(eqn.invars[0], known[0], dim, at)
        behind = [d for d, names in enumerate(rule.operands[2]) if factor in names]
        updates = Split(behind[0], order=at.order) if len(behind) == 1 else None
        if table is None or updates is None or known[2] != updates:
            if updates is None or table is None or not self.values.is_uniform(eqn.invars[2], updates.dim):
                return []
            updates = Split(updates.dim)
        return [_own((table, at, updates), (table,), _as_it_is)]

    def _rows(self, atom: Atom, have: Placement | None, dim: int, at: Split) -> Split | None:
        """How the array must lie whose rows are at these places: as they were, or in the order; None: it does not."""
        assert at.places is not None
        want = Split(dim) if at.order else Split(dim, order=Order(at.places.key))
        if at.order and at.order.key != at.places.key:
            return None
        if have == want or (isinstance(have, Replicated) and at.order):
            return want
        return want if isinstance(have, Replicated) and self.values.is_uniform(atom, dim) else None

    def _are_rows(self, places: Places | None, length: int) -> bool:
        """Whether the numbers of each shard are rows of its own, as those of the first are of the first."""
        if places is None or places.table < 0:
            return False
        table, count = self.tables[places.table], self.count
        if len(table) % count or length % count or table.min() < 0 or table.max() >= length:
            return False
        parts = table.reshape(count, -1) - np.arange(count)[:, None] * (length // count)
        return bool((parts == parts[0]).all()) and bool(parts[0].max() < length // count)

    def _is_identity(self, places: Places | None) -> bool:
        if places is None or places.table < 0:
            return False
        table = self.tables[places.table]
        return np.array_equal(table, np.arange(len(table)))

    # Groups.

    def _counts(self, eqn: JaxprEqn) -> list[AxisStrategy] | None:
        """`bincount`: how many rows have each key."""
        zeros, indices, ones = eqn.invars
        key = self._key(indices)
        is_bincount = (
            self.values.constant(zeros) == 0 and self.values.constant(ones) == 1 and len(zeros.aval.shape) == 1
        )
        if key is None or not is_bincount or ones.aval.size != indices.aval.size:
            return None
        counts = Partial(counts=key)
        found = [s for s in strategies(rule_for(eqn), self.count) if s.operands[1] == Split(0)]
        return [dataclasses.replace(s, results=(counts,)) for s in found] or None

    def _key(self, indices: Atom) -> int | None:
        """The key whose numbers these are; sorted by it they would be sorted, too, and none at its lower end is left out."""
        parts = list(self.values.parts(indices, self.key_of))
        leaves = [atom for atom, eqn in parts if eqn is None]
        keys = list(dict.fromkeys(atom for atom in leaves if isinstance(atom, Var)))
        if len(keys) != 1 or keys[0] not in self.key_of or keys[0].aval.size != indices.aval.size:
            return None
        (key,) = keys
        # From one place that constants say to the next it goes evenly with the key, or stands still: to try all is to know.
        reach = 2 + sum(abs(int(atom.val)) for atom in leaves if isinstance(atom, Literal))
        even = all(eqn is None or self._is_even(eqn) for _, eqn in parts)
        if not even or reach > MAX_STEPS or not np.issubdtype(key.aval.dtype, np.integer):
            return None
        limit = np.iinfo(key.aval.dtype)
        near = np.arange(max(-reach, limit.min), min(reach, limit.max) + 1)
        domain = np.array([limit.min, *near, limit.max], key.aval.dtype)
        made = self.values.function(indices, {key: domain})
        if made is None or (np.diff(np.broadcast_to(made, domain.shape)) < 0).any() or np.min(made) < 0:
            return None
        return self.key_of[key]

    def _is_even(self, eqn: JaxprEqn) -> bool:
        """Whether it makes numbers that grow by one with the key, or do not, of others that do."""
        if eqn.primitive.name in ("add", "sub"):
            return any(self.values.constant(atom) is not None for atom in eqn.invars)
        return eqn.primitive.name in (*_CHOICES, *RESHAPES)

    def _multiplies(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy]:
        """`ragged_dot`, of rows in the order of the groups."""
        (ragged,) = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        lhs, sizes, rule = known[0], known[2], rule_for(eqn)
        if not isinstance(lhs, Split) or lhs.dim != ragged or lhs.order is None or len(eqn.invars) != 3:
            return []
        factor = _one(rule.operands[0][ragged])
        if not isinstance(sizes, Partial) or sizes.counts != lhs.order.key or factor not in rule.splittable():
            return []
        along = split_along(rule, factor)
        wants = [_in_order(want, lhs.order) for want in along.operands[:2]]
        fits = all(have == want for have, want in zip(known, wants, strict=False) if isinstance(want, Split))
        return [_own((*wants, sizes), tuple(_in_order(p, lhs.order) for p in along.results), _as_it_is)] if fits else []

    # All else.

    def _as_others(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy]:
        """What is done to rows, whichever they are."""
        own = [p for p in known if isinstance(p, Split) and (p.order or p.places)]
        orders = dict.fromkeys((p.order, p.places) for p in own)
        (order, places), rule = next(iter(orders)), rule_for(eqn)
        if len(orders) > 1 or (places and eqn.primitive.name not in RESHAPES):
            return []
        found = []
        for strategy in strategies(rule, self.count):
            operands = zip(eqn.invars, known, strategy.operands, strict=True)
            wants = [want for each in operands if (want := self._wanted(*each)) is not None]
            if strategy.factor is None or len(wants) < len(known) or REPLICATED in strategy.results or strategy.picks:
                continue
            if not _is_by_rows(rule, strategy) or not _is_blind(eqn, rule, strategy, self.count):
                continue
            results = [_in_order(p, order, places) for p in strategy.results]
            found.append(dataclasses.replace(strategy, operands=tuple(wants), results=tuple(results)))
        return found

    def _wanted(self, atom: Atom, have: Placement | None, want: Placement) -> Placement | None:
        """How an operand is read that others read as `want`; None: not by rows."""
        if isinstance(have, Split) and (have.order or have.places):
            return have if want == Split(have.dim) else None
        if isinstance(want, Split):
            return want if self.values.is_uniform(atom, want.dim) else None
        return want

    def _computes_places(self, eqn: JaxprEqn, known: Known) -> list[AxisStrategy]:
        """`order // k`, and what makes indices of such numbers."""
        found = dict.fromkeys(p for p in known if isinstance(p, Split) and p.places)
        like = dict.fromkeys((p.dim, p.order, p.places.key) for p in found if p.places)  # type: ignore[union-attr]
        if (
            len(like) > 1
            or eqn.primitive.name not in OPERATIONS
            or len(eqn.outvars) != 1
            or any(p.table < 0 for p in _places(found))
        ):
            return []
        tables = []
        for atom, placement in zip(eqn.invars, known, strict=True):
            if isinstance(placement, Split) and placement.places:
                tables.append(self.tables[placement.places.table])
            else:
                constant = self.values.constant(atom)
                if constant is None:
                    return []
                tables.append(np.asarray(constant))
        (dim, order, key) = next(iter(like))
        made = np.asarray(OPERATIONS[eqn.primitive.name](eqn.params, *tables)).astype(eqn.outvars[0].aval.dtype)
        rows = len(self.tables[_places(found)[0].table])
        result = Split(dim, order=order, places=Places(key, self._table(np.broadcast_to(made, (rows,)))))
        pairs = zip(eqn.invars, known, strict=True)
        wants = [p if isinstance(p, Split) else Split(dim) if a.aval.ndim else REPLICATED for a, p in pairs]
        return [_own(tuple(wants), (result,), _as_it_is)]

    def _table(self, table: np.ndarray) -> int:
        for k, known in enumerate(self.tables):
            if known.dtype == table.dtype and np.array_equal(known, table):
                return k
        self.tables.append(table)
        return len(self.tables) - 1


def _is_plain_sort(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "sort" or len(eqn.invars[0].aval.shape) != 1:
        return False
    return bool(eqn.params["is_stable"]) and eqn.params["num_keys"] == 1


def _is_by_rows(rule: ShardingRule, strategy: AxisStrategy) -> bool:
    """Whether what is split stands in each dim alone: of rows in pairs, who is whose neighbour matters."""
    dims = [dim for term in (*rule.operands, *rule.results) for dim in term if strategy.factor in dim]
    return all(dim == (strategy.factor,) for dim in dims)


def _is_blind(eqn: JaxprEqn, rule: ShardingRule, strategy: AxisStrategy, count: int) -> bool:
    """Whether a shard does not ask where it stands."""
    if rule.local is None:
        return True
    try:
        shard_program(eqn, rule, dataclasses.replace(strategy, blocks=2), count)
    except NoPositionError:
        return False
    return True


def _one(items: Sequence[Any]) -> Any:
    return items[0] if len(items) == 1 else None


def _places(placements: Iterable[Placement | None]) -> list[Places]:
    return [p.places for p in placements if isinstance(p, Split) and p.places]


def _in_order(placement: Placement, order: Order | None, places: Places | None = None) -> Placement:
    return dataclasses.replace(placement, order=order, places=places) if isinstance(placement, Split) else placement


def _own(operands: Sequence[Placement], results: Sequence[Placement], local: LocalProgram) -> AxisStrategy:
    return AxisStrategy("rows", tuple(operands), tuple(results), local=local)


def _as_it_is(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> list[jax.Array]:
    return bind_eqn(eqn, *operands)


def _sort_here(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> list[jax.Array]:
    """The sort, where what counts all rows counts those of the shard."""
    rows = operands[0].shape[0]
    return bind_eqn(eqn, *(x if len(x) == rows else lax.iota(x.dtype, rows) for x in operands))

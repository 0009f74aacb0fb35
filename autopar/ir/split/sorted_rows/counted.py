"""Finds values that count how many rows have each value of a key: the lengths of groups of rows sorted by it.

In:     an equation of a program, and the keys by which the program sorts rows.
Out:    `summed`: of which key the equation's result is a sum over all rows, whether these are the lengths of consecutive
        groups, and the dims along which its operands are cut into parts.
Method: what a program computes of a key row by row, and sums up over the rows, is computed of all keys near the constants of
        the program instead: `bincount`, sums of `one_hot`, differences of running counts. Between these constants it is
        linear in the key, or constant, so trying them all is a proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar._jax import Atom, JaxprEqn, Literal, Var
from autopar.ir.known_values import RESHAPES, KnownValues, kept_dims
from autopar.ir.rules import rule_for
from autopar.ir.rules.index_map import MAX_STEPS, OPERATIONS
from autopar.ir.split.placement import SUM, Split
from autopar.ir.split.strategy import strategies

_COMPARISONS = {"le_to": "le", "lt_to": "lt", **{name: name for name in "eq ne lt le gt ge".split()}}
"""Comparisons, and how integers are compared."""
_BY_ROW = ("add", "sub", "max", "min", "clamp", "select_n", "and", "or", "not", *_COMPARISONS)
"""Elementwise operations that make of integers that grow by one with the key, or are constant, such integers."""
_PICKS = ("argmax", "argmin", "top_k", "approx_top_k", "iota")
"""Primitives whose last result is not negative."""
_KEEPING = {"gather": 0, "select_n": 1, **dict.fromkeys(RESHAPES, 0)}
"""Primitives whose result is not negative if their operands are not, from the first that is a number on."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What an equation sums up over the rows of a key.

    Attributes:
        key: The number of the key.
        are_groups: Whether they are the lengths of consecutive groups of the rows sorted by the key, from the first row on.
        cuts: For each operand the dim along which it is cut into parts; None: it is whole. (): the operands are sums.
    """

    key: int
    are_groups: bool
    cuts: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """An array for each key.

    Attributes:
        values: [key, dims...]; of length 1 along dims where all elements agree, and along those of rows.
        rows: The dims that are rows of a key.
        source: The value whose rows these are, or were before they were summed up; None: it is the same for all keys.
    """

    values: np.ndarray
    rows: tuple[int, ...] = ()
    source: Var | None = None

    @property
    def is_sum(self) -> bool:
        return self.source is not None and not self.rows

    def whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """The values, of full length along all dims; there must be no rows."""
        return np.broadcast_to(self.values, (len(self.values), *shape))


def summed(eqn: JaxprEqn, values: KnownValues, key_of: Mapping[Var, int], count: int) -> Sums | None:
    """What the result of an equation sums up over rows in `count` parts; None: it is not known to be such a sum.

    None for integers below 32 bits: they may overflow for all rows where they do not for a part.

    Args:
        key_of: Keys by which rows are sorted, and the same in sorted order -> their numbers.
    """
    (var,) = eqn.outvars
    chain = _Chain(values, key_of)
    if var.aval.dtype.itemsize < 4 or not chain.follows(var) or len({key_of[source] for source in chain.sources}) != 1:
        return None
    domain = _domain(chain.sources[0], chain.reach, values)
    if domain is None or len(domain) * max(map(_entries, chain.eqns)) > 16 * MAX_STEPS:
        return None
    made = _Tables(values, key_of, domain)
    table = made.of(var)
    if table is None or not table.is_sum:
        return None
    rows = [found.rows for atom in eqn.invars if (found := made.of(atom)) is not None]
    cuts = _cuts(eqn, rows, count) if any(rows) else ()
    return None if cuts is None else Sums(key_of[chain.sources[0]], _are_groups(table.values), cuts)


def _entries(eqn: JaxprEqn) -> int:
    """About how many entries the table of a result has for each key: as many as the dims that are not rows."""
    sizes = sorted(eqn.outvars[0].aval.shape)
    return int(np.prod(sizes[:1] if eqn.primitive.name in _BY_ROW else sizes[:-1] if len(sizes) > 1 else sizes)) or 1


def _cuts(eqn: JaxprEqn, rows: list[tuple[int, ...]], count: int) -> tuple[int | None, ...] | None:
    """The dims along which the operands of a sum over rows are cut, each part of rows in the same way."""
    for strategy in strategies(rule_for(eqn), count):
        wants = [Split(dims[0]) if dims else None for dims in rows]
        fits = all(want is None or want == have for want, have in zip(wants, strategy.operands, strict=True))
        if fits and strategy.results == (SUM,):
            return tuple(p.dim if isinstance(p, Split) else None for p in strategy.operands)
    return None


def _domain(key: Var, reach: int, values: KnownValues) -> np.ndarray | None:
    """All keys up to `reach`, and the least and greatest ones."""
    if reach > MAX_STEPS or not np.issubdtype(key.aval.dtype, np.integer):
        return None
    limit = np.iinfo(key.aval.dtype)
    least = 0 if _is_not_negative(key, values) else limit.min
    near = np.arange(max(-reach, least), min(reach, limit.max) + 1)
    return np.array([least, *near, limit.max], key.aval.dtype)


def _is_not_negative(key: Atom, values: KnownValues) -> bool:
    """Whether a key is known not to be negative: unsigned, an index that something picked, or chosen of such."""
    key, maker = values.definition(key)
    if isinstance(key, Literal):
        return bool(key.val >= 0)
    if np.issubdtype(key.aval.dtype, np.unsignedinteger):
        return True
    name = maker.primitive.name if maker is not None else ""
    if maker is None or not np.issubdtype(maker.invars[-1].aval.dtype if name in _KEEPING else np.int32, np.integer):
        return False
    if name == "sort":
        return _is_not_negative(maker.invars[maker.outvars.index(key)], values)
    if name in _KEEPING:
        return all(
            _is_not_negative(atom, values) for atom in maker.invars[_KEEPING[name] :][: 1 if name == "gather" else None]
        )
    return name in _PICKS and key is maker.outvars[-1]


def _are_groups(counts: np.ndarray) -> bool:
    """Whether each key is counted once, in groups that go up with it, or, above all groups, not at all."""
    if counts.ndim != 2 or (counts < 0).any() or (counts.sum(1) > 1).any():
        return False
    group = np.where(counts.any(1), counts.argmax(1), counts.shape[1])
    return not (np.diff(group) < 0).any()


@dataclass
class _Chain:
    """The equations by which a value is computed of keys and constants.

    Attributes:
        sources: The keys.
        reach: The sum of the absolute values of all constants.
    """

    values: KnownValues
    key_of: Mapping[Var, int]
    sources: list[Var] = field(default_factory=list)
    eqns: dict[JaxprEqn, None] = field(default_factory=dict)
    reach: int = 2

    def follows(self, atom: Atom) -> bool:
        """Add what a value is computed of; whether all of that is understood."""
        atom, eqn = self.values.definition(atom)
        if isinstance(atom, Literal):
            self.reach += abs(int(atom.val)) if np.isfinite(atom.val) else MAX_STEPS
            return True
        if atom in self.key_of:
            self.sources += [] if atom in self.sources else [atom]
            return True
        if eqn is None or eqn in self.eqns:
            return eqn is not None
        self.eqns[eqn] = None
        if eqn.primitive.name == "iota":
            self.reach += eqn.outvars[0].aval.shape[eqn.params["dimension"]]
        is_known = eqn.primitive.name in (*_BY_ROW, *RESHAPES, *_OTHERS)
        return is_known and all(self.follows(operand) for operand in eqn.invars)


class _Tables:
    """The tables of values that are computed of keys and constants, for the keys of a domain."""

    def __init__(self, values: KnownValues, key_of: Mapping[Var, int], domain: np.ndarray):
        self.values, self.key_of, self.domain = values, key_of, domain
        self.made: dict[Var, _Table | None] = {}

    def of(self, atom: Atom) -> _Table | None:
        """The table of a value; None: it is no sum over rows, and not computed row by row."""
        atom, eqn = self.values.definition(atom)
        if isinstance(atom, Literal):
            return _Table(np.asarray(atom.val, atom.aval.dtype)[None])
        if atom in self.key_of:
            dims = tuple(range(atom.aval.ndim))
            return _Table(self.domain.reshape(-1, *(1 for _ in dims)), dims, atom)
        if atom not in self.made:
            assert eqn is not None, "a chain of equations ends in keys and constants"
            operands = [self.of(operand) for operand in eqn.invars]
            known = [table for table in operands if table is not None]
            self.made[atom] = _applied(eqn, known) if len(known) == len(operands) else None
        return self.made[atom]


def _applied(eqn: JaxprEqn, operands: list[_Table]) -> _Table | None:
    """The table of an equation's result."""
    name = eqn.primitive.name
    sources = {table.source: None for table in operands if table.source is not None}
    is_mixed = len({table.is_sum for table in operands if table.source is not None}) > 1
    if is_mixed or (len(sources) > 1 and any(table.rows for table in operands)):
        return None  # rows of a key, and the same in another order
    if name in _BY_ROW:
        return _elementwise(eqn, operands, next(iter(sources), None))
    return (_reshaped if name in RESHAPES else _OTHERS[name])(eqn, operands, next(iter(sources), None))


def _elementwise(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    is_sum = any(table.is_sum for table in operands)
    moving = [table for table in operands if table.source is not None]
    if name in ("add", "sub") and not is_sum and len(moving) > 1:
        return None
    if is_sum and (
        name not in ("add", "sub") or any(table.source is None and table.values.any() for table in operands)
    ):
        return None
    if len({table.rows for table in moving}) > 1:
        return None
    arrays = [
        table.values.reshape(len(table.values), *_filled(table.values.shape[1:], aval.ndim)) for table in operands
    ]
    with np.errstate(all="ignore"):
        made = OPERATIONS[_COMPARISONS.get(name, name)](eqn.params, *arrays)
    return _Table(np.asarray(made).astype(aval.dtype), moving[0].rows if moving else (), source)


def _filled(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    return shape if len(shape) == ndim else (1,) * ndim


def _reshaped(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    """Reshapes, broadcasts, and changes of dtype that keep all numbers apart."""
    (table,), (before,), after = operands, (eqn.invars[0].aval,), eqn.outvars[0].aval
    if eqn.primitive.name == "convert_element_type":
        narrows = after.dtype.itemsize < before.dtype.itemsize or not np.issubdtype(before.dtype, np.integer)
        if narrows and before.dtype != np.bool_ and table.rows:
            return None
        return _Table(table.values.astype(after.dtype), table.rows, source)
    if before.shape == after.shape:
        return table
    is_broadcast = eqn.primitive.name == "broadcast_in_dim"
    places = [*eqn.params["broadcast_dimensions"]] if is_broadcast else kept_dims(before.shape, after.shape)
    kept = {d: place for d, place in enumerate(places) if place is not None}
    if any(size > 1 and d not in kept for d, size in enumerate(before.shape)):
        if 0 < len(table.rows) < before.ndim:
            return None
        rows = tuple(range(after.ndim)) if table.rows else ()
        whole = table.values if table.rows else table.whole(before.shape)
        return _Table(whole.reshape(-1, *((1,) * after.ndim if rows else after.shape)), rows, source)
    if any(after.shape[kept[d]] != before.shape[d] for d in table.rows if d in kept):
        return None
    rows = tuple(kept[d] for d in table.rows if d in kept)
    shape = [1] * after.ndim
    for d, place in kept.items():
        shape[place] = table.values.shape[1 + d]
    return _Table(table.values.reshape(-1, *shape), rows, source)


def _added_up(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    """`reduce_sum` over all rows."""
    (table,), shape, axes = operands, eqn.invars[0].aval.shape, tuple(map(int, eqn.params["axes"]))
    if not table.rows or not set(table.rows) <= set(axes):
        return None
    sizes = [1 if d in table.rows else size for d, size in enumerate(shape)]
    made = np.broadcast_to(table.values, (len(table.values), *sizes)).sum(tuple(d + 1 for d in axes))
    return _Table(made.astype(eqn.outvars[0].aval.dtype), (), source)


def _scattered(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    """Ones that are added to zeros, at an index for each row."""
    zeros, indices, ones = operands
    table, places, updates = (atom.aval for atom in eqn.invars)
    is_count = zeros.source is None and ones.source is None and not zeros.values.any() and (ones.values == 1).all()
    is_by_row = table.ndim == 1 and updates.size * places.shape[-1] == places.size and places.shape[-1] == 1
    if not is_count or not is_by_row or indices.rows != tuple(range(places.ndim - 1)):
        return None
    at, size = indices.values.reshape(-1).astype(np.int64), table.shape[0]
    at = np.clip(at, 0, size - 1) if "CLIP" in str(eqn.params["mode"]) else at
    return _Table((at[:, None] == np.arange(size)).astype(table.dtype), (), source)


def _joined(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    """`concatenate` and `stack` of sums and zeros."""
    if any(table.rows or (source is not None and table.source is None and table.values.any()) for table in operands):
        return None
    keys = max(len(table.values) for table in operands)
    parts = [np.broadcast_to(t.values, (keys, *atom.aval.shape)) for t, atom in zip(operands, eqn.invars, strict=True)]
    if eqn.primitive.name == "stack":
        return _Table(np.stack(parts, eqn.params["axis"] + 1), (), source)
    return _Table(np.concatenate(parts, eqn.params["dimension"] + 1), (), source)


def _sliced(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    (table,), p = operands, eqn.params
    steps = p["strides"] or (1,) * len(p["start_indices"])
    where = [slice(*each) for each in zip(p["start_indices"], p["limit_indices"], steps, strict=True)]
    return None if table.rows else _Table(table.whole(eqn.invars[0].aval.shape)[:, *where], (), source)


def _counting(eqn: JaxprEqn, operands: list[_Table], source: Var | None) -> _Table | None:
    shape, dim = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    numbers = np.arange(shape[dim], dtype=eqn.outvars[0].aval.dtype)
    return _Table(numbers.reshape(1, *(size if d == dim else 1 for d, size in enumerate(shape))))


_OTHERS = {
    "reduce_sum": _added_up,
    "scatter-add": _scattered,
    "concatenate": _joined,
    "stack": _joined,
    "slice": _sliced,
    "iota": _counting,
}
"""Other operations that are understood."""

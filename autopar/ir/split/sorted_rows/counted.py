"""Finds equations that count how many rows have each value of a key: the lengths of groups of rows sorted by it.

In:     an equation, and the keys by which a program sorts rows.
Out:    `counted`: the key that it counts, and the dims along which its operands are cut into parts; None: it is not known to
        count one.
Method: `bincount` adds ones at indices that grow with the key, which is proved by evaluating them at all keys near the
        constants of the program; a sum of `one_hot` compares the key with 0, 1, 2, ....
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from autopar._jax import Atom, JaxprEqn, Literal, Var
from autopar.ir.known_values import RESHAPES, KnownValues
from autopar.ir.rules import rule_for
from autopar.ir.rules.index_map import MAX_STEPS
from autopar.ir.split.placement import Split
from autopar.ir.split.strategy import strategies

_CHOICES = "max min clamp eq ne lt le gt ge select_n and or not".split()
"""Primitives that compare numbers or pick one of them."""
_PICKS = ("argmax", "argmin", "top_k", "approx_top_k", "iota")
"""Primitives whose last result is not negative."""


Counted: TypeAlias = tuple[int, tuple[int | None, ...]]
"""What an equation counts: the number of a key; and for each operand the dim along which it is cut into parts, or None."""


def counted(eqn: JaxprEqn, values: KnownValues, key_of: Mapping[Var, int], count: int) -> Counted | None:
    """What a `scatter-add` or a `reduce_sum` over rows in `count` parts counts.

    None for integers below 32 bits: they may overflow for all rows where they do not for a part.
    """
    if eqn.outvars[0].aval.dtype.itemsize < 4:
        return None
    return (_bincount if eqn.primitive.name == "scatter-add" else _one_hot_sum)(eqn, values, key_of, count)


def _bincount(eqn: JaxprEqn, values: KnownValues, key_of: Mapping[Var, int], count: int) -> Counted | None:
    zeros, indices, ones = eqn.invars
    is_bincount = values.uniform_value(zeros) == 0 and values.uniform_value(ones) == 1 and len(zeros.aval.shape) == 1
    key = _key(indices, values, key_of) if is_bincount and ones.aval.size == indices.aval.size else None
    found = [s for s in strategies(rule_for(eqn), count) if s.operands[1] == Split(0)]
    if key is None or not found:
        return None
    of_ones = found[0].operands[2]
    return key, (None, 0, of_ones.dim if isinstance(of_ones, Split) else None)


def _key(indices: Atom, values: KnownValues, key_of: Mapping[Var, int]) -> int | None:
    """The key of which indices are a non-decreasing, non-negative function; None: not known to be one."""
    parts = list(values.expression(indices, key_of))
    leaves = [atom for atom, eqn in parts if eqn is None]
    keys = list(dict.fromkeys(atom for atom in leaves if isinstance(atom, Var)))
    if len(keys) != 1 or keys[0] not in key_of or keys[0].aval.size != indices.aval.size:
        return None
    (key,) = keys
    # Between two constants the function is linear in the key, or constant: trying all keys near them is a proof.
    reach = 2 + sum(abs(int(atom.val)) for atom in leaves if isinstance(atom, Literal))
    even = all(eqn is None or _is_even(eqn, values) for _, eqn in parts)
    if not even or reach > MAX_STEPS or not np.issubdtype(key.aval.dtype, np.integer):
        return None
    limit = np.iinfo(key.aval.dtype)
    least = 0 if _is_not_negative(key, values) else limit.min
    near = np.arange(max(-reach, least), min(reach, limit.max) + 1)
    domain = np.array([least, *near, limit.max], key.aval.dtype)
    made = values.evaluate(indices, {key: domain})
    if made is None or (np.diff(np.broadcast_to(made, domain.shape)) < 0).any() or np.min(made) < 0:
        return None
    return key_of[key]


def _is_even(eqn: JaxprEqn, values: KnownValues) -> bool:
    """Whether an equation maps values that grow by one with the key, or are constant, to such values."""
    if eqn.primitive.name in ("add", "sub"):
        return any(values.uniform_value(atom) is not None for atom in eqn.invars)
    return eqn.primitive.name in (*_CHOICES, *RESHAPES)


def _one_hot_sum(eqn: JaxprEqn, values: KnownValues, key_of: Mapping[Var, int], count: int) -> Counted | None:
    """What a sum of `one_hot` counts; its key must not be negative: such rows are in no group, but sort before the first."""
    (hot,), summed = eqn.invars, eqn.params["axes"]
    last = hot.aval.ndim - 1
    _, made = values.definition(hot)
    while made is not None and made.primitive.name in ("convert_element_type", "copy"):
        _, made = values.definition(made.invars[0])
    if made is None or made.primitive.name != "eq" or tuple(summed) != tuple(range(last)) or hot.aval.shape[0] % count:
        return None
    for repeated, numbers in (made.invars, made.invars[::-1]):
        row = _repeated(repeated, last, values) if values.counts(numbers) == last else None
        if row is None:
            continue
        key = values.origin(row)
        if isinstance(key, Var) and key in key_of and key.aval.size == row.aval.size and _is_not_negative(key, values):
            return key_of[key], (0,)
    return None


def _is_not_negative(key: Var, values: KnownValues) -> bool:
    """Whether a key is known not to be negative: an index that something picked, or unsigned."""
    _, maker = values.definition(key)
    is_pick = maker is not None and maker.primitive.name in _PICKS and key is maker.outvars[-1]
    return is_pick or np.issubdtype(key.aval.dtype, np.unsignedinteger)


def _repeated(atom: Atom, dim: int, values: KnownValues) -> Atom | None:
    """The value that an array repeats along one dim, and along no other; None: it is not known to be such an array."""
    size, along = atom.aval.size // max(1, atom.aval.shape[dim]), [dim]
    _, eqn = values.definition(atom)
    while eqn is not None and eqn.primitive.name == "broadcast_in_dim":
        along = [d for d, place in enumerate(eqn.params["broadcast_dimensions"]) if place in along]
        atom = eqn.invars[0]
        _, eqn = values.definition(atom)
    is_single = all(atom.aval.shape[d] == 1 for d in along)
    return atom if is_single and atom.aval.size == size else None

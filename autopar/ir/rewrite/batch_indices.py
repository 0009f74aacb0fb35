"""Indices that only count are batch dims: `x[jnp.arange(n), ids]` reads ids[k] of row k, as `take_along_axis` does.

In:     a flat program, and the values of its constants.
Out:    the same program, in which a `gather` or `scatter` whose index into a dim of length n counts 0 ... n - 1 along a
        dim of the indices has both as batching dims: they split freely, over a mesh and in time.
Method: a column of the indices is followed through what JAX's indexing makes of it (concatenation, broadcast, the
        `where(i < 0, i + n, i)` of negative indices) and out of bodies of loops, back to an `iota` or a constant like one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import (
    Atom,
    Constant,
    Jaxpr,
    JaxprEqn,
    Literal,
    SourceInfo,
    Var,
    find_primitives,
    make_jaxpr,
    new_eqn,
    new_var,
    primitives,
    replace_eqn,
    shaped,
)
from autopar.ir.region import is_region, region_of

Position = tuple[int, int]
"""A dim, and a place along it: one column of an array."""


def batch_indices(jaxpr: Jaxpr, constants: Mapping[Var, Constant]) -> Jaxpr:
    """Make batching dims of indices that count.

    Args:
        jaxpr: Flat program.
        constants: Values of those of its inputs that are constants.
    """
    return _Walk({}, {}, constants).body(jaxpr)


@dataclass(frozen=True, slots=True)
class _Walk:
    """What made each value, and what it is another name of: inside of a body, or behind a barrier."""

    origin: dict[Var, JaxprEqn]
    same: dict[Var, Atom]
    known: Mapping[Var, Constant]

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if is_region(eqn):
                eqns.append(self.region(eqn))
            elif eqn.primitive in _INDEXING:
                eqns += self.indexing(eqn)
            else:
                eqns.append(eqn)
            self.origin.update(dict.fromkeys(eqns[-1].outvars, eqns[-1]))
        return make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns)

    def region(self, eqn: JaxprEqn) -> JaxprEqn:
        region = region_of(eqn)
        for b in region.bindings:
            if b.role == "const":
                self.same.update((inside, b.outer) for inside in b.variables)
            elif b.role == "through" and b.result is not None:
                self.same[b.result] = b.outer
        return region.with_bodies(list(map(self.body, region.bodies)))

    # Reading and writing by index.

    def indexing(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equation, with batching dims for the columns that count; before it, what makes the other columns."""
        names = _GATHER if eqn.primitive.name == "gather" else _SCATTER
        numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1]
        searched, single, of_table, of_indices = (getattr(numbers, name) for name in names)
        batch = dict(zip(of_table, of_indices, strict=True))
        columns = dict(enumerate(searched))
        for k, d in enumerate(searched):
            # The last column stays: indices have one at least.
            along = self.counts(indices, (indices.aval.ndim - 1, k)) if d in single and len(columns) > 1 else None
            if along is not None and along not in batch.values() and indices.aval.shape[along] == _shape(eqn)[d]:
                batch[d] = along
                del columns[k]
        if len(columns) == len(searched):
            return [eqn]
        eqns, rest = self.columns(indices, list(columns), eqn.source_info)
        pairs = sorted(batch.items())  # as JAX wants them
        found = (
            tuple(columns.values()),
            tuple(d for d in single if d not in batch),
            tuple(d for d, _ in pairs),
            tuple(along for _, along in pairs),
        )
        numbers = numbers._replace(**dict(zip(names, found, strict=True)))
        params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
        return [*eqns, replace_eqn(eqn, invars=[eqn.invars[0], rest, *eqn.invars[2:]], params=params)]

    def columns(self, indices: Atom, wanted: Sequence[int], source: SourceInfo) -> tuple[list[JaxprEqn], Atom]:
        """The wanted columns of the indices, side by side."""
        *lead, count = indices.aval.shape
        made_by = self.origin.get(indices)
        eqns, parts = [], []
        if made_by is not None and made_by.primitive.name == "concatenate" and len(made_by.invars) == count:
            parts = [made_by.invars[k] for k in wanted]
        else:
            for k in wanted:
                bounds = {"start_indices": (*(0 for _ in lead), k), "limit_indices": (*lead, k + 1), "strides": None}
                parts.append(_column_var(indices, 1))
                eqns.append(new_eqn(primitives.slice_p, [indices], parts[-1:], bounds, source_info=source))
        if len(parts) > 1:
            joined, params = _column_var(indices, len(parts)), {"dimension": len(lead)}
            eqns.append(new_eqn(primitives.concatenate_p, parts, [joined], params, source_info=source))
            parts = [joined]
        return eqns, parts[0]

    # Counting.

    def counts(self, atom: Atom, column: Position | None) -> int | None:
        """The dim along which an array, or one column of it, is 0, 1, 2, ...; None: it is not known to count."""
        while not isinstance(atom, Literal) and atom in self.same:
            atom = self.same[atom]
        if isinstance(atom, Literal):
            return None
        if atom in self.known:
            return _counts_along(np.asarray(self.known[atom]), column)
        eqn = self.origin.get(atom)
        if eqn is None:
            return None
        match eqn.primitive.name:
            case "iota":
                along = eqn.params["dimension"]
                return along if column is None or column[0] != along else None
            case "convert_element_type":
                dtype, of = atom.aval.dtype, eqn.invars[0].aval.dtype
                integers = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(of, jnp.integer)
                fits = integers and max(atom.aval.shape, default=0) <= jnp.iinfo(dtype).max
                return self.counts(eqn.invars[0], column) if fits else None
            case "select_n":
                return self.counts(eqn.invars[1], column) if self.is_false(eqn.invars[0], column) else None
            case "concatenate":
                return self.of_part(eqn, column)
            case "broadcast_in_dim":
                return self.moved(eqn.invars[0], atom, eqn.params["broadcast_dimensions"], column)
            case "reshape" | "squeeze" | "expand_dims":
                return self.moved(eqn.invars[0], atom, _kept_dims(eqn.invars[0].aval.shape, atom.aval.shape), column)
        return None

    def is_false(self, atom: Atom, column: Position | None) -> bool:
        """Whether a predicate is that something which counts is negative, or a constant that says no."""
        while not isinstance(atom, Literal) and atom in self.same:
            atom = self.same[atom]
        if isinstance(atom, Literal):
            return not atom.val
        if atom in self.known:
            return not np.any(np.asarray(self.known[atom]))
        eqn = self.origin.get(atom)
        if eqn is None or eqn.primitive.name != "lt":
            return False
        least = eqn.invars[1]
        return isinstance(least, Literal) and least.val == 0 and self.counts(eqn.invars[0], column) is not None

    def of_part(self, eqn: JaxprEqn, column: Position | None) -> int | None:
        """In which operand of a concatenation the column is."""
        if column is None or column[0] != eqn.params["dimension"]:
            return None
        place = column[1]
        for part in eqn.invars:
            size = part.aval.shape[column[0]]
            if place < size:
                return self.counts(part, (column[0], place))
            place -= size
        return None

    def moved(self, source: Atom, target: Atom, places: Sequence[int | None], column: Position | None) -> int | None:
        """Through an operation that puts dim d of its operand at `places[d]`, None where it is dropped."""
        inner: Position | None = None
        for d, place in enumerate(places):
            if column is not None and place == column[0]:
                stretched = source.aval.shape[d] != target.aval.shape[place]
                inner = d, 0 if stretched else column[1]
        along = self.counts(source, inner)
        if along is None or places[along] is None:
            return None
        return places[along] if source.aval.shape[along] == target.aval.shape[places[along]] else None


_INDEXING = find_primitives(
    "gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"
)
_GATHER = ("start_index_map", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims")
_SCATTER = (
    "scatter_dims_to_operand_dims", "inserted_window_dims", "operand_batching_dims", "scatter_indices_batching_dims",
)  # fmt: skip
"""What JAX calls the same four things of both: dims that are searched, of which one element is taken, batching dims."""


def _shape(eqn: JaxprEqn) -> tuple[int, ...]:
    """Of what is read from, or written into."""
    return eqn.invars[0].aval.shape


def _column_var(indices: Atom, count: int) -> Var:
    """A variable for some columns of the indices."""
    return new_var(shaped(jax.ShapeDtypeStruct((*indices.aval.shape[:-1], count), indices.aval.dtype)))


def _counts_along(value: np.ndarray, column: Position | None) -> int | None:
    """The same of a constant."""
    if column is not None:
        value = np.take(value, [column[1]], axis=column[0])
    for along, size in enumerate(value.shape):
        count = np.arange(size).reshape([size if d == along else 1 for d in range(value.ndim)])
        if size > 1 and np.array_equal(value, np.broadcast_to(count, value.shape)):
            return along
    return None


def _kept_dims(source: tuple[int, ...], target: tuple[int, ...]) -> list[int | None]:
    """Where a reshape that only adds or drops dims of length 1 puts each dim; None: nowhere."""
    kept = [d for d, size in enumerate(target) if size != 1]
    if [target[d] for d in kept] != [size for size in source if size != 1]:
        return [None] * len(source)
    places = iter(kept)
    return [next(places) if size != 1 else None for size in source]

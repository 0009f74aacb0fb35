"""Turns gather and scatter indices that count 0, 1, 2, ... into batching dims.

`x[jnp.arange(n), ids]` reads element ids[k] of row k, as `take_along_axis` does.

In:     a flat program, and the values of its constants.
Out:    the same program, in which a `gather` or `scatter` whose index into a dim of length n counts 0 ... n - 1 along a
        dim of the indices has both as batching dims, which a mesh and microbatches can split.
Method: `known_values.py` tells which columns of the indices count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar._jax import (
    Atom,
    Constant,
    Jaxpr,
    JaxprEqn,
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
from autopar.ir.known_values import KnownValues
from autopar.ir.region import in_bodies


def batch_indices(jaxpr: Jaxpr, constants: Mapping[Var, Constant]) -> Jaxpr:
    """Replace indices that count by batching dims.

    `constants`: the values of the inputs that are constants.
    """
    return _Walk(KnownValues(jaxpr, constants)).body(jaxpr)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Rewrites a program and its bodies."""

    known: KnownValues

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            eqns += self.indexing(eqn) if eqn.primitive in _INDEXING else [in_bodies(eqn, self.body)]
        return make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns)

    def indexing(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equation with batching dims for the columns that count, after equations that slice out the other columns."""
        names = _GATHER if eqn.primitive.name == "gather" else _SCATTER
        numbers, indices, shape = eqn.params["dimension_numbers"], eqn.invars[1], eqn.invars[0].aval.shape
        searched, single, of_table, of_indices = (getattr(numbers, name) for name in names)
        batch = dict(zip(of_table, of_indices, strict=True))
        columns = dict(enumerate(searched))
        for k, d in enumerate(searched):
            # The last column stays: indices need at least one.
            along = self.known.counts(indices, (indices.aval.ndim - 1, k)) if d in single and len(columns) > 1 else None
            if along is not None and along not in batch.values() and indices.aval.shape[along] == shape[d]:
                batch[d] = along
                del columns[k]
        if len(columns) == len(searched):
            return [eqn]
        eqns, rest = self.columns(indices, list(columns), eqn.source_info)
        pairs = sorted(batch.items())  # JAX wants them ascending
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
        """The wanted columns of the indices as one array, after the equations that slice and join them."""
        *lead, count = indices.aval.shape
        made_by = self.known.maker.get(indices)
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


_INDEXING = find_primitives(
    "gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"
)
_GATHER = ("start_index_map", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims")
_SCATTER = (
    "scatter_dims_to_operand_dims", "inserted_window_dims", "operand_batching_dims", "scatter_indices_batching_dims",
)  # fmt: skip
"""JAX's names for the same four fields of gather and scatter: dims indexed, dims of size 1 dropped, batching dims of both."""


def _column_var(indices: Atom, count: int) -> Var:
    """A variable for `count` columns of the indices."""
    return new_var(shaped(jax.ShapeDtypeStruct((*indices.aval.shape[:-1], count), indices.aval.dtype)))

"""Folds the test which of several writes to an index won, in the gradient of a scatter whose indices are a permutation.

In:     a flat program. To differentiate `y.at[order].set(x)`, JAX scatters the number of each element of x, gathers the
        numbers back and compares: of several writes to one index only one counts.
Out:    the same program, in which these comparisons are constants where `order` is a permutation of all rows, as `argsort`
        makes it.
Method: match each comparison (`eq`) by the equations that define its operands; dead code then removes the scatter.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, Jaxpr, JaxprEqn
from autopar.ir.build import Equations
from autopar.ir.known_values import KnownValues
from autopar.ir.region import in_bodies
from autopar.ir.rewrite.dead_code import with_equations


def resolve_unique_writes(jaxpr: Jaxpr) -> Jaxpr:
    """Replace comparisons of scattered with gathered numbers by constants, where the answer is known."""
    known = KnownValues(jaxpr)
    if not any(eqn.primitive.name == "scatter" for eqn in known.maker.values()):
        return jaxpr
    return _answered(jaxpr, known)


def _answered(jaxpr: Jaxpr, known: KnownValues) -> Jaxpr:
    eqns = Equations()
    for eqn in jaxpr.eqns:
        answer = _answer(eqn, known) if eqn.primitive.name == "eq" else None
        if answer is None:
            eqns.append(in_bodies(eqn, lambda body: _answered(body, known)))
        else:
            (var,) = eqn.outvars
            eqns.define(var, functools.partial(jnp.full, var.aval.shape, answer), [], eqn.source_info)
    return with_equations(jaxpr, eqns)


def _answer(eqn: JaxprEqn, known: KnownValues) -> bool | None:
    """The answer of a comparison, for all elements; None: it is not known."""
    for one, other in (eqn.invars, eqn.invars[::-1]):
        _, looks = known.definition(one)
        if looks is None:
            continue
        if looks.primitive.name == "scatter" and known.uniform_value(other) == 0:
            return False if known.writes_each(looks) and _is_numbered(looks.invars[2], known) else None
        if looks.primitive.name == "gather":
            _, writes = known.definition(looks.invars[0])
            if writes is not None and writes.primitive.name == "scatter" and _same(writes.invars[2], other, known):
                return True if known.writes_each(writes) and _looks_there(looks, writes, known) else None
    return None


def _same(one: Atom, other: Atom, known: KnownValues) -> bool:
    return known.definition(one)[0] is known.definition(other)[0]


def _is_numbered(updates: Atom, known: KnownValues) -> bool:
    """Whether the scattered numbers are 1, 2, ..., without overflow, so that none is 0."""
    _, add = known.definition(updates)
    if add is None or add.primitive.name != "add" or not jnp.issubdtype(add.outvars[0].aval.dtype, jnp.unsignedinteger):
        return False
    ones = [known.uniform_value(atom) for atom in add.invars]
    most = np.iinfo(updates.aval.dtype).max
    return any(one == 1 and _counts_to(add.invars[1 - k], known) < most for k, one in enumerate(ones))


def _counts_to(atom: Atom, known: KnownValues) -> float:
    """How many numbers an `iota` counts that a value is, reshaped or broadcast; inf: it is none."""
    _, eqn = known.definition(atom)
    while eqn is not None and eqn.primitive.name in ("reshape", "broadcast_in_dim", "squeeze", "expand_dims"):
        _, eqn = known.definition(eqn.invars[0])
    if eqn is None or eqn.primitive.name != "iota":
        return math.inf
    return eqn.outvars[0].aval.shape[eqn.params["dimension"]]


def _looks_there(gather: JaxprEqn, scatter: JaxprEqn, known: KnownValues) -> bool:
    """Whether a gather reads each element at the index at which the scatter wrote it."""
    reads, writes = gather.params["dimension_numbers"], scatter.params["dimension_numbers"]
    (dim,) = writes.scatter_dims_to_operand_dims
    window = tuple(1 if d == dim else size for d, size in enumerate(scatter.invars[0].aval.shape))
    return (
        _same(gather.invars[1], scatter.invars[1], known)
        and tuple(gather.params["slice_sizes"]) == window
        and tuple(reads.offset_dims) == tuple(writes.update_window_dims)
        and tuple(reads.collapsed_slice_dims) == tuple(writes.inserted_window_dims)
        and tuple(reads.start_index_map) == tuple(writes.scatter_dims_to_operand_dims)
        and not reads.operand_batching_dims
    )

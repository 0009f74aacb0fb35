"""Reads loads and stores in the body of a Pallas kernel, and rewrites a body for shorter buffers, loops and grids.

In:     equations of the body: `get`, `swap`, `addupdate`, and Triton's `masked_load`, `masked_swap`.
Out:    `access_of`: the part of a buffer that is accessed; `shorter_loop`, `on_shorter_buffers`, `with_last_steps`: the body
        with fewer trips of a loop, with shorter buffers, with a shorter grid.
Method: JAX keeps indices as a tree of slices and index arrays, whose leaves are operands of the equation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar._jax import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, new_var, open_jaxpr, replace_eqn


@dataclass(frozen=True, slots=True)
class Access:
    """A load or a store.

    Attributes:
        buffer: The buffer.
        shape: Shape of the buffer.
        starts: For each dim the first index, or an array of indices.
        sizes: For each dim the length of the slice; 1 for an array of indices.
        others: The other operands: mask, fill value, stored value.
        stored: The stored value; None: it is a load.
        reads: Whether the old value is read; the old value that a store returns does not count.
    """

    buffer: Var
    shape: tuple[int, ...]
    starts: tuple[Atom | int, ...]
    sizes: tuple[int, ...]
    others: tuple[Atom, ...]
    stored: Atom | None
    reads: bool

    @property
    def is_whole(self) -> bool:
        """Whether all of the buffer is accessed, without a mask."""
        return self.sizes == self.shape and len(self.others) == (self.stored is not None)


def is_buffer(atom: object) -> bool:
    """Whether an atom is a buffer rather than a value."""
    return isinstance(atom, Var) and "Ref" in type(atom.aval).__name__


def access_of(eqn: JaxprEqn) -> Access | None:
    """The access of a load or a store; None: the equation is none, or its indices are not understood."""
    parts = _parts(eqn)
    if parts is None or not is_buffer(parts[0]):
        return None
    buffer, indexers, *others = parts
    stored = others[0] if eqn.primitive.name in ("swap", "addupdate", "masked_swap") else None
    reads = eqn.primitive.name not in ("swap", "masked_swap")
    shape = tuple(buffer.aval.shape)
    if not indexers:
        return Access(buffer, shape, (0,) * len(shape), shape, _present(others), stored, reads)
    starts: list[Any] = []
    sizes: list[int] = []
    for index in getattr(indexers[0], "indices", ()):
        size = getattr(index, "size", None) if type(index).__name__ == "Slice" else 1
        if not isinstance(size, int) or getattr(index, "stride", 1) != 1:
            return None
        starts.append(getattr(index, "start", index))
        sizes.append(size)
    if len(indexers) > 1 or len(starts) != len(shape):
        return None
    return Access(buffer, shape, tuple(starts), tuple(sizes), _present(others), stored, reads)


def _present(atoms: Iterable[Atom | None]) -> tuple[Atom, ...]:
    return tuple(atom for atom in atoms if atom is not None)


def _parts(eqn: JaxprEqn) -> list[Any] | None:
    """Buffer, list of indexers, then the other operands: stored value, mask, fill value; None: it is no access."""
    match eqn.primitive.name:
        case "get":
            return [eqn.invars[0], list(jax.tree.unflatten(eqn.params["tree"], eqn.invars[1:]))]
        case "swap" | "addupdate":
            indexers = jax.tree.unflatten(eqn.params["tree"], eqn.invars[2:])
            return [eqn.invars[0], list(indexers), eqn.invars[1]]
        case "masked_load" | "masked_swap":
            buffer, indexers, *others = jax.tree.unflatten(eqn.params["args_tree"], eqn.invars)
            return [buffer, list(indexers or ()), *others]
    return None


# Rewriting a body.


def with_last_steps(body: Jaxpr, lengths: Mapping[int, tuple[int, int]]) -> Jaxpr:
    """The body with its tests for the last step (`program_id == n - 1`) changed: `lengths`: grid dim -> (old n, new n)."""
    if all(old == new for old, new in lengths.values()):
        return body
    index_of: dict[Atom, int] = {}
    eqns = []
    for eqn in body.eqns:
        if eqn.primitive.name == "program_id":
            index_of[eqn.outvars[0]] = eqn.params["axis"]
        if eqn.primitive.name == "eq" and isinstance(eqn.invars[1], Literal) and isinstance(eqn.invars[0], Var):
            old, new = lengths.get(index_of.get(eqn.invars[0], -1), (0, 0))
            if old and bool(eqn.invars[1].val == old - 1):
                last = type(eqn.invars[1])(np.asarray(new - 1, eqn.invars[1].aval.dtype)[()], eqn.invars[1].aval)
                eqn = replace_eqn(eqn, invars=[eqn.invars[0], last])
        eqns.append(eqn)
    return body.replace(eqns=eqns)


def shorter_loop(body: Jaxpr, at: int, trips: int) -> Jaxpr:
    """The body with `trips` trips of the loop that is its `at`-th equation."""
    loop = body.eqns[at]
    params = {**loop.params, "length": trips, "unroll": min(loop.params["unroll"], trips)}
    return body.replace(eqns=[*body.eqns[:at], replace_eqn(loop, params=params), *body.eqns[at + 1 :]])


def on_shorter_buffers(body: Jaxpr, lengths_of: Mapping[int, Mapping[int, int]]) -> Jaxpr:
    """The body with other buffer lengths: position among its arguments -> dim -> length."""
    new = {body.invars[at]: resized_buffer(body.invars[at].aval, lengths) for at, lengths in lengths_of.items()}
    return _retyped(body, new)


def _retyped(body: Jaxpr, types: Mapping[Var, Aval]) -> Jaxpr:
    """The body with other types for some of its arguments."""
    new = {var: new_var(types[var]) for var in body.invars if var in types}
    return body.replace(invars=[new.get(var, var) for var in body.invars], eqns=[_on_others(e, new) for e in body.eqns])


def _on_others(eqn: JaxprEqn, buffer_for: Mapping[Var, Var]) -> JaxprEqn:
    """The equation with its buffers replaced by others."""
    invars = [buffer_for.get(atom, atom) if isinstance(atom, Var) else atom for atom in eqn.invars]
    if all(new is old for new, old in zip(invars, eqn.invars, strict=True)):
        return eqn
    if _parts(eqn) is not None:
        return _access_of_others(eqn, buffer_for)

    def inner(closed: Jaxpr | ClosedJaxpr, operands: Sequence[Atom]) -> Jaxpr | ClosedJaxpr:
        body, _ = open_jaxpr(closed)
        types = {var: atom.aval for var, atom in zip(body.invars, operands, strict=True) if is_buffer(atom)}
        body = _retyped(body, types)
        return body if isinstance(closed, Jaxpr) else closed.replace(jaxpr=body)

    if "branches" in eqn.params:
        params = {"branches": tuple(inner(branch, invars[1:]) for branch in eqn.params["branches"])}
    else:
        params = {"jaxpr": inner(eqn.params["jaxpr"], invars)}
    return replace_eqn(eqn, invars=invars, params={**eqn.params, **params})


def resized_buffer(aval: Aval, lengths: Mapping[int, int]) -> Aval:
    """A buffer's type with other lengths along some dims."""
    shape = tuple(lengths.get(dim, size) for dim, size in enumerate(aval.shape))
    return aval.update(inner_aval=aval.inner_aval.update(shape=shape))


def _access_of_others(eqn: JaxprEqn, buffer_for: Mapping[Var, Var]) -> JaxprEqn:
    """A load or a store with its buffer replaced by another."""
    old = next(atom for atom in eqn.invars if isinstance(atom, Var) and atom in buffer_for)
    shape = buffer_for[old].aval.shape
    key = "args_tree" if "args_tree" in eqn.params else "tree"
    first = 0 if key == "args_tree" else 1 if eqn.primitive.name == "get" else 2
    parts = jax.tree.unflatten(eqn.params[key], eqn.invars[first:])
    resized = jax.tree.map(
        lambda part: dataclasses.replace(part, shape=shape) if hasattr(part, "int_indexer_shape") else part,
        parts,
        is_leaf=lambda part: hasattr(part, "int_indexer_shape"),
    )
    leaves, tree = jax.tree.flatten(resized)
    invars = [buffer_for[old] if atom is old else atom for atom in (*eqn.invars[:first], *leaves)]
    return replace_eqn(eqn, invars=invars, params={**eqn.params, key: tree})

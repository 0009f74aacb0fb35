"""Loads from and stores to the buffers of a kernel: which part of a buffer, and the same of a shorter one.

In:     equations of the body of a Pallas kernel: `get`, `swap`, `addupdate`, and Triton's `masked_load`, `masked_swap`.
Out:    `access_of`; `shorter_loop`, `on_shorter_buffers`, `with_last_steps`: a body of which one loop has fewer trips; whose
        buffers are shorter; whose grid has fewer steps.
Method: JAX keeps indices as a tree of slices and arrays of numbers, whose leaves are operands of the equation.
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
        buffer: Which.
        shape: Of the buffer.
        starts: For each of its dims the first place, or the places.
        sizes: How many from there on; 1 where there are places.
        others: A mask, what stands where it is not, what is stored.
        stored: What is stored; None: it is a load.
        reads: Whether what stood there is read; what a store gives back of it has no part in this.
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
        """Whether all of the buffer is touched, whatever stands in it."""
        return self.sizes == self.shape and len(self.others) == (self.stored is not None)


def is_buffer(atom: object) -> bool:
    """Whether an atom is a buffer rather than a value."""
    return isinstance(atom, Var) and "Ref" in type(atom.aval).__name__


def access_of(eqn: JaxprEqn) -> Access | None:
    """What a load or a store touches; None: it is none, or written in another way."""
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
    """Buffer, list of indexers, what is stored, mask, what stands where it is not."""
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


# The same on shorter buffers.


def with_last_steps(body: Jaxpr, lengths: Mapping[int, tuple[int, int]]) -> Jaxpr:
    """A body whose steps find the last one of some dims at another number: for each dim its length, and the new one."""
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
    """A body one of whose loops, the `at`-th of its equations, has so many trips."""
    loop = body.eqns[at]
    params = {**loop.params, "length": trips, "unroll": min(loop.params["unroll"], trips)}
    return body.replace(eqns=[*body.eqns[:at], replace_eqn(loop, params=params), *body.eqns[at + 1 :]])


def on_shorter_buffers(body: Jaxpr, lengths_of: Mapping[int, Mapping[int, int]]) -> Jaxpr:
    """A body whose buffers, by their positions among its arguments, have other lengths along some dims."""
    new = {body.invars[at]: resized_buffer(body.invars[at].aval, lengths) for at, lengths in lengths_of.items()}
    return _retyped(body, new)


def _retyped(body: Jaxpr, types: Mapping[Var, Aval]) -> Jaxpr:
    """A body some of whose arguments have other types."""
    new = {var: new_var(types[var]) for var in body.invars if var in types}
    return body.replace(invars=[new.get(var, var) for var in body.invars], eqns=[_on_others(e, new) for e in body.eqns])


def _on_others(eqn: JaxprEqn, buffer_for: Mapping[Var, Var]) -> JaxprEqn:
    """An equation on the buffers that stand for its own."""
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
    """The type of a buffer with other lengths along some dims."""
    shape = tuple(lengths.get(dim, size) for dim, size in enumerate(aval.shape))
    return aval.update(inner_aval=aval.inner_aval.update(shape=shape))


def _access_of_others(eqn: JaxprEqn, buffer_for: Mapping[Var, Var]) -> JaxprEqn:
    """A load or a store, on the buffer that stands for its own."""
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

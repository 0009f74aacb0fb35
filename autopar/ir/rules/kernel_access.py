"""Loads from and stores to the buffers of a kernel: which part of a buffer, and the same of a shorter one.

In:     equations of the body of a Pallas kernel: `get`, `swap`, `addupdate`, and Triton's `masked_load`, `masked_swap`.
Out:    `access_of`; `shorter_loop`: a body of which one loop has fewer trips, over buffers that are shorter.
Method: JAX keeps indices as a tree of slices and arrays of numbers, whose leaves are operands of the equation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, new_var, open_jaxpr, replace_eqn, scan_counts, scan_params


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


def is_buffer(atom: Any) -> bool:
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


def _present(atoms: Any) -> tuple[Atom, ...]:
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


def shorter_loop(body: Jaxpr, at: int, walked: Mapping[int, Mapping[int, int]], trips: int) -> Jaxpr:
    """A body one of whose loops has so many trips.

    Args:
        body: Of the kernel.
        at: The loop's number among its equations; nothing else touches the buffers that it walks through.
        walked: For each of these, by its position among the body's arguments, its new length along some dims.
        trips: Of the new loop.
    """
    loop = body.eqns[at]
    new: dict[Atom, Var] = {}
    for position, lengths in walked.items():
        new[body.invars[position]] = new_var(resized_buffer(body.invars[position].aval, lengths))
    operands = [new.get(atom, atom) if isinstance(atom, Var) else atom for atom in loop.invars]
    inside, _ = open_jaxpr(loop.params["jaxpr"])
    pairs = zip(inside.invars, loop.invars, operands, strict=True)
    inner = {var: new_var(atom.aval) for var, old, atom in pairs if atom is not old}
    eqns = [_on_others(eqn, inner) for eqn in inside.eqns]
    inside = inside.replace(invars=[inner.get(var, var) for var in inside.invars], eqns=eqns)
    params = {**scan_params(loop.params, inside, *scan_counts(loop.params)), "length": trips}
    params["unroll"] = min(params["unroll"], trips)
    eqns = [*body.eqns[:at], replace_eqn(loop, invars=operands, params=params), *body.eqns[at + 1 :]]
    return body.replace(invars=[new.get(var, var) for var in body.invars], eqns=eqns)


def resized_buffer(aval: Any, lengths: Mapping[int, int]) -> Any:
    """The type of a buffer with other lengths along some dims."""
    shape = tuple(lengths.get(dim, size) for dim, size in enumerate(aval.shape))
    return aval.update(inner_aval=aval.inner_aval.update(shape=shape))


def _on_others(eqn: JaxprEqn, buffer_for: Mapping[Var, Var]) -> JaxprEqn:
    """A load or a store, on the buffer that stands for its own."""
    old = next((atom for atom in eqn.invars if isinstance(atom, Var) and atom in buffer_for), None)
    if old is None:
        return eqn
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

"""Infers from structure which arguments are state and which are the batch.

In:     the traced program: trees and types of arguments and outputs.
Out:    for each output leaf the input leaf it replaces; which argument leaves are batch.
Method: an argument is state if a subtree of the outputs has its structure, shapes and dtypes; arguments are matched in
        order. A tree whose floating leaves come back in another dtype is state too, with a warning; a single array is not.
        The batch is the arguments that are not state and whose leaves share their leading dim. Of several leading dims
        (frozen weights may have one) it is the one along which the step can be computed row by row. A single array that
        comes back after other state may be a batch of which the step returns a reconstruction: it is the batch if no other
        argument can be, or if it has the batch's leading dim. A random key, typed or as integers, has no samples, and
        arguments that the step does not read do not count. Of arrays that differ in their leading dims (a batch of each task,
        a mask beside samples) those are batch by which work is split (`samples_among`). Samples may lie behind time
        (`time_major.py`). What the user names is no state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from autopar._jax import Aval, Var, is_key
from autopar.errors import BatchError, warn
from autopar.grouping import grouped
from autopar.ir.dims import Dims
from autopar.ir.program import Program
from autopar.ir.split.rounds.rounds import rows_are_samples, samples_among, sizes_of_most_work
from autopar.ir.split.rounds.steps import dims_of_samples
from autopar.ir.trace.parameters import Argument, integers
from autopar.ir.trace.returned import num_updated, objects_in
from autopar.ir.trace.time_major import samples_behind_time
from autopar.ir.work import num_bytes


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of the program's inputs.

    Attributes:
        aliases: Output leaf -> input leaf whose new value it is, of the same dtype.
        state: Input leaves whose new value is returned.
        batch: Input leaves that hold samples.
        dims: For each of these its dims that run over samples: dim 0; of a stack that a loop of training steps reads, the
            dim behind it; of one that a loop of microbatches reads, both.
        donated: Whether each input leaf is donated.
    """

    aliases: dict[int, int]
    state: tuple[int, ...]
    batch: tuple[int, ...]
    donated: tuple[bool, ...]
    dims: Mapping[int, Dims]

    @property
    def leading(self) -> dict[int, int]:
        """For each leaf of the batch the dim that microbatches split."""
        return {k: min(dims) for k, dims in self.dims.items()}

    @property
    def may_hold_layers(self) -> tuple[int, ...]:
        """Input leaves that may be stacks of layers: the state; for a step without state, all but the batch."""
        return self.state or tuple(k for k in range(len(self.donated)) if k not in self.batch)


def find_roles(program: Program, batch_argnums: object = "auto", donate_argnums: object = "auto") -> Roles:
    """Tell state from batch.

    `batch_argnums`: `"auto"`, or the numbers of the parameters that are the batch.
    `donate_argnums`: `"auto"` (state is donated), or numbers of parameters.

    Raises `BatchError`: the batch is ambiguous, or no argument has that number.
    """
    arguments = argument_slices(program)
    objects: dict[int, tuple[int, ...]] = dict.fromkeys(objects_in(program.out_tree).arguments, ())
    if batch_argnums == "auto":
        found = objects | _returned(program, arguments, objects)
        batch, dims = _find_batch_or_time(program, arguments, found)
        found = {number: span for number, span in found.items() if number not in batch}
    else:
        batch = _positions(program, "batch_argnums", batch_argnums)
        dims = _behind_time(program, arguments, batch, _dims(program, _leaves(arguments, batch)))
        found = objects | _returned(program, arguments, objects, batch)
    pairs = {out: arguments[number][0] + k for number, span in found.items() for k, out in enumerate(span)}
    pairs |= _updated(program, arguments)
    cast = {out: k for out, k in pairs.items() if program.out_avals[out].dtype != program.in_avals[k].dtype}
    _warn_of_casts(program, cast)
    aliases = {out: k for out, k in pairs.items() if out not in cast}
    state = tuple(sorted(pairs.values()))
    changed = tuple(n for n in found if not set(state).isdisjoint(range(*arguments[n])))
    donated = [False] * len(program.jaxpr.invars)
    for number in changed if donate_argnums == "auto" else _positions(program, "donate_argnums", donate_argnums):
        for leaf in range(*arguments[number]):
            donated[leaf] = leaf not in cast.values() and (donate_argnums != "auto" or leaf in state)
    return Roles(aliases, state, tuple(dims), tuple(donated), dims)


def _dims(program: Program, leaves: Sequence[int]) -> dict[int, Dims]:
    """The leaves that hold samples, and along which dims.

    Other leaves hold a number, or a key, for each step of a loop. Of those that differ in the size of what may be samples
    within a step, those of most bytes hold them. Outside of loops, `samples_among` says which.
    """
    invars, found = program.jaxpr.invars, dict[int, Dims]()
    for k, (_, dims) in zip(leaves, dims_of_samples(program.jaxpr, [invars[k] for k in leaves]).items(), strict=True):
        most = len(program.in_avals[k].shape) - (k in program.raw_keys)
        if any(d < most for d in dims):
            found[k] = frozenset(d for d in dims if d < most)
    first = [k for k, dims in found.items() if dims == {0}]
    if len({program.in_avals[k].shape[0] for k in first}) > 1:
        others = set(first).difference(samples_among(program.jaxpr, first) or first)
        found = {k: dims for k, dims in found.items() if k not in others}
    within = [k for k, dims in found.items() if 0 not in dims]
    sizes = grouped((program.in_avals[k].shape[min(found[k])], num_bytes(invars[k])) for k in within)
    most = max(sizes, key=lambda size: sum(sizes[size]), default=0)
    return {k: dims for k, dims in found.items() if k not in within or program.in_avals[k].shape[min(dims)] == most}


def find_batch(program: Program, state: Iterable[int], sure: bool = True) -> tuple[int, ...]:
    """Positions (among the program's arguments) of those outside `state` that share their leading dim.

    Of several leading dims it is the one along which the step, or clearly most of it, can be computed row by row; several, if
    all of these hold samples (points inside of a domain, and on its border); none, if their rows belong together (of a graph).

    `sure`: whether `state` has all arguments that are state; if not, several sizes tell nothing.

    Raises `BatchError`: one of several dims may be the batch's.
    """
    arguments = argument_slices(program)
    candidates = _candidates(program, arguments, state)
    if not candidates:
        return _of_several_sizes(program, arguments, state)
    if len(set(candidates.values())) > 1:
        by_size = _leaves_by_size(program, arguments, candidates)
        rows = rows_are_samples(program.jaxpr, by_size) or _scanned_by_steps(program, arguments, candidates)
        if sure and len(rows) != 1:
            several = _of_several_sizes(program, arguments, state)
            if len({candidates.get(n) for n in several}) != 1:
                return several
            rows = sizes_of_most_work(program.jaxpr, {size: by_size[size] for size in rows})
        if len(rows) == 1:
            return tuple(number for number, size in candidates.items() if size == rows[0])
        listed = "; ".join(f"argument {_label(program.arguments[n])}: leading dim {d}" for n, d in candidates.items())
        raise BatchError(
            "which arguments are the batch cannot be told.",
            given=listed,
            wrong="they are not state, and their leading dims differ.",
            do="pass batch_argnums=..., the positions of the arguments that hold samples; batch_argnums=(), if none does (a "
            "whole graph).",
            candidates={program.arguments[n].number: size for n, size in candidates.items()},
        )
    return tuple(candidates)


def _find_batch(
    program: Program, arguments: Sequence[tuple[int, int]], found: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """The batch, given the arguments `found` among the outputs: those are state, but single arrays may be the batch."""
    sizes = set(_candidates(program, arguments, found).values())
    trees, after_state = _trees(program), list(found)[1:]
    alone = [n for n in after_state if jax.tree_util.treedef_is_leaf(trees[n])]
    doubtful = _candidates(program, arguments, set(range(len(arguments))).difference(alone))
    state = [n for n in found if n not in doubtful or (sizes and doubtful[n] not in sizes)]
    return find_batch(program, state, sure=len(state) == len(found))


def _find_batch_or_time(
    program: Program, arguments: Sequence[tuple[int, int]], found: Mapping[int, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[int, Dims]]:
    """The batch, and its dims that run over samples, which may lie behind time; arguments as of `_find_batch`."""
    others = [n for n in range(len(arguments)) if n not in found]
    try:
        batch = _find_batch(program, arguments, found)
    except BatchError:
        dims = _behind_time(program, arguments, others, {})
        if not dims:
            raise
        batch = ()
    else:
        dims = _behind_time(program, arguments, others, _dims(program, _leaves(arguments, batch)))
    return tuple(n for n, span in enumerate(arguments) if n in batch or not dims.keys().isdisjoint(range(*span))), dims


def _behind_time(
    program: Program, arguments: Sequence[tuple[int, int]], numbers: Iterable[int], dims: dict[int, Dims]
) -> dict[int, Dims]:
    """The dims of samples that lie behind time in the arguments of these numbers; otherwise those that are given."""
    avals = program.in_avals
    read = _read_inputs(program) - random_keys(program)
    leaves = [[k for k in range(*arguments[n]) if k in read and avals[k].shape] for n in numbers]
    leading = {k: min(of) for k, of in dims.items()}
    found = samples_behind_time(program.jaxpr, leaves, leading)
    return {k: frozenset({dim}) for k, dim in found.items()} or dims


def _leaves(arguments: Sequence[tuple[int, int]], numbers: Iterable[int]) -> list[int]:
    return [k for n in numbers for k in range(*arguments[n])]


def _leaves_by_size(
    program: Program, arguments: Sequence[tuple[int, int]], candidates: Mapping[int, int]
) -> dict[int, list[int]]:
    spans = [(size, range(*arguments[number])) for number, size in candidates.items()]
    return grouped((size, k) for size, span in spans for k in span if program.in_avals[k].shape)


def _of_several_sizes(program: Program, arguments: Sequence[tuple[int, int]], state: Iterable[int]) -> tuple[int, ...]:
    """Arguments outside `state` whose leaves differ in their leading dims, if some of these run over samples."""
    objects, read = objects_in(program.out_tree).arguments, _read_inputs(program) - random_keys(program)
    numbers = [n for n in range(len(arguments)) if n not in state and n not in objects]
    leaves = [k for k in _leaves(arguments, numbers) if k in read and program.in_avals[k].shape]
    samples = set(samples_among(program.jaxpr, leaves) if leaves else ())
    return tuple(n for n in numbers if not samples.isdisjoint(range(*arguments[n])))


def _scanned_by_steps(
    program: Program, arguments: Sequence[tuple[int, int]], candidates: Mapping[int, int]
) -> list[int]:
    """The leading dims of candidates that are stacks of batches, one for each step of a loop."""
    groups = _leaves_by_size(program, arguments, candidates)
    return [size for size, leaves in groups.items() if any(0 not in dims for dims in _dims(program, leaves).values())]


def _candidates(program: Program, arguments: Sequence[tuple[int, int]], state: Iterable[int]) -> dict[int, int]:
    """Arguments outside `state` whose leaves share their leading dim, and that dim.

    One that the step does not read (the key of a net without dropout) counts only if one that it reads has the same dim.
    """
    found, keys = {}, random_keys(program)
    read = _read_inputs(program)
    for number, (start, stop) in enumerate(arguments):
        shapes = [tuple(program.in_avals[k].shape) for k in range(start, stop) if k not in keys]
        leading = {shape[0] for shape in shapes if shape}
        if number not in state and len(leading) == 1:
            found[number] = leading.pop()
    for number in objects_in(program.out_tree).arguments:
        found.pop(number, None)
    sizes = {size for number, size in found.items() if not read.isdisjoint(range(*arguments[number]))}
    return {number: size for number, size in found.items() if size in sizes}


def _read_inputs(program: Program) -> set[int]:
    """Input leaves that an equation or a result of the program reads."""
    jaxpr = program.jaxpr
    atoms = {a for eqn in jaxpr.eqns for a in eqn.invars if isinstance(a, Var)}
    atoms.update(a for a in jaxpr.outvars if isinstance(a, Var))
    return {k for k, var in enumerate(jaxpr.invars) if var in atoms}


def random_keys(program: Program) -> set[int]:
    """Input leaves that are random keys, typed or as integers."""
    return {k for k, aval in enumerate(program.in_avals) if is_key(aval) or k in program.raw_keys}


def _returned(
    program: Program,
    arguments: Sequence[tuple[int, int]],
    objects: Collection[int],
    batch: Collection[int] | None = None,
) -> dict[int, tuple[int, ...]]:
    """For each argument found among the outputs, the output leaves that are its new value.

    First those of the same dtypes; then those whose floating leaves come back in another, never single arrays.

    Args:
        objects: Arguments that hold objects, which are left out.
        batch: The batch, which is left out; None: not known, so the last argument that may be it is not cast state.
    """
    found: dict[int, tuple[int, ...]] = {}
    trees = _trees(program)
    for type_of in (_type, _cast_type):
        cast = type_of is _cast_type
        candidates = _candidates(program, arguments, {*objects, *found}) if cast and batch is None else ()
        for number, (start, stop) in enumerate(arguments):
            is_last = [n for n in candidates if n not in found] == [number]
            is_doubtful = cast and (is_last or jax.tree_util.treedef_is_leaf(trees[number]))
            is_decided = number in found or number in objects or number in (batch or ())
            if start == stop or is_decided or is_doubtful:
                continue
            used = {leaf for span in found.values() for leaf in span}
            span = _find_in_result(program, number, (start, stop), used, type_of)
            if span is not None:
                found[number] = span
    return found


def _updated(program: Program, arguments: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Output leaves that are new arrays of objects -> the input leaves of the same paths."""
    found, start = {}, 0
    updated = objects_in(program.out_tree).updated
    for number, tree in zip(updated, program.out_tree.children()[: len(updated)], strict=True):
        place = {program.in_paths[k]: k for k in range(*arguments[number])}
        for out in range(start, start + tree.num_leaves):
            k = place.get(program.out_paths[out])
            if k is not None and _cast_type(program.in_avals[k]) == _cast_type(program.out_avals[out]):
                found[out] = k
        start += tree.num_leaves
    return found


def _find_in_result(
    program: Program, number: int, leaves: tuple[int, int], used: Collection[int], type_of: Callable[[Aval], object]
) -> tuple[int, ...] | None:
    """The first unused subtree of the result with an argument's structure and types, as output leaves."""
    result_begins = num_updated(program.out_tree)
    wanted = alike(_trees(program)[number], program.in_avals[slice(*leaves)], type_of)
    for kind, first, last in subtrees(program.out_tree, program.out_avals, type_of):
        if kind == wanted and first >= result_begins and not any(k in used for k in range(first, last)):
            return tuple(range(first, last))
    return None


def _warn_of_casts(program: Program, cast: Mapping[int, int]) -> None:
    if cast:
        out, k = next(iter(cast.items()))
        more = f" (and {len(cast) - 1} more)" if len(cast) > 1 else ""
        was, now = program.in_avals[k].dtype, program.out_avals[out].dtype
        warn(
            f"`{program.name}` returns state of another dtype than it is passed: {program.in_paths[k]} goes in as {was} "
            f"and comes out as {now}{more}. The memory that it is passed in cannot be reused, and the next call is planned "
            f"and compiled anew. Cast it back in the step (`new.astype(old.dtype)`), or begin with {now}."
        )


def _positions(program: Program, option: str, argnums: object) -> tuple[int, ...]:
    """Positions, among the program's arguments, of the user's argument numbers."""
    position = {argument.number: k for k, argument in enumerate(program.arguments)}
    numbers = [n for n in integers(argnums) if n not in program.defaulted]
    missing = [n for n in numbers if n not in position]
    if missing:
        raise BatchError(
            f"`{option}` names no argument of this call.",
            given=f"{option}={argnums!r}; the arguments are {', '.join(map(_label, program.arguments))}",
            wrong=f"there is no argument {missing[0]} that holds arrays.",
            do="pass positions of these.",
            candidates={},
        )
    return tuple(position[n] for n in numbers)


def _label(argument: Argument) -> str:
    return argument.name if argument.number is None else f"{argument.number} ({argument.name})"


def argument_slices(program: Program) -> list[tuple[int, int]]:
    """The range of input leaves of each argument (positional, then by keyword)."""
    positional, by_keyword = program.in_tree.children()
    sizes = [child.num_leaves for child in (*positional.children(), *by_keyword.children())]
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def arguments_of(program: Program) -> list[tuple[PyTreeDef, int, int]]:
    """Each argument (positional, then by keyword) with its range of input leaves."""
    return [(tree, *span) for tree, span in zip(_trees(program), argument_slices(program), strict=True)]


def _type(aval: Aval) -> tuple[object, ...]:
    return tuple(aval.shape), aval.dtype


def _cast_type(aval: Aval) -> tuple[object, ...]:
    """A key, equal for leaves of one shape that differ at most in their floating dtype."""
    return tuple(aval.shape), jnp.floating if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype


def alike(tree: PyTreeDef, avals: Sequence[Aval], type_of: Callable[[Aval], object] = _type) -> tuple[object, ...]:
    """A key, equal for trees of the same structure and leaf types."""
    return tree, *map(type_of, avals)


def subtrees(
    tree: PyTreeDef, avals: Sequence[Aval], type_of: Callable[[Aval], object] = _type
) -> list[tuple[tuple[object, ...], int, int]]:
    """Every subtree of a tree, as its `alike` key and its range of leaves: outermost first, then in order."""
    found, level = list[tuple[tuple[object, ...], int, int]](), [(tree, 0, tree.num_leaves)]
    while level:
        found += [(alike(tree, avals[first:last], type_of), first, last) for tree, first, last in level]
        following = []
        for tree, start, _ in level:
            for child in tree.children():
                following.append((child, start, start + child.num_leaves))
                start += child.num_leaves
        level = following
    return found


def _trees(program: Program) -> list[PyTreeDef]:
    return [tree for half in program.in_tree.children() for tree in half.children()]

"""Which arguments are state and which the batch, told from structure alone.

In:     the traced program: trees and types of arguments and outputs.
Out:    for each output leaf the input leaf it replaces; which argument leaves are batch.
Method: an argument is state if a subtree of the outputs has its structure, shapes and dtypes; arguments are matched in
        order. The batch is what is not state and whose leaves share their leading dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import BatchError
from autopar.ir.trace import Program


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of the program's inputs.

    Attributes:
        aliases: Output leaf -> input leaf whose new value it is.
        state: Input leaves that come back.
        batch: Input leaves that hold samples along dim 0.
        donated: Per input leaf.
        state_arguments: Numbers of the arguments that are state.
    """

    aliases: dict[int, int]
    state: tuple[int, ...]
    batch: tuple[int, ...]
    donated: tuple[bool, ...]
    state_arguments: tuple[int, ...]


def find_roles(program: Program, batch_argnums: Any = "auto", donate_argnums: Any = "auto") -> Roles:
    """Tell state from batch.

    Args:
        program: The traced step.
        batch_argnums: `"auto"`, or the positions of the arguments that are the batch.
        donate_argnums: `"auto"` (state is donated), or positions.
    """
    arguments = argument_slices(program)
    found: dict[int, tuple[int, ...]] = {}
    outputs = _subtrees(program)
    used: set[int] = set()
    trees = [tree for half in program.in_tree.children() for tree in half.children()]
    for number, (start, stop) in enumerate(arguments):
        if start == stop:
            continue
        wanted = tuple(_type(a) for a in program.in_avals[start:stop])
        tree = trees[number]
        for output_tree, first, last in outputs:
            span = range(first, last)
            if (
                last - first == stop - start
                and not used.intersection(span)
                and output_tree == tree
                and tuple(_type(a) for a in program.out_avals[first:last]) == wanted
            ):
                found[number] = tuple(span)
                used.update(span)
                break
    aliases = {out: arguments[number][0] + k for number, span in found.items() for k, out in enumerate(span)}
    state = tuple(sorted(aliases.values()))
    chosen = tuple(found) if donate_argnums == "auto" else _positions(donate_argnums)
    donated = [False] * len(program.jaxpr.invars)
    for number in chosen:
        for leaf in range(*arguments[number]):
            donated[leaf] = True
    batch = _batch_leaves(program, arguments, found, batch_argnums)
    return Roles(aliases, state, batch, tuple(donated), tuple(found))


def argument_slices(program: Program) -> list[tuple[int, int]]:
    """For each argument (positional, then by keyword) its range of input leaves."""
    positional, by_keyword = program.in_tree.children()
    sizes = [child.num_leaves for child in (*positional.children(), *by_keyword.children())]
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _type(aval: Any) -> tuple[Any, ...]:
    return tuple(aval.shape), aval.dtype


def _subtrees(program: Program) -> list[tuple[Any, int, int]]:
    """Every subtree of the outputs with its range of leaves, outermost first, then in order."""
    found, level = [], [(program.out_tree, 0, program.out_tree.num_leaves)]
    while level:
        found += level
        following = []
        for tree, start, _ in level:
            for child in tree.children():
                following.append((child, start, start + child.num_leaves))
                start += child.num_leaves
        level = following
    return found


def _positions(argnums: Any) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _batch_leaves(
    program: Program, arguments: Sequence[tuple[int, int]], state: Any, batch_argnums: Any
) -> tuple[int, ...]:
    shapes = [tuple(a.shape) for a in program.in_avals]
    if batch_argnums != "auto":
        chosen = _positions(batch_argnums)
        return tuple(k for n in chosen for k in range(*arguments[n]) if shapes[k])
    candidates = {}
    for number, (start, stop) in enumerate(arguments):
        if number in state:
            continue
        leading = {shapes[k][0] for k in range(start, stop) if shapes[k] and not _is_key(program, k)}
        if len(leading) == 1:
            candidates[number] = leading.pop()
    sizes = sorted(set(candidates.values()))
    if len(sizes) > 1:
        listed = "; ".join(
            f"argument {n} ({program.in_paths[arguments[n][0]].split('/')[0]}): leading dim {size}"
            for n, size in candidates.items()
        )
        raise BatchError(
            "which arguments are the batch cannot be told.",
            given=listed,
            wrong="they are not state, and their leading dims differ.",
            do="pass batch_argnums=..., the positions of the arguments that hold samples.",
            candidates=candidates,
        )
    return tuple(k for n in candidates for k in range(*arguments[n]) if shapes[k])


def _is_key(program: Program, leaf: int) -> bool:
    return jax.dtypes.issubdtype(program.in_avals[leaf].dtype, jax.dtypes.prng_key)

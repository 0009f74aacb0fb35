"""Which arguments are state and which the batch, told from structure alone.

In:     the traced program: trees and types of arguments and outputs.
Out:    for each output leaf the input leaf it replaces; which argument leaves are batch.
Method: an argument is state if a subtree of the outputs has its structure, shapes and dtypes; arguments are matched in
        order. The batch is what is not state and whose leaves share their leading dim. An array by itself may also be the
        batch of which the step returns a reconstruction: after other state it is taken for the batch if nothing else
        can be, or if the batch has its leading dim. A random key, typed or of integers, has no samples. What the user names as
        the batch is not state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar._jax import is_key
from autopar.errors import BatchError
from autopar.ir.program import Program
from autopar.ir.trace.parameters import Argument, integers


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
        batch_argnums: `"auto"`, or the numbers of the parameters that are the batch.
        donate_argnums: `"auto"` (state is donated), or numbers of parameters.

    Raises:
        BatchError: Which arguments are the batch cannot be told, or none has that number.
    """
    arguments = argument_slices(program)
    if batch_argnums == "auto":
        found = _returned(program, arguments, ())
        batch = _find_batch(program, arguments, found)
        found = {number: span for number, span in found.items() if number not in batch}
    else:
        batch = _chosen(program, "batch_argnums", batch_argnums)
        found = _returned(program, arguments, batch)
    aliases = {out: arguments[number][0] + k for number, span in found.items() for k, out in enumerate(span)}
    donated = [False] * len(program.jaxpr.invars)
    for number in found if donate_argnums == "auto" else _chosen(program, "donate_argnums", donate_argnums):
        for leaf in range(*arguments[number]):
            donated[leaf] = True
    samples = tuple(k for n in batch for k in range(*arguments[n]) if program.in_avals[k].shape)
    return Roles(aliases, tuple(sorted(aliases.values())), samples, tuple(donated), tuple(found))


def find_batch(program: Program, state: Iterable[int]) -> tuple[int, ...]:
    """Positions (among the program's arguments) of those that share their leading dim and are not in `state`.

    Raises:
        BatchError: Several leading dims are to choose from.
    """
    arguments = argument_slices(program)
    candidates = _candidates(program, arguments, state)
    if len(set(candidates.values())) > 1:
        listed = "; ".join(f"argument {_label(program.arguments[n])}: leading dim {d}" for n, d in candidates.items())
        raise BatchError(
            "which arguments are the batch cannot be told.",
            given=listed,
            wrong="they are not state, and their leading dims differ.",
            do="pass batch_argnums=..., the positions of the arguments that hold samples.",
            candidates={program.arguments[n].number: size for n, size in candidates.items()},
        )
    return tuple(candidates)


def _find_batch(
    program: Program, arguments: Sequence[tuple[int, int]], found: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """The batch, where `found` comes back: that is state, but for arrays that look like the batch."""
    sizes = set(_candidates(program, arguments, found).values())
    trees, after_state = _trees(program), list(found)[1:]
    alone = [n for n in after_state if jax.tree_util.treedef_is_leaf(trees[n])]
    doubtful = _candidates(program, arguments, set(range(len(arguments))).difference(alone))
    state = [n for n in found if n not in doubtful or (sizes and doubtful[n] not in sizes)]
    return find_batch(program, state)


def _candidates(program: Program, arguments: Sequence[tuple[int, int]], state: Iterable[int]) -> dict[int, int]:
    """Arguments outside of `state` whose leaves share their leading dim, and that dim."""
    found = {}
    for number, (start, stop) in enumerate(arguments):
        keys = [k for k in range(start, stop) if is_key(program.in_avals[k]) or k in program.raw_keys]
        shapes = [tuple(program.in_avals[k].shape) for k in range(start, stop) if k not in keys]
        leading = {shape[0] for shape in shapes if shape}
        if number not in state and len(leading) == 1:
            found[number] = leading.pop()
    return found


def _returned(
    program: Program, arguments: Sequence[tuple[int, int]], batch: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """For each argument that comes back, the batch apart, the output leaves that are its next value."""
    found: dict[int, tuple[int, ...]] = {}
    outputs = _subtrees(program)
    used: set[int] = set()
    trees = _trees(program)
    for number, (start, stop) in enumerate(arguments):
        if start == stop or number in batch:
            continue
        wanted = tuple(_type(a) for a in program.in_avals[start:stop])
        for tree, first, last in outputs:
            span = range(first, last)
            if (
                last - first == stop - start
                and not used.intersection(span)
                and tree == trees[number]
                and tuple(_type(a) for a in program.out_avals[first:last]) == wanted
            ):
                found[number] = tuple(span)
                used.update(span)
                break
    return found


def _chosen(program: Program, option: str, argnums: Any) -> tuple[int, ...]:
    """Positions among the program's arguments of those with the user's numbers."""
    position = {argument.number: k for k, argument in enumerate(program.arguments)}
    numbers = [n for n in integers(argnums) if n not in program.left_out]
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


def _trees(program: Program) -> list[Any]:
    return [tree for half in program.in_tree.children() for tree in half.children()]

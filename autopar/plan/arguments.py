"""Checks that arguments are those a step was compiled for, and names the ones that differ.

In:     the traced program, and the arguments of a call or one new value of an argument.
Out:    the flat leaves, or the number of the argument; or `StructureChangedError` that names the argument's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import StructureChangedError, listed
from autopar.ir.program import Program
from autopar.ir.trace.containers import key_text
from autopar.ir.trace.state import argument_slices, arguments_of
from autopar.plan.words import differences, type_text

MAX_LINES = 6


def check_arguments(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The flat leaves of the arguments, checked against those the step was compiled for.

    Raises `StructureChangedError`: the structure, a shape or a dtype differs; says which.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    if tree != program.in_tree or not all(_has_type(x, aval) for x, aval in zip(leaves, program.in_avals, strict=True)):
        raise _changed(program, args, kwargs)
    return leaves


def arguments_like(program: Program, made: Any) -> list[tuple[int, int]]:
    """The ranges of input leaves of the arguments with the structure, shapes and dtypes of `made`."""
    leaves, tree = jax.tree.flatten(made)
    found = ((first, stop) for own, first, stop in arguments_of(program) if own == tree)
    return [span for span in found if not any(_differences(program, span, leaves))]


def find_argument(program: Program, made: Any, number: int) -> tuple[int, int]:
    """The range of leaves of an argument like `made`: of this number (positional, then by name), or else of the first.

    Raises `StructureChangedError`: there is none; says what differs.
    """
    found = arguments_like(program, made)
    if found:
        wanted = argument_slices(program)[number : number + 1]
        return wanted[0] if wanted and wanted[0] in found else found[0]
    leaves, tree = jax.tree.flatten(made)
    alike = ((first, stop) for own, first, stop in arguments_of(program) if own == tree)
    nearest = [*_differences(program, span, leaves)] if (span := next(alike, None)) else []
    raise StructureChangedError(
        "the new state does not fit the step.",
        given=_in_lines(nearest) if nearest else str(tree),
        wrong="no argument of the step has these types." if nearest else "no argument of the step has this structure.",
        do="let init_fn return exactly what the step takes.",
        path=nearest[0][0] if nearest else "",
    )


def _differences(program: Program, span: tuple[int, int], leaves: Sequence[Any]) -> Iterator[tuple[str, str]]:
    own = slice(*span)
    for path, aval, leaf in zip(program.in_paths[own], program.in_avals[own], leaves, strict=True):
        if not _has_type(leaf, aval):
            yield path, _difference(path, *(type_text(x.shape, str(x.dtype)) for x in (aval, leaf)))


def _in_lines(found: Sequence[tuple[str, str]]) -> str:
    return listed([line for _, line in found], MAX_LINES, "\n")


def _has_type(leaf: Any, aval: Any) -> bool:
    # As in `jax.jit`, a Python number fits any dtype, and NumPy's 64 bits become 32 if JAX has no 64.
    dtype = getattr(leaf, "dtype", aval.dtype)
    if dtype != aval.dtype and isinstance(leaf, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return np.shape(leaf) == tuple(aval.shape) and dtype == aval.dtype


def _changed(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StructureChangedError:
    was = {
        path: type_text(aval.shape, str(aval.dtype))
        for path, aval in zip(program.in_paths, program.in_avals, strict=True)
    }
    now = dict(_types(program, args, kwargs))
    lines = [(path, _difference(path, before, here)) for path, before, here in differences(was, now)]
    if not lines:
        lines = [
            ("", f"the containers differ: compiled for {program.in_tree}, given {jax.tree.structure((args, kwargs))}.")
        ]
    return StructureChangedError(
        f"the arguments are not those `{program.name}` was compiled for.",
        given=_in_lines(lines),
        wrong="a compiled step runs for one structure, one set of shapes and dtypes.",
        do="pass such arguments, or call the step itself, which plans and compiles for new ones.",
        path=lines[0][0],
    )


def _difference(path: str, was: str | None, now: str | None) -> str:
    if now is None:
        return f"{path} is missing; it was {was}."
    return f"{path} is {now}; it was {was}." if was else f"{path} is {now}; there was no such argument."


def _types(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str]]:
    """Path and type of each leaf; arguments have the program's names, as far as it has that many."""
    slices: Sequence[tuple[int, int]] = argument_slices(program)
    known = [
        program.in_paths[start].split("/")[0] if start < stop else f"argument {n}"
        for n, (start, stop) in enumerate(slices)
    ]
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        half, argument, *rest = path
        if half.idx == 1:
            name = argument.key
        else:
            name = known[argument.idx] if argument.idx < len(known) else f"argument {argument.idx}"
        text = "/".join([name, *map(key_text, rest)])
        if text.removesuffix("/value") in program.in_paths:
            text = text.removesuffix("/value")
        dtype = getattr(leaf, "dtype", None)
        found.append((text, type_text(np.shape(leaf), str(jax.dtypes.result_type(leaf) if dtype is None else dtype))))
    return found

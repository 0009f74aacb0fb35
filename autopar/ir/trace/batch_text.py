"""The batch of a step in the words of messages.

In:     the traced program, the roles of its inputs.
Out:    text: the batch's arguments with their rows, or why there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import listed
from autopar.grouping import grouped
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles, random_keys


def batch_text(program: Program, roles: Roles) -> str:
    """The batch in errors: its arguments, and the rows of each leaf where they differ. If there is none: why."""
    if roles.batch:
        names = ", ".join(dict.fromkeys(program.in_paths[k].split("/")[0] for k in roles.batch))
        rows = _rows(program, roles.leading)
        return names if len(rows) == 1 else f"{names} ({', '.join(rows)})"
    rest = [k for k in range(len(program.in_avals)) if k not in roles.state and k not in random_keys(program)]
    rows = _rows(program, dict.fromkeys(rest, 0))
    if len(rows) < 2:
        return "every argument is state, is not read, or has no dims."
    return f"arrays differ in their first dim: {', '.join(rows)}. A batch's share it, or each is split by itself."


def _rows(program: Program, dims: Mapping[int, int]) -> list[str]:
    """The sizes of these leaves' dims, each with the leaves that have it."""
    avals = program.in_avals
    paths = grouped((avals[k].shape[dims[k]], program.in_paths[k]) for k in dims if avals[k].shape)
    return [f"{size} rows in {listed(names, 3)}" for size, names in paths.items()]

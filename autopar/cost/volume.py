"""Counts the bytes that a collective sends along each mesh axis.

In:     as for `collective_seconds`.
Out:    for each axis, the bytes that one device sends along it.
Method: the least necessary: Chan et al., "Collective communication: theory, practice, and experience", 2007, sec. 4.
        Axis by axis, inner axes first: an outer axis carries what is left after the inner ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost.steps import CollectiveKind
from autopar.mesh import LogicalMesh

_PASSES: dict[CollectiveKind, int] = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "collective-permute": 1,
    "ragged-all-to-all": 1,
}


def sent_bytes(
    kind: CollectiveKind, num_bytes: float, axes: tuple[str, ...], mesh: LogicalMesh
) -> Iterator[tuple[str, float]]:
    """(axis, bytes that one device sends along it).

    Args:
        kind: Kind of collective.
        num_bytes: Operand bytes on one device; for an all-gather, result bytes.
        axes: Mesh axes.
        mesh: The mesh.
    """
    inner_first = [axis for axis in reversed(tuple(mesh.axis_sizes)) if axis in axes and mesh.size_of(axis) > 1]
    left = float(num_bytes)
    for axis in inner_first:
        size = mesh.size_of(axis)
        if kind == "collective-permute":
            yield axis, left
            return
        yield axis, _PASSES[kind] * left * (size - 1) / size
        if kind not in ("all-to-all", "ragged-all-to-all"):
            left /= size

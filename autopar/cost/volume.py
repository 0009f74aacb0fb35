"""Bytes that a collective sends, by mesh axis.

In:     as of `collective_seconds`.
Out:    for each axis what one device sends along it.
Method: the least that is needed: Chan et al., "Collective communication: theory, practice, and experience", 2007, sec. 4.
        Axis by axis, the inner ones first, as the seconds have it: an outer axis carries what is left of the sum.
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
        kind: What the collective does.
        num_bytes: Operand bytes on one device; of an all-gather, result bytes.
        axes: Mesh axes.
        mesh: Their sizes.
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

"""Draws the sharding of each tensor: a grid of devices, each in the colour of the piece that it holds.

In:     a plan's values.
Out:    a table that can be searched by path; each row can be opened for a description of its grid.
Method: devices that hold the same piece have the same colour; a partial sum is hatched, since every device holds a term of
        each number. Equal layers are merged (`paths.collapse_paths`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from autopar.markup import grid, picture, tag
from autopar.mesh import LogicalMesh, Sharding, boxes
from autopar.plan.decision import Decision, Value
from autopar.plan.words import bytes_text, type_text
from autopar.report.page import merged_values

MAX_ROWS = 400
MAX_DEVICES = 256
"""The most devices drawn; larger meshes are described by text."""
MAX_TIPS = 64
"""The most devices whose cells have tooltips."""
NUM_COLOURS = 12


def tensor_table(plan: Decision) -> str:
    """The table of all arguments and results, and of the activations that go through memory."""
    rows = [_row(plan, *each) for each in merged_values(plan)]
    sizes = sorted((-size, k) for k, (size, _) in enumerate(rows))
    kept = sorted(k for _, k in sizes[:MAX_ROWS])
    find = tag("input", type="search", placeholder="search by path, type or sharding", class_="find")
    more = f"and {len(rows) - len(kept)} smaller ones" if len(rows) > len(kept) else ""
    head = tag(
        "tr", *(tag("th", words) for words in ("on the mesh", "path", "type", "sharding", "arrays", "per device"))
    )
    table = grid(head, (rows[k][1] for k in kept), "tensors")
    return find + tag("div", table, class_="wide") + (tag("p", more, class_="soft") if more else "")


def _row(plan: Decision, value: Value, count: int, each: int) -> tuple[int, str]:
    """(bytes on a device, the row) of `count` equal values of `each` bytes."""
    mesh = plan.stages[value.stage].logical_mesh
    words = _in_words(value, mesh, plan)
    cells = (
        tag("td", device_grid(value.shape, value.sharding, mesh)),
        tag("td", tag("details", tag("summary", escape(value.name)), words), class_="code"),
        tag("td", escape(type_text(value.shape, value.dtype)), class_="code"),
        tag("td", escape(str(value.sharding)), class_="code"),
        tag("td", str(count), class_="number"),
        tag("td", bytes_text(each * count), class_="number"),
    )
    return each * count, tag("tr", *cells)


def _in_words(value: Value, mesh: LogicalMesh, plan: Decision) -> str:
    """The description in an opened row."""
    split = [
        f"dim {dim} of {size} is in {math.prod(map(mesh.size_of, axes))} parts over {', '.join(axes)}"
        for dim, (size, axes) in enumerate(zip(value.shape, value.sharding.dims, strict=True))
        if axes
    ]
    lines = ["; ".join(split) + "." if split else "Whole on every device."]
    copies = mesh.num_devices // max(1, value.sharding.num_shards(mesh))
    if split and copies > 1 and not value.sharding.partial:
        lines.append(f"Each part is on {copies} devices.")
    if value.sharding.partial:
        lines.append(
            f"A sum not yet added up over {', '.join(value.sharding.partial)}: each holds a part of every number."
        )
    whole = Sharding.replicated(len(value.shape)).local_bytes(value.shape, value.dtype, mesh)
    each = value.sharding.local_bytes(value.shape, value.dtype, mesh)
    stage = f" of stage {value.stage}" if len(plan.stages) > 1 else ""
    lines.append(f"{bytes_text(each)} of {bytes_text(whole)} on each device, {value.role}{stage}.")
    asked = re.sub(r"\{[^}]*\}", "*", value.name)
    why = tag("code", escape(f"plan.explain({asked!r})"))
    return tag("p", *(escape(line + " ") for line in lines), "Why: ", why)


def device_grid(shape: Sequence[int], sharding: Sharding, mesh: LogicalMesh) -> str:
    """The grid of a mesh's devices, its last axis across, each in the colour of its piece."""
    if mesh.num_devices > MAX_DEVICES:
        return tag("span", f"1/{sharding.num_shards(mesh)} on each", class_="soft")
    across = mesh.shape[-1] if mesh.num_devices > 1 else 1
    down = mesh.num_devices // across
    size = 13 if across <= 16 else 7
    cells, held = [], boxes(shape, sharding, mesh)
    pieces = sorted(set(held))
    for number, box in enumerate(held):
        row, column = divmod(number, across)
        colour = f"p{pieces.index(box) % NUM_COLOURS}" if any(sharding.dims) else "whole"
        tip: tuple[str, ...] = ()
        if mesh.num_devices <= MAX_TIPS:
            part = ", ".join(
                ":" if side == (0, length) else "{}:{}".format(*side) for side, length in zip(box, shape, strict=True)
            )
            sums = ", a part of the sum" if sharding.partial else ""
            tip = (tag("title", escape(f"device {number}: [{part}]{sums}")),)
        frame = {"x": column * size, "y": row * size, "width": size - 1.5, "height": size - 1.5, "rx": 1.5}
        cells.append(tag("rect", *tip, class_=colour, **frame))
        if sharding.partial:
            d = f"M{column * size + 2:g} {row * size + size - 4:g}l{size - 6:g} -{size - 6:g}"
            cells.append(tag("path", d=d, class_="hatch"))
    svg = picture(down * size, *cells, label=f"{sharding} on {mesh}", width=across * size)
    return svg.replace("<svg ", f'<svg width="{across * size}" height="{down * size}" ', 1)

"""Draws the model as blocks with the user's names: the blocks of each stage, and what crosses between stages.

In:     a plan.
Out:    a column per stage with its blocks of parameters, and arrows with bytes between them.
Method: among the state's paths, parameters are distinguished from the optimizer's copies of them: subtrees with the same paths
        are copies, and the one with the shortest path is the original. A block is one level of names below it, and for
        numbered layers two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from autopar.grouping import grouped, summed
from autopar.markup import tag
from autopar.plan.decision import Decision, Stage, Value
from autopar.plan.profile import Crossing
from autopar.plan.words import bytes_text, count_text
from autopar.report.paths import collapse_paths

Block = tuple[str, int, int, int]
"""Name, number of arrays, bytes of the whole, bytes on one device."""


def model_picture(plan: Decision) -> str:
    """The picture of all stages, in order, with the bytes between them."""
    root = parameter_root([v.name for v in plan.values if v.role == "state"])
    values = [v for v in plan.values if v.role == "state" and (not root or v.name.startswith(f"{root}/"))]
    if not values:
        return ""
    parts = []
    most = max(size for _, _, size, _ in _blocks(plan, values, root))
    for number, stage in enumerate(plan.stages):
        own = [*_blocks(plan, [v for v in values if v.stage == number], root)]
        parts.append(_column(plan, number, stage, own, most))
        if number + 1 < len(plan.stages):
            parts.append(_border(plan.profile.crossings, number))
    return tag("div", *parts, class_="model")


def parameter_root(paths: Sequence[str]) -> str:
    """The path of the parameters' subtree, of which the state has copies elsewhere; "": there is none."""
    below: dict[str, dict[str, None]] = {}
    for path in paths:
        parts = path.split("/")
        for k in range(1, len(parts)):
            below.setdefault("/".join(parts[:k]), {})["/".join(parts[k:])] = None
    alike = grouped((tuple(sorted(ends)), root) for root, ends in below.items())
    repeated = [(len(ends), roots) for ends, roots in alike.items() if len(roots) > 1]
    # Equal layers have the same paths too, but fewer than the model.
    best = max(repeated, key=lambda pair: (pair[0], -pair[1][0].count("/")), default=(0, [""]))
    covered = best[0] * len(best[1]) >= len(paths) / 2
    roots = best[1] if covered and not _are_siblings(best[1]) else []
    return min(roots, key=lambda root: (root.count("/"), roots.index(root)), default="")


def _are_siblings(roots: Sequence[str]) -> bool:
    """Whether roots differ in numbers only, as layers do."""
    return len({re.sub(r"\d+", "#", root) for root in roots}) == 1


def _blocks(plan: Decision, values: Sequence[Value], root: str) -> Iterable[Block]:
    def sizes_of(v: Value) -> tuple[str, tuple[int, int, int]]:
        rest = v.name[len(root) :].lstrip("/").split("/") if root else v.name.split("/")[1:] or [v.name]
        is_numbered = len(rest) > 2 and rest[1].isdecimal()
        whole = math.prod(v.shape) * np.dtype(v.dtype).itemsize
        each = v.sharding.local_bytes(v.shape, v.dtype, plan.stages[v.stage].logical_mesh)
        return "/".join(rest[: 2 if is_numbered else 1]), (1, whole, each)

    merged = collapse_paths(summed(map(sizes_of, values)).items())
    for name, sizes, count in merged:
        arrays, whole, each = sizes
        yield name, arrays * count, whole * count, each * count


def _column(plan: Decision, number: int, stage: Stage, blocks: Sequence[Block], most: int) -> str:
    devices = f"device{'s' * (stage.submesh.num_devices > 1)} {stage.submesh}"
    mesh = " x ".join(f"{axis}={size}" for axis, size in stage.logical_mesh.axis_sizes.items())
    name = f"stage {number}" if len(plan.stages) > 1 else "one mesh"
    boxes = [
        tag(
            "div",
            tag("b", escape(block)),
            tag("span", f"{bytes_text(whole)}, {bytes_text(each)} on each device", class_="soft"),
            tag("i", class_="fill", style=f"width:{max(1.0, 100 * whole / max(most, 1)):.0f}%"),
            class_="block",
            title=f"{block}: {count_text(arrays, 'array')}",
        )
        for block, arrays, whole, each in blocks
    ]
    ends = [text for text in dict.fromkeys(stage.operations) if text]
    about = " … ".join((ends[0], ends[-1])) if len(ends) > 1 else "".join(ends)
    return tag(
        "div",
        tag("h3", name),
        tag("p", escape(f"{devices}, {mesh}"), class_="soft"),
        tag("div", *(boxes or [tag("p", "no parameters", class_="soft")]), class_="blocks"),
        tag("p", escape(about), class_="soft code") if len(plan.stages) > 1 else "",
        class_="stage",
    )


def _border(crossings: Sequence[Crossing], number: int) -> str:
    """The bytes that cross the border behind a stage, each message once."""
    lines = []
    for kind, arrow in (("forward", "→"), ("backward", "←")):
        over = [c for c in crossings if c.kind == kind and min(c.source, c.target) <= number < max(c.source, c.target)]
        if over:
            each = sum(c.bytes // c.messages for c in over)
            tip = "\n".join(f"stage {c.source} to {c.target}: {c.messages} x {c.largest}" for c in over)
            lines.append(tag("span", tag("b", arrow), " ", bytes_text(each), title=tip))
    return tag("div", *lines, class_="border")

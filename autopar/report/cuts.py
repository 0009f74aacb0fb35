"""Explains why a pipeline is cut where it is: bytes that cross each border, balance of stages, and alternative places.

In:     a plan with stages and its planning problem in memory.
Out:    `Page`: for each border the chosen place, the places next to it, and the place between its neighbours that the fewest
        bytes cross.
Method: read off the chain of segments on which the borders were chosen (`inter_op/chain.py`): bytes over a border and work of
        a segment, both of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.inter_op.chain import Chain
from autopar.inter_op.weigh import weigh_segments
from autopar.intra_op.sharded import describe
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, seconds_text
from autopar.report.page import Page, Table
from autopar.streams.assemble import PipelinePlan


def cuts_page(plan: Decision) -> Page:
    """The page about where the step is cut."""
    pipeline = plan.attached.pipeline
    assert isinstance(pipeline, PipelinePlan), "one program is not cut"
    device = plan.attached.cluster.device
    cut = weigh_segments(pipeline.cut, min(stage.mesh.num_devices for stage in pipeline.stages), device)
    chain, borders = cut.chain, pipeline.borders
    marked = len(borders) - 1 == len(chain.marks) and tuple(chain.marks) == tuple(borders[1:])
    facts = (
        ("stages", f"{len(borders)}, of {chain.num_segments} segments that a border may stand between"),
        ("chosen by", "mark_stage in the step" if marked else f"the method, {plan.method}"),
        ("step time", f"{seconds_text(plan.cost.step_seconds)} predicted"),
    )
    table = Table(
        "Borders, and where else they could be",
        ("border", "the stage begins with", "crossing per microbatch", "largest stage's work", ""),
        tuple(_rows(chain, borders)),
        (2, 3),
        "Forward and backward. Work is in seconds, on as many devices as the smallest stage has; 100 % is an equal share.",
    )
    return Page(f"Stages of `{plan.name}`", facts, (table,))


def _rows(chain: Chain, borders: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    first_of: dict[int, str] = {}
    for eqn, segment, behind in zip(chain.loop.eqns, chain.segment, chain.backward, strict=True):
        if segment >= 0 and not behind:
            first_of.setdefault(segment, describe(eqn))
    for number in range(1, len(borders)):
        low, at = borders[number - 1], borders[number]
        high = borders[number + 1] if number + 1 < len(borders) else chain.num_segments
        places = {at: "chosen"}
        least = min(range(low + 1, high), key=lambda p: (chain.cut_bytes[p], abs(p - at)))
        for place, text in ((least, "least crosses here"), (at - 1, "one earlier"), (at + 1, "one later")):
            if low < place < high:
                places.setdefault(place, text)
        for k, (place, text) in enumerate(places.items()):
            moved = (*borders[:number], place, *borders[number + 1 :])
            name = f"{number - 1} | {number}" if k == 0 else ""
            share = _largest_share(chain, moved)
            yield name, first_of.get(place, ""), bytes_text(float(chain.cut_bytes[place])), f"{share:.0%}", text


def _largest_share(chain: Chain, borders: tuple[int, ...]) -> float:
    """Work of the largest stage over the mean."""
    work = np.add.reduceat(chain.work, borders)
    return float(work.max() / work.mean()) if work.mean() else 1.0

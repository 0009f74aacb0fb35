"""Explains a plan as a whole: the operations that compute time goes into, and why a pipeline is cut where it is.

In:     a plan with its planning problem in memory.
Out:    `compute_page`: the operations that take longest, each with its number of runs, its time, and the rate that it reaches.
        `cuts_page`: for each border the chosen place, the places next to it, and the place between its neighbours that the
        fewest bytes cross.
Method: read off the tasks of every stage, including loop bodies, with the planner's seconds of each kernel. Operations of the
        same primitive and line are one row, in whatever layer or stage they are. All branches count. Borders: read
        off the chain of segments on which they were chosen (`inter_op/chain.py`): bytes over a border and work of a segment,
        both of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.cost.kernels import Kernel, MemoryPass
from autopar.inter_op.chain import Chain
from autopar.inter_op.weigh import weigh_segments
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.sharded import computed, describe
from autopar.intra_op.strategies import split_fraction
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, count_text, rate_text, seconds_text, share_text
from autopar.report.page import Page, Table
from autopar.report.readers import describe_phase
from autopar.streams.assemble import PipelinePlan

MAX_OPERATIONS = 24


@dataclass(slots=True)
class Operation:
    """The operations of one name in one step, over all stages, on one device of each.

    Attributes:
        name: Primitive and line.
        times: Number of runs.
        seconds: Seconds of all runs.
        flops: FLOPs of the runs that are products; 0: none is.
        num_bytes: Bytes that go through memory.
    """

    name: str
    times: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0

    def add(self, times: int, seconds: float, kernel: Kernel, flops: float) -> None:
        """Add an operation of this name, which runs `times` times."""
        self.times += times
        self.seconds += times * seconds
        self.num_bytes += times * kernel.num_bytes
        self.flops += 0.0 if isinstance(kernel, MemoryPass) else times * flops

    @property
    def reaches(self) -> str:
        """The rate as text: FLOP/s of products, else bytes per second."""
        if not self.seconds:
            return ""
        return (
            f"{self.flops / self.seconds / 1e12:.3g} TFLOP/s"
            if self.flops
            else rate_text(self.num_bytes / self.seconds)
        )


def operations_of(plan: Decision) -> list[Operation]:
    """All operations of a step, by name, the longest first."""
    found: dict[str, Operation] = {}
    planned = plan.attached.pipeline
    for stage in planned.stages:
        graph, choices = stage.sharded.graph, stage.sharded.choices
        seconds = OperationSeconds(graph, choices, plan.attached.cluster.device)
        for task in stage.tasks:
            for eqn, times in computed(task.body, planned.times(task)):
                index = graph.op_node.get(eqn)
                if index is not None:
                    node, name = graph.nodes[index], describe_phase(eqn)
                    share = split_fraction(node.strategies[choices[index]], graph.mesh.axis_sizes)
                    operation = found.setdefault(name, Operation(name))
                    operation.add(times, seconds.of(eqn), seconds.kernel(index), node.rule.flops * share)
    return sorted(found.values(), key=lambda operation: -operation.seconds)


def compute_page(plan: Decision) -> Page:
    """The page about where the compute time goes."""
    operations = operations_of(plan)
    total = sum(operation.seconds for operation in operations)
    products = [operation for operation in operations if operation.flops]
    table = Table(
        "Compute in one step, by operation",
        ("operation", "times", "each", "all", "share", "reaches"),
        tuple(_rows(operations[:MAX_OPERATIONS], total)),
        (1, 2, 3, 4, 5),
        _rest(operations[MAX_OPERATIONS:]),
    )
    return Page(f"Compute of `{plan.name}`", tuple(_facts(plan, products, total)), (table,))


def _facts(plan: Decision, products: list[Operation], total: float) -> Iterator[tuple[str, str]]:
    yield "step time", f"{seconds_text(plan.cost.step_seconds)} predicted"
    where = "" if plan.is_one_program else ", one device of each stage, all stages together"
    yield "compute", f"{seconds_text(total)}{where}"
    seconds, flops = sum(p.seconds for p in products), sum(p.flops for p in products)
    if seconds:
        text = f"{share_text(seconds / total)} of it, at {flops / seconds / 1e12:.3g} TFLOP/s; the rest goes through memory"
        yield "products", text


def _rows(operations: list[Operation], total: float) -> Iterator[tuple[str, ...]]:
    for operation in operations:
        each, share = operation.seconds / operation.times, operation.seconds / (total or 1.0)
        yield (
            operation.name,
            str(operation.times),
            seconds_text(each),
            seconds_text(operation.seconds),
            share_text(share),
            operation.reaches,
        )


def _rest(operations: list[Operation]) -> str:
    if not operations:
        return ""
    return f"and {count_text(len(operations), 'other')}, {seconds_text(sum(o.seconds for o in operations))} in all"


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
        tuple(_border_rows(chain, borders)),
        (2, 3),
        "Forward and backward. Work is in seconds, on as many devices as the smallest stage has; 100 % is an equal share.",
    )
    return Page(f"Stages of `{plan.name}`", facts, (table,))


def _border_rows(chain: Chain, borders: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
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

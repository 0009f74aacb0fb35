"""Lists the operations that a device's compute time goes into.

In:     a plan with its planning problem in memory.
Out:    `Page`: the operations that take longest, each with its number of runs, its time, and the rate that it reaches.
Method: read off the tasks of every stage, including loop bodies, with the planner's seconds of each kernel. Operations of the
        same primitive and line are one row, in whatever layer or stage they are. All branches count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.kernels import Kernel, Pass
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.sharded import computed
from autopar.intra_op.strategies import split_fraction
from autopar.plan.decision import Decision
from autopar.plan.words import count_text, rate_text, seconds_text, share_text
from autopar.report.page import Page, Table
from autopar.report.readers import describe_phase

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
        self.flops += 0.0 if isinstance(kernel, Pass) else times * flops

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

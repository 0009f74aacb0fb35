"""Pads dims whose length does not divide, so that devices can split them.

In:     a step, and its plan without padding.
Out:    lengths to pad and what they become; the step with longer dims (`ir/rewrite/padding.py`).
Method: padding a length is worth a try if each device then has less of it, and if there is something to gain: products
        along it that some devices repeat, or exposed collectives. The padded step is planned like any other, and the faster
        plan is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from autopar.debug import check_after
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.problem import planning_seconds
from autopar.intra_op.strategies import split_fraction
from autopar.ir.check import check_program
from autopar.ir.program import Program
from autopar.ir.region import equations_within
from autopar.ir.rewrite.padded_factors import is_product
from autopar.ir.rewrite.padding import pad_dims
from autopar.ir.work import EqualRules
from autopar.search.methods import Auto
from autopar.search.request import Request
from autopar.streams.assemble import StepPlan
from autopar.tuning import TUNING

Lengths = Mapping[int, int]
"""Length of a dim -> its padded length."""


def padded_program(program: Program, lengths: Lengths) -> Program:
    """The step with padded dims; its arguments and results are unchanged."""
    if not lengths:
        return program
    jaxpr = pad_dims(program.jaxpr, lengths)
    check_after("padding", check_program, jaxpr)
    return dataclasses.replace(program, jaxpr=jaxpr)


def lengths_that_do_not_divide(request: Request) -> dict[int, int]:
    """Lengths in a good part of the step's products that more devices could split if padded -> the padded lengths."""
    whole, along, rules = 0.0, dict[int, float](), EqualRules()
    for eqn, times in equations_within(request.program.jaxpr):
        if not is_product(eqn):
            continue
        rule = rules.of(eqn)
        whole += times * rule.flops
        for length in dict.fromkeys(rule.sizes.values()):
            along[length] = along.get(length, 0.0) + times * rule.flops
    rows = set(request.batch_sizes)
    padded = {n: padded_length(n, request.cluster.num_devices) for n in sorted(along) if n not in rows}
    return {n: m for n, m in padded.items() if m > n and along[n] >= TUNING.padding_looks * whole}


def padded_length(length: int, num_devices: int) -> int:
    """The padded length, not much longer, that most devices can split; the same length if padding does not help."""
    now = length // math.gcd(length, num_devices)
    for parts in (d for d in range(num_devices, 1, -1) if num_devices % d == 0):
        padded = -(-length // parts) * parts
        if padded <= TUNING.padded_most * length and padded // parts < now:
            return padded
    return length


def worth_padding(planned: StepPlan, lengths: Lengths, request: Request, num_tried: int = 1) -> dict[int, int]:
    """The lengths whose padding may repay planning, judged by the plan without padding.

    The gain is in products along a length that some devices repeat; or, if no devices can split it, in exposed collectives.
    `num_tried`: number of plans tried for this one, which will be tried again.
    """
    operations = products = 0.0
    along, repeated = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0.0)
    for stage in planned.stages if lengths else ():
        graph, choices = stage.sharded.graph, stage.sharded.choices
        seconds = OperationSeconds(graph, choices, request.cluster.device)
        for node, choice in zip(graph.nodes, choices, strict=True):
            if node.kind != "op":
                continue
            taken = node.weight * seconds.of(node.eqn)
            operations += taken
            if is_product(node.eqn):
                products += taken
                share = split_fraction(node.strategies[choice], graph.mesh.axis_sizes)
                for length in dict.fromkeys(n for n in node.rule.sizes.values() if n in lengths):
                    along[length] += taken
                    repeated[length] += taken * (1 - 1 / (share * stage.mesh.num_devices))
    if not products:
        return {}
    tasks = [task for stage in planned.stages for task in stage.tasks]
    exposed = sum(sum(task.exposed_seconds) for task in tasks) / sum(task.seconds for task in tasks)

    def gain(length: int) -> float:
        hardly_split = math.gcd(length, request.cluster.num_devices) == 1
        return (1 - exposed) * repeated[length] / operations + hardly_split * exposed * along[length] / products

    takes = num_tried * sum(planning_seconds(stage.sharded.problem) for stage in planned.stages)
    steps = request.method.steps if isinstance(request.method, Auto) else TUNING.repaying_steps
    least = max(TUNING.padding_looks, takes / (steps * planned.seconds))
    return {n: m for n, m in lengths.items() if gain(n) >= least}

"""Dims that do not divide: which of them are made longer, so that the devices can split them.

In:     a step, and what was planned of it as it stands.
Out:    lengths of its products, each with the length that it is to become; the step with longer dims (`ir/rewrite/padding.py`).
Method: a length is worth it if every device then has less of it than now, and if there is something to win: products along it
        that some devices repeat, or collectives that nothing hides. The longer step is planned like any other; the faster
        of both plans is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from autopar.debug import check_behind
from autopar.intra_op.costs import OperationSeconds
from autopar.intra_op.problem import planning_seconds
from autopar.intra_op.strategies import split_fraction
from autopar.ir.check import check_program
from autopar.ir.program import Program
from autopar.ir.region import equations_within
from autopar.ir.rewrite.longer import is_product
from autopar.ir.rewrite.padding import pad_dims
from autopar.ir.work import EqualRules
from autopar.search.methods import Auto
from autopar.search.request import Request
from autopar.streams.assemble import StepPlan
from autopar.tuning import TUNING

Lengths = Mapping[int, int]
"""A length -> what it becomes."""


def padded_program(program: Program, lengths: Lengths) -> Program:
    """The step with longer dims; its arguments and results are as they were."""
    if not lengths:
        return program
    jaxpr = pad_dims(program.jaxpr, lengths)
    check_behind("padding", check_program, jaxpr)
    return dataclasses.replace(program, jaxpr=jaxpr)


def lengths_that_do_not_divide(request: Request) -> dict[int, int]:
    """Lengths along which a good part of the step's products goes, and that longer dims would let more devices split."""
    whole, along, rules = 0.0, dict[int, float](), EqualRules()
    for eqn, times in equations_within(request.program.jaxpr):
        if not is_product(eqn):
            continue
        rule = rules.of(eqn)
        whole += times * rule.flops
        for length in dict.fromkeys(rule.sizes.values()):
            along[length] = along.get(length, 0.0) + times * rule.flops
    rows = set(request.batch_sizes)
    longer = {n: longer_length(n, request.cluster.num_devices) for n in sorted(along) if n not in rows}
    return {n: m for n, m in longer.items() if m > n and along[n] >= TUNING.padding_looks * whole}


def longer_length(length: int, num_devices: int) -> int:
    """The length that most devices can split of those that are not much longer; the same where that wins nothing."""
    now = length // math.gcd(length, num_devices)
    for parts in (d for d in range(num_devices, 1, -1) if num_devices % d == 0):
        longer = -(-length // parts) * parts
        if longer <= TUNING.padded_most * length and longer // parts < now:
            return longer
    return length


def worth_padding(planned: StepPlan, lengths: Lengths, request: Request, num_tried: int = 1) -> dict[int, int]:
    """Those lengths of which longer ones may win what it takes to plan them, by what the plan without them does.

    Products along a length are repeated by some devices; or, if none can split it at all, their collectives are exposed.
    About `num_tried` plans were tried for this one, and will be again.
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

"""What is to be decided of a program on a mesh, made a choice problem.

In:     the program's decision graph, the device, what a method forbids.
Out:    `Setting`: what is allowed of each decision, which decisions are one, and what all choices cost.
Method: the passes of `SHARD`, in order. What follows, again and again, is solve, lower and the clock (`shard.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import InfeasibleError
from autopar.intra_op.check import check_graph
from autopar.intra_op.costs import Prices
from autopar.intra_op.graph import Graph
from autopar.intra_op.restrict import Allowed, Restrict, pin_constraints
from autopar.intra_op.tying import tie_nodes
from autopar.ir.passes import Pass
from autopar.mesh import Device


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Decisions on their way to a choice problem.

    Attributes:
        graph: The decisions.
        device: What a mesh is made of.
        restrict: Forbids choices.
        allowed: What is left.
        class_of: Class of each node; those of one class choose alike. Until they are tied: ().
        prices: Seconds of all choices; None until they are known.
    """

    graph: Graph
    device: Device
    restrict: Restrict | None = None
    allowed: Allowed = field(default_factory=Allowed)
    class_of: Sequence[int] = ()
    prices: Prices | None = None

    @property
    def priced(self) -> Prices:
        """The prices, which are known."""
        assert self.prices is not None, "behind the last pass"
        return self.prices


def check_setting(setting: Setting) -> None:
    """Assert that decisions, masks, classes and prices belong together."""
    nodes, class_of = setting.graph.nodes, setting.class_of
    check_graph(setting.graph)
    for index, mask in setting.allowed.masks.items():
        assert len(mask) == nodes[index].num_choices, f"{nodes[index].name}: a mask of {len(mask)} choices"
    if class_of:
        assert len(class_of) == len(nodes), f"{len(class_of)} classes for {len(nodes)} decisions"
    if setting.prices is not None:
        for node, number in zip(nodes, class_of, strict=True):
            told = len(setting.prices.costs[number])
            assert told == node.num_choices, f"{node.name}: {told} prices for {node.num_choices} choices"


def _restricted(setting: Setting) -> Setting:
    allowed = Allowed()
    pin_constraints(setting.graph, allowed)
    if setting.restrict is not None:
        setting.restrict(setting.graph, allowed)
    _check_pins(setting.graph, allowed)
    return dataclasses.replace(setting, allowed=allowed)


def _tied(setting: Setting) -> Setting:
    return dataclasses.replace(setting, class_of=tie_nodes(setting.graph, setting.allowed.keys))


def _priced(setting: Setting) -> Setting:
    prices = Prices(setting.graph, setting.device, setting.class_of, setting.allowed.masks)
    return dataclasses.replace(setting, prices=prices)


SHARD: tuple[Pass[Setting], ...] = (
    Pass("restrict", "what the user's constraints and the method forbid", _restricted),
    Pass("tying", "what is alike chooses alike", _tied),
    Pass("costs", "seconds of each choice, and of each pair of choices", _priced),
)
"""Of the decisions of a step, or of a stage, on each mesh that is tried."""


def _check_pins(graph: Graph, allowed: Allowed) -> None:
    for index, mask in allowed.masks.items():
        if not mask.any():
            node = graph.nodes[index]
            reasons = allowed.reasons.get(index, [str(allowed.keys[index])])
            raise InfeasibleError(
                "the pins on one value contradict each other or the method.",
                given="; ".join(reasons),
                wrong=f"no sharding of {node.name} keeps all of them.",
                do="drop one of them, or choose another mesh.",
                constraint=reasons[0],
            )

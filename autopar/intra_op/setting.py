"""Prepares the choice problem of a program on a mesh: restrictions, ties and prices.

In:     the program's decision graph, the device, a method's restrictions.
Out:    `Setting`: the allowed choices, the classes of tied nodes, and the seconds of all choices.
Method: the passes of `SHARD`, in order; `shard.py` then solves, lowers and simulates.
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
    """A decision graph with all that is needed to build its choice problems.

    Attributes:
        graph: The decision graph.
        device: The device of the mesh.
        restrict: Forbids choices.
        allowed: The choices that are allowed.
        class_of: Class of each node; nodes of one class take the same choice. (): not tied yet.
        prices: Seconds of all choices; None: not priced yet.
    """

    graph: Graph
    device: Device
    restrict: Restrict | None = None
    allowed: Allowed = field(default_factory=Allowed)
    class_of: Sequence[int] = ()
    prices: Prices | None = None

    @property
    def priced(self) -> Prices:
        """The prices, after the last pass."""
        assert self.prices is not None, "not priced yet"
        return self.prices


def check_setting(setting: Setting) -> None:
    """Assert that nodes, masks, classes and prices match."""
    nodes, class_of = setting.graph.nodes, setting.class_of
    check_graph(setting.graph)
    for index, mask in setting.allowed.masks.items():
        assert len(mask) == nodes[index].num_choices, f"{nodes[index].name}: a mask of {len(mask)} choices"
    if class_of:
        assert len(class_of) == len(nodes), f"{len(class_of)} classes for {len(nodes)} decisions"
    if setting.prices is not None:
        for node, number in zip(nodes, class_of, strict=True):
            count = len(setting.prices.costs[number])
            assert count == node.num_choices, f"{node.name}: {count} prices for {node.num_choices} choices"


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
"""The passes from a decision graph to its choice problem."""


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

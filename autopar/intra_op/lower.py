"""Lower a solved graph to the sharded program: every conversion in its place, none made twice.

In:     the flat program, the decision graph, one choice per node.
Out:    `Body` (`sharded.py`).
Method: values are converted when first needed, from whichever copy is cheapest, through the hub's sharding where the
        value has one; all copies made on the way may be used again. Small collectives of one kind over the same axes
        whose operands are ready together are sent as one (`fuse.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.cost.reshard import cheapest_reshard
from autopar.cost.steps import apply_to_sharding
from autopar.intra_op.fuse import fuse_collectives
from autopar.intra_op.graph import Graph, stacked
from autopar.intra_op.sharded import Body, Compute, Gate, Instruction, Move, Region, describe
from autopar.intra_op.strategies import Strategy
from autopar.ir.region import is_region, region_of
from autopar.ir.source import is_backward
from autopar.mesh import Sharding


def lower(jaxpr: Jaxpr, graph: Graph, choices: Sequence[int]) -> Body:
    """The sharded program of a flat program under one choice per node of its graph."""
    return _Lowering(graph, choices, {}).program(jaxpr)


def lower_part(
    jaxpr: Jaxpr,
    graph: Graph,
    choices: Sequence[int],
    inputs: Sequence[Sharding],
    outputs: Sequence[Sharding],
    gates: Mapping[int, Sequence[Var]] | None = None,
) -> Body:
    """The sharded program of a part of a graph's program.

    Args:
        jaxpr: Some of its equations; the invars may be any of its variables.
        graph: Decisions of the whole program.
        choices: One per node.
        inputs: The sharding in which each invar arrives.
        outputs: The sharding in which each outvar leaves.
        gates: Equations, by identity, from which on the readers of some values wait for another: that one first.
    """
    return _Lowering(graph, choices, gates or {}).body(jaxpr, inputs, outputs)


class _Lowering:
    def __init__(self, graph: Graph, choices: Sequence[int], gates: Mapping[int, Sequence[Var]]):
        self.graph, self.choices, self.mesh, self.gates = graph, choices, graph.mesh, gates
        self.copies: dict[Var, list[Sharding]] = {}
        self.emitted: list[list[Instruction]] = []

    def program(self, jaxpr: Jaxpr) -> Body:
        inputs = [self.chosen(node) for node in self.graph.inputs]
        outputs = [self.chosen(node) for node in self.graph.outputs]
        return self.body(jaxpr, inputs, outputs)

    def chosen(self, node: int) -> Sharding:
        """The chosen sharding of a port or hub."""
        return self.graph.nodes[node].shardings[self.choices[node]]

    def port(self, eqn: JaxprEqn, role: str, k: int) -> Sharding:
        return self.chosen(self.graph.ports[id(eqn), role, k])

    def strategy(self, eqn: JaxprEqn) -> Strategy:
        node = self.graph.op_node[id(eqn)]
        return self.graph.nodes[node].strategies[self.choices[node]]

    def body(self, jaxpr: Jaxpr, inputs: Sequence[Sharding], outputs: Sequence[Sharding]) -> Body:
        self.emitted.append([])
        for var, sharding in zip(jaxpr.invars, inputs, strict=True):
            self.copies[var] = [sharding]
        for eqn in jaxpr.eqns:
            if id(eqn) in self.gates:
                earlier, *gated = self.gates[id(eqn)]
                copies = tuple((var, s) for var in gated for s in self.copies[var])
                self.emit(Gate((earlier, self.copies[earlier][0]), copies))
            if is_region(eqn):
                self.region(eqn)
            else:
                self.compute(eqn)
        for atom, sharding in zip(jaxpr.outvars, outputs, strict=True):
            self.need(atom, sharding)
        instructions = fuse_collectives(self.emitted.pop(), self.mesh)
        return Body(
            tuple(zip(jaxpr.invars, inputs, strict=True)), instructions, tuple(zip(jaxpr.outvars, outputs, strict=True))
        )

    def emit(self, instruction: Instruction) -> None:
        self.emitted[-1].append(instruction)

    def need(self, atom: Var | Literal, sharding: Sharding, eqn: JaxprEqn | None = None) -> None:
        """Have the copy of `atom` in `sharding` that `eqn` reads (None: it is a result), converting it now if there is none."""
        if isinstance(atom, Literal) or sharding in self.copies[atom]:
            return
        backward, reader = (True, "result") if eqn is None else (is_backward(eqn), describe(eqn))
        hub = self.graph.hubs.get((atom, backward))
        if hub is not None:
            self.convert(atom, self.chosen(hub), reader)
        self.convert(atom, sharding, reader)

    def convert(self, var: Var, target: Sharding, reader: str) -> None:
        copies = self.copies[var]
        if target in copies:
            return
        shape, itemsize = tuple(var.aval.shape), var.aval.dtype.itemsize
        routes = [(source, cheapest_reshard(shape, itemsize, source, target, self.mesh)) for source in copies]
        at, route = min(routes, key=lambda pair: (pair[1].seconds, len(pair[1].steps)))
        for step in route.steps:
            following = apply_to_sharding(step, at, self.mesh)
            if following not in copies:
                self.emit(Move(var, at, following, step, reader))
                copies.append(following)
            at = following
        assert at == target, f"reshard of {var} ended in {at}, not {target}"

    def compute(self, eqn: JaxprEqn) -> None:
        strategy = self.strategy(eqn)
        for atom, sharding in zip(eqn.invars, strategy.operands, strict=True):
            self.need(atom, sharding, eqn)
        rule = self.graph.nodes[self.graph.op_node[id(eqn)]].rule
        self.emit(Compute(eqn, rule, strategy))
        self.define(eqn.outvars, strategy.results)

    def define(self, variables: Sequence[Var], shardings: Sequence[Sharding]) -> None:
        for var, sharding in zip(variables, shardings, strict=True):
            self.copies[var] = [sharding]

    def region(self, eqn: JaxprEqn) -> None:
        region = region_of(eqn)
        inside = [self.port(eqn, role, k) for (role, k), _ in region.named()]
        outside = [stacked(s) if b.is_stacked else s for b, s in zip(region.bindings, inside, strict=True)]
        operands, results = region.of_operands(outside), region.of_results(outside)
        for atom, sharding in zip(eqn.invars, operands, strict=True):
            self.need(atom, sharding, eqn)
        bodies = tuple(
            self.body(body, region.entering(k, inside), region.leaving(k, inside))
            for k, body in enumerate(region.bodies)
        )
        self.emit(Region(eqn, tuple(operands), tuple(results), bodies))
        self.define(eqn.outvars, results)

"""Checks decision graphs and sharded programs; run after each pass under `AUTOPAR_CHECK=1`.

In:     `Graph`, `Body`.
Out:    nothing, or an `AssertionError` that names the node or instruction: a bug of ours, never the user's.
Method: every copy is made before it is read or awaited; a move's step leads to the sharding that the move states; at
        boundaries of loops and branches each value has the same sharding on both sides, and all devices know whether a loop
        goes on and which branch is taken: devices that disagree would wait for each other's collectives forever.
"""

from __future__ import annotations

from autopar._jax import Literal
from autopar.cost.steps import apply_to_sharding
from autopar.intra_op.graph import Graph
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Move, Region, describe
from autopar.ir.region import region_of
from autopar.mesh import LogicalMesh, Sharding


def check_graph(graph: Graph) -> None:
    """Assert that each node has choices, and that edges have one sharding per choice at either end.

    Raises `AssertionError`: the graph is malformed; the message names the node or edge.
    """
    for position, node in enumerate(graph.nodes):
        assert node.index == position and node.num_choices, f"{node.name}: out of place, or without a choice"
        assert (node.kind == "op") == bool(node.strategies), (
            f"{node.name}: a {node.kind} with strategies, or an op without"
        )
    for edge in graph.edges:
        source, target = graph.nodes[edge.source], graph.nodes[edge.target]
        joined = f"{edge.var}, from {source.name} to {target.name}"
        assert len(edge.given) == source.num_choices, f"{joined}: {len(edge.given)} ways given"
        assert len(edge.wanted) == target.num_choices, f"{joined}: {len(edge.wanted)} ways wanted"


def check_body(body: Body, mesh: LogicalMesh) -> None:
    """Assert that a sharded program can be run.

    Raises `AssertionError`: it cannot; the message names the instruction.
    """
    defined: set[Copy] = set(body.inputs)
    assert len(defined) == len(body.inputs), "an input comes twice"
    for instruction in body.instructions:
        for copy in instruction.needs:
            assert copy in defined, f"{instruction}: {copy[0]} in {copy[1]} is not defined"
        match instruction:
            case Move() | Fused():
                for move in instruction.moves:
                    reached = apply_to_sharding(move.step, move.source, mesh)
                    assert reached == move.target, f"{move}: leads to {reached}"
            case Compute(eqn, rule, strategy):
                assert len(rule.operands) == len(strategy.operands) == len(eqn.invars), f"{instruction}: operands"
                assert len(rule.results) == len(strategy.results) == len(eqn.outvars), f"{instruction}: results"
            case Region():
                _check_boundary(instruction, mesh)
        defined.update(instruction.makes)
    for atom, sharding in body.outputs:
        known = isinstance(atom, Literal) or (atom, sharding) in defined
        assert known, f"the result {atom} is not defined in {sharding}"


def _check_boundary(region: Region, mesh: LogicalMesh) -> None:
    parts, at = region_of(region.eqn), describe(region.eqn)
    assert len(region.bodies) == len(parts.bodies), f"{at}: {len(region.bodies)} bodies"
    for inner, program in zip(region.bodies, parts.bodies, strict=True):
        assert [var for var, _ in inner.inputs] == list(program.invars), f"{at}: a body has other inputs"
        assert len(inner.outputs) == len(program.outvars), f"{at}: a body has other results"
        check_body(inner, mesh)
    given, made = iter(region.operands), iter(region.results)
    entering = [iter(inner.inputs) for inner in region.bodies]
    leaving = [iter(inner.outputs) for inner in region.bodies]
    for b in parts.bindings:
        shardings = [_row(next(given), b.lead)] if b.operand is not None else []
        shardings += [next(into)[1] for var, into in zip(b.inputs, entering, strict=False) if var is not None]
        shardings += [next(out)[1] for atom, out in zip(b.outputs, leaving, strict=False) if atom is not None]
        shardings += [_row(next(made), b.lead)] if b.result is not None else []
        assert len(set(shardings)) == 1, f"{at}: {b.role} is sharded as {', '.join(map(str, shardings))}"
        assert b.role != "test" or shardings[0] == Sharding.replicated(0), f"{at}: devices may not agree on its test"


def _row(sharding: Sharding, lead: int) -> Sharding:
    """The sharding of a value in a body, without the `lead` leading dims of its stack."""
    return Sharding(sharding.dims[lead:], sharding.partial)

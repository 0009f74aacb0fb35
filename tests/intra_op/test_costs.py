"""Seconds of choices: of kernels on one device's share, of conversions on edges, of ties, masks and loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cost import reshard_seconds
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import build_problem, operation_seconds
from autopar.ir.region import ASSUMED_TRIPS
from autopar.ir.trace.trace import trace_step
from autopar.mesh import Device, Link, LogicalMesh

RATE = 1e9
DEVICE = Device("toy", RATE)
QUICK = Link(0.0, 1e10)  # nothing to gain by sending small ones together
MESH = LogicalMesh((2, 4), links=(QUICK, QUICK))
M, K, N = 16, 32, 64


def types(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def graph_of(function, *shapes, mesh=MESH):
    return build_graph(trace_step(function, types(*shapes)).jaxpr, mesh, {})


def products(graph):
    return [node for node in graph.nodes if node.kind == "op" and node.name == "dot_general"]


def alone(graph):
    return range(len(graph.nodes))


def test_a_product_costs_its_share_of_the_work():
    graph = graph_of(jnp.matmul, (M, K), (K, N))
    (product,) = products(graph)
    seconds = build_problem(graph, DEVICE, alone(graph)).costs[product.index]
    for strategy, found in zip(product.strategies, seconds, strict=True):
        shardings = (*strategy.operands, *strategy.results)
        axes = {axis for sharding in shardings for dims in sharding.dims for axis in dims}
        assert found == pytest.approx(2 * M * K * N / RATE / math.prod(map(MESH.size_of, axes)))
    assert operation_seconds(graph, DEVICE)[product.eqn] == seconds.min() < seconds.max()


def chain(x, w):
    return jnp.tanh(x @ w) @ w.T


def test_an_edge_costs_the_cheapest_conversion():
    graph = graph_of(chain, (M, K), (K, N))
    problem = build_problem(graph, DEVICE, alone(graph))
    expected = {}
    for edge in graph.edges:
        table = np.asarray(reshard_seconds(edge.shape, edge.itemsize, edge.given, edge.wanted, MESH)) * edge.weight
        key, table = (
            ((edge.source, edge.target), table)
            if edge.source < edge.target
            else (
                (edge.target, edge.source),
                table.T,
            )
        )
        expected[key] = expected.get(key, 0.0) + table
    assert {key for key, table in expected.items() if table.any()} == set(problem.edges)
    for key, table in problem.edges.items():
        np.testing.assert_allclose(table, expected[key])


def test_what_is_forbidden_costs_more_than_anything():
    graph = graph_of(chain, (M, K), (K, N))
    first, second = products(graph)
    mask = np.arange(first.num_choices) % 2 == 0
    free = build_problem(graph, DEVICE, alone(graph))
    found = build_problem(graph, DEVICE, alone(graph), {first.index: mask})
    np.testing.assert_array_equal(found.costs[first.index], np.where(mask, free.costs[first.index], np.inf))
    np.testing.assert_array_equal(found.costs[second.index], free.costs[second.index])


def test_tied_nodes_are_one():
    graph = graph_of(lambda x, w: (x @ w, (x + 1) @ w), (M, K), (K, N))
    first, second = products(graph)
    kept = [n for n in alone(graph) if n != second.index]
    class_of = [kept.index(first.index if n == second.index else n) for n in alone(graph)]
    free, tied = build_problem(graph, DEVICE, alone(graph)), build_problem(graph, DEVICE, class_of)
    random = np.random.default_rng(0)
    for _ in range(20):
        chosen = [int(random.integers(len(costs))) for costs in tied.costs]
        assert tied.cost(chosen) == pytest.approx(free.cost([chosen[number] for number in class_of]))


@pytest.mark.parametrize("trips, known", [(1, True), (3, True), (ASSUMED_TRIPS, False)])
def test_a_loop_costs_all_its_trips(trips, known):
    def loop(x, w):
        if not known:
            return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: jnp.tanh(x @ w[0]), x)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    graph = graph_of(loop, (M, K), (trips, K, K))
    (product,) = products(graph)
    seconds = build_problem(graph, DEVICE, alone(graph)).costs[product.index]
    assert seconds.max() == pytest.approx(trips * 2 * M * K * K / RATE)

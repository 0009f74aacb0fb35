"""What programs on one mesh have in common is found once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.intra_op import build_graph as module
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import build_problem
from autopar.intra_op.graph import Tables
from autopar.ir.trace.trace import trace_step
from autopar.mesh import LogicalMesh

MESH, OTHER = LogicalMesh((2, 4)), LogicalMesh((4, 2))
DEVICE = autopar.Cluster.of("1x8 a100").device


def traced(depth):
    def step(w, x):
        for _ in range(depth):
            x = jnp.tanh(x @ w)
        return w, x.sum()

    args = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return trace_step(step, args).jaxpr


@pytest.mark.parametrize("mesh", [MESH, OTHER], ids=str)
def test_shared_tables_change_nothing_and_are_made_once(mesh, monkeypatch):
    """A graph like one on another mesh shares them too."""
    tables, asked = Tables(), []
    enumerate_strategies = module.enumerate_strategies
    monkeypatch.setattr(module, "enumerate_strategies", lambda *a: asked.append(a) or enumerate_strategies(*a))
    first = traced(2)
    graph = build_graph(first, mesh, {0: 0}, (1,), tables=tables)
    build_problem(graph, DEVICE, range(len(graph.nodes)))
    before, conversions = len(asked), len(tables.conversions)
    second = traced(3)
    like = build_graph(second, OTHER if mesh is MESH else MESH, {0: 0}, (1,))
    alone = build_graph(second, mesh, {0: 0}, (1,))
    del asked[:]
    for one in (like, None):
        graph = build_graph(second, mesh, {0: 0}, (1,), like=one, tables=tables)
        assert [node.num_choices for node in graph.nodes] == [node.num_choices for node in alone.nodes]
        count = range(len(graph.nodes))
        shared, own = build_problem(graph, DEVICE, count), build_problem(alone, DEVICE, count)
        assert shared.edges.keys() == own.edges.keys()
        assert all(np.array_equal(shared.edges[key], own.edges[key]) for key in own.edges)
        assert all(np.array_equal(*pair) for pair in zip(shared.costs, own.costs, strict=True))
    assert before and not asked and conversions == len(tables.conversions)


def test_operations_of_one_form_share_their_choices():
    """Which function is applied to each element says nothing about how it may be split."""

    def step(x):
        return jnp.tanh(x) + jnp.sin(x), x.sum()

    jaxpr = trace_step(step, (jax.ShapeDtypeStruct((8, 16), jnp.float32),)).jaxpr
    of = {node.name: node for node in build_graph(jaxpr, MESH, {}, (0,)).nodes}
    assert of["tanh"].strategies is of["sin"].strategies and of["tanh"].signature != of["sin"].signature
    assert of["reduce_sum"].strategies != of["sin"].strategies != of["add"].strategies

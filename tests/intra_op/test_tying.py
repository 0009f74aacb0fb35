"""Ties: equal layers share their choices, what stands elsewhere does not; untied in the end, with the gap of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.intra_op import tying
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.shard import shard
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.intra_op.untie import untie
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh
from autopar.options import Options

LAYERS, WIDTH = 12, 64
CLUSTER = autopar.Cluster.of("1x8 h100")


def train_step(params, batch):
    """Layers of four weights of one shape: three are read side by side, the fourth behind them."""

    def loss_of(params):
        x = batch["x"]
        for layer in params:
            q, k, v = (x @ layer[name] for name in ("wq", "wk", "wv"))
            x = x + jnp.tanh(q * k + v) @ layer["wo"]
        return jnp.mean((x - batch["y"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g * jnp.abs(g), params, jax.grad(loss_of)(params))


@pytest.fixture(scope="module")
def traced():
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
    params = [{name: weight for name in ("wq", "wk", "wv", "wo")} for _ in range(LAYERS)]
    array = jax.ShapeDtypeStruct((32, WIDTH), np.float32)
    program = trace_step(train_step, (params, {"x": array, "y": array}))
    return program, find_roles(program, (1,))


def class_by_path(program, roles):
    graph = build_graph(program.jaxpr, logical_mesh(CLUSTER, (8,)), roles.aliases, roles.batch)
    classes = tying.tie_nodes(graph, {}, untied_nodes=0)
    return {path: classes[graph.inputs[k]] for k, path in enumerate(program.in_paths)}, classes


def test_weights_of_one_shape_are_told_apart_by_where_they_stand(traced):
    class_of, _ = class_by_path(*traced)
    named = {tuple(path.replace("[", "/").replace("]", "").split("/")[-2:]): c for path, c in class_of.items()}
    layers = {name: [c for (_, last), c in sorted(named.items()) if last.strip("'\"") == name] for name in ("wq", "wo")}
    assert [len(found) for found in layers.values()] == [LAYERS, LAYERS]
    assert not set(layers["wq"]) & set(layers["wo"])


def test_layers_between_others_are_tied(traced):
    class_of, classes = class_by_path(*traced)
    inner = [class_of[path] for path in class_of if "wq" in path][2:-2]
    assert len(set(inner)) < len(inner)
    assert len(set(classes)) < 0.6 * len(classes)


def test_the_answer_is_untied_and_its_gap_is_of_the_whole(traced, monkeypatch):
    program, roles = traced
    monkeypatch.setattr(tying.tie_nodes, "__defaults__", (0,))
    mesh = logical_mesh(CLUSTER, (2, 4))
    options = Options()
    graph = build_graph(program.jaxpr, mesh, roles.aliases, roles.batch)
    tied = shard(graph, CLUSTER.device, options, None, roles.donated)
    assert len(tied.problem.costs) < len(tied.graph.nodes)
    untied = untie(
        tied,
        CLUSTER.device,
        roles.donated,
        lambda sharded: True,
        "highs",
        TimeLimit(options.solver_seconds),
    )
    assert len(untied.problem.costs) == len(untied.graph.nodes) == len(set(untied.class_of))
    assert untied.problem.cost(untied.choices) <= tied.solution.objective * (1 + 1e-9)
    least = solve(untied.problem)
    assert least.status == "optimal" and untied.solution.bound <= least.objective * (1 + 1e-9)
    assert untied.solution.objective == pytest.approx(untied.problem.cost(untied.choices))

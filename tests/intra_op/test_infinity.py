"""Partial sums end where infinity would become NaN: the parts of a finite sum times infinity are of both signs, or 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.intra_op.build_graph import build_graph
from autopar.mesh import LogicalMesh
from tests.ir.traced import traced
from tests.models.case import Case
from tests.sweep import check_faithful, compile_case, largest_error, reference


def step(state, batch):
    """Sums over a split dim, rows and single elements of a split table, times and over what is infinite or 0."""
    flaw, n = batch["flaw"], batch["n"]
    hidden = batch["x"] @ state["w"]
    row = state["table"][n]
    found = {
        "sum times": hidden * flaw,
        "sum over": hidden / flaw,
        "row times": row * flaw,
        "row over": row / flaw,
        "number times": state["table"][n, 1] * flaw,
        "matrix": hidden @ jnp.diag(flaw[:4]),
        "mean": jnp.mean(batch["x"], 0) * flaw[0],
        "window": jnp.convolve(row, flaw[:3], "same"),
        "bias": jax.nn.softmax(-jnp.abs(row) * flaw),
    }
    return state, found


def flawed():
    random = np.random.default_rng(0)
    state = {"w": random.normal(size=(16, 4)), "table": random.normal(size=(8, 4))}
    batch = {"x": random.normal(size=(8, 16)), "flaw": np.array([np.inf, 0.0, 2.0, -np.inf])}
    state, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (state, batch))
    return Case("flawed", step, state, ({**batch, "n": jnp.int32(5)},))


@pytest.mark.parametrize("shape, seeds", [((8,), (0, 1, 2)), ((2, 2, 2), (3, 4))])
def test_infinity_is_where_it_is_in_jit(shape, seeds):
    case = flawed()
    for seed in seeds:
        compiled = compile_case(case, shape, f"random{seed}")
        check_faithful(compiled)
        error, where = largest_error(case, compiled, reference(case))
        assert error < 1e-5, (seed, where)


@pytest.mark.parametrize(
    "function, carries",
    [
        (lambda x, y: x * y, []),
        (lambda x, y: x / y, []),
        (lambda x, y: x @ y, []),
        (lambda x, y: x + y, ["+0"]),
        (lambda x, y: x * 0.5, ["+0"]),
        (lambda x, y: x * np.float32(np.inf), []),
        (lambda x, y: x / 0.0, []),
        (lambda x, y: jnp.where(y > 0, x, 2 * y), ["+0"]),
    ],
)
def test_which_operations_carry(function, carries):
    jaxpr = traced(function, jnp.ones((8, 8)), jnp.ones((8, 8)))
    graph = build_graph(jaxpr, LogicalMesh((4,)), {})
    last = [node for node in graph.nodes if node.kind == "op"][-1]
    assert [str(s) for s in last.strategies if "+" in str(s)] == carries


def test_a_gradient_is_reduced_behind_the_thin_matrix():
    """Of W + A @ B only the gradients of A and B are summed over devices, not that of their product."""
    size, rank = 256, 4
    state = {"a": jax.ShapeDtypeStruct((size, rank), "float32"), "b": jax.ShapeDtypeStruct((rank, size), "float32")}
    batch = {"x": jax.ShapeDtypeStruct((4096, size), "float32"), "w": jax.ShapeDtypeStruct((size, size), "float32")}

    def train(state, batch):
        def loss(p):
            return jnp.mean(jnp.tanh(batch["x"] @ (batch["w"] + p["a"] @ p["b"])))

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    parallel = autopar.parallelize(
        train, cluster=autopar.Cluster.of("8 h100"), method=autopar.DataParallel(), batch_argnums=1
    )
    collectives = parallel.plan(state, batch).cost.collectives
    assert sum(c.bytes for c in collectives if c.kind == "all-reduce") == 2 * size * rank * 4
    assert not [c for c in collectives if c.kind == "reduce-scatter"]

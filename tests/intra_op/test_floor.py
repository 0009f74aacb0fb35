"""What is called impossible is: no plan needs less than the floor, and what a plan needs is a budget that can be kept."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar import Auto, Cluster, DataParallel, Device, Link, PipelineParallel, ShardParallel, ThreeD
from autopar.errors import InfeasibleError, NoPlanFoundError
from autopar.intra_op import shard as sharding
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import build_problem
from autopar.intra_op.floor import memory_floor
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.lower import lower
from autopar.intra_op.restrict import Allowed
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh
from autopar.search.one_mesh import restrict_plan
from autopar.search.request import Request
from tests.draw import draw_choices
from tests.models.registry import CASES
from tests.tuned import tune

CLUSTER = Cluster(1, 4, Device("toy", 1e12, 80e9, 1e12), Link(1e-6, 1e10), Link(1e-6, 1e10))


@pytest.mark.parametrize(
    "name, method",
    [
        ("gpt_scan", None),
        ("gpt_scan", DataParallel(zero=3)),
        ("mlp_multisteps", None),
        ("mlp_multisteps", DataParallel(zero=0)),
        ("haiku_lstm", DataParallel(zero=3)),
    ],
)
def test_no_plan_is_below_the_floor(name, method):
    case = CASES[name]()
    program = trace_step(case.step, (case.state, case.batches[0]))
    roles, mesh = find_roles(program, (1,)), logical_mesh(CLUSTER, (2, 2))
    graph, allowed = build_graph(program.jaxpr, mesh, roles.aliases, roles.batch), Allowed()
    if method is not None:
        restrict_plan(Request(program, roles, CLUSTER, method), mesh, graph, allowed)
    classes = range(len(graph.nodes))
    costs = build_problem(graph, CLUSTER.device, classes, allowed.masks).costs
    floor = memory_floor(graph, costs, classes, roles.donated)
    assert floor.num_bytes > 0
    for seed in range(2):
        body = lower(graph, draw_choices(graph, seed, allowed))
        peak = measure_liveness(body, mesh, held_values(graph), roles.donated).peak_bytes
        assert floor.num_bytes <= peak * (1 + 1e-9)


def random_step(seed):
    """A few layers of random kinds and widths, scanned or not, with or without remat."""
    random = np.random.default_rng(seed)
    width, layers = int(random.choice([16, 32])), int(random.integers(1, 4))
    kind, scanned, remat = random.integers(3), bool(random.integers(2)), bool(random.integers(2))

    def block(x, w):
        h = jnp.tanh(x @ w)
        return x * h.mean() if kind == 0 else x + h if kind == 1 else jax.nn.softmax(h) @ w.T

    def loss_fn(params, x):
        body = jax.checkpoint(block) if remat else block
        if scanned:
            x, _ = lax.scan(lambda x, w: (body(x, w), None), x, params["w"])
        else:
            for k in range(layers):
                x = body(x, params["w"][k])
        return jnp.mean((x @ params["head"]) ** 2)

    def train_step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return train_step, {"w": array(layers, width, width), "head": array(width, 8)}, array(16, width)


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_what_a_plan_needs_can_be_kept(seed, monkeypatch):
    tune(monkeypatch, sharding, around_turns=0)  # it is asked what fits, not how fast that is
    step, params, batch = random_step(seed)
    shape = (4,) if seed % 2 else (2, 2)

    def plan(method):
        return autopar.parallelize(step, cluster=CLUSTER, method=method, batch_argnums=(1,)).plan(params, batch)

    for known in (DataParallel(zero=0), DataParallel(zero=3), ShardParallel(shape)):
        budget = plan(known).cost.peak_bytes[0]
        assert plan(ShardParallel(shape, memory_budget_bytes=budget)).cost.peak_bytes[0] <= budget


@pytest.mark.parametrize("seed", [0, 2])
def test_no_method_is_refused_what_it_needs(seed):
    """A plan's own peak is a budget that its method keeps, and `Auto()` too, whose plan is no slower then, however small the
    step; no plan takes less than errors say."""
    step, params, batch = random_step(seed)
    methods = (
        DataParallel(zero=1, num_microbatches=2, offload="never"),
        ThreeD(data=2, tensor=2, zero=1, num_microbatches=1, offload="never"),
        ThreeD(data=2, pipeline=2, zero=1, num_microbatches=2, offload="never"),
        PipelineParallel(num_stages=2, num_microbatches=4, offload="never"),
    )

    def planned(method, budget=None):
        asked = dataclasses.replace(method, memory_budget_bytes=budget)
        cost = autopar.parallelize(step, cluster=CLUSTER, method=asked, batch_argnums=(1,)).plan(params, batch).cost
        return max(cost.peak_bytes), cost.step_seconds

    found = [*map(planned, methods)]
    for method, (budget, _) in zip(methods, found, strict=True):
        assert planned(method, budget)[0] <= budget, method
    least = min(peak for peak, _ in found)
    peak, seconds = planned(Auto(offload="never"), least)
    assert peak <= least and seconds <= min(known for peak, known in found if peak == least) * (1 + 1e-6)
    with pytest.raises(InfeasibleError) as refused:
        planned(Auto(offload="never"), least // 3)
    assert least // 3 < refused.value.needed_bytes <= least


def test_the_error_says_what_was_proved():
    step, params, batch = random_step(1)
    planned = autopar.parallelize(step, cluster=CLUSTER, method=ShardParallel((4,), memory_budget_bytes=10))
    with pytest.raises(InfeasibleError, match="at least") as caught:
        planned.plan(params, batch)
    assert not isinstance(caught.value, NoPlanFoundError) and caught.value.needed_bytes > 10

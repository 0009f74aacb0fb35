"""Overlap: a hand-made program's clock, loops that gather ahead, and what must hold of every program."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import autopar
from autopar import Achieved, Cluster, DataParallel, Device, Link, ShardParallel
from autopar.cost import collective_seconds
from autopar.intra_op.lanes import run_lanes


def device(overlap, awaited=()):
    return Device("d", 1e12, memory_bytes_per_second=1e12, achieved=Achieved(overlap=overlap, awaited=awaited))


def plan_of(scanned, zero, rate, overlap, layers=8, width=256, batch=256, budget=None, awaited=()):
    """A stack of layers under data parallelism."""

    def loss_of(params, x):
        if scanned:
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        else:
            for k in range(layers):
                x = jnp.tanh(x @ params[k])
        return jnp.mean(x**2)

    def step(params, x):
        grads = jax.grad(loss_of)(params, x)
        return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))

    shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
    stack = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    params = stack if scanned else [shape] * layers
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    cluster = Cluster(1, 4, device(overlap, awaited), Link(1e-7, rate), Link(1e-7, rate))
    method = DataParallel(zero=zero, memory_budget_bytes=budget)
    return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(params, x)


def bounds(plan):
    cost = plan.cost
    return max(cost.compute_seconds, cost.communication_seconds), cost.compute_seconds + cost.communication_seconds


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
def test_bounds(scanned, zero, overlap):
    plan = plan_of(scanned, zero, 1e10, overlap)
    least, most = bounds(plan)
    assert least * (1 - 1e-9) <= plan.cost.step_seconds <= most * (1 + 1e-9)
    exposed = sum(plan.cost.exposed_seconds)
    assert plan.cost.step_seconds == pytest.approx(plan.cost.compute_seconds + exposed)
    assert len(plan.cost.exposed_seconds) == len(plan.cost.collectives)
    for seconds, c in zip(plan.cost.exposed_seconds, plan.cost.collectives, strict=True):
        assert -1e-12 <= seconds <= c.times * collective_seconds(c.kind, c.bytes, c.axes, plan.mesh) * (1 + 1e-6)
    if overlap == 0:
        assert plan.cost.step_seconds == pytest.approx(most)


def test_a_loop_gathers_the_next_layer_behind_this_one():
    # No room for the whole stack of 16.8 MB at once.
    plan = plan_of(True, 3, 1e11, 1.0, layers=64, batch=256, budget=38_500_000)
    inside = [(c, e) for c, e in zip(plan.cost.collectives, plan.cost.exposed_seconds, strict=True) if c.times > 1]
    assert inside, "parameters are gathered layer by layer"
    total = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, plan.mesh) for c, _ in inside)
    assert sum(e for _, e in inside) < 0.3 * total


def test_gradients_are_reduced_behind_the_backward_pass():
    quick = plan_of(False, 0, 2e11, 1.0, width=2048, batch=4096)
    exposed, total = sum(quick.cost.exposed_seconds), quick.cost.communication_seconds
    assert exposed < 0.5 * total
    assert plan_of(False, 0, 2e11, 0.0, width=2048, batch=4096).cost.step_seconds > quick.cost.step_seconds


def test_kernels_wait_for_the_kinds_that_a_device_awaits():
    def exposed_share(awaited):
        plan = plan_of(False, 0, 2e11, 1.0, width=2048, batch=4096, awaited=(awaited,))
        sums = zip(plan.cost.exposed_seconds, plan.cost.collectives, strict=True)
        shown = [(seconds, c) for seconds, c in sums if c.kind == "all-reduce"]
        sent = sum(collective_seconds(c.kind, c.bytes, c.axes, plan.mesh) for _, c in shown)
        return sum(seconds for seconds, _ in shown) / sent

    assert exposed_share("all-reduce") == pytest.approx(1.0)
    assert exposed_share("all-to-all") < 0.5


def test_the_same_program_twice_is_the_same():
    plan = plan_of(False, 3, 1e10, 1.0)
    sharded = plan.origin.pipeline.stages[0].sharded
    first, second = (run_lanes(sharded.body, lambda eqn: 1e-6, sharded.graph.mesh, device(0.5)) for _ in range(2))
    assert first == second


def test_each_equation_is_priced_once_however_many_trips_are_simulated():
    """Three trips of each loop were each priced anew, and nine of a loop in it."""

    def step(params, x):
        def outer(x, w):
            return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=6)[0], None

        return jax.tree.map(lambda g: -0.1 * g, jax.grad(lambda p: jnp.mean(lax.scan(outer, x, p)[0]))(params))

    params, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 64, 64), (64, 64)))
    method = ShardParallel(mesh_shape=(8,))
    plan = autopar.parallelize(step, cluster=Cluster.of("1x8 h100"), method=method, batch_argnums=(1,)).plan(params, x)
    sharded, asked = plan.origin.pipeline.stages[0].sharded, []

    def seconds_of(eqn):
        asked.append(eqn)
        return 1e-6

    run_lanes(sharded.body, seconds_of, sharded.graph.mesh, device(0.5))
    assert len(asked) == len({id(eqn) for eqn in asked}) > 10


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_dim_behind_others_are_transposed(dim):
    """What is gathered along the first dim lies as it comes; along another, kernels put every row together."""

    def step(weights, x):
        return jnp.mean(jnp.tanh(x @ weights))

    spec = PartitionSpec(*("x" if dim == d else None for d in (0, 1)))
    weights, x = (jax.ShapeDtypeStruct((rows, 256), jnp.float32) for rows in (256, 4096))
    seconds = []
    for turning in (1.0, 5.0):
        described = Device("d", 1e12, memory_bytes_per_second=1e9, achieved=Achieved(turning=turning))
        cluster = Cluster(1, 4, described, Link(1e-7, 1e12), Link(1e-7, 1e12))
        method = ShardParallel(mesh_shape=(4,), constraints={"weights": spec, "x": PartitionSpec("x")})
        plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(weights, x)
        assert [c.kind for c in plan.cost.collectives][:1] == ["all-gather"]
        seconds.append(plan.cost.step_seconds)
    assert seconds[1] - seconds[0] == pytest.approx(4 * 256 * 256 * 4 / 1e9 if dim else 0.0)

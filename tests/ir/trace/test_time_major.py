"""Batches whose samples lie behind time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from tests.sweep import QUICK, SLOW

TIME, BATCH, WIDTH = 6, 16, 8


def recur(params, inputs, carry):
    """Outputs of a recurrent layer at all times."""

    def tick(carry, x):
        carry = jnp.tanh(x @ params["in"] + carry @ params["own"])
        return carry, carry

    return jax.lax.scan(tick, carry, inputs)[1]


def trained(params, loss_fn):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def one_argument(params, batch):
    x = batch["x"]
    return trained(params, lambda p: jnp.mean((recur(p, x, jnp.zeros(x.shape[1:])) - batch["y"]) ** 2))


def first_carry(params, steps, carry):
    """A trajectory, one longer than its rewards, and the state that the loop begins with."""
    x = steps["x"].reshape(-1, steps["x"].shape[-1])  # all times at once, as a convolution would have them

    def loss_fn(p):
        seen = jnp.tanh(x @ p["in"]).reshape(steps["x"].shape)
        return jnp.mean((recur(p, seen, carry)[:-1] - steps["reward"][..., None]) ** 2)

    return trained(params, loss_fn)


def shuffled_minibatches(params, steps, last):
    """Returns by a loop backwards in time, then gradients of minibatches of all times and samples, shuffled."""
    _, returns = jax.lax.scan(lambda after, r: (r + 0.9 * after,) * 2, last, steps["reward"], reverse=True)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps["x"], returns))
    order = jax.random.permutation(jax.random.key(0), len(rows[0]))
    rows = jax.tree.map(lambda x: x[order].reshape(4, -1, *x.shape[1:]), rows)

    def update(params, rows):
        return trained(params, lambda p: jnp.mean((jnp.tanh(rows[0] @ p["in"]).sum(-1) - rows[1]) ** 2))

    return jax.lax.scan(update, params, rows)


def batch_major(params, batch):
    x = batch["x"]
    return trained(params, lambda p: jnp.mean(recur(p, x.swapaxes(0, 1), jnp.zeros((len(x), x.shape[-1]))) ** 2))


def layers(params, batch):
    """As many layers as samples."""

    def loss_fn(p):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], p["stack"])[0] ** 2)

    return trained(params, loss_fn)


def arrays(*trailing, lead=(TIME, BATCH)):
    return np.random.default_rng(0).normal(size=(*lead, *trailing)).astype(np.float32)


PARAMS = {name: 0.3 * arrays(lead=(WIDTH, WIDTH)) for name in ("in", "own")}
STEPS = {"x": arrays(WIDTH, lead=(TIME + 1, BATCH)), "reward": arrays()}
CASES = {
    "one argument": (one_argument, (PARAMS, {"x": arrays(WIDTH), "y": arrays(WIDTH)}), [1, 1]),
    "first carry": (first_carry, (PARAMS, STEPS, arrays(lead=(BATCH, WIDTH))), [1, 1, 0]),
    "shuffled": (
        shuffled_minibatches,
        (PARAMS, {"x": arrays(WIDTH), "reward": arrays()}, arrays(lead=(BATCH,))),
        [1, 1, 0],
    ),
    "batch major": (batch_major, (PARAMS, {"x": arrays(WIDTH, lead=(BATCH, TIME))}), [0]),
    "as many times as samples": (batch_major, (PARAMS, {"x": arrays(WIDTH, lead=(TIME, TIME))}), [0]),
    "layers": (layers, ({"stack": arrays(WIDTH, WIDTH, lead=(TIME,))}, {"x": arrays(WIDTH, lead=(TIME, 4))}), [0]),
}


@pytest.mark.parametrize("step, arguments, dims", CASES.values(), ids=CASES)
def test_samples(step, arguments, dims):
    roles = find_roles(trace_step(step, arguments, {}))
    assert [sorted(of) for of in roles.dims.values()] == [[dim] for dim in dims]
    assert len(roles.state) == len(arguments[0])


METHODS = {
    "data parallel": autopar.DataParallel(),
    "in microbatches": autopar.DataParallel(zero=3, num_microbatches=2),
    "stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
}


EQUAL = [(case, name) for case in CASES for name in METHODS if case in ("one argument", "first carry")]


@pytest.mark.parametrize("case, name", [*EQUAL, ("shuffled", "data parallel")])  # shuffling needs all samples
@pytest.mark.filterwarnings("ignore:.*far from even")
def test_equal_to_jit(case, name):
    method, (step, arguments, _) = METHODS[name], CASES[case]
    planned = autopar.parallelize(step, method=method, donate_argnums=())
    got, want = planned(*arguments), jax.jit(step)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    assert planned.plan(*arguments).num_microbatches == (method.num_microbatches or 1)


@pytest.mark.parametrize("case", ["one argument", "first carry", "shuffled"])
def test_data_parallelism_shares_the_work(case):
    step, arguments, _ = CASES[case]
    grown = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(64 * n for n in x.shape), x.dtype), arguments[0])
    longer = {WIDTH: 64 * WIDTH, BATCH: 64 * BATCH}
    rest = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(tuple(longer.get(n, n) for n in x.shape), x.dtype), arguments[1:]
    )
    seconds = []
    for count in (1, 8):
        cluster = autopar.Cluster(1, count, SLOW, QUICK)
        planned = autopar.parallelize(step, cluster=cluster, method=autopar.DataParallel())
        seconds.append(planned.plan(grown, *rest).cost.compute_seconds)
    assert seconds[0] > 3 * seconds[1]

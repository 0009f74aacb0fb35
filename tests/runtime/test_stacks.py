"""What is handed out of a stack that no `jax.Array` can be spread over: usable as an array, taken by any other step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.runtime.stacks import StackedArray


def step_along(dim):
    """A step of eight layers, stacked along a dim."""

    def step(params, batch):
        def loss_fn(params):
            layers = jnp.moveaxis(params, dim, 0)
            x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), batch["x"], layers)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    return step


@functools.cache
def stepped_along(dim):
    """State after one step of a pipeline whose stages hold two chunks each; what it should be; the batch; the step."""
    step = step_along(dim)
    random = np.random.default_rng(0)
    params = random.normal(size=(8, 8, 8)).astype(np.float32)
    batch = {name: random.normal(size=(8, 8)).astype(np.float32) for name in ("x", "y")}
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2, schedule="interleaved")
    state, _ = autopar.parallelize(step, method=method, batch_argnums=1)(params, batch)
    assert isinstance(state, StackedArray) and state.dim == dim
    assert {part.shape[dim] for part in state.parts} == {2}
    return state, np.asarray(jax.jit(step)(params, batch)[0]), batch, step


@pytest.fixture(params=[0, 1], ids=["along dim 0", "along dim 1"])
def stepped(request):
    return stepped_along(request.param)


USES = {
    "jit": lambda x: jax.jit(lambda x: x * 2)(x),
    "grad": jax.grad(lambda x: jnp.sum(x**2) / 2),
    "jnp": jnp.sum,
    "norm": optax.global_norm,
    "operators": lambda x: 1 - x / 2 + x @ x,
    "beside an array": lambda x: jnp.ones(8) * x,
    "tree": lambda x: jax.tree.map(lambda a, b: a + b, {"w": x}, {"w": x})["w"],
    "methods": lambda x: x.astype(jnp.int32).sum(axis=0),
    "index": lambda x: x[2, ::2],
    "iteration": lambda x: list(x)[-1],
    "put": lambda x: jax.device_put(x, jax.devices()[3]),
    "numpy": lambda x: np.mean(x, axis=0),
}


@pytest.mark.parametrize(
    "dim, use", [(0, use) for use in USES] + [(1, use) for use in ("jit", "operators", "index", "numpy")]
)
def test_used_as_an_array(dim, use):
    state, expected, *_ = stepped_along(dim)
    np.testing.assert_allclose(USES[use](state), USES[use](jnp.asarray(expected)), rtol=2e-5, atol=1e-6)


def test_its_type_is_known_without_reading_it(stepped):
    state, expected, *_ = stepped
    assert jax.eval_shape(lambda x: x[0], state).shape == (8, 8)
    assert (state.shape, state.ndim, state.dtype, len(state)) == (expected.shape, 3, expected.dtype, 8)


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel(),
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
        autopar.PipelineParallel(num_stages=4, num_microbatches=2, schedule="interleaved"),
    ],
    ids=str,
)
def test_the_next_step_may_be_another(stepped, method):
    state, expected, batch, step = stepped
    got, _ = autopar.parallelize(step, method=method, batch_argnums=1)(state, batch)
    want = np.asarray(jax.jit(step)(expected, batch)[0])
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=1e-6)

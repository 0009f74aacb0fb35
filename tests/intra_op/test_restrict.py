"""Hand methods on one device: data parallelism of every ZeRO stage is then the step itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar


def step(weights, x):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(weights)
    return weights - 0.1 * gradient, loss


@pytest.mark.parametrize("zero", range(4))
def test_data_parallel_on_one_device(zero):
    cluster = autopar.Cluster.local(jax.devices()[:1])
    planned = autopar.parallelize(step, cluster=cluster, method=autopar.DataParallel(zero=zero))
    weights, x = jnp.eye(4), jnp.arange(32.0).reshape(8, 4) / 32
    expected, (new, loss) = jax.jit(step)(weights, x), planned(weights, x)
    np.testing.assert_allclose(new, expected[0], rtol=1e-6)
    np.testing.assert_allclose(loss, expected[1], rtol=1e-6)
    assert not planned.plan(jnp.eye(4), x).cost.collectives

"""What a plan's page is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar


@pytest.mark.parametrize("count", (1, 4))
def test_a_result_may_be_a_number_of_the_program(count):
    """A counter that starts again, a constant metric: no variable of the program holds them."""

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
        return {"w": state["w"] - gradient, "n": jnp.zeros_like(state["n"])}, 1.0

    method = autopar.ShardParallel(num_microbatches=count)
    parallel = autopar.parallelize(step, method=method, batch_argnums=1, donate_argnums=())
    state, x = {"w": jnp.ones((8, 8)) / 8, "n": jnp.int32(3)}, jnp.ones((32, 8))
    new, metric = parallel(state, x)
    expected, _ = jax.jit(step)(state, x)
    assert int(new["n"]) == 0 and float(metric) == 1
    np.testing.assert_allclose(new["w"], expected["w"], rtol=1e-5)

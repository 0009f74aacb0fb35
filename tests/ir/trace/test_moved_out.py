"""A loss that takes gradients in a loop, as layers that learn at test time do: its forward pass does not end there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar import Cluster, PipelineParallel, parallelize
from autopar.ir.gradient import is_backward
from autopar.ir.trace.trace import trace_step

PARAMS = {name: jax.ShapeDtypeStruct((3, 8, 8), jnp.float32) for name in ("inner", "outer")}
BATCH = jax.ShapeDtypeStruct((16, 4, 8), jnp.float32)


def learns(w, x):
    """[sequence, features]: a step of gradient descent at each of them."""

    def inner_loss(w, x):
        return jnp.sum((jnp.tanh(x @ w) - x) ** 2)

    return lax.scan(lambda w, x: (w - 0.1 * jax.grad(inner_loss)(w, x), jnp.tanh(x @ w)), w, x)[1]


def train(params, batch):
    def loss_fn(params):
        x = batch
        for k in range(3):
            x = jax.vmap(learns, (None, 0))(params["inner"][k], x) @ params["outer"][k]
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_one_forward_pass():
    passes = [is_backward(eqn) for eqn in trace_step(train, (PARAMS, BATCH)).jaxpr.eqns if "jvp" in _scope(eqn)]
    assert True in passes and passes == sorted(passes), "forward, then backward"


def _scope(eqn):
    return str(eqn.source_info.name_stack)


def test_stages_share_the_layers(recwarn):
    method = PipelineParallel(num_stages=3, num_microbatches=2)
    parallelize(train, cluster=Cluster.of("3 h100"), method=method, batch_argnums=1).plan(PARAMS, BATCH)
    assert not [str(each.message) for each in recwarn if "far from even" in str(each.message)]

"""Products of 8-bit floats: what scales them is found over the whole batch, in shards and in microbatches too."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import autopar
from autopar._jax import find_primitives
from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_equation, flat_eqns

WIDTH, BATCH = 64, 128
METHODS = [
    autopar.ShardParallel(mesh_shape=(4,)),
    autopar.DataParallel(zero=3),
    autopar.DataParallel(num_microbatches=2),
    autopar.PipelineParallel(num_stages=2, num_microbatches=2),
]


def scaled_product(a, b, a_scale, b_scale, *, preferred_element_type):
    """What cuDNN's kernel computes."""
    a, b = (
        x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), x.shape[2] // s.shape[2], axis=2)
        for x, s in ((a, a_scale), (b, b_scale))
    )
    return [jnp.einsum("bmk,bnk->bmn", a, b).astype(preferred_element_type)]


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """It has no other meaning on a CPU."""
    (primitive,) = find_primitives("scaled_matmul_wrapper")
    mlir.register_lowering(primitive, mlir.lower_fun(scaled_product), platform="cpu")


def cluster():
    device = autopar.Device("slow", peak_flops=1e7, memory_bytes=1e9, memory_bytes_per_second=1e9)
    return autopar.Cluster.local(jax.devices()[:4], device=device, intra=autopar.Link(1e-7, 1e9))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_rule_of_scaled_matmul():
    def scaled(a, b, a_scale, b_scale):
        return jax.nn.scaled_matmul(a, b, a_scale, b_scale)

    a, b = (normal(2, n, 128).astype(jnp.float8_e4m3fn) for n in (8, 4))
    scales = [jnp.exp2(jnp.round(normal(2, n, 4))).astype(jnp.float8_e8m0fnu) for n in (8, 4)]
    (eqn,) = (e for e in flat_eqns(scaled, a, b, *scales) if e.primitive.name == "scaled_matmul_wrapper")
    assert str(rule_for(eqn)) == "ab(cd),ae(cd),abc,aec->abe {sum c d}"
    assert check_equation(eqn, limit=5) > 1


def block_scaled(mode="mxfp8", **settings):
    """Blocks of 32 numbers share an exponent; of numbers of 4 bits blocks of 16, with a scale of 8 bits."""
    configs = [jax.nn.get_scaled_dot_general_config(mode, **settings)] * 3

    def apply(w, x):
        return jax.nn.scaled_dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), configs=configs)

    def train_step(params, batch):
        def loss_fn(params):
            hidden = jnp.tanh(apply(params["up"], batch["x"]))
            return jnp.mean((apply(params["down"], hidden) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"up": normal(WIDTH, WIDTH) / 8, "down": normal(WIDTH, WIDTH, seed=1) / 8}
    return train_step, params


def flax_layers():
    """Scales follow a history of the largest numbers, which comes back as a gradient."""
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            dense = {"dot_general_cls": linen.Fp8DirectDotGeneralOp, "use_bias": False}
            return linen.Dense(WIDTH, **dense)(jnp.tanh(linen.Dense(WIDTH, **dense)(x)))

    model = Model()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean((model.apply(s, batch["x"]) - batch["y"]) ** 2))(state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads["params"])
        return {"params": params, "_overwrite_with_gradient": grads["_overwrite_with_gradient"]}, loss

    return train_step, jax.jit(model.init)(jax.random.key(0), jnp.ones((BATCH, WIDTH)))


def in_4_bits():
    return block_scaled("nvfp4", global_scale=jnp.ones((1,)))


def frozen_in_4_bits():
    """Weights of 4 bits in the state, rounded anew by the step, beside others that learn."""
    packed = [jnp.asarray(7 * normal(WIDTH, WIDTH, seed=k).clip(-1, 1), jnp.int4) for k in range(2)]
    params = [normal(WIDTH, WIDTH, seed=k) / 8 for k in range(2)]

    def train_step(state, batch):
        def loss_fn(params):
            hidden = batch["x"]
            for frozen, own in zip(state["packed"], params, strict=True):
                hidden = jnp.tanh(hidden @ (frozen.astype(jnp.float32) / 32 + own))
            return jnp.mean((hidden - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"packed": [jnp.where(w > 3, w - 1, w) for w in state["packed"]], "params": params}, loss

    return train_step, {"packed": packed, "params": params}


@pytest.mark.parametrize(
    "make, method",
    [
        (flax_layers, autopar.Auto()),
        *itertools.product([block_scaled], METHODS[:3]),
        *itertools.product([flax_layers], METHODS[2:]),
        (in_4_bits, METHODS[3]),
        (frozen_in_4_bits, METHODS[1]),
    ],
)
def test_equal_to_jit(make, method):
    fn, state = make()
    step = autopar.parallelize(fn, cluster=cluster(), method=method, donate_argnums=())
    plain, wanted, got = jax.jit(fn), state, state
    for k in range(2):
        batch = {"x": normal(BATCH, WIDTH, seed=2 + k), "y": normal(BATCH, WIDTH, seed=5)}
        (wanted, loss), (got, parallel) = plain(wanted, batch), step(got, batch)
        np.testing.assert_allclose(parallel, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, wanted)

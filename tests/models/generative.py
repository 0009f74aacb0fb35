"""Generative models: random numbers in the step, several losses, codebooks, flows."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.data import BATCH, batches, dense, normal, on_device
from tests.models.registry import case
from tests.models.transformers import adamw, apply, trained

SIZE = 24


def samples(random):
    return normal(random, BATCH, SIZE)


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        h = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(32)(x)))
        mean, log_var = jnp.split(nn.Dense(16)(h), 2, -1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(self.make_rng("latent"), mean.shape)
        return nn.Dense(SIZE)(nn.relu(nn.Dense(32)(z))), mean, log_var


@case("vae_dropout")
def vae_dropout():
    model, optimizer = VAE(), adamw()
    params = model.init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1), "latent": jax.random.key(2)}, jnp.zeros((1, SIZE))
    )

    def step(state, x):
        key, dropout, latent = jax.random.split(state["key"], 3)

        def loss_fn(params):
            y, mean, log_var = model.apply(params, x, rngs={"dropout": dropout, "latent": latent})
            kl = -0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)
            return (((x - y) ** 2).sum(-1) + 0.1 * kl).mean(), kl

        (loss, kl), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss, "kl": kl}

    return step, {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(3)}, batches(samples)


@case("diffusion")
def diffusion():
    """Noise at drawn times, a schedule looked up, an average of the weights, a raw key in the state."""
    random = np.random.default_rng(1)
    params = on_device(
        {
            "time": normal(random, 10, 32) * 0.3,
            "layers": [dense(random, SIZE, 32), dense(random, 32, 32), dense(random, 32, SIZE)],
        }
    )
    optimizer, kept = adamw(), jnp.asarray(np.cumprod(1 - np.linspace(0.01, 0.3, 10)), jnp.float32)

    def step(state, x):
        key, for_time, for_noise = jax.random.split(state["key"], 3)
        time = jax.random.randint(for_time, (x.shape[0],), 0, 10)
        noise = jax.random.normal(for_noise, x.shape)
        level = kept[time][:, None]

        def loss_fn(params):
            h = apply(params["layers"][0], jnp.sqrt(level) * x + jnp.sqrt(1 - level) * noise) + params["time"][time]
            h = h + jax.nn.silu(apply(params["layers"][1], jax.nn.silu(h)))
            return ((apply(params["layers"][2], h) - noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"params": params, "average": average, "opt_state": opt_state, "key": key}, loss

    state = {"params": params, "average": params, "opt_state": optimizer.init(params), "key": jax.random.PRNGKey(4)}
    return step, state, batches(samples)


@case("gan_two_optimizers", refused="batch statistics")
def gan_two_optimizers():
    random = np.random.default_rng(2)
    params = on_device(
        {
            "make": [dense(random, 8, 32), dense(random, 32, SIZE)],
            "judge": [dense(random, SIZE, 32), dense(random, 32, 1)],
        }
    )
    optimizers = {"make": adamw(3e-3), "judge": optax.sgd(0.05)}

    def network(layers, x):
        return apply(layers[1], jax.nn.leaky_relu(apply(layers[0], x), 0.2))

    def step(state, x):
        key, now = jax.random.split(state["key"])
        z = jax.random.normal(now, (x.shape[0], 8))
        params, opt = state["params"], state["opt"]

        def judge_loss(judge):
            real, made = network(judge, x), network(judge, jax.lax.stop_gradient(network(params["make"], z)))
            return (jax.nn.softplus(-real) + jax.nn.softplus(made)).mean()

        def make_loss(make, judge):
            return jax.nn.softplus(-network(judge, network(make, z))).mean()

        loss_j, grads = jax.value_and_grad(judge_loss)(params["judge"])
        updates, opt_j = optimizers["judge"].update(grads, opt["judge"])
        judge = optax.apply_updates(params["judge"], updates)
        loss_m, grads = jax.value_and_grad(make_loss)(params["make"], judge)
        updates, opt_m = optimizers["make"].update(grads, opt["make"], params["make"])
        make = optax.apply_updates(params["make"], updates)
        return {"params": {"make": make, "judge": judge}, "opt": {"make": opt_m, "judge": opt_j}, "key": key}, (
            loss_j,
            loss_m,
        )

    opt = {name: each.init(params[name]) for name, each in optimizers.items()}
    return step, {"params": params, "opt": opt, "key": jax.random.key(5)}, batches(samples)


@case("vq_vae")
def vq_vae():
    """Nearest codes, gradients straight through, a codebook that follows by moving averages."""
    random = np.random.default_rng(3)
    params = on_device({"encode": dense(random, SIZE, 16), "decode": dense(random, 16, SIZE)})
    book = on_device({"codes": normal(random, 12, 4), "count": np.ones(12, np.float32), "sum": normal(random, 12, 4)})
    optimizer = adamw()

    def step(state, x):
        def loss_fn(params):
            z = apply(params["encode"], x).reshape(-1, 4)
            distance = (
                (z**2).sum(-1, keepdims=True) - 2 * z @ state["book"]["codes"].T + (state["book"]["codes"] ** 2).sum(-1)
            )
            nearest = distance.argmin(-1)
            code = state["book"]["codes"][nearest]
            y = apply(params["decode"], (z + jax.lax.stop_gradient(code - z)).reshape(x.shape[0], -1))
            return ((x - y) ** 2).mean() + 0.25 * ((z - jax.lax.stop_gradient(code)) ** 2).mean(), (z, nearest)

        (loss, (z, nearest)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        count = 0.9 * state["book"]["count"] + 0.1 * jnp.zeros(12).at[nearest].add(1.0)
        total = 0.9 * state["book"]["sum"] + 0.1 * jax.ops.segment_sum(z, nearest, 12)
        book = {"codes": total / count[:, None], "count": count, "sum": total}
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "book": book}, {
            "loss": loss,
            "used": nearest,
        }

    return step, {"params": params, "opt_state": optimizer.init(params), "book": book}, batches(samples)


@case("flow_coupling")
def flow_coupling():
    """Invertible layers: halves swapped, masks, a triangular matrix with its log-determinant."""
    random = np.random.default_rng(4)
    params = {
        "layers": [[dense(random, SIZE // 2, 32), dense(random, 32, SIZE)] for _ in range(2)],
        "matrix": (np.eye(SIZE) + 0.05 * random.normal(size=(SIZE, SIZE))).astype(np.float32),
    }

    def loss_fn(params, x):
        lower = jnp.tril(params["matrix"])
        x = jax.scipy.linalg.solve_triangular(lower, x.T, lower=True).T
        log_det = -jnp.log(jnp.abs(jnp.diagonal(lower))).sum()
        for layer in params["layers"]:
            a, b = jnp.split(x, 2, -1)
            scale, shift = jnp.split(apply(layer[1], jnp.tanh(apply(layer[0], a))), 2, -1)
            scale = jnp.tanh(scale)
            x = jnp.concatenate([b * jnp.exp(scale) + shift, a], -1)[:, ::-1]
            log_det = log_det + scale.sum(-1)
        return (0.5 * (x**2).sum(-1) - log_det).mean()

    return trained(loss_fn, params, adamw(), samples)

"""Steps that take a gradient where another has led, in stages: as `jax.jit` of the same, leaf by leaf, over three steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import MicrobatchError
from tests.sweep import QUICK, SLOW, _host, relative_error

WIDTH, BATCH, STEPS = 12, 8, 3
OPTIMIZER = optax.adam(1e-2)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def layers(seed, *widths):
    return [
        {"w": normal(seed + k, a, b) / a**0.5, "b": jnp.zeros(b)}
        for k, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    ]


def mlp(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def update(grads, params, moments):
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments


def sharpness_aware():
    """Foret et al., 2021: the gradient where the first one has led; layers run again for it."""
    params = layers(0, WIDTH, WIDTH, WIDTH, 4)
    hidden = jax.checkpoint(lambda layer, x: jnp.tanh(x @ layer["w"] + layer["b"]))

    def loss_of(params, batch):
        x = hidden(params[1], hidden(params[0], batch["x"]))
        return jnp.mean((mlp(params[2:], x) - batch["y"]) ** 2)

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        norm = optax.global_norm(grads)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        grads = jax.grad(loss_of)(moved, batch)
        return update(grads, params, moments), loss

    return (
        step,
        (params, OPTIMIZER.init(params)),
        lambda k: {"x": normal(k, BATCH, WIDTH), "y": normal(k + 9, BATCH, 4)},
    )


def draws():
    """The generator is trained against the new critic on samples of its own, which the batch never meets."""
    made, critic = layers(0, 4, WIDTH, WIDTH), layers(9, WIDTH, WIDTH, 1)

    def step(state, batch):
        key, first, second = jax.random.split(state["key"], 3)
        noise = [jax.random.normal(k, (BATCH, 4)) for k in (first, second)]

        def critic_loss(p):
            return jnp.mean(mlp(p, mlp(state["made"], noise[0]))) - jnp.mean(jnp.tanh(mlp(p, batch["x"])))

        lost, grads = jax.value_and_grad(critic_loss)(state["critic"])
        critic, moments = update(grads, state["critic"], state["moments"])
        won, grads = jax.value_and_grad(lambda p: jnp.mean(mlp(critic, mlp(p, noise[1])) ** 2))(state["made"])
        made = jax.tree.map(lambda p, g: p - 0.1 * g, state["made"], grads)
        return {"made": made, "critic": critic, "moments": moments, "key": key}, (lost, won)

    state = {"made": made, "critic": critic, "moments": OPTIMIZER.init(critic), "key": jax.random.PRNGKey(3)}
    return step, state, lambda k: {"x": normal(k, BATCH, WIDTH)}


def adversaries():
    """WGAN-GP: a critic with a penalty on its slope, then the generator against the critic that has just been trained."""
    made, critic = layers(0, 4, WIDTH, WIDTH), layers(9, WIDTH, WIDTH, 1)

    def step(state, batch):
        made, critic, of_made, of_critic = state
        fake = mlp(made, batch["z"])

        def critic_loss(critic):
            between = batch["t"] * batch["x"] + (1 - batch["t"]) * fake
            slope = jax.vmap(jax.grad(lambda x: mlp(critic, x)[0]))(between)
            penalty = jnp.mean((jnp.sqrt(jnp.sum(slope**2, -1) + 1e-12) - 1) ** 2)
            return jnp.mean(mlp(critic, fake)) - jnp.mean(mlp(critic, batch["x"])) + 10 * penalty

        lost, grads = jax.value_and_grad(critic_loss)(critic)
        critic, of_critic = update(grads, critic, of_critic)
        won, grads = jax.value_and_grad(lambda made: -jnp.mean(mlp(critic, mlp(made, batch["z"]))))(made)
        made, of_made = update(grads, made, of_made)
        return (made, critic, of_made, of_critic), (lost, won)

    def batch(k):
        return {
            "x": normal(k, BATCH, WIDTH),
            "z": normal(k + 9, BATCH, 4),
            "t": jax.nn.sigmoid(normal(k + 20, BATCH, 1)),
        }

    return step, (made, critic, OPTIMIZER.init(made), OPTIMIZER.init(critic)), batch


def actor_and_critic():
    """Soft actor-critic: critics, then the actor against them, then the temperature; targets follow."""
    actor, critics = layers(0, WIDTH, WIDTH, 4), [layers(5, WIDTH + 2, WIDTH, 1), layers(7, WIDTH + 2, WIDTH, 1)]
    temperature = jnp.float32(0.5)

    def act(actor, seen, noise):
        mean, spread = jnp.split(mlp(actor, seen), 2, -1)
        action = jnp.tanh(mean + jnp.exp(jnp.clip(spread, -3, 1)) * noise)
        return action, -jnp.sum(noise**2 / 2 + jnp.clip(spread, -3, 1) + jnp.log(1 - action**2 + 1e-4), -1)

    def worth(critics, seen, action):
        return jnp.stack([mlp(one, jnp.concatenate([seen, action], -1))[:, 0] for one in critics])

    def step(state, batch):
        actor, critics, targets, temperature, moments = state
        action, likely = act(actor, batch["next"], batch["noise"])
        goal = batch["reward"] + 0.9 * (worth(targets, batch["next"], action).min(0) - temperature * likely)
        lost, grads = jax.value_and_grad(lambda c: jnp.mean((worth(c, batch["seen"], batch["action"]) - goal) ** 2))(
            critics
        )
        critics, of_critics = update(grads, critics, moments[0])

        def actor_loss(actor):
            action, likely = act(actor, batch["seen"], batch["noise"])
            return jnp.mean(temperature * likely - worth(critics, batch["seen"], action).min(0)), likely

        (won, likely), grads = jax.value_and_grad(actor_loss, has_aux=True)(actor)
        actor, of_actor = update(grads, actor, moments[1])
        temperature -= 0.01 * jax.grad(lambda t: -jnp.mean(t * (likely - 2.0)))(temperature)
        targets = optax.incremental_update(critics, targets, 0.05)
        return (actor, critics, targets, temperature, (of_critics, of_actor)), (lost, won)

    def batch(k):
        found = {name: normal(k + at, BATCH, WIDTH) for at, name in enumerate(("seen", "next"))}
        return {
            **found,
            "action": normal(k + 3, BATCH, 2),
            "noise": normal(k + 4, BATCH, 2),
            "reward": normal(k + 5, BATCH),
        }

    moments = OPTIMIZER.init(critics), OPTIMIZER.init(actor)
    return step, (actor, critics, jax.tree.map(jnp.copy, critics), temperature, moments), batch


def measured_after():
    """The loss where a step has led: a round without a backward pass."""
    params = layers(0, WIDTH, WIDTH, 4)

    def loss_of(params, batch):
        return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)

    def step(params, batch):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params, batch))
        return params, loss_of(params, batch)

    return step, params, lambda k: {"x": normal(k, BATCH, WIDTH), "y": normal(k + 9, BATCH, 4)}


def shuffled(others=lambda samples, order: samples[order]):
    """Manifold mixup: between two layers each sample meets another one, from whatever microbatch."""
    params = layers(0, WIDTH, WIDTH, WIDTH, 4)

    def step(params, batch):
        def loss_of(params):
            x = jnp.tanh(mlp(params[:1], batch["x"]))
            x, y = (0.7 * a + 0.3 * others(a, batch["order"]) for a in (x, batch["y"]))
            return jnp.mean((mlp(params[1:], x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def batch(k):
        order = jnp.asarray(np.random.default_rng(k).permutation(BATCH))
        return {"x": normal(k, BATCH, WIDTH), "y": normal(k + 9, BATCH, 4), "order": order}

    return step, params, batch


def augmented():
    """Mixup of samples that were augmented at such length that no stage does it for all of them at once."""
    params = layers(0, WIDTH, WIDTH, 4)

    def step(params, batch):
        x = batch["x"]
        for _ in range(6):
            x = jnp.tanh(x @ jnp.eye(WIDTH, k=1) + 0.1)
        x, y = (0.7 * a + 0.3 * jnp.flip(a, 0) for a in (jnp.where(x > 0, jnp.roll(x, 3, 0), x), batch["y"]))
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((mlp(params, x) - y) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, params, lambda k: {"x": normal(k, BATCH, WIDTH), "y": normal(k + 9, BATCH, 4)}


def epochs(turns=2):
    """Proximal policy optimization: a scan over epochs of a scan over minibatches, each a training step."""
    params = layers(0, WIDTH, WIDTH, 4)

    def one(params, rows):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(p, rows["x"]) - rows["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def step(params, batch):
        def epoch(params, key):
            order = jax.random.permutation(key, BATCH)
            return jax.lax.scan(one, params, jax.tree.map(lambda a: a[order].reshape(2, BATCH // 2, -1), batch))

        return jax.lax.scan(epoch, params, jax.random.split(jax.random.key(0), turns))

    return step, params, lambda k: {"x": normal(k, BATCH, WIDTH), "y": normal(k + 9, BATCH, 4)}


def batches_of_steps(turns=3):
    """A scan over a stack of batches, `[steps, batch, ...]`, with a rate and a random key for each step."""
    params = layers(0, WIDTH, WIDTH, 4)

    def one(params, given):
        rows, rate, key = given
        x = rows["x"] + 0.1 * jax.random.normal(key, rows["x"].shape)
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - rows["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    def step(params, batch):
        return jax.lax.scan(one, params, (batch["rows"], batch["rate"], batch["key"]))

    def batch(k):
        rows = {"x": normal(k, turns, BATCH, WIDTH), "y": normal(k + 9, turns, BATCH, 4)}
        return {"rows": rows, "rate": jnp.full(turns, 0.1), "key": jax.random.split(jax.random.key(k), turns)}

    return step, params, batch


# How often a microbatch goes forwards and backwards, the step, how it is cut.
def ranked(change=lambda worths: worths):
    """A critic whose gradients are clipped by their norm, then an actor that divides its critic's worths by their range."""
    actor, critic = layers(0, WIDTH, WIDTH, WIDTH), layers(5, 2 * WIDTH, WIDTH, 1)

    def worth(critic, batch, action):
        return mlp(critic, jnp.concatenate([batch["x"], action], -1))[:, 0]

    def step(state, batch):
        actor, critic, of_actor, of_critic = state
        lost, grads = jax.value_and_grad(lambda c: jnp.mean((worth(c, batch, batch["y"]) - batch["r"]) ** 2))(critic)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 0.1), grads)
        critic, of_critic = update(grads, critic, of_critic)

        def actor_loss(actor):
            worths = change(worth(critic, batch, mlp(actor, batch["x"])))
            low, high = jnp.quantile(jax.lax.stop_gradient(worths), jnp.asarray([0.1, 0.9]))
            return jnp.mean((worths / jnp.maximum(high - low, 0.1) - batch["r"]) ** 2), high

        (won, high), grads = jax.value_and_grad(actor_loss, has_aux=True)(actor)
        actor, of_actor = update(grads, actor, of_actor)
        return (actor, critic, of_actor, of_critic), (lost, won, high)

    return (
        step,
        (actor, critic, OPTIMIZER.init(actor), OPTIMIZER.init(critic)),
        lambda k: {"x": normal(k, BATCH, WIDTH), "y": normal(k + 9, BATCH, WIDTH), "r": normal(k + 20, BATCH)},
    )


CELLS = [
    (2, sharpness_aware, autopar.PipelineParallel(num_stages=2, num_microbatches=1)),
    (2, sharpness_aware, autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule="zb-h1")),
    (2, adversaries, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (2, draws, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (2, draws, autopar.PipelineParallel(num_stages=2, num_microbatches=1)),
    (2, actor_and_critic, autopar.ThreeD(data=2, tensor=1, pipeline=2, num_microbatches=2)),
    (4, ranked, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (2, measured_after, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (3, shuffled, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (
        3,
        lambda: shuffled(lambda samples, _: jnp.flip(samples, 0)),
        autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    ),
    (3, lambda: shuffled(lambda samples, _: jnp.roll(samples, 3, 0)), autopar.ThreeD(2, 1, 2, num_microbatches=2)),
    (3, augmented, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (4, epochs, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (3, batches_of_steps, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    (3, batches_of_steps, autopar.PipelineParallel(num_stages=2, num_microbatches=1)),
    (3, batches_of_steps, autopar.ThreeD(data=2, tensor=1, pipeline=2, num_microbatches=4)),
]


def parallel(case, method):
    step, state, batch = case()
    devices = jax.devices()[: getattr(method, "data", 1) * 2]
    cluster = autopar.Cluster.local(devices, device=SLOW, intra=QUICK)
    return (
        autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,), donate_argnums=()),
        state,
        batch,
    )


@pytest.mark.parametrize("num_rounds, case, method", CELLS)
def test_rounds_equal_jit(num_rounds, case, method):
    step, state, batch = parallel(case, method)
    plain, same = jax.jit(case()[0]), state
    for k in range(STEPS):
        state, told = step(state, batch(k))
        same, wanted = plain(same, batch(k))
        leaves = jax.tree_util.tree_leaves_with_path((state, told))
        for (path, got), leaf in zip(leaves, jax.tree.leaves((same, wanted)), strict=True):
            assert relative_error(_host(got), _host(leaf)) <= 2e-5, jax.tree_util.keystr(path)
    assert step.plan(state, batch(0)).origin.pipeline.cut.chain.num_rounds == num_rounds


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_each_step_of_a_loop_is_split(num_microbatches):
    """Three steps on four devices: the batch of each is split, though three is no multiple of four, or of two."""
    step, state, batch = batches_of_steps()
    method = autopar.DataParallel(zero=3, num_microbatches=num_microbatches)
    cluster = autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK)
    found = autopar.parallelize(step, cluster=cluster, method=method, donate_argnums=())
    got, wanted = found(state, batch(0)), jax.jit(step)(state, batch(0))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert relative_error(_host(a), _host(b)) <= 2e-5, jax.tree_util.keystr(path)
    plan = found.plan(state, batch(0))
    shardings = plan.shardings[0][1]["rows"]
    assert shardings["x"][0] is None and shardings["x"][1], "steps stay in order; samples are split"
    assert plan.cost.figures.amount == 3 * BATCH


def test_stages_split_each_step_of_a_loop():
    step, state, batch = parallel(*CELLS[-1][1:])
    plan = step.plan(state, batch(0))
    x = plan.shardings[0][1]["rows"]["x"]
    assert x[0] is None and x[1] == "data", x


@pytest.mark.parametrize(
    "cell, told",
    [
        (0, "goes through the stages 2 times forwards and 2 backwards, since gradients"),
        (6, "through the stages 4 times forwards and 2 backwards"),
        (7, "through the stages 2 times forwards and 1 backwards"),
    ],
)
def test_rounds_are_told(cell, told):
    step, state, batch = parallel(*CELLS[cell][1:])
    with pytest.warns(match=told):
        step.plan(state, batch(0))


def test_a_loop_of_many_steps_is_no_round():
    """More turns than stages take: the error says what else does it."""
    step, params, batch = epochs(turns=9)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    found = autopar.parallelize(step, cluster=autopar.Cluster(1, 2, SLOW, QUICK), method=method, batch_argnums=(1,))
    with pytest.raises(MicrobatchError, match=r"`scan` at test_rounds_of_stages\.py") as raised:
        found.plan(params, batch(0))
    assert "up to 16 times" in str(raised.value) and "ShardParallel(num_microbatches=2)" in str(raised.value)


def test_what_a_round_ends_with_is_not_what_stands_in_the_way():
    """Of two values of the whole batch that samples wait for, the error names the one that no round can end with."""

    def settled(worths):
        """Much work, which goes on until the last sample has settled."""
        squares = jax.lax.stop_gradient(jnp.tanh(worths))[:, None, None] * jnp.eye(64)
        return worths + jax.lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: x @ x, squares).sum((1, 2))

    step, state, batch = parallel(lambda: ranked(settled), autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    with pytest.raises(MicrobatchError, match="`while` at"):
        step.plan(state, batch(0))

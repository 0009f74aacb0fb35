"""Steps around two models or a model's own samples: preferences, distillation, policy gradients on generated text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.models.data import BATCH, batches, dense, norm, normal, on_device, tokens
from tests.models.registry import case
from tests.models.transformers import adamw, apply, layer_norm

VOCABULARY, LENGTH, PROMPT, WIDTH, HEADS = 32, 10, 4, 32, 4


def params_of(random):
    return on_device(
        {
            "embed": normal(random, VOCABULARY, WIDTH) * 0.3,
            "positions": normal(random, LENGTH, WIDTH) * 0.3,
            "norm": norm(WIDTH),
            "qkv": dense(random, WIDTH, 3 * WIDTH, bias=False),
            "out": dense(random, WIDTH, WIDTH),
            "head": dense(random, WIDTH, VOCABULARY),
        }
    )


def mix(params, q, k, v, present):
    """Attention of queries over the keys that are present."""
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(present, scores, -1e9))
    return apply(params["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], WIDTH))


def log_probabilities(params, ids):
    """Of each token after the first."""
    x = params["embed"][ids] + params["positions"]
    q, k, v = jnp.split(apply(params["qkv"], layer_norm(params["norm"], x)), 3, -1)
    x = x + mix(params, q, k, v, jnp.tril(jnp.ones((LENGTH, LENGTH), bool)))
    table = jax.nn.log_softmax(apply(params["head"], x[:, :-1]))
    return jnp.take_along_axis(table, ids[:, 1:, None], axis=-1)[..., 0]


@case("preference_pairs")
def preference_pairs():
    """DPO: a chosen and a rejected answer, a frozen reference model, both answers in one call."""
    reference = params_of(np.random.default_rng(0))
    params = params_of(np.random.default_rng(1))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw())

    def score(params, batch):
        ids = jnp.concatenate([batch["chosen"], batch["rejected"]])
        present = jnp.arange(1, LENGTH) < jnp.tile(batch["lengths"], 2)[:, None]
        chosen, rejected = jnp.split((log_probabilities(params, ids) * present).sum(-1), 2)
        return chosen - rejected

    def step(state, batch):
        def loss_fn(params):
            margin = 0.1 * (score(params, batch) - lax.stop_gradient(score(state["reference"], batch)))
            return -jax.nn.log_sigmoid(margin).mean(), margin

        (loss, margin), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "margin": margin, "accuracy": (margin > 0).mean()}
        return {"params": params, "reference": state["reference"], "opt_state": opt_state}, metrics

    def make(random):
        pair = tokens(random, 2, BATCH, LENGTH, vocabulary=VOCABULARY)
        lengths = random.integers(4, LENGTH + 1, BATCH).astype(np.int32)
        return {"chosen": pair[0], "rejected": pair[1], "lengths": lengths}

    return step, {"params": params, "reference": reference, "opt_state": optimizer.init(params)}, batches(make)


def generate(params, prompt, key):
    """Tokens drawn one by one, the keys and values of earlier ones kept in a cache."""
    cache = jnp.zeros((2, prompt.shape[0], LENGTH, WIDTH))

    def one(carry, place):
        ids, cache, key = carry
        token = lax.dynamic_slice_in_dim(ids, place, 1, axis=1)
        x = params["embed"][token] + lax.dynamic_slice_in_dim(params["positions"], place, 1)
        q, k, v = jnp.split(apply(params["qkv"], layer_norm(params["norm"], x)), 3, -1)
        cache = lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, place, 0))
        x = x + mix(params, q, *cache, jnp.arange(LENGTH) <= place)
        key, now = jax.random.split(key)
        drawn = jax.random.categorical(now, apply(params["head"], x[:, 0]))
        known = lax.dynamic_slice_in_dim(ids, place + 1, 1, axis=1)[:, 0]
        following = jnp.where(place + 1 < PROMPT, known, drawn)
        return (lax.dynamic_update_slice(ids, following[:, None], (0, place + 1)), cache, key), None

    ids = jnp.pad(prompt, ((0, 0), (0, LENGTH - PROMPT)))
    (ids, _, _), _ = lax.scan(one, (ids, cache, key), jnp.arange(LENGTH - 1))
    return ids


@case(
    "policy_gradient_generation",
    refused="the second of two updates waits for the first one's gradient over all samples",
)
def policy_gradient_generation():
    """The step generates with a cache, rewards its own text within groups, and takes two clipped updates in a scan."""
    params = params_of(np.random.default_rng(2))
    optimizer = adamw(3e-3)
    target = jnp.asarray(np.random.default_rng(3).random(VOCABULARY) < 0.3)

    def step(state, prompt):
        key, now = jax.random.split(state["key"])
        ids = generate(state["params"], prompt, now)
        reward = target[ids[:, PROMPT:]].mean(-1, dtype=jnp.float32)
        grouped = reward.reshape(-1, 4)
        advantage = ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 0.1)).reshape(-1)
        old = log_probabilities(state["params"], ids)[:, PROMPT - 1 :]

        def loss_fn(params):
            ratio = jnp.exp(log_probabilities(params, ids)[:, PROMPT - 1 :] - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            return -jnp.minimum(ratio * advantage[:, None], clipped * advantage[:, None]).mean()

        def update(carry, _):
            params, opt_state = carry
            loss, grads = jax.value_and_grad(loss_fn)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        (params, opt_state), losses = lax.scan(update, (state["params"], state["opt_state"]), length=2)
        metrics = {"losses": losses, "reward": reward, "text": ids}
        return {"params": params, "opt_state": opt_state, "key": key}, metrics

    state = {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(4)}
    return step, state, batches(lambda random: tokens(random, BATCH, PROMPT, vocabulary=VOCABULARY))


@case("self_distillation_average")
def self_distillation_average():
    """A teacher that is the moving average of the student; two views by random crops; a running center."""
    random = np.random.default_rng(5)
    student = on_device([dense(random, 12, 48), dense(random, 48, 16)])
    optimizer = optax.inject_hyperparams(optax.adamw, static_args=("b1", "b2", "eps", "eps_root"))(
        optax.linear_schedule(1e-3, 1e-2, 5), eps=1e-3, weight_decay=1e-2
    )

    def network(layers, x):
        return apply(layers[1], jax.nn.gelu(apply(layers[0], x)))

    def view(key, x):
        start = jax.random.randint(key, (x.shape[0],), 0, 8)
        crops = jax.vmap(lambda row, s: lax.dynamic_slice(row, (s,), (12,)))(x, start)
        return crops * jax.random.uniform(jax.random.fold_in(key, 1), (x.shape[0], 1), minval=0.8, maxval=1.2)

    def step(state, x):
        key, *keys = jax.random.split(state["key"], 3)
        first, second = (view(k, x) for k in keys)

        def loss_fn(student):
            outputs = network(state["teacher"], jnp.concatenate([first, second]))
            targets = jax.nn.softmax((outputs - state["center"]) / 0.5)
            logits = jax.nn.log_softmax(network(student, jnp.concatenate([second, first])))
            return -(targets * logits).sum(-1).mean(), outputs.mean(0)

        (loss, center), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["student"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["student"])
        student = optax.apply_updates(state["student"], updates)
        teacher = optax.incremental_update(student, state["teacher"], 0.05)
        center = 0.9 * state["center"] + 0.1 * center
        new = {"student": student, "teacher": teacher, "center": center, "opt_state": opt_state, "key": key}
        return new, {"loss": loss, "rate": opt_state.hyperparams["learning_rate"]}

    state = {
        "student": student,
        "teacher": student,
        "center": jnp.full(16, 0.1),
        "opt_state": optimizer.init(student),
        "key": jax.random.key(6),
    }
    return step, state, batches(lambda random: normal(random, BATCH, 20))

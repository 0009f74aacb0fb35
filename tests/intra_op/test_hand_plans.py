"""The methods of the papers: what data parallelism, ZeRO and Megatron-LM's tensor parallelism do, read off their plans."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.intra_op.sharded import Compute, Region

LAYERS, BATCH, TOKENS, WIDTH, HEADS, WORDS = 3, 16, 32, 64, 8, 128
CLUSTER = autopar.Cluster.of("1x8 h100")


def step(weights, x):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(weights)
    return weights - 0.1 * gradient, loss


@pytest.mark.parametrize("zero", [0, 3])
def test_data_parallel_on_one_device(zero):
    cluster = autopar.Cluster.local(jax.devices()[:1])
    planned = autopar.parallelize(step, cluster=cluster, method=autopar.DataParallel(zero=zero))
    weights, x = jnp.eye(4), jnp.arange(32.0).reshape(8, 4) / 32
    expected, (new, loss) = jax.jit(step)(weights, x), planned(weights, x)
    np.testing.assert_allclose(new, expected[0], rtol=1e-6)
    np.testing.assert_allclose(loss, expected[1], rtol=1e-6)
    assert not planned.plan(jnp.eye(4), x).cost.collectives


def train_step(state, tokens):
    """A GPT with momentum."""

    def norm(x, scale):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def loss_fn(params):
        x = params["embed"][tokens]
        for layer in params["layers"]:
            y = norm(x, layer["norm1"])
            q, k, v = ((y @ layer[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ layer["out"]
            x = x + jax.nn.gelu(norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
        logits = x @ params["head"]
        chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, loss


def new_state(make):
    square = {name: make(WIDTH, WIDTH) for name in (*"qkv", "out")}
    layer = square | {"norm1": make(WIDTH), "norm2": make(WIDTH), "up": make(WIDTH, 256), "down": make(256, WIDTH)}
    params = {"embed": make(WORDS, WIDTH), "layers": [layer] * LAYERS, "head": make(WIDTH, WORDS)}
    return {"params": params, "moments": params}


def plan_of(tokens=TOKENS, **settings):
    types = new_state(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32))
    method = autopar.ThreeD(**settings)
    planned = autopar.parallelize(train_step, cluster=CLUSTER, method=method)
    return planned.plan(types, jax.ShapeDtypeStruct((BATCH, tokens), jnp.int32))


def large(plan, tokens=TOKENS):
    """Collectives of whole activations over the tensor axis, by kind."""
    found = Counter()
    for c in plan.cost.collectives:
        if c.axes == ("tensor",) and c.bytes >= BATCH * tokens * WIDTH * 4:
            found[c.kind] += c.times
    return found


def test_tensor_parallelism_is_megatrons():
    """Two all-reduces forward and two backward in a layer; at most one of the embedding and one of the head's gradient."""
    plan = plan_of(tensor=8)
    assert set(large(plan)) == {"all-reduce"} and 0 <= large(plan)["all-reduce"] - 4 * LAYERS <= 2
    assert {c.kind for c in plan.cost.collectives} == {"all-reduce"}
    split = {v.name for v in plan.values if v.role == "state" and any(v.sharding.dims)}
    assert split == {v.name for v in plan.values if v.role == "state" and "norm" not in v.name}


def test_sequence_parallelism_leaves_sums_in_parts():
    plan = plan_of(tensor=8, sequence=True, tokens=2048)
    found = large(plan, 2048)
    # A product with few weights takes them whole, on its part of the tokens. Without ties that is found by what is exposed in
    # all programs seen, and not by what is exposed in the best of them: 5.55 ms.
    assert found["reduce-scatter"] >= 3 * LAYERS
    assert plan.cost.step_seconds < 5.5e-3
    assert found["all-gather"] >= 4 * LAYERS
    assert found["all-reduce"] <= 1, "but for the embedding's"
    assert set(found) <= {"reduce-scatter", "all-gather", "all-reduce"}


@pytest.mark.parametrize("zero, moments, parameters", [(0, 1, 1), (1, 4, 1), (2, 4, 1), (3, 4, 4)])
def test_zero_splits_state_over_the_data_axis(zero, moments, parameters):
    plan = plan_of(data=4, tensor=2, zero=zero)
    for value in plan.values:
        if value.role == "state":
            parts = 4 if any("data" in axes for axes in value.sharding.dims) else 1
            assert parts == (moments if "moments" in value.name else parameters), value.name
            assert any("tensor" in axes for axes in value.sharding.dims) or "norm" in value.name, value.name


@pytest.mark.parametrize(
    "settings",
    [{"data": 2, "tensor": 4, "sequence": True}, {"data": 2, "tensor": 2, "pipeline": 2, "zero": 3, "sequence": True}],
    ids=["one stage", "two stages"],
)
def test_equal_to_jit(settings):
    keys = iter(jax.random.split(jax.random.key(0), 100))
    state = new_state(lambda *shape: 0.2 * jax.random.normal(next(keys), shape))
    tokens = jax.random.randint(next(keys), (BATCH, TOKENS), 0, WORDS)
    wanted = jax.jit(train_step)(state, tokens)
    planned = autopar.parallelize(train_step, method=autopar.ThreeD(**settings), donate_argnums=())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), planned(state, tokens), wanted)


def test_random_bits_are_made_where_their_samples_are():
    def dropped(weights, x, key):
        def loss_fn(w):
            return ((jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ w) ** 2).mean()

        loss, gradient = jax.value_and_grad(loss_fn)(weights)
        return weights - 0.1 * gradient, loss

    types = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32))
    planned = autopar.parallelize(dropped, cluster=CLUSTER, method=autopar.DataParallel())
    plan = planned.plan(*types, jax.eval_shape(lambda: jax.random.key(0)))
    made = [
        i
        for i in plan.origin.pipeline.stages[0].sharded.body.instructions
        if isinstance(i, Compute) and i.eqn.outvars[0].aval.size == 256 * 64
    ]
    whole = [str(i) for i in made if not any(any(s.dims) for s in i.strategy.results)]
    assert made and not whole, "\n".join(whole)


def test_a_key_in_the_state_stays_whole():
    """Its two words would go to one device each, and JAX cannot split them."""

    def step(state, x):
        weights, key = state
        key, own = jax.random.split(key)
        noise = jax.random.normal(own, x.shape)
        return (weights - 0.1 * jax.grad(lambda w: jnp.mean(((x + noise) @ w) ** 2))(weights), key), None

    state = jnp.ones((8, 8)), jax.random.key(0)
    plan = autopar.parallelize(
        step, cluster=autopar.Cluster.of("1x2 h100"), method=autopar.DataParallel(zero=3), batch_argnums=(1,)
    ).plan(state, jnp.ones((4, 8)))
    (weights, key), _ = plan.shardings[0]
    assert any(weights) and not any(key)


def _energies(weights, samples):
    return jnp.tanh(jnp.tanh(samples @ weights["in"]) @ weights["out"]).sum(-1)


def joined_batches(weights, x, key):
    """Samples joined with as many that are drawn."""

    def loss_fn(w):
        drawn = jax.random.normal(key, x.shape)
        joined = _energies(w, jnp.concatenate([x, drawn]))
        return jnp.mean(joined[: len(x)]) - jnp.mean(joined[len(x) :])

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))


def second_batch(weights, x, key):
    """As many samples as the batch has, drawn, that never meet it: the generator's update in a GAN."""

    def loss_fn(w):
        return jnp.mean(_energies(w, x)) - jnp.mean(_energies(w, jax.random.normal(key, x.shape)) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_fn)(weights))


@pytest.mark.parametrize("fn", [joined_batches, second_batch], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "method", [autopar.DataParallel(), autopar.ThreeD(data=8)], ids=["data parallel", "three axes"]
)
def test_what_is_made_for_samples_is_split(fn, method):
    """Every product is of samples, or of what is drawn for them."""
    weights = {"in": 0.1 * jax.random.normal(jax.random.key(1), (64, 64)), "out": jnp.eye(64)}
    arguments = weights, jax.random.normal(jax.random.key(2), (256, 64)), jax.random.key(3)
    wanted = jax.jit(fn)(*arguments)
    planned = autopar.parallelize(fn, method=method, donate_argnums=())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), planned(*arguments), wanted)
    (stage,) = planned.plan(*arguments).origin.pipeline.stages
    products = [i for i in _computed(stage.sharded.body) if i.eqn.primitive.name == "dot_general"]
    whole = [str(i) for i in products if not any(any(s.dims) or s.partial for s in i.strategy.results)]
    assert products and not whole, "\n".join(whole)


def trained_against_new_critic(weights, x, key):
    """A GAN's generator: its samples are drawn, and cross the border between stages."""

    def critic_loss(critic):
        return jnp.mean(_energies(critic, x)) - jnp.mean(_energies(critic, x[::-1]) ** 2)

    critic = jax.tree.map(lambda w, g: w - 0.1 * g, weights["critic"], jax.grad(critic_loss)(weights["critic"]))

    def loss_fn(make):
        made = jnp.tanh(jax.random.normal(key, x.shape) @ make["in"]) @ make["out"]
        return jnp.mean(_energies(critic, made) ** 2)

    make = jax.tree.map(lambda w, g: w - 0.1 * g, weights["make"], jax.grad(loss_fn)(weights["make"]))
    return {"critic": critic, "make": make}


def test_what_is_drawn_for_samples_is_split_in_the_next_stage_too():
    """It did not know that the rows that it receives are samples, and its products were done alike by all devices."""
    one = {"in": 0.1 * jax.random.normal(jax.random.key(1), (64, 64)), "out": jnp.eye(64)}
    arguments = {"critic": one, "make": one}, jnp.ones((256, 64)), jax.random.key(3)
    method = autopar.ThreeD(data=4, pipeline=2, num_microbatches=2)
    planned = autopar.parallelize(trained_against_new_critic, method=method, batch_argnums=(1,))
    for stage in planned.plan(*arguments).origin.pipeline.stages:
        products = [i for i in _computed(stage.sharded.body) if i.eqn.primitive.name == "dot_general"]
        whole = [str(i) for i in products if not any(any(s.dims) or s.partial for s in i.strategy.results)]
        assert products and not whole, "\n".join(whole)


def _computed(body):
    for instruction in body.instructions:
        match instruction:
            case Compute():
                yield instruction
            case Region(bodies=bodies):
                for inner in bodies:
                    yield from _computed(inner)

"""State, batch and what is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import BatchError
from autopar.ir.trace.parameters import parameters_of, static_of
from autopar.ir.trace.state import find_batch, find_roles
from autopar.ir.trace.trace import trace_step


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"w": array(8, 8)}
BATCH = {"x": array(16, 8)}
SAMPLES = array(16, 8)
KEY = array(2, dtype=jnp.uint32)


def shrunk(params):
    return jax.tree.map(lambda p: p * 0.9, params)


def step(state, batch, n=1):
    return shrunk(state), jnp.mean(batch["x"]) * n


def autoencoder(params, x):
    return shrunk(params), x @ params["w"], jnp.mean(x)


def names(program, leaves):
    return [program.in_paths[k] for k in leaves]


def roles_of(fn, args, kwargs=None, batch="auto", donate="auto", static_argnums=()):
    program = trace_step(fn, args, kwargs, static_of(parameters_of(fn), static_argnums))
    roles = find_roles(program, batch, donate)
    donated = [k for k, gone in enumerate(roles.donated[: program.num_args]) if gone]
    return names(program, roles.state), names(program, roles.batch), names(program, donated)


@pytest.mark.parametrize("kwargs", [{}, {"batch": BATCH}, {"state": PARAMS, "batch": BATCH}])
def test_positions_are_the_signatures(kwargs):
    args = (PARAMS, BATCH)[: 2 - len(kwargs)]
    assert roles_of(step, args, kwargs, 1, 0) == (["state/w"], ["batch/x"], ["state/w"])
    assert roles_of(step, args, kwargs, 1, 1) == (["state/w"], ["batch/x"], ["batch/x"])


def test_static_arguments_count():
    found = roles_of(lambda mode, s, b: step(s, b, len(mode)), ("a", PARAMS, BATCH), None, 2, 1, static_argnums=0)
    assert found == (["s/w"], ["b/x"], ["s/w"])


def test_a_parameter_with_a_default_may_be_left_out():
    assert roles_of(step, (PARAMS, BATCH), None, (1, 2)) == (["state/w"], ["batch/x"], ["state/w"])
    with pytest.raises(BatchError, match="(?s)0 \\(args/0\\), 1 \\(args/1\\).*there is no argument 2"):
        roles_of(lambda *args: step(*args), (PARAMS, BATCH), None, (1, 2))


def test_the_batch_is_not_state():
    """Its reconstruction has its shape; it was donated, and gone after the first step."""
    for batch in ("auto", 1):
        assert roles_of(autoencoder, (PARAMS, SAMPLES), None, batch) == (["params/w"], ["x"], ["params/w"])
    denoise = roles_of(lambda p, x, y: (*autoencoder(p, x), y.mean()), (PARAMS, SAMPLES, array(16, 3)))
    assert denoise == (["p/w"], ["x", "y"], ["p/w"])
    tree = roles_of(lambda p, b: (shrunk(p), shrunk(b)), (PARAMS, BATCH), None, 1)
    assert tree == (["p/w"], ["b/x"], ["p/w"])


def test_an_array_after_state_is_state_beside_a_batch():
    """Raw random keys, momentum: another leading dim than the batch's."""

    def train(params, key, batch):
        return shrunk(params), jax.random.split(key)[0], jnp.mean(batch["x"])

    state = ["params/w", "key"]
    assert roles_of(train, (PARAMS, KEY, BATCH)) == (state, ["batch/x"], state)
    assert roles_of(train, (PARAMS, jax.random.key(0), BATCH)) == (state, ["batch/x"], state)
    momentum = lambda w, m, b: (w * m, m * 0.9, jnp.mean(b["x"]))  # noqa: E731
    assert roles_of(momentum, (array(8, 8), array(8, 8), BATCH)) == (["w", "m"], ["b/x"], ["w", "m"])


def test_two_that_may_be_the_batch():
    fn = lambda p, pair, x: (shrunk(p), pair * 2, x * 2)  # noqa: E731
    with pytest.raises(
        BatchError, match="argument 1 \\(pair\\): leading dim 2; argument 2 \\(x\\): leading dim 16"
    ) as e:
        roles_of(fn, (PARAMS, array(2), SAMPLES))
    assert e.value.candidates == {1: 2, 2: 16}
    assert roles_of(fn, (PARAMS, array(2), SAMPLES), None, 2) == (["p/w", "pair"], ["x"], ["p/w", "pair"])


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8)], ids=["stack", "matrix"])
def test_frozen_weights_are_no_batch(shape):
    """All arrays of a frozen stack share their first dim, too; but no step goes through layers, or columns, row by row."""

    def step(adapter, frozen, batch):
        def loss(adapter):
            layers = frozen["w"] if len(shape) == 3 else jnp.stack([frozen["w"]] * 3)
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ (w + adapter["w"])), None), batch["x"], layers)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - g, adapter, jax.grad(loss)(adapter))

    assert roles_of(step, (PARAMS, {"w": array(*shape)}, BATCH)) == (["adapter/w"], ["batch/x"], ["adapter/w"])


def test_samples_that_are_needed_twice_are_the_batch():
    """A step that takes its gradient where another has led it: not row by row, but in two rounds; points in time in none."""

    def step(params, times, batch):
        def loss(p):
            return jnp.mean(jnp.tanh(batch["x"] @ p["w"] * (times[-1] - times[0])) ** 2)

        led = jax.tree.map(lambda p, g: p + g / jnp.linalg.norm(g), params, jax.grad(loss)(params))
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(led))

    assert roles_of(step, (PARAMS, array(10), BATCH)) == (["params/w"], ["batch/x"], ["params/w"])


def noise(key, p):
    return jax.random.normal(jax.random.wrap_key_data(key), p.shape)


def in_a_jit(key, p):
    return jax.jit(noise)(key, p)


def in_a_scan(key, p):
    one = jax.checkpoint(lambda x, k: (x + noise(jax.random.key_data(jax.random.fold_in(key, k)), p), None))
    return jax.lax.scan(one, p, jnp.arange(3))[0]


def in_a_cond(key, p):
    return jax.lax.cond(p[0, 0] > 0, lambda: noise(key, p), lambda: p)


@pytest.mark.parametrize("random", [noise, in_a_jit, in_a_scan, in_a_cond])
def test_a_key_of_integers_is_no_batch(random):
    """`train_step(params, batch, rng)` with `jax.random.PRNGKey`, which has a leading dim of 2 and no samples."""
    fn = lambda p, b, rng: (jax.tree.map(lambda w: w + random(rng, w), p), jnp.mean(b["x"]))  # noqa: E731
    assert roles_of(fn, (PARAMS, BATCH, KEY)) == (["p/w"], ["b/x"], ["p/w"])
    assert roles_of(lambda p, b, rng: fn(p, b, rng[0]), (PARAMS, BATCH, array(16, 2, dtype=jnp.uint32)))[1] == [
        "b/x",
        "rng",
    ]


def test_what_is_not_read_is_no_batch():
    """A raw key passed to a net without dropout (Haiku's `apply`) has a leading dim of 2; unread labels go with the batch."""
    train = lambda p, b, other: (shrunk(p), jnp.mean(b["x"]))  # noqa: E731
    assert roles_of(train, (PARAMS, BATCH, KEY)) == (["p/w"], ["b/x"], ["p/w"])
    assert roles_of(train, (PARAMS, BATCH, array(16)))[1] == ["b/x", "other"]
    assert roles_of(lambda p, rng: shrunk(p), (PARAMS, KEY))[1] == []


def cast_up(tree):
    return jax.tree.map(lambda x: (x * 0.9).astype(jnp.float32), tree)


LOW = {"b": array(8), "w": array(8, 8, dtype=jnp.bfloat16)}


def test_state_that_comes_back_in_another_dtype():
    """It is state, its memory is not reused, and the warning names path and dtypes. What may be the batch alone is none."""
    match = "(?s)p/w goes in as bfloat16 and comes out as float32.*next call is planned"
    with pytest.warns(UserWarning, match=match):
        assert roles_of(lambda p, b: (cast_up(p), jnp.mean(b["x"])), (LOW, BATCH)) == (["p/b", "p/w"], ["b/x"], ["p/b"])
    with pytest.warns(UserWarning, match="p/w goes in as bfloat16"):
        one_leaf = {"w": array(8, 8, dtype=jnp.bfloat16)}
        assert roles_of(lambda p, b: (cast_up(p), jnp.mean(b["x"])), (one_leaf, BATCH))[0] == ["p/w"]
    half = {"x": array(16, 8, dtype=jnp.bfloat16)}
    assert roles_of(lambda p, b: (shrunk(p), cast_up(b)), (PARAMS, half)) == (["p/w"], ["b/x"], ["p/w"])
    assert roles_of(lambda p, x: (shrunk(p), cast_up(x)), (PARAMS, half["x"])) == (["p/w"], ["x"], ["p/w"])
    labels = {"y": array(16, dtype=jnp.int32)}
    assert roles_of(lambda p, b: (shrunk(p), cast_up(b)), (PARAMS, labels))[1] == ["b/y"]


def test_the_batch_of_what_is_known_not_to_be_state():
    program = trace_step(lambda p, b: jnp.mean(b["x"] @ p["w"]), (PARAMS, BATCH))
    assert find_batch(program, {0}) == (1,)
    with pytest.raises(BatchError, match=r"0 \(p\): leading dim 8; argument 1 \(b\)"):
        find_batch(program, ())


def test_weights_of_classes_in_an_argument_of_their_own():
    """All gradients are linear in them, so that their rows could be taken one by one too, but not the forward pass."""

    def train(params, batch, weights):
        def loss(p):
            logits = jnp.tanh(batch["x"] @ p["w"]) @ p["w"]
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
            of_sample = weights[batch["y"]]
            return -jnp.sum(picked * of_sample) / jnp.sum(of_sample)

        value, gradient = jax.value_and_grad(loss)(params)
        return {"w": params["w"] - 0.1 * gradient["w"]}, value

    batch = {"x": array(16, 8), "y": array(16, dtype=jnp.int32)}
    args = {"w": array(8, 8)}, batch, array(5)
    assert roles_of(train, args)[:2] == (["params/w"], ["batch/x", "batch/y"])


def test_what_the_batch_holds_beside_samples():
    """Weights of classes, positions, a mask: read whole, whether their rows divide as the samples do or not."""

    def step(params, batch):
        def loss(p):
            logits = (batch["x"] + jnp.sin(batch["positions"])) @ p["w"]
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
            return jnp.sum(picked * batch["weights"][batch["y"]]) / 16

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    for classes in (8, 5):
        params, weights = {"w": array(8, classes)}, array(classes)
        labels = jax.ShapeDtypeStruct((16,), jnp.int32)
        batch = {"x": array(16, 8), "y": labels, "positions": array(8), "weights": weights}
        for said in ("auto", 1):
            assert roles_of(step, (params, batch), None, said)[1] == ["batch/x", "batch/y"]


def test_a_batch_for_each_task():
    """Of several sizes, each split by itself; a graph, whose nodes depend on each other, holds no samples."""

    def step(params, batches):
        loss = lambda p: sum(jnp.mean(jnp.tanh(x @ p["w"]) ** 2) for x in batches)  # noqa: E731
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    found = roles_of(step, (PARAMS, [array(8, 8), array(16, 8), array(24, 8)]))
    assert found == (["params/w"], ["batches/0", "batches/1", "batches/2"], ["params/w"])

    def on_graph(params, graph):
        def loss(p):
            sent = (graph["x"] @ p["w"])[graph["edges"][0]]
            return jnp.mean(jax.ops.segment_sum(sent, graph["edges"][1], 16) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    graph = {"x": array(16, 8), "edges": jax.ShapeDtypeStruct((2, 64), jnp.int32)}
    assert roles_of(on_graph, (PARAMS, graph)) == (["params/w"], [], ["params/w"])


def test_arguments_of_several_sizes():
    """Samples inside of a domain and on its border, a key beside them; of one graph, whose rows belong together, none."""

    def step(params, inside, border, key):
        def loss(p):
            noise = jax.random.normal(key, (8,))
            return jnp.mean(jnp.tanh(inside @ p["w"] + noise) ** 2) + jnp.mean(jnp.tanh(border @ p["w"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    for key in (KEY, jax.random.key(0)):
        found = roles_of(step, (PARAMS, array(64, 8), array(16, 8), key))
        assert found == (["params/w"], ["inside", "border"], ["params/w"])

    def on_graph(params, nodes, senders, receivers):
        def loss(p):
            return jnp.mean(jax.ops.segment_sum((nodes @ p["w"])[senders], receivers, 16) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    edges = jax.ShapeDtypeStruct((64,), jnp.int32)
    assert roles_of(on_graph, (PARAMS, array(16, 8), edges, edges)) == (["params/w"], [], ["params/w"])

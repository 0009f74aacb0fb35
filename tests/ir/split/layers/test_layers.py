"""Scans over layers taken apart: the same numbers, and stacks that come as parts."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar._jax import eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.split.layers.layers import layer_count, split_layers
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step

LAYERS, WIDTH, BATCH = 6, 8, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def scanned(body, around=lambda f: f, reverse=False):
    """A training step of a scan over stacked layers."""

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(
            around(lambda x, layer: (body(x, layer), None)), batch["x"], params["layers"], reverse=reverse
        )
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss

    return step


def plain(x, layer):
    return jnp.tanh(x @ layer["kernel"] + layer["bias"])


def cast(x, layer):
    return jnp.tanh(x @ layer["kernel"].astype(jnp.bfloat16).astype(jnp.float32)) + layer["bias"]


def make_arguments():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)

    params = {"layers": {"kernel": draw(LAYERS, WIDTH, WIDTH), "bias": draw(LAYERS, WIDTH)}, "head": draw(WIDTH, 2)}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}, {"x": draw(BATCH, WIDTH), "y": draw(BATCH, 2)}


def run_in_parts(step, state, batch, count):
    program = trace_step(step, (state, batch))
    roles = find_roles(program)
    parts = split_layers(program.jaxpr, LAYERS, count, roles.aliases)
    check_program(parts.jaxpr)
    flat = []
    values = program.flatten_inputs(jax.tree.leaves((state, batch)))
    for value, positions, dim in zip(values, parts.inputs, parts.input_dims, strict=True):
        flat += np.split(np.asarray(value), count, axis=dim) if len(positions) > 1 else [value]
    made = jax.jit(lambda *a: eval_jaxpr(parts.jaxpr, [], *a))(*flat)
    results = [
        np.concatenate([made[at] for at in positions], axis=dim) if len(positions) > 1 else made[positions[0]]
        for positions, dim in zip(parts.outputs, parts.output_dims, strict=True)
    ]
    return parts, program.unflatten_outputs(results)


def one_stack():
    """The kernels of all layers, and a batch."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((LAYERS, WIDTH, WIDTH), (BATCH, WIDTH)))


@pytest.mark.parametrize(
    "step, count",
    [
        pytest.param(scanned(plain), 2, id="plain in 2"),
        pytest.param(scanned(plain), 6, id="plain in 6"),
        pytest.param(scanned(plain, reverse=True), 3, id="reversed in 3"),
        pytest.param(scanned(plain, reverse=True), 6, id="reversed in 6"),
        pytest.param(scanned(plain, jax.checkpoint), 3, id="checkpoint in 3"),
        pytest.param(scanned(cast), 2, id="cast in 2"),
    ],
)
def test_same_numbers(step, count):
    state, batch = make_arguments()
    parts, got = run_in_parts(step, state, batch, count)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    # Kernel and bias of the parameters and of both moments, in and out.
    assert sum(len(p) == count for p in parts.inputs) == 6 == sum(len(p) == count for p in parts.outputs)
    names = [eqn.primitive.name for eqn in parts.jaxpr.eqns]
    assert names.count("scan") == (2 * count if count < LAYERS else 0) and "concatenate" not in names


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("count", [2, 6])
def test_layers_along_another_dim(dim, count):
    """Flax's `nn.scan(..., variable_axes={"params": 1})`: the weights are transposed before the scan, and cut before that."""

    def step(state, batch):
        def loss_fn(kernels):
            x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, jnp.moveaxis(kernels, dim, 0))
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss_fn)(state[0])
        moment = 0.9 * state[1] + grads
        return (state[0] - 0.1 * moment, moment), value

    rng = np.random.default_rng(0)
    shape = [WIDTH, WIDTH]
    shape.insert(dim, LAYERS)
    state = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    batch = jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)
    parts, got = run_in_parts(step, state, batch, count)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert [len(p) for p in parts.inputs] == [count, count, 1] and parts.input_dims == (dim, dim, 0)
    assert [len(p) for p in parts.outputs] == [count, count, 1] and parts.output_dims == (dim, dim, 0)
    assert "concatenate" not in [eqn.primitive.name for eqn in parts.jaxpr.eqns]


def newton_schulz(grads):
    """All layers' matrices at once, as `optax.contrib.muon` does."""
    x = grads / (jnp.sqrt((grads**2).sum((1, 2), keepdims=True)) + 1e-3)
    return jax.lax.fori_loop(0, 3, lambda _, x: 1.5 * x - 0.5 * x @ (x.mT @ x), x)


def until_small(grads):
    """So many turns as the largest of a whole vector needs, and no number of turns in parts."""

    def body(carry):
        scale, x = carry
        return scale / 2, jnp.tanh(x) + 0.1 * x.mT

    return jax.lax.while_loop(lambda carry: carry[0].max() > 0.1, body, (jnp.ones(3), grads))[1]


def heavy_branch(grads):
    """A root of every layer's matrix, if there are any."""

    def root(x):
        return jnp.linalg.cholesky(x @ x.mT + jnp.eye(WIDTH)) @ x

    return jax.lax.cond(jnp.isfinite(grads).all(), root, lambda x: x.mT * 0, grads)


def history(grads):
    """A scan over other things that reads, carries and stacks what is of layers; a loop in it."""

    def turn(x, inputs):
        step, rows = inputs
        x = jax.lax.fori_loop(0, 2, lambda _, x: x + step * jnp.tanh(x), x)
        return x, (x * rows[:, None]).sum(-1)

    rows = jnp.stack([grads.sum(-1), grads.max(-1)])
    x, sums = jax.lax.scan(turn, jnp.zeros_like(grads), (jnp.arange(2.0), rows))
    return x + grads + sums.sum(0)[..., None]


def sum_over_layers(grads):
    """What a loop adds up over all layers, and nothing in it waits for, is added up of the parts behind it."""
    turned, total = jax.lax.fori_loop(0, 3, lambda _, c: (jnp.tanh(c[0]), c[1] + (c[0] ** 2).sum()), (grads, 0.0))
    return turned / (1 + total)


def only_a_sum(grads):
    """A loop of which nothing is left but a sum over all layers."""
    return grads / (1 + jax.lax.fori_loop(0, 3, lambda k, total: total + (grads**2).sum() / (1 + k), 0.0))


def layer_by_layer(grads):
    """A scan of little work in which each layer waits for the one before: it goes from part to part, too."""
    return jax.lax.scan(lambda most, g: (jnp.maximum(most, g[0]), most), grads[0, 0], grads)[1][:, None]


def over_all_layers(grads):
    """Layers meet in the loop: not done apart."""
    return jax.lax.fori_loop(0, 3, lambda _, x: x / jnp.sqrt((x**2).sum()), grads)


LOOPS = [
    newton_schulz,
    until_small,
    heavy_branch,
    history,
    sum_over_layers,
    only_a_sum,
    layer_by_layer,
    over_all_layers,
]


@pytest.mark.parametrize("update, count", zip(LOOPS, itertools.cycle([2, 6]), strict=False))
def test_loops_of_an_update(update, count):
    """What a loop or a branch does to each layer by itself is done to each part by itself."""

    def step(state, batch):
        def loss_fn(kernels):
            return jnp.mean(jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, kernels)[0] ** 2)

        value, grads = jax.value_and_grad(loss_fn)(state)
        return state - 0.1 * update(100 * grads), value

    state, batch = one_stack()
    parts, got = run_in_parts(step, state, batch, count)
    for a, b in zip(got, jax.jit(step)(state, batch), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    whole = update is over_all_layers
    assert [len(p) for p in parts.inputs] == ([1, 1] if whole else [count, 1])
    assert ("concatenate" in [eqn.primitive.name for eqn in parts.jaxpr.eqns]) == whole


@pytest.mark.parametrize("count", [2, 6])
def test_branch_around_an_update(count):
    """Weights and moments that only a branch reads, part by part, lie in parts: so does what it makes of them."""

    def step(state, batch):
        def loss_fn(kernels):
            return jnp.mean(jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, kernels)[0] ** 2)

        def update(state):
            moment = 0.9 * state[1] + grads
            return state[0] - 0.1 * moment, moment

        value, grads = jax.value_and_grad(loss_fn)(state[0])
        return jax.lax.cond(value < 10.0, update, lambda state: state, state), value

    kernels, batch = one_stack()
    state = kernels, jnp.ones_like(kernels)
    parts, got = run_in_parts(step, state, batch, count)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert [len(p) for p in parts.inputs] == [len(p) for p in parts.outputs] == [count, count, 1]
    assert "concatenate" not in [eqn.primitive.name for eqn in parts.jaxpr.eqns]


def count_layers(step, state, batch):
    program = trace_step(step, (state, batch))
    roles = find_roles(program)
    return layer_count(program.jaxpr, roles.may_hold_layers, roles.aliases)


def test_layers_are_told_from_their_work():
    state, batch = make_arguments()
    assert count_layers(scanned(plain), state, batch) == LAYERS
    assert count_layers(lambda s, b: (s, b["x"].sum()), state, batch) == 0


def test_layers_are_told_from_chunks():
    """A loss in more chunks than there are layers, of more work than these, is no stack of layers."""

    def step(state, batch):
        def loss_fn(state):
            x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, state["kernels"])
            chunks = x.reshape(2 * LAYERS, -1, WIDTH)
            return jax.lax.map(lambda rows: jax.nn.logsumexp(rows @ state["head"], axis=-1).sum(), chunks).sum()

        value, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    rng = np.random.default_rng(0)
    shapes = {"kernels": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, 16 * WIDTH)}
    state = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    batch = jnp.asarray(rng.normal(size=(4 * LAYERS, WIDTH)), jnp.float32)
    assert count_layers(step, state, batch) == LAYERS


@pytest.mark.parametrize("count", [2, 3, 6])
def test_single_layers_are_read_from_their_part(count):
    """Behind the scan and before it; the gradient of a layer stands in its part."""

    def step(state, batch):
        def loss_fn(kernels):
            x, _ = jax.lax.scan(
                lambda x, k: (jnp.tanh(x @ k), None), batch @ kernels[1, ::2].T @ kernels[5, :4], kernels
            )
            return jnp.mean(x**2) + 0.1 * (kernels[0] ** 2).sum() + 0.2 * jnp.sin(kernels[-2, 1:3]).sum()

        value, grads = jax.value_and_grad(loss_fn)(state)
        return state - 0.1 * grads, value

    state, batch = one_stack()
    parts, got = run_in_parts(step, state, batch, count)
    for a, b in zip(got, jax.jit(step)(state, batch), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert [len(p) for p in parts.inputs] == [count, 1] and [len(p) for p in parts.outputs] == [count, 1]
    assert "concatenate" not in [eqn.primitive.name for eqn in parts.jaxpr.eqns]


def test_what_needs_all_layers_gets_them():
    """A stack that is also read whole stays one argument, and its parts are joined where all are needed."""

    def step(state, batch):
        def loss_fn(kernels):
            x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, kernels)
            return jnp.mean(x**2) + 0.1 * jnp.mean(jnp.sort(kernels, axis=0)[:2])

        return state - 0.1 * jax.grad(loss_fn)(state)

    state, batch = one_stack()
    parts, got = run_in_parts(step, state, batch, 3)
    np.testing.assert_allclose(got, jax.jit(step)(state, batch), rtol=2e-5, atol=2e-6)
    assert [len(p) for p in parts.inputs] == [1, 1]


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_also_leaves_as_another_result_stays_whole(is_trained):
    """Old parameters beside the new ones, or frozen ones that are returned twice."""

    def step(state, batch):
        def loss_fn(kernels):
            return jnp.mean(jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, kernels)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return loss, state - 0.1 * grads if is_trained else state, {"seen": state}

    state, batch = one_stack()
    parts, got = run_in_parts(step, state, batch, 3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(state, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert [len(p) for p in parts.inputs] == [1, 1] and [len(p) for p in parts.outputs] == [1, 1, 1]

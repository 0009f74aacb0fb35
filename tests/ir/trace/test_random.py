"""Random numbers of a flat program: bit by bit those of the step, and no typed key is left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

from autopar._jax import is_key
from autopar.ir.check import check_program
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import evaluate


def run_flat(fn, *args):
    """The result of `fn` through its flat program."""
    program = trace_step(fn, args)
    check_program(program.jaxpr)
    flat = program.flatten_inputs(jax.tree.leaves(args))
    return program.unflatten_outputs(evaluate(program.jaxpr, *flat))


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        if is_key(jax.typeof(y)):
            x, y = random.key_data(x), random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def dropout(key, x):
    return jnp.where(random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def split_in_scan(key, x):
    def body(key, row):
        key, now = random.split(key)
        return key, random.normal(now, row.shape) + row

    return lax.scan(body, key, x)


def keys_as_scanned_inputs(key, x):
    return lax.scan(lambda c, k: (c + 1, (random.uniform(k), random.fold_in(k, c))), 0, random.split(key, 5))


def split_in_while(key, x):
    def body(state):
        key, total = state
        key, now = random.split(key)
        return key, total + random.uniform(now)

    return lax.while_loop(lambda state: state[1] < 3.0, body, (key, 0.0))


def branch_of_keys(key, x):
    return lax.cond(x.sum() > 0, lambda k: random.fold_in(k, 1), lambda k: random.split(k)[0], key)


def gather_of_keys(key, x):
    keys = random.split(key, (3, 4))
    picked = keys[jnp.array([0, 2, 1]), 1]
    return picked, keys[::2, 1:3], keys.reshape(12), keys.T, jnp.concatenate([keys, keys]), keys[:, None]


def index_of_keys(key, x):
    keys = random.split(key, 4)
    later = lax.dynamic_update_slice(keys, keys[:1], (jnp.int32(2),))
    return lax.dynamic_index_in_dim(keys, jnp.int32(x.shape[0]) - 5), later, keys[0] == keys[1], keys != keys[::-1]


def moved_keys(key, x):
    keys = random.split(key, 4)
    taken = jnp.take(keys, jnp.array([1, 9]), axis=0)
    return jnp.roll(keys, 1), keys.at[1].set(key), taken, jnp.stack([key, random.clone(key)])[::-1]


def empty_keys(key, x):
    return jnp.empty_like(random.split(key, 4)).at[:].set(key)


def choice_of_keys(key, x):
    first, second = random.split(key)
    return jnp.where(x.sum() > 0, first, second), jnp.broadcast_to(first, (2, 3))


def batched_keys(key, x):
    keys = random.split(key, 4)
    return jax.vmap(lambda k: random.normal(k, (3,)))(keys), jax.vmap(random.fold_in)(keys, jnp.arange(4))


def fold_in_one_key(key, x):
    return jax.vmap(random.fold_in, (None, 0))(key, jnp.arange(4)), random.fold_in(key, 7)


def old_style_key(key, x):
    raw = random.PRNGKey(3)
    first, second = random.split(raw)
    return random.normal(first, (4,)), random.key_data(key), second


def captured_key(key, x):
    return random.normal(CAPTURED, (3,)) + random.normal(random.key(5), (3,))


def inside_remat(key, x):
    @jax.checkpoint
    def layer(x):
        return jnp.tanh(dropout(key, x) @ x.T)

    return jax.grad(lambda x: layer(x).sum())(x)


CAPTURED = random.key(11)
STEPS = [
    dropout, split_in_scan, keys_as_scanned_inputs, split_in_while, branch_of_keys, gather_of_keys, index_of_keys,
    moved_keys, empty_keys, choice_of_keys, batched_keys, fold_in_one_key, old_style_key, captured_key, inside_remat,
]  # fmt: skip
DISTRIBUTIONS = {
    "bits_8": lambda k: random.bits(k, (3, 5), jnp.uint8),
    "bits_16": lambda k: random.bits(k, (3, 5), jnp.uint16),
    "normal": lambda k: random.normal(k, (4, 3)),
    "normal_bf16": lambda k: random.normal(k, (4, 3), jnp.bfloat16),
    "uniform": lambda k: random.uniform(k, (4, 3), minval=-1, maxval=2),
    "randint": lambda k: random.randint(k, (7,), 0, 100),
    "permutation": lambda k: random.permutation(k, 10),
    "permutation_rows": lambda k: random.permutation(k, jnp.arange(12).reshape(6, 2)),
    "choice": lambda k: random.choice(k, 10, (4,), replace=False),
    "categorical": lambda k: random.categorical(k, jnp.arange(12.0).reshape(3, 4)),
    "gumbel": lambda k: random.gumbel(k, (5,)),
    "truncated_normal": lambda k: random.truncated_normal(k, -1, 1, (5,)),
    "exponential": lambda k: random.exponential(k, (5,)),
    "gamma": lambda k: random.gamma(k, jnp.array([0.5, 2.0, 3.0])),
    "beta": lambda k: random.beta(k, 2.0, 3.0, (3,)),
    "poisson": lambda k: random.poisson(k, 3.0, (3,)),
    "orthogonal": lambda k: random.orthogonal(k, 3),
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps(step):
    args = random.key(0), jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(6, 4)
    expected = jax.jit(step)(*args)
    if step is inside_remat:  # floating-point work, which a compiler may fuse
        np.testing.assert_allclose(run_flat(step, *args), expected, rtol=1e-5, atol=1e-6)
    else:
        assert_same_bits(run_flat(step, *args), step(*args) if step is split_in_while else expected)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    draw, key = DISTRIBUTIONS[name], random.key(1)
    expected, actual = draw(key), run_flat(draw, key)
    if expected.dtype.kind in "iub":
        assert_same_bits(actual, expected)
    else:
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators(impl):
    def step(key):
        first, second = random.split(key)
        return random.bits(first, (4, 3)), second, random.fold_in(second, 3)

    key = random.key(0, impl=impl)
    program = trace_step(step, (key,))
    assert program.key_inputs == (impl,) and program.key_outputs == (None, impl, impl)
    assert_same_bits(run_flat(step, key), step(key))


def test_threefry_becomes_counters():
    """What is left of `random_bits` is elementwise over a counter, so that it can be sharded."""
    program = trace_step(dropout, (random.key(0), jnp.ones((4, 3))))
    names = [eqn.primitive.name for eqn in program.jaxpr.eqns]
    assert "threefry2x32" in names and "iota_2x32_shape" in names
    assert not [name for name in names if name.startswith("random_")]


def test_keys_at_the_border():
    program = trace_step(lambda key, n: (random.split(key, 3), n), (random.key(0), 3))
    assert program.in_avals[0].shape == () and program.jaxpr.invars[0].aval.shape == (2,)
    assert program.out_avals[0].shape == (3,) and program.jaxpr.outvars[0].aval.shape == (3, 2)
    assert program.key_inputs == ("threefry2x32", None)

"""Casts and reshapes that are written twice are done once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar._jax import all_equations, eval_jaxpr, make_jaxpr
from autopar.ir.rewrite.duplicates import merge_duplicates
from autopar.ir.trace.trace import trace_step

NARROW = jnp.bfloat16


def cast_twice(w, x):
    return jnp.tanh(x.astype(NARROW) @ w.astype(NARROW)) @ w.astype(NARROW).T


def to_two_types(w, x):
    return x.astype(NARROW) @ w.astype(NARROW) + x.astype(jnp.float16) @ w.astype(jnp.float16)


def in_a_loop(w, x):
    return lax.scan(lambda x, row: (jnp.tanh(x @ w.T) @ w.T + row, None), x, x)[0]


def of_samples(w, x):
    x = jnp.tanh(x @ w)
    return x.T @ w @ x.T


def from_the_host(w, x):
    kept = jax.device_put(w, jax.memory.Space.Host)
    return x @ jax.device_put(kept, jax.memory.Space.Device) @ jax.device_put(kept, jax.memory.Space.Device), kept


def behind_a_barrier(w, x):
    return x @ w.T + x @ lax.optimization_barrier(w).T


def returned_twice(w, x):
    return w.T, w.T, x


def random_twice(w, x):
    key = jax.random.key(0)
    return x + jax.random.normal(key, x.shape) + jax.random.normal(key, x.shape) + w


@pytest.mark.parametrize(
    "step, name, before, after",
    [
        (cast_twice, "convert_element_type", 3, 2),
        (to_two_types, "convert_element_type", 6, 6),
        (in_a_loop, "transpose", 2, 1),
        (of_samples, "transpose", 2, 2),
        (behind_a_barrier, "transpose", 2, 2),
        (returned_twice, "transpose", 2, 2),
        (random_twice, "threefry2x32", 2, 2),
    ],
)
def test_equal_operations_are_merged(step, name, before, after):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(2)]
    program = trace_step(step, arrays).jaxpr
    merged = merge_duplicates(program)
    counts = [sum(eqn.primitive.name == name for eqn in all_equations(each)) for each in (program, merged)]
    assert counts == [before, after]
    assert (merged is program) == (before == after) or step is random_twice
    one, other = (jax.jit(lambda *a, p=p: eval_jaxpr(p, (), *a))(*arrays) for p in (merged, program))
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_copies_from_the_host_stay():
    """One copy would be held on the device from its first reader to its last."""
    arrays = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    program = trace_step(from_the_host, arrays).jaxpr
    first, *others = program.eqns
    there = make_jaxpr([*first.outvars, program.invars[1]], program.outvars[:1], others)
    assert sum(eqn.primitive.name == "device_put" for eqn in others) == 2 and merge_duplicates(there) is there


def test_a_weight_that_is_cast_twice_is_sent_as_one_that_is_cast_once():
    def moved(cast):
        def step(w, x):
            def loss(w):
                first, second = cast(w)
                return (jnp.tanh(x @ first) @ second).astype(jnp.float32).sum()

            return w - 0.1 * jax.grad(loss)(w)

        types = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((8192, 4096), NARROW)
        method = autopar.DataParallel(zero=3)
        plan = autopar.parallelize(step, cluster=autopar.Cluster.of("4 h100"), method=method).plan(*types)
        return [(c.kind, c.bytes, c.times) for c in plan.cost.collectives]

    assert moved(lambda w: (w.astype(NARROW), w.astype(NARROW))) == moved(lambda w: (w.astype(NARROW),) * 2)

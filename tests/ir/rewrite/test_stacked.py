"""Equal decompositions are one of a stack, which devices share; the program computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import eval_jaxpr, open_jaxpr
from autopar.ir.check import check_program
from autopar.ir.rewrite.stacked import stack_decompositions
from autopar.ir.trace.flatten import flatten
from tests.ir.split.cases import equations, primitives_in

WIDTH = 6


def matrices(count, width=WIDTH):
    draw = np.random.default_rng(0)
    return [np.float32(w @ w.T + width * np.eye(width)) for w in draw.normal(size=(count, width, width))]


def rewritten(fun, *args, num_devices=4):
    flat, consts = flatten(*open_jaxpr(jax.make_jaxpr(fun)(*args)))
    made = stack_decompositions(flat, num_devices)
    check_program(made)
    results = jax.jit(lambda *args: eval_jaxpr(made, (), *args))(*jax.tree.leaves(args), *consts)
    for got, want in zip(results, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    return made


def root(m):
    values, vectors = jnp.linalg.eigh(m)
    return (vectors * values**-0.25) @ vectors.T


def stacks_of(made, name):
    return [eqn.invars[0].aval.shape for eqn in equations(made.eqns) if eqn.primitive.name == name]


@pytest.mark.parametrize("count, length", [(2, 4), (4, 4), (5, 8)])
def test_stacks_are_shared_evenly(count, length):
    made = rewritten(lambda ms: [root(m) for m in ms], matrices(count))
    assert stacks_of(made, "eigh") == [(length, WIDTH, WIDTH)]


def test_what_depends_on_each_other_is_not_in_one_stack():
    """The second factorization of each is of what came of its first, and one matrix is of another size."""

    def twice(ms, other):
        again = []
        for m in ms:  # what reads a result of the first group stands before the last matrix is known
            first = jnp.linalg.cholesky(m)
            again.append(jnp.linalg.cholesky(first @ first.T + jnp.eye(WIDTH)) + first)
        return again, jnp.linalg.cholesky(other)

    made = rewritten(twice, matrices(3), matrices(1, 4)[0])
    assert stacks_of(made, "cholesky") == [(4, WIDTH, WIDTH), (4, WIDTH, WIDTH), (4, 4)]


def test_branches_loops_and_several_results():
    def in_branch(ms, flag):
        both = jax.lax.cond(flag, lambda: [tuple(jnp.linalg.qr(m)) for m in ms], lambda: [(m, m) for m in ms])
        return jax.lax.fori_loop(0, 2, lambda _, h: sum(map(root, ms)) + h, both[0][0]), both

    made = rewritten(in_branch, matrices(3), np.bool_(True))
    assert stacks_of(made, "eigh") == [(4, WIDTH, WIDTH)]
    assert primitives_in(made.eqns)["qr"] == 1


@pytest.mark.parametrize("fun", [lambda ms: root(ms[0]), lambda ms: jnp.linalg.cholesky(jnp.stack(ms))])
def test_nothing_to_stack(fun):
    flat = flatten(*open_jaxpr(jax.make_jaxpr(fun)(matrices(3))))[0]
    assert stack_decompositions(flat, 4) is flat


def test_devices_share_the_roots_of_shampoo():
    def step(state, x):
        weights, statistics = state
        loss = lambda ws: jnp.mean(sum(jnp.tanh(x @ w) for w in ws) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(weights)
        statistics = [s + g @ g.T for s, g in zip(statistics, grads, strict=True)]
        new = [w - 0.1 * root(s) @ g for w, s, g in zip(weights, statistics, grads, strict=True)]
        return (new, statistics), value

    weights = [np.float32(np.random.default_rng(k).normal(size=(32, 32))) for k in range(8)]
    state, x = jax.tree.map(jnp.asarray, (weights, matrices(8, 32))), np.ones((16, 32), np.float32)
    device = autopar.Device("slow", 1e8, memory_bytes_per_second=1e9)
    seconds, wanted = {}, jax.jit(step)(state, x)
    for count in (1, 8):
        cluster = autopar.Cluster.local(jax.devices()[:count], device=device, intra=autopar.Link(1e-7, 1e9))
        compiled = autopar.parallelize(step, cluster=cluster, method=autopar.ShardParallel()).compile(state, x)
        seconds[count] = compiled.plan.cost.compute_seconds
        got = compiled(jax.tree.map(jnp.copy, state), x)
    assert seconds[8] < seconds[1] / 6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted)

"""What a loop adds up of samples alone has a loop of its own; the function stays the same."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import eval_jaxpr, scan_counts
from autopar.ir.check import check_program
from autopar.ir.rewrite.carries_apart import take_carries_apart
from tests.ir.traced import traced

CHUNKS, WIDTH = 4, 8


def scans(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def chunked_step(body, begin, end):
    """A training step of a loss in chunks: `body(w, carry, chunk)` over the chunks, and `end` of the last carry."""

    def step(params, x, mask):
        def loss(params):
            h = jnp.tanh(x @ params["in"]).reshape(CHUNKS, -1, WIDTH)
            trip = jax.checkpoint(lambda carry, chunk: (body(params["out"], carry, chunk), None))
            return end(jax.lax.scan(trip, begin, (h, mask.reshape(CHUNKS, -1)))[0])

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def lost(w, chunk):
    return (jax.nn.logsumexp(chunk[0] @ w, -1) * chunk[1]).sum()


def mean(w, carry, chunk):
    return carry[0] + lost(w, chunk), carry[1] + chunk[1].sum()


def by_number(w, carry, chunk):
    """The number of the chunk weighs both sums."""
    total, count, number = carry
    return total + number * lost(w, chunk), count + number * chunk[1].sum(), number + 1


def weighed_so_far(w, carry, chunk):
    """The loss of a chunk reads what was counted before it."""
    return carry[0] + lost(w, chunk) / (1 + carry[1]), carry[1] + chunk[1].sum()


MEAN = chunked_step(mean, (0.0, 0.0), lambda sums: sums[0] / sums[1])


def arguments(rows=16):
    random = np.random.default_rng(0)
    shapes = {"in": (6, WIDTH), "out": (WIDTH, 32)}
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return params, random.normal(size=(rows, 6)).astype(np.float32), (random.random(rows) < 0.7).astype(np.float32)


@pytest.mark.parametrize(
    "step, carries",
    [
        (MEAN, [1, 1]),
        (chunked_step(by_number, (0.0, 0.0, 1.0), lambda sums: sums[0] / sums[1]), [2, 2]),
        (chunked_step(weighed_so_far, (0.0, 0.0), lambda sums: sums[0] / sums[1]), [1, 2]),
    ],
    ids=["mean", "by number", "weighed so far"],
)
def test_a_mask_is_added_up_in_a_loop_of_its_own(step, carries):
    args = arguments()
    flat = traced(step, *args)
    made = take_carries_apart(flat, [2, 3])
    check_program(made)
    assert len(scans(made)) == len(scans(flat)) + 1
    assert [scan_counts(eqn.params)[1] for eqn in scans(made)][:2] == carries
    run = jax.jit(lambda jaxpr, *leaves: eval_jaxpr(jaxpr, (), *leaves), static_argnums=0)
    for got, want in zip(run(made, *jax.tree.leaves(args)), run(flat, *jax.tree.leaves(args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def both(w, carry, chunk):
    """Each of the sums depends on a weight."""
    return carry[0] + lost(w, chunk), carry[1] + chunk[1].sum() * w[0, 0]


def as_much(w, carry, chunk):
    """What depends on samples alone is as much work as the rest."""
    large = jnp.sin(jnp.outer(chunk[1], jnp.arange(256.0)))
    return carry[0] + lost(w, chunk), carry[1] + jnp.abs(large).sum()


@pytest.mark.parametrize(
    "step, batch",
    [
        (chunked_step(both, (0.0, 0.0), lambda sums: sums[0] / sums[1]), [2, 3]),
        (chunked_step(as_much, (0.0, 0.0), lambda sums: sums[0] / sums[1]), [2, 3]),
        (MEAN, [2]),  # the mask is state
        (lambda *args: chunked_step(mean, (0.0, 0.0), lambda sums: sums[0])(*args), [2, 3]),  # the count is not read
    ],
    ids=["weights", "work", "state", "unread"],
)
def test_other_loops_stay(step, batch):
    flat = traced(step, *arguments())
    assert len(scans(take_carries_apart(flat, batch))) == len(scans(flat))


def mean_in_two_loops(params, x, mask):
    def loss(params):
        h, parts = jnp.tanh(x @ params["in"]).reshape(CHUNKS, -1, WIDTH), mask.reshape(CHUNKS, -1)
        trip = jax.checkpoint(lambda total, chunk: (total + lost(params["out"], chunk), None))
        total, _ = jax.lax.scan(trip, 0.0, (h, parts))
        return total / jax.lax.scan(lambda count, part: (count + part.sum(), None), 0.0, parts)[0]

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize("method", [autopar.PipelineParallel(2, num_microbatches=4), autopar.ShardParallel((4,), 4)])
def test_backward_passes_do_not_wait_for_the_count(method):
    """Stages refused the step, and one mesh computed the loss twice."""

    def seconds(step):
        planned = autopar.parallelize(step, cluster=autopar.Cluster.of("4 a100"), method=method)
        return planned.plan(*arguments(64)).cost.step_seconds

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seconds(MEAN) == pytest.approx(seconds(mean_in_two_loops), rel=1e-3)

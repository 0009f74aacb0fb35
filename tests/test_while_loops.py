"""Loops whose number of trips depends on data: devices share their work, communicate in them, and end together."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.intra_op.check import check_body
from autopar.intra_op.sharded import Region
from autopar.ir.region import ASSUMED_TRIPS
from autopar.mesh import Sharding
from tests.models.case import Case
from tests.sweep import QUICK, SLOW, check_case, check_faithful, largest_error, reference

BATCH, WIDTH = 8, 16
LOOPS: dict[str, object] = {}


def loop(build):
    LOOPS[build.__name__] = build
    return build


def layer(params, z, x):
    return jnp.tanh(z @ params["w"] + x)


@loop
def until_the_sum_settles(params, x):
    """The condition reads a sum over all samples and features, a partial sum on each device."""
    return lax.while_loop(
        lambda c: jnp.sum((c[0] - c[1]) ** 2) > 1e-4, lambda c: (layer(params, c[0], x), c[0]), (x, 2 * x)
    )[0]


@loop
def until_no_sample_moves(params, x):
    """A largest change that the body hands on, and a number of trips."""

    def body(carry):
        z, _, count = carry
        new = layer(params, z, x)
        return new, jnp.abs(new - z).max(), count + 1

    return lax.while_loop(lambda c: (c[1] > 1e-3) & (c[2] < 30), body, (x, jnp.float32(1), 0))[0]


@loop
def each_sample_for_itself(params, x):
    """`vmap` of a while: some samples take many trips, and one takes none."""
    x = x.at[3].set(0)

    def solve(row):
        return lax.while_loop(
            lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-4) & (c[2] < 40),
            lambda c: (layer(params, c[0], row), c[0], c[2] + 1),
            (row, 2 * row, 0),
        )[::2]

    z, count = jax.vmap(solve)(x)
    return z + count[:, None]


@loop
def samples_that_hear_of_others(params, x):
    """`vmap` of a while whose body reads a mean over samples, also of those that have ended."""

    def solve(row):
        return lax.while_loop(
            lambda c: (jnp.sum(c[0] ** 2) > 0.5) & (c[1] < 9),
            lambda c: (0.6 * layer(params, c[0], row) + lax.pmean(c[0], "samples") / 8, c[1] + 1),
            (row, 0),
        )[0]

    return jax.vmap(solve, axis_name="samples")(x)


@loop
def loops_for_each_of_each(params, x):
    """`vmap` of `vmap` of a while, around another."""

    def root(a):
        inner = lax.while_loop(lambda v: v > 2.0, lambda v: v / 3, a)
        return lax.while_loop(lambda v: jnp.abs(v * v - a) > 1e-4, lambda v: 0.5 * (v + a / v), 1 + inner)

    return jax.vmap(jax.vmap(root))(1 + jnp.abs(x) * jnp.arange(1.0, 1 + WIDTH))


@loop
def a_sample_is_not_a_number(params, x):
    """A NaN ends a loop for its sample, and in a maximum over all samples the whole loop."""
    spoilt = x.at[5, 3].set(jnp.nan)
    alone = jax.vmap(lambda row: lax.while_loop(lambda v: jnp.sum(v) < 50, lambda v: v * v + 1, row))(spoilt)
    ends, trips = lax.while_loop(
        lambda c: jnp.max(c[0]) < 1e3, lambda c: (c[0] + 1 + jnp.log(40 - c[0]), c[1] + 1), (jnp.abs(x), 0)
    )
    return jnp.nan_to_num(alone, nan=7.0) % 5 + jnp.nan_to_num(ends, nan=3.0) % 5 + trips


@loop
def never(params, x):
    """No trip: results are the operands; those of a loop that sums gradients are no partial sums."""
    sums = lax.while_loop(lambda c: jnp.sum(c[1]) > 1e6, lambda c: (c[0] + x.T @ c[1], c[1] * 2), (params["w"], x))[0]
    return x @ sums


@loop
def gradients_add_up(params, x):
    """The body adds partial sums to a carry, which the condition reads too."""

    def body(carry):
        total, v, count = carry
        return total + jax.grad(lambda w: jnp.mean(jnp.tanh(v @ w) ** 2))(params["w"]), jnp.roll(v, 1, 0), count + 1

    start = jnp.zeros_like(params["w"]), x, 0
    total = lax.while_loop(lambda c: (jnp.abs(c[0]).max() < 0.3) & (c[2] < 9), body, start)[0]
    return x @ total


@loop
def loops_in_loops(params, x):
    """The condition of the inner loop reads all samples, and that of the outer one what it ends with."""

    def inner(z):
        return lax.while_loop(
            lambda c: (jnp.sum(c[0] ** 2) > 3.0) & (c[1] < 5),
            lambda c: (0.5 * layer(params, c[0], x), c[1] + 1),
            (z, 0),
        )[0]

    def outer(carry):
        z, count = carry
        return layer(params, inner(z), 2 * x), count + 1

    return lax.while_loop(lambda c: (jnp.mean(c[0]) < 2.0) & (c[1] < 4), outer, (x, 0))[0]


@loop
def branches_in_loops(params, x):
    """A branch that communicates, chosen by what all samples say, in a loop in a scan in a branch."""

    def body(carry):
        z, count = carry
        far, near = (lambda z: layer(params, z, x - jnp.mean(z, 0))), (lambda z: z @ params["w"] + 1)
        return lax.cond(jnp.sum(z) > 1, far, near, z), count + 1

    def turn(z, _):
        z, _ = lax.while_loop(lambda c: (jnp.sum(c[0][::2]) < 60) & (c[1] < 5), body, (z, 0))
        return jnp.sin(z), None

    return lax.cond(jnp.sum(x) > -100, lambda x: lax.scan(turn, x, None, length=2)[0], jnp.sin, x)


@loop
def as_often_as_the_batch_says(params, x):
    """The body adds partial sums to a carry, which nothing reads before the end."""
    often = 2 + (jnp.abs(x[0, 0]) * 4).astype(int)

    def body(k, total):
        return total + jax.grad(lambda w: jnp.mean(jnp.tanh(k * x @ w) ** 2))(params["w"])

    return x @ lax.fori_loop(0, often, body, params["w"])


@loop
def one_element_decides(params, x):
    """The condition reads one element of an array that devices share, and a flag that the body hands on as a constant."""

    def body(carry):
        return carry[0] + 0.3 + jax.nn.softplus(layer(params, carry[0], x)), False

    return lax.while_loop(lambda c: c[1] | (c[0][5, 2] < 3.0), body, (x, True))[0]


@functools.cache
def case(name):
    random = np.random.default_rng(1)

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"] @ params["in"]
            z = lax.stop_gradient(LOOPS[name](lax.stop_gradient(params), lax.stop_gradient(x)))
            return jnp.mean((layer(params, z, x) @ params["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    params = {"in": normal(WIDTH, WIDTH) / 4, "w": normal(WIDTH, WIDTH) / 16, "out": normal(WIDTH, WIDTH) / 4}
    batches = tuple({"x": normal(BATCH, WIDTH), "y": normal(BATCH, WIDTH)} for _ in range(2))
    return Case(name, step, params, batches)


@pytest.mark.parametrize("name, method", zip(LOOPS, itertools.cycle(("random0", "zero3")), strict=False))
def test_equal_to_jit(name, method):
    check_case(case(name), (2, 4) if method == "random0" else (8,), method)


@pytest.mark.parametrize(
    "name, method",
    [
        ("until_no_sample_moves", autopar.DataParallel()),
        ("branches_in_loops", autopar.Auto()),
        ("loops_in_loops", autopar.ThreeD(data=2, tensor=2)),
        ("each_sample_for_itself", autopar.ThreeD(data=2, tensor=2)),
        ("samples_that_hear_of_others", autopar.DataParallel()),
        ("each_sample_for_itself", autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
        ("each_sample_for_itself", autopar.DataParallel(zero=3, num_microbatches=2)),
        ("until_the_sum_settles", autopar.PipelineParallel(num_stages=2, num_microbatches=1)),
    ],
    ids=str,
)
def test_equal_to_jit_under_every_method(name, method):
    cluster = autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK)
    step = autopar.parallelize(case(name).step, cluster=cluster, method=method, batch_argnums=(1,))
    compiled = step.compile(case(name).state, case(name).batches[0])
    check_faithful(compiled)
    worst, where = largest_error(case(name), compiled, reference(case(name)))
    assert worst <= 1e-5, where


def planned(name, method, num_devices=4):
    cluster = autopar.Cluster(1, num_devices, SLOW, QUICK)
    step = autopar.parallelize(case(name).step, cluster=cluster, method=method, batch_argnums=(1,))
    return step.plan(case(name).state, case(name).batches[0])


@pytest.mark.parametrize(
    "method", [autopar.DataParallel(), autopar.ThreeD(data=4)], ids=["data parallel", "three axes"]
)
@pytest.mark.parametrize("name", ["until_the_sum_settles", "each_sample_for_itself"])
def test_devices_share_the_work_of_a_loop(name, method, recwarn):
    one = planned(name, autopar.ShardParallel(mesh_shape=(1,)), 1).cost.compute_seconds
    assert planned(name, method).cost.compute_seconds < 0.3 * one
    assert not [w for w in recwarn if "do alike" in str(w.message)]


def test_what_each_trip_reads_is_gathered_before_the_loop():
    sent = planned("until_the_sum_settles", autopar.DataParallel(zero=3)).cost.collectives
    assert [c.times for c in sent if c.kind == "all-gather"] and all(c.times == 1 for c in sent if c.bytes > 4)
    assert [(c.kind, c.times) for c in sent if c.bytes == 4 and c.times > 1] == [("all-reduce", ASSUMED_TRIPS)]


def test_partial_sums_are_added_up_behind_the_loop():
    sent = planned("as_often_as_the_batch_says", autopar.DataParallel()).cost.collectives
    assert all(c.times == 1 for c in sent if c.bytes >= 4 * WIDTH * WIDTH), sent
    assert sum(c.kind == "all-reduce" and c.bytes >= 4 * WIDTH * WIDTH for c in sent) >= 2


@pytest.mark.parametrize("name", ["each_sample_for_itself", "loops_for_each_of_each"])
def test_devices_end_loops_alone_whose_samples_do(name):
    """Nothing is sent in them, and none waits for the samples of others."""
    assert all(c.times == 1 for c in planned(name, autopar.DataParallel()).cost.collectives)
    sent = planned("samples_that_hear_of_others", autopar.DataParallel()).cost.collectives
    assert sorted(c.bytes for c in sent if c.times > 1) == [1, 4 * WIDTH], "the condition, and the mean"


def test_devices_that_may_not_agree_on_whether_a_loop_goes_on_are_found():
    (stage,) = planned("until_the_sum_settles", autopar.DataParallel()).origin.pipeline.stages
    body, mesh = stage.sharded.body, stage.sharded.mesh
    check_body(body, mesh)
    (loop,) = (i for i in body.instructions if isinstance(i, Region) and i.eqn.primitive.name == "while")
    test, trip = loop.bodies
    *before, last = test.instructions
    partial = Sharding((), ("x",))
    last = dataclasses.replace(last, strategy=dataclasses.replace(last.strategy, results=(partial,)))
    test = dataclasses.replace(test, instructions=(*before, last), outputs=last.makes)
    broken = dataclasses.replace(loop, bodies=(test, trip))
    instructions = tuple(broken if i is loop else i for i in body.instructions)
    with pytest.raises(AssertionError, match=r"while at test_while_loops\.py.*devices may not agree"):
        check_body(dataclasses.replace(body, instructions=instructions), mesh)

"""Scans over layers in as many parts as stages need to be even; and masks, which no stage sends."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.inter_op.cut import cut_step
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.search.parts import even_parts, parts_apart
from autopar.search.request import Request
from autopar.search.stage_search import Stages, search_pipelines

LAYERS, BATCH, LENGTH, WIDTH = 8, 8, 80, 32
RNG = np.random.default_rng(0)
COMPUTES = autopar.Device("slow", 1e8, memory_bytes_per_second=1e12)
"""Its products take all of its time."""


def make_step(head):
    """A scan over layers with a causal mask, and a head so many times as wide as a layer."""

    def loss_fn(params, batch):
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

        def layer(x, kernel):
            y = jnp.tanh(x @ kernel)
            scores = jnp.where(causal, y @ y.swapaxes(1, 2), -1e9)
            return x + jax.nn.softmax(scores) @ y, None

        x, _ = jax.lax.scan(layer, batch, params["layers"])
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1))

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {
        "layers": (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 8).astype(np.float32),
        "head": (RNG.normal(size=(WIDTH, head * WIDTH)) / 8).astype(np.float32),
    }
    return step, params, RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


def cut(head, num_parts):
    step, params, batch = make_step(head)
    program = trace_step(step, (params, batch))
    return cut_step(program, find_roles(program, (1,)), num_parts, 4)


@pytest.mark.parametrize("head, num_stages, parts", [(1, 2, 2), (1, 4, 4), (8, 2, 8), (64, 2, 2)])
def test_as_few_as_serve(head, num_stages, parts):
    """A wide head takes layers from the second stage; beside one that is larger than all layers, no part helps."""
    assert even_parts(cut(head, num_stages), num_stages) == parts


def test_even_pipeline_equals_plain_jit(tmp_path):
    """Also when its plan comes from a file, which says how many parts there are."""
    step, params, batch = make_step(8)
    method, cluster = (
        autopar.PipelineParallel(num_stages=2, num_microbatches=4),
        autopar.Cluster.local(jax.devices()[:2], device=COMPUTES),
    )
    parallel = autopar.parallelize(step, method=method, cluster=cluster, batch_argnums=(1,))
    parallel.plan(params, batch).save(tmp_path / "plan.json")
    compiled = parallel.compile(params, batch, plan=autopar.Plan.load(tmp_path / "plan.json"))
    assert compiled.plan.parts == LAYERS
    chain, stages = compiled.plan.origin.pipeline.cut.chain, compiled.plan.origin.pipeline.borders
    of_stage = np.add.reduceat(chain.work, stages)
    assert of_stage.max() / of_stage.sum() < 0.6
    for _ in range(3):
        want = jax.jit(step)(params, batch)
        got = compiled(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
        params = want[0]


def test_a_mask_made_of_nothing_is_not_sent():
    """It stands before the loop over microbatches, and is larger than what is at hand everywhere."""
    chain = cut(1, 2).chain
    equations = zip(chain.loop.eqns, chain.segment, chain.backward, strict=True)
    _, second = (segment for eqn, segment, behind in equations if eqn.primitive.name == "scan" and not behind)
    activations = BATCH // 4 * LENGTH * WIDTH * 4
    assert chain.cut_bytes[second] == 2 * activations, "what enters the second part, and its gradient"


def test_layers_stand_by_themselves_where_some_must_run_again():
    """Without a loop it may be some of them, and the cheapest of what they keep; the loop would run again whole."""
    step, params, batch = make_step(1)

    def plan(**options):
        method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, **options)
        cluster = autopar.Cluster.local(jax.devices()[:2])
        return autopar.parallelize(step, method=method, cluster=cluster, batch_argnums=(1,))

    roomy = plan().plan(params, batch)
    assert roomy.parts == 2 and set(roomy.origin.pipeline.tasks.levels) == {0.0}
    budget = 0.7 * max(roomy.cost.peak_bytes)
    tight = plan(memory_budget_bytes=budget).compile(params, batch)
    assert tight.plan.parts == LAYERS and max(tight.plan.cost.peak_bytes) <= budget
    assert 0.0 < max(tight.plan.origin.pipeline.tasks.levels) < np.inf, "something runs again, not everything"
    want, got = jax.jit(step)(params, batch), tight(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_more_memory_gives_no_slower_pipeline():
    """What fits less memory fits more. Short of it, the best pipelines run a loop again under one schedule or another, and the
    same stages without loops are faster; a hundredth is what loops may cost that keep all they make, and so stay loops."""
    step, params, batch = make_step(1)
    device, link = autopar.Device("slow", 1e8, memory_bytes_per_second=1e9), autopar.Link(1e-4, 1e6)
    cluster = autopar.Cluster(1, 2, device=device, intra=link)
    program = trace_step(step, (params, batch))
    best = []
    for budget in (4.5e5, 6e5, 1e6):
        found = Stages()
        search_pipelines(
            Request(program, find_roles(program, (1,)), cluster, autopar.Auto(memory_budget_bytes=budget)), found
        )
        assert found.best is not None and found.best.peak_bytes <= budget, f"{budget:.0f} bytes"
        best.append(found.best)
    assert best[1].cut.stacks.count == LAYERS > best[-1].cut.stacks.count
    for less, more in itertools.pairwise(best):
        assert more.seconds <= 1.01 * less.seconds


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_run_again_anyway_stay_in_loops(checkpointed):
    """By themselves they would keep as much."""

    def step(w, x):
        def layer(x, k):
            return jnp.tanh(jnp.tanh(x @ k) @ k), None

        each = jax.checkpoint(layer) if checkpointed else layer
        loss, grad = jax.value_and_grad(lambda w: (jax.lax.scan(each, x, w)[0] ** 2).mean())(w)
        return w - grad, loss

    types = jax.ShapeDtypeStruct((LAYERS, 16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    program = trace_step(step, types)
    assert parts_apart(program, find_roles(program, (1,)), None) == (0 if checkpointed else LAYERS)

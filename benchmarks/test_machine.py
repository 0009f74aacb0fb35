"""Overhead of autopar on this machine: of a step on one device, and of the driver of a pipeline; and the time of planning."""

from __future__ import annotations

import statistics

import overhead
import pytest
from gpt import Config
from mlp import make_step
from planning_time import measure as plan_once

import autopar

MOST_OVER_JIT = 1.25
"""A step of a millisecond through autopar over the same under `jax.jit`, on one device, while other things run."""
MOST_SECONDS_PER_INSTRUCTION = 0.5e-3


def test_one_device(benchmark):
    """Both take turns; `overhead.py` prints more of them."""
    benchmark.group = "one device over jax.jit"
    plain, ours = benchmark.pedantic(overhead.measure, args=(256, 4, 12, 10), rounds=1)
    benchmark.extra_info.update(jit_seconds=plain, autopar_seconds=ours, ratio=ours / plain)
    assert ours < MOST_OVER_JIT * plain


def test_driver_of_a_pipeline(benchmark):
    """4 stages of 16 microbatches that compute next to nothing."""
    benchmark.group = "driver of a pipeline"
    step, params, batch = make_step(16, 4, 32)
    cluster = autopar.Cluster.local(autopar.Cluster.local().devices[:4])
    method = autopar.PipelineParallel(num_stages=4, num_microbatches=16)
    compiled = autopar.parallelize(step, cluster=cluster, method=method).compile(params, batch)
    held = [params]

    def once():
        held[0], _ = compiled(held[0], batch)

    benchmark.pedantic(once, rounds=20, warmup_rounds=3)
    instructions = sum(map(len, compiled.plan.streams.values()))
    benchmark.extra_info["instructions"] = instructions
    assert statistics.median(benchmark.stats.stats.data) < MOST_SECONDS_PER_INSTRUCTION * instructions


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_planning(scanned, benchmark):
    """A GPT of 6 layers on a (2, 4) mesh, from the function to the plan; `planning_time.py` goes on to 96 layers."""
    benchmark.group = "planning"
    row = benchmark.pedantic(plan_once, args=(Config(layers=6, scanned=scanned, batch=16), (2, 4), "highs"), rounds=1)
    benchmark.extra_info.update(equations=row[0], decisions=row[1], step=row[5], gap=row[6])

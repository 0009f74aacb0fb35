"""One stage that runs again, in more and more microbatches."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.search import alone
from autopar.search.progress import silent
from autopar.search.request import Request
from autopar.search.stage_search import Stages
from tests.small_mlp import train_step


@pytest.mark.parametrize(
    "of_samples, counts", [(0, [1, 2]), (100, [1, 2, 4, 8, 16]), (10_000, [2**k for k in range(9)])]
)
def test_no_more_microbatches_where_samples_need_next_to_nothing(monkeypatch, of_samples, counts):
    """Of 100 bytes and those of the samples, more than a tenth must go with each half of them: the budget is 50."""
    asked = []

    def pipeline_under(request, method, *rest):
        asked.append(method.num_microbatches)
        needed = 100 + of_samples / method.num_microbatches
        raise InfeasibleError("no.", given="", wrong="", do="", budget_bytes=50, needed_bytes=needed)

    monkeypatch.setattr(alone, "pipeline_under", pipeline_under)
    rows = jax.ShapeDtypeStruct((256, 4), jnp.float32)
    program = trace_step(train_step, ([jax.ShapeDtypeStruct((4, 4), jnp.float32)], {"x": rows, "y": rows}))
    request = Request(program, find_roles(program, (1,)), autopar.Cluster.of("2 h100"), autopar.Auto())
    found = Stages()
    alone.search_alone(request, request.method, (), found, silent, math.inf)
    assert asked == counts and len(found.tried) == len(counts) and found.best is None

"""Each model by each way to run it: autopar's methods, one device, expert shardings, and google-parallax."""

from __future__ import annotations

import functools

import pytest
from cases import CASES, SMALL
from ways import WAYS, NotThere, run_of


@functools.cache
def made(model, size):
    """The same functions for all ways: what JAX traces of them once, it knows."""
    return getattr(CASES[model], size)()


@pytest.mark.predicted
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", CASES)
def test_step(model, way, cluster, size, clocked):
    if size == "small" and model not in SMALL:
        pytest.skip("not in the small set: --size full")
    case = CASES[model]
    try:
        run = run_of(case, made(model, size), way, cluster)
    except NotThere as why:
        pytest.skip(str(why))
    clocked(model, way, run)

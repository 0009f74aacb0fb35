"""ZeRO-3 of scanned models fits, since each layer's weights are gathered inside the loop, forward and again backward."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.options import Offload

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from llama import LLAMA_70B, LLAMA_405B, Llama, make_step  # noqa: E402


def planned(config: Llama, cluster: str, budget: float | None = None, offload: Offload = "auto") -> autopar.Plan:
    step, *types = make_step(config)
    method = autopar.DataParallel(zero=3, memory_budget_bytes=budget, offload=offload)
    return autopar.parallelize(step, cluster=autopar.Cluster.of(cluster), method=method, batch_argnums=(1,)).plan(
        *types
    )


@pytest.mark.parametrize(
    "config, cluster",
    [(LLAMA_70B, "8x8 h100"), (replace(LLAMA_405B, batch=2048), "256x8 h100")],
    ids=["llama-70b", "llama-405b"],
)
def test_a_layer_is_gathered_at_a_time(config, cluster):
    """Of 64 sequences of 4096 tokens on 64 devices 31 GB; the stack of gathered weights alone would be 140."""
    plan = planned(config, cluster)
    assert max(plan.cost.peak_bytes) <= 80e9
    largest = config.width * config.hidden * 2
    inside = [c for c in plan.cost.collectives if c.kind == "all-gather" and c.bytes == largest]
    assert sum(c.times for c in inside) == 3 * 2 * config.layers, "gate, up and down, in both passes"
    assert not any(c.kind == "all-gather" and c.bytes >= largest * config.layers for c in plan.cost.collectives)


def test_what_is_refused_is_refused_by_a_proof():
    """Where nothing may be offloaded, a budget is called too small only where state, and a layer, do not fit."""
    peak = max(planned(LLAMA_70B, "8x8 h100").cost.peak_bytes)
    assert max(planned(LLAMA_70B, "8x8 h100", peak).cost.peak_bytes) <= peak
    with pytest.raises(InfeasibleError) as refused:
        planned(LLAMA_70B, "8x8 h100", 12e9, offload="never")
    assert 12e9 < refused.value.needed_bytes <= peak

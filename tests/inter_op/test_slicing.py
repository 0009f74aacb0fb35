"""The slicing DP against brute force, and against numbers one can check by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.inter_op.slicing import slice_stages


def all_slicings(num_layers, sizes, total):
    """Every way to cut layers into stages on submeshes that together use all devices."""
    for count in range(1, num_layers + 1):
        for inner in itertools.combinations(range(1, num_layers), count - 1):
            firsts = (0, *inner)
            lasts = (*(f - 1 for f in inner), num_layers - 1)
            for kinds in itertools.product(range(len(sizes)), repeat=count):
                if sum(sizes[k] for k in kinds) == total:
                    yield list(zip(firsts, lasts, kinds, strict=True))


def sliced(seconds, sizes, devices, microbatches, border=None, limits=None, gap=0.0):
    border = np.zeros(len(seconds)) if border is None else border
    limits = np.full(seconds.shape, np.inf) if limits is None else limits
    return slice_stages(seconds, sizes, devices, microbatches, transfer_seconds=border, max_in_flight=limits, gap=gap)


def brute_force(seconds, sizes, total, microbatches, border=None, limits=None):
    best = np.inf
    for stages in all_slicings(seconds.shape[0], sizes, total):
        times = [seconds[s] for s in stages]
        if limits is not None and any(limits[s] < min(len(stages) - k, microbatches) for k, s in enumerate(stages)):
            continue
        crossing = 0.0 if border is None else sum(border[first] for first, _, _ in stages[1:])
        best = min(best, sum(times) + (microbatches - 1) * max(times) + crossing)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("extra", ["plain", "transfers", "memory", "both"])
def test_equals_brute_force(seed, extra):
    rng = np.random.default_rng(seed)
    layers, sizes, devices = int(rng.integers(2, 6)), [1, 2, 3, 4][: int(rng.integers(2, 5))], int(rng.integers(2, 7))
    seconds = rng.uniform(0.1, 1.0, (layers, layers, len(sizes)))
    seconds[rng.random(seconds.shape) < 0.1] = np.inf
    border = rng.uniform(0, 0.5, layers) if extra in ("transfers", "both") else None
    limits = rng.integers(0, 5, seconds.shape) if extra in ("memory", "both") else None
    microbatches = int(rng.integers(1, 9))
    expected = brute_force(seconds, sizes, devices, microbatches, border, limits)
    if not np.isfinite(expected):
        with pytest.raises(InfeasibleError, match="no slicing into stages fits"):
            sliced(seconds, sizes, devices, microbatches, border, limits)
        return
    found = sliced(seconds, sizes, devices, microbatches, border, limits)
    assert found.latency_seconds == pytest.approx(expected, rel=1e-12)
    assert [s.first for s in found.stages] == [0, *(s.last + 1 for s in found.stages[:-1])]
    assert found.stages[-1].last == layers - 1 and sum(sizes[s.submesh] for s in found.stages) == devices


def test_equal_layers_are_cut_evenly():
    layers = 8
    seconds = np.zeros((layers, layers, 1))
    for first, last in itertools.product(range(layers), repeat=2):
        seconds[first, last, 0] = last - first + 1
    found = sliced(seconds, [1], 4, 16)
    assert [(s.first, s.last) for s in found.stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert found.latency_seconds == 8 + 15 * 2


def test_one_microbatch_takes_the_least_sum():
    seconds = np.full((2, 2, 2), np.inf)
    seconds[0, 1, 1] = 1.0  # both layers on both devices
    seconds[0, 0, 0], seconds[1, 1, 0] = 0.4, 0.5
    assert [s.submesh for s in sliced(seconds, [1, 2], 2, 1).stages] == [0, 0]
    assert [s.submesh for s in sliced(seconds + np.array([0.2, 0.0]), [1, 2], 2, 1).stages] == [1]


@pytest.mark.parametrize("seed", range(4))
def test_a_gap_costs_at_most_so_much(seed):
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0.1, 1.0, (6, 6, 3))
    exact = sliced(seconds, [1, 2, 4], 8, 8).latency_seconds
    assert exact <= sliced(seconds, [1, 2, 4], 8, 8, gap=0.05).latency_seconds <= exact * 1.05


def test_hosts_are_counted_and_not_devices():
    """Thousands of devices in submeshes of whole hosts are as few hosts: the same stages."""
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.1, 1.0, (6, 6, 3))
    few, many = sliced(seconds, [1, 2, 4], 8, 16), sliced(seconds, [256, 512, 1024], 2048, 16)
    assert few == many

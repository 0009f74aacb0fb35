"""Places of arrays in memory: by hand, and of programs; and budgets that only gaps exceed."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, ShardParallel
from autopar.errors import InfeasibleError
from autopar.intra_op.heap import Range, gap_bytes, lost_bytes
from autopar.intra_op.liveness import measure_liveness, overwriting
from autopar.intra_op.read_off import gaps_in
from tests.intra_op.test_exposure import sharded_of
from tests.intra_op.test_liveness import lowered

N = 16
PART = 64 * N * N * 4


@pytest.mark.parametrize(
    "ranges, want",
    [
        ([(8, 0, 1), (8, 2, 3)], 0),  # the second takes the place of the first
        ([(6, 0, 1), (5, 0, 3), (3, 2, 3), (4, 2, 3)], 0),  # the longest-lived first
        ([(5, 0, 0), (4, 1, 3), (3, 0, 2), (2, 1, 1)], 1),  # 3 is above 5, and 2 not between it and 4, but above both
        ([], 0),
    ],
)
def test_by_hand(ranges, want):
    assert lost_bytes([Range(1000 * size, begin, end) for size, begin, end in ranges]) == 1000 * want


@pytest.mark.parametrize(
    "ranges, results, want",
    [
        ([(8, 0, 1)], [(3, 2, 3)], 3),  # the result has memory before it is made
        ([(3, 0, 1)], [(8, 2, 3)], 0),  # an array that is no larger takes it until then,
        ([(3, 0, 1), (3, 0, 1)], [(8, 2, 3)], 3),  # one at a time
        ([(3, 0, 2)], [(8, 2, 3)], 0),
    ],
)
def test_results_by_hand(ranges, results, want):
    made = [[Range(1000 * size, begin, end) for size, begin, end in given] for given in (ranges, results)]
    assert lost_bytes(*made) == 1000 * want


def test_results_that_overwrite_nothing_are_there_from_the_start():
    def update(w, x):
        return w - jnp.sum((x @ w) ** 2)

    body, mesh, stored = lowered(update, (N, N), (64 * N, N))
    product, state = PART, N * N * 4
    assert gap_bytes(body, mesh, stored) == state
    assert gap_bytes(body, mesh, stored, overwriting(body, [True, False]).keys()) == 0
    assert not overwriting(body, [False, True])
    assert measure_liveness(body, mesh, stored).peak_bytes < 2 * product + 2 * state


def test_live_ranges_that_are_known_are_not_found_again(monkeypatch):
    """Of inputs that live to the end, as those of a stage's task, as of others."""

    def update(w, x):
        return w - jnp.sum((x @ w) ** 2), w.T @ w

    body, mesh, stored = lowered(update, (N, N), (64 * N, N))
    for donated in ([True, False], [False, False]):
        in_place = overwriting(body, donated).keys()
        known = measure_liveness(body, mesh, stored, donated)
        want = gap_bytes(body, mesh, stored, in_place)
        with monkeypatch.context() as patch:
            patch.delattr("autopar.intra_op.liveness.find_versions")
            assert gap_bytes(body, mesh, stored, in_place, known) == want > 0


def test_gaps_of_a_program_depend_on_what_it_may_overwrite():
    def update(w, x):
        return w - jnp.sum((x @ w) ** 2)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, N), (64 * N, N))]
    parallel = autopar.parallelize(update, cluster=Cluster.of("1 h100"), method=ShardParallel(), batch_argnums=1)
    sharded = sharded_of(parallel.plan(*arguments))
    assert sharded.donated == (True, False)
    assert gaps_in(sharded.graph, sharded.body, (True, False)) == 0
    assert gaps_in(sharded.graph, sharded.body, (False, False)) == N * N * 4


def step(w, two, three, four, five):
    """Makes arrays of 5, 3, 4 and 2 times the size of `w`, which are alive as in the third case above."""
    five, three = five @ w, three @ w
    four = four @ (five[0] * w)
    two = two @ (four[0] * w)
    total = jnp.sum(three) + jnp.sum(two[0])
    return jnp.sum(four) + jnp.sum(four * total)


SHAPES = [(N, N), *((64 * k * N, N) for k in (2, 3, 4, 5))]


def test_of_a_program():
    body, mesh, stored = lowered(step, *SHAPES)
    peak = measure_liveness(body, mesh, stored)
    alive = peak.peak_bytes - peak.argument_bytes
    assert 9 * PART < alive < 9.1 * PART
    assert alive + gap_bytes(body, mesh, stored) == 10 * PART + 4  # the result has memory of its own


def plan(budget=None):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    method = ShardParallel(mesh_shape=(1,), memory_budget_bytes=budget)
    return autopar.parallelize(step, cluster=Cluster(1, 1), method=method, batch_argnums=()).plan(*arguments)


def test_a_budget_holds_with_gaps():
    (peak,) = plan().cost.peak_bytes
    assert peak == 14 * PART + N * N * 4 + 10 * PART + 4
    assert plan(peak).cost.peak_bytes == (peak,)
    with pytest.raises(InfeasibleError, match="for gaps between arrays") as caught:
        plan(peak - PART // 2)
    assert caught.value.needed_bytes == peak

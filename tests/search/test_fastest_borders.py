"""Where stages begin: by the clock of the schedule, of the borders that a few limits on the largest stage allow."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

import autopar
from autopar._jax import make_jaxpr
from autopar.errors import InfeasibleError
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.chain import Chain
from autopar.search.fastest_borders import borders_by_speed, in_fastest_borders
from autopar.search.methods import Auto
from autopar.search.solve_stages import Solved, Terms
from autopar.streams.schedules import find_schedule
from tests.models.registry import CASES
from tests.streams.test_schedules import Circle

COUNT = 4


def chain_of(seconds, cut_bytes):
    """A chain whose backward passes take twice as long as the forward ones, by their sum."""
    num, seconds = len(seconds), np.array(seconds)
    work = tuple((*seconds / 3, *2 * seconds / 3))
    passes = (*[0] * num, *[1] * num)
    segments = (*range(num), *range(num))
    return Chain(make_jaxpr([], [], []), passes, segments, num, work, np.array(cut_bytes, float), ())


def cluster(bytes_per_second=1e9, hosts=1):
    link = autopar.Link(1e-7, bytes_per_second)
    return autopar.Cluster(hosts, 4 // hosts, autopar.Device("slow", 1e8, memory_bytes_per_second=1e9), link, link)


def cut_of(chain, parts=1, after_pass=()):
    """A step that is cut, of which only these are known; `after_pass`: passes whose end values wait for."""
    counts = {"split": SimpleNamespace(count=COUNT), "stacks": SimpleNamespace(count=parts)}
    return SimpleNamespace(chain=chain, after_pass=dict(enumerate(after_pass)), **counts)


def begin(chain, num_stages, schedule="1f1b", parts=1, **rate):
    return first(borders_by_speed(cut_of(chain, parts), [1] * num_stages, find_schedule(schedule), cluster(**rate)))


def first(ranked):
    return next(iter(ranked))


def terms():
    return Terms(cluster(), Auto().options(), Solved())


def test_balance_is_given_up_for_bytes_only_where_that_makes_the_step_faster():
    """Two stages of 10 s, or one of 10.9 s and fewer bytes."""
    chain = chain_of([9.1, 0.9, 10.0], [0, 1e6, 4e8, 0])
    assert balanced_borders(chain, 2) == (0, 1)
    assert begin(chain, 2) == (0, 2), "0.2 s for each pass of a microbatch, beside 10 s of a stage"
    assert begin(chain, 2, bytes_per_second=1e8) == (0, 1), "2 s"
    assert begin(chain, 2, parts=2) == (0, 1), "equal parts of a stack are one array"


def test_next_to_nothing_is_won():
    assert begin(chain_of([9.96, 0.04, 10.0], [0, 1e3, 1e6, 0]), 2) == (0, 1), "fewer bytes"


def test_what_a_short_last_stage_costs_depends_on_the_schedule():
    """Stages of 11, 8 and 2 s, or of 4, 7 and 10 s; under 1F1B a microbatch comes back sooner from a short last one."""
    chain = chain_of([4.0, 7.0, 8.0, 2.0], [0, 5, 7, 3, 0])
    assert begin(chain, 3, "1f1b") == (0, 2, 3)
    assert begin(chain, 3, "gpipe") == begin(chain, 3, "zb-h1") == (0, 1, 2)


def test_backward_passes_that_wait_for_all_microbatches_run_in_another_order():
    """That of GPipe, whatever the schedule says."""
    chain = chain_of([4.0, 7.0, 8.0, 2.0], [0, 5, 7, 3, 0])
    cut = cut_of(chain, after_pass=[0])
    assert first(borders_by_speed(cut, [1] * 3, find_schedule("1f1b"), cluster())) == begin(chain, 3, "gpipe")


@pytest.mark.parametrize("schedule, wanted", [("1f1b", (0, 4)), ("zb-h1", (0, 4)), ("interleaved", (0, 2, 6, 8))])
def test_more_devices_are_faster(schedule, wanted):
    chain = chain_of([1.0] * 12, [0, *[1e3] * 11, 0])
    sizes = [1, 2] * (len(wanted) // 2)
    assert first(borders_by_speed(cut_of(chain), sizes, find_schedule(schedule), cluster())) == wanted


def test_a_schedule_that_deadlocks_is_left_to_its_check():
    chain = chain_of([9.1, 0.9, 10.0], [0, 1e6, 4e8, 0])
    assert first(borders_by_speed(cut_of(chain), [1, 1], Circle(), cluster())) == balanced_borders(chain, 2)


@pytest.mark.parametrize("name, most", [("haiku_convnext_pooling", 0.0172), ("vae_dropout", 0.00107)])
def test_stages_of_models(name, most):
    """A last stage with next to no work, whose borders send least, made these steps 0.0200 and 0.00114 s."""
    case = CASES[name]()
    link = autopar.Link(1e-7, 1e9)
    slow = autopar.Cluster(1, 8, autopar.Device("slow", 1e8, memory_bytes_per_second=1e9), link, link)
    method = autopar.PipelineParallel(submeshes=(2, 2, 2, 2), num_microbatches=COUNT)
    planned = autopar.parallelize(case.step, cluster=slow, method=method, batch_argnums=(1,))
    assert planned.plan(case.state, case.batches[0]).cost.step_seconds < most


def planned(borders, seconds, pairs=0):
    """A pipeline of which only these are known; `pairs`: of the problem of its one stage."""
    problem = SimpleNamespace(costs=[], edges={(0, 1): np.broadcast_to(0.0, pairs)})
    stages = [SimpleNamespace(sharded=SimpleNamespace(problem=problem))]
    return SimpleNamespace(borders=borders, stages=stages, seconds_for=lambda goal: seconds)


def test_the_simulator_chooses_among_borders_that_are_nearly_as_fast():
    """By the clock of borders even stages are 1 % faster; sharded, these send much within, which it knows nothing of."""
    chain = chain_of([9.6, 0.4, 10.0], [0, 1e6, 1e8, 0])
    seconds = {(0, 2): 1.2, (0, 1): 1.0}

    def within(pairs=0, beat=math.inf):
        def plan(borders):
            return planned(borders, seconds[borders], pairs)

        return in_fastest_borders(cut_of(chain), [1, 1], find_schedule("1f1b"), terms(), plan, beat).borders

    ranked = borders_by_speed(cut_of(chain), [1, 1], find_schedule("1f1b"), cluster())
    assert [*ranked] == [(0, 2), (0, 1)] and ranked[0, 2] < ranked[0, 1] < 1.05 * ranked[0, 2]
    assert within() == (0, 1)
    assert within(pairs=10**7) == (0, 2), "it would take seconds"
    assert within(beat=1.0) == (0, 2), "far from the best step known"


@pytest.mark.parametrize("name, stages, most", [("gan_two_optimizers", 2, 8.3e-4), ("gaussian_process", 4, 1.46e-3)])
def test_even_stages_that_send_more_within(name, stages, most):
    """0.816 and 1.468 ms: faster by the clock of borders, and not on the clock."""
    case, link = CASES[name](), autopar.Link(1e-7, 1e9)
    slow = autopar.Cluster(1, 8, autopar.Device("slow", 1e8, memory_bytes_per_second=1e9), link, link)
    method = autopar.PipelineParallel(num_stages=stages, num_microbatches=COUNT)
    plan = autopar.parallelize(case.step, cluster=slow, method=method, batch_argnums=(1,))
    assert plan.plan(case.state, case.batches[0]).cost.step_seconds < most


def test_the_next_borders_where_the_fastest_do_not_fit():
    chain, tried = chain_of([9.1, 0.9, 10.0], [0, 1e6, 4e8, 0]), []

    def within(*fitting):
        tried.clear()

        def plan(borders):
            tried.append(borders)
            if borders not in fitting:
                raise InfeasibleError("no.", given="", wrong="", do="", needed_bytes=borders[1])
            return planned(borders, 1.0, pairs=10**7)

        return in_fastest_borders(cut_of(chain), [1, 1], find_schedule("1f1b"), terms(), plan).borders

    assert within((0, 1), (0, 2)) == (0, 2) and tried == [(0, 2)]
    assert within((0, 1)) == (0, 1) and tried == [(0, 2), (0, 1)]
    with pytest.raises(InfeasibleError) as error:
        within()
    assert error.value.needed_bytes == 1, "the one that needs least"

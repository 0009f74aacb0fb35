"""The walk through meshes of three axes, on stand-ins for plans of known seconds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.errors import NoPlanFoundError
from autopar.intra_op.exposure import Exposure, OwnExposure
from autopar.mesh import Cluster, LogicalMesh, logical_mesh
from autopar.search import meshes
from autopar.search.meshes import Searched
from autopar.search.methods import Auto
from autopar.search.progress import silent
from autopar.search.request import Request


def plan(seconds, *shape, pairs=0, nodes=0):
    problem = SimpleNamespace(costs=[np.zeros(1)], edges={(0, 1): np.zeros((pairs, 1))})
    solution = SimpleNamespace(objective=seconds)
    known = {"problem": problem, "solution": solution, "graph": SimpleNamespace(nodes=range(nodes)), "exposure": None}
    return SimpleNamespace(mesh=LogicalMesh(shape), step_seconds=seconds, shared_seconds=0.1 * seconds, **known)


@pytest.mark.parametrize(
    "of_three_axes, is_left_out",
    [
        ((), False),
        ((6.0,), False),
        ((6.0, 6.2), False),
        ((6.0, 6.2, 6.1), True),
        ((6.0, 6.2, 5.9), False),
        ((6.0, 6.7), True),
        ((6.7, 6.0), False),
    ],
)
def test_the_walk_ends_after_two_that_are_slower(of_three_axes, is_left_out):
    """Or one that is much slower. One that is a little slower may stand before the fastest: data and tensor degrees win and
    lose in steps."""
    request = SimpleNamespace(options=SimpleNamespace(repays=lambda worth, takes: True, repaying_steps=1000))
    shapes = [(2, 8, 4), (4, 4, 4), (8, 2, 4)]
    results = [plan(30.0, 64), plan(10.0, 16, 4)]
    results += [plan(seconds, *shape) for seconds, shape in zip(of_three_axes, shapes, strict=False)]
    why = meshes._not_worth_it(request, Searched(results, []), LogicalMesh((16, 2, 2)))
    assert bool(why) is is_left_out and ("slower than one before" in why or not is_left_out)


@pytest.mark.parametrize("needed, is_left_out", [(105, False), (120, True), (math.inf, False)])
def test_no_third_axis_where_two_need_much_more_than_there_is(needed, is_left_out):
    """Of a small step, too. Where they need a little more, or failed for another reason, it is tried."""
    facts = {} if needed == math.inf else {"budget_bytes": 100, "needed_bytes": needed}
    failure = NoPlanFoundError("no.", given="", wrong="", do="", **facts)
    program = SimpleNamespace(jaxpr=SimpleNamespace(eqns=()))
    request = SimpleNamespace(options=SimpleNamespace(is_over=False), program=program, budget_bytes=100.0)
    searched = Searched([], [], failure)
    assert bool(meshes._not_worth_it(request, searched, LogicalMesh((2, 2, 2)))) is is_left_out
    assert not meshes._not_worth_it(request, searched, LogicalMesh((2, 4)))


@pytest.mark.parametrize("shape, is_left_out", [((4, 2, 8), True), ((8, 2, 4), False)])
def test_to_split_the_hosts_in_two_says_nothing_about_splitting_each_of_them(shape, is_left_out):
    """On the other mesh there are degrees of tensor parallelism that fewer axes do not have: here it was 1.5 % faster."""
    cluster = Cluster.of("8x8 h100")
    known = [plan(9.244, 8, 8), plan(9.246, 2, 4, 8)]
    for each in known:
        each.mesh = logical_mesh(cluster, each.mesh.shape)
    request = SimpleNamespace(options=SimpleNamespace(repays=lambda worth, takes: True, repaying_steps=1000))
    why = meshes._not_worth_it(request, Searched(known, []), logical_mesh(cluster, shape))
    assert bool(why) is is_left_out and ("elsewhere" in why or not is_left_out)


@pytest.mark.parametrize(
    "second, nodes, steps, is_left_out",
    [
        (15.447, 0, 1000, False),
        (15.447, 0, 1, True),
        (15.447, 30_000, 10**12, True),
        (15.447, 30_000, math.inf, False),
        (15.470, 0, 10**12, True),
    ],
)
def test_little_may_be_won_on_three_axes_where_the_second_won_little(second, nodes, steps, is_left_out):
    """A vision transformer on 8 H100: 0.15 % on two axes, 0.06 % more on three. A descent from two axes to three is done
    whatever it wins where it is quick and short beside all steps, unless two won nothing."""
    request = SimpleNamespace(options=Auto(steps=steps).options())
    known = [plan(15.470, 8), plan(second, 2, 4, pairs=1_000_000, nodes=nodes)]
    why = meshes._not_worth_it(request, Searched(known, []), LogicalMesh((2, 2, 2)))
    assert bool(why) is is_left_out and ("the second axis" in why or not is_left_out)
    known.append(plan(second, 2, 2, 2))
    again = meshes._not_worth_it(request, Searched(known, []), LogicalMesh((2, 2, 2)))
    assert bool(again) or steps == math.inf, "one shows what the others may win"


def test_a_price_a_little_above_the_best_is_no_reason_to_abandon_a_mesh():
    """Small problems are solved whatever they win; large ones on three axes descend from known answers, which is as quick."""
    small, large = plan(1.0, 8, 8), plan(1.0, 8, 8, pairs=2_000_000)
    assert meshes._to_beat(small, LogicalMesh((8, 8))) > 1 and meshes._to_beat(large, LogicalMesh((8, 8))) == 1
    assert meshes._to_beat(large, LogicalMesh((2, 8, 4))) > meshes._to_beat(small, LogicalMesh((2, 8, 4)))


@pytest.mark.parametrize(
    "nodes, cluster, steps, again",
    [
        (580, Cluster.of("16 tpu v5e"), 1, [(2, 2, 4)]),
        (1300, Cluster.of("16 tpu v5e"), 1, [(8, 2)]),
        (1300, Cluster.of("16 tpu v5e"), math.inf, [(2, 2, 4), (4, 2, 2), (8, 2)]),
        (580, Cluster.local(), 1, []),
    ],
)
def test_meshes_nearly_the_best_are_planned_as_if_named_in_a_part_of_the_time(
    monkeypatch, nodes, cluster, steps, again
):
    """A step of microseconds, which repays no planning; its best mesh began with what others had shown. Where kernels hide
    nothing, these showed nothing."""

    def of(seconds, shape, nodes):
        problem = SimpleNamespace(costs=[0] * nodes, edges={}, rows=[])
        return SimpleNamespace(**vars(plan(seconds, *shape)) | {"problem": problem, "gap": 0.0})

    asked = []

    def search(request, chosen, report, alone, like):
        asked.extend(mesh.shape for mesh in chosen)

    monkeypatch.setattr(meshes, "search_meshes", search)
    request = Request(SimpleNamespace(name="step"), None, cluster, Auto(steps=steps))
    first = of(4.601e-6, (4, 4), nodes)
    results = [first, of(4.595e-6, (2, 2, 4), nodes), of(4.595e-6, (4, 2, 2), nodes), of(4.613e-6, (8, 2), 10)]
    meshes.search_unaided(request, Searched(results, [], unaided=first), silent)
    assert asked == again


@pytest.mark.parametrize("is_alike", [False, True])
def test_the_best_mesh_is_not_planned_again_where_the_same_exposure_was_seen_to_the_end(monkeypatch, is_alike):
    """Its price is far from the clock; but it was found by what a search shows that itself began with nothing."""
    asked = []
    monkeypatch.setattr(meshes, "search_meshes", lambda request, chosen, report, alone, like: asked.extend(chosen))

    def of(seconds, shape, exposure):
        problem = SimpleNamespace(costs=[0] * 1300, edges={}, rows=[])
        known = {"problem": problem, "gap": 0.0, "exposure": exposure}
        known["solution"] = SimpleNamespace(objective=1.04 * seconds)
        return SimpleNamespace(**vars(plan(seconds, *shape)) | known)

    own, other = (OwnExposure(0.1, own={}, before=Exposure(least)) for least in (0.1, 0.2))
    first, best = of(0.0857, (4, 4), own), of(0.0856, (2, 2, 4), own if is_alike else other)
    request = Request(SimpleNamespace(name="step"), None, Cluster.of("4x4 tpu v5e"), Auto(steps=1))
    meshes.search_unaided(request, Searched([first, best], [], unaided=first), silent)
    assert asked == ([] if is_alike else [best.mesh])


@pytest.mark.parametrize("cluster, compared, again", [("", True, False), ("", False, True), ("1x8 h100", True, True)])
def test_where_nothing_hides_the_best_mesh_is_planned_once(monkeypatch, cluster, compared, again):
    """Other plans have then shown nothing: with the same well-known plans, a small GPT's second search was half of all."""
    asked = []
    monkeypatch.setattr(meshes, "search_meshes", lambda request, chosen, report, alone, like: asked.extend(chosen))

    def of(seconds, shape):
        known = {"problem": SimpleNamespace(costs=[0] * 1300, edges={}, rows=[]), "gap": 0.0}
        return SimpleNamespace(**vars(plan(seconds, *shape)) | known | {"solution": SimpleNamespace(objective=1.0)})

    first, best = of(0.95, (8,)), of(0.9, (2, 4))
    machine = Cluster.of(cluster) if cluster else Cluster.local()
    request = Request(SimpleNamespace(name="step"), None, machine, Auto())
    searched = Searched([first, best], [], compared=[first.mesh, best.mesh][: 1 + compared], unaided=first)
    meshes.search_unaided(request, searched, silent)
    assert (best.mesh in asked) == again


@pytest.mark.parametrize(
    "price, seconds, gap, asked_for",
    [
        (9.0, 9.25, 0.0, [(8, 2, 4), (2, 4, 8)]),
        (9.3, 9.25, 0.0, [(8, 2, 4)]),
        (9.3, 9.22, 0.3, [(8, 2, 4), (2, 4, 8)]),
        (9.3, 9.22, 0.0, [(8, 2, 4)]),
        (9.3, 9.25, 0.3, [(8, 2, 4)]),
    ],
)
def test_on_several_hosts_what_may_be_better_than_the_best_is_planned_as_if_named_too(
    monkeypatch, price, seconds, gap, asked_for
):
    """Its clock is near the best; a price far below it says that a search with what it shows itself may end lower. Where it is
    as fast as the best, or nearly, a gap says so, whatever the price."""
    cluster, asked = Cluster.of("8x8 h100"), []

    def of(seconds, shape, price, gap=0.0):
        problem = SimpleNamespace(costs=[0] * 6000, edges={}, rows=[])
        known = {"problem": problem, "gap": gap, "solution": SimpleNamespace(objective=price)}
        return SimpleNamespace(**vars(plan(seconds, *shape)) | known)

    def search(request, chosen, report, alone, like):
        asked.extend(mesh.shape for mesh in chosen)
        assert request.thorough

    monkeypatch.setattr(meshes, "search_meshes", search)
    first = of(9.5, (8, 8), 9.5)
    results = [first, of(9.2, (8, 2, 4), 8.9), of(seconds, (2, 4, 8), price, gap)]
    request = Request(SimpleNamespace(name="step"), None, cluster, Auto(steps=1))
    meshes.search_unaided(request, Searched(results, [], unaided=first), silent)
    assert asked == asked_for


@pytest.mark.parametrize("gap, steps, again", [(0.02, 10_000, True), (0.0, 10_000, False), (0.02, 1, False)])
def test_on_one_host_a_descent_that_leaves_a_gap_is_planned_as_if_named(monkeypatch, gap, steps, again):
    """A T5 on eight devices: 0.08 % faster, for as long as its other meshes took; not where there are few steps."""
    asked = []

    def of(seconds, shape, gap):
        problem = SimpleNamespace(costs=[0] * 6000, edges={}, rows=[])
        known = {"problem": problem, "gap": gap, "solution": SimpleNamespace(objective=seconds)}
        return SimpleNamespace(**vars(plan(seconds, *shape)) | known)

    def search(request, chosen, report, alone, like):
        asked.extend(mesh.shape for mesh in chosen)
        assert request.thorough

    monkeypatch.setattr(meshes, "search_meshes", search)
    first = of(0.0290, (8,), 0.0)
    request = Request(SimpleNamespace(name="step"), None, Cluster.of("1x8 h100"), Auto(steps=steps))
    meshes.search_unaided(request, Searched([first, of(0.0289, (2, 2, 2), gap)], [], unaided=first), silent)
    assert asked == [(2, 2, 2)] * again

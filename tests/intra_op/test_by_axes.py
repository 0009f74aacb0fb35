"""A mesh of three axes, begun at an answer on fewer: nothing is lost, and what is found is no worse."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autopar import Auto, Cluster, DataParallel, LogicalMesh, ShardParallel
from autopar.intra_op import by_axes
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.by_axes import behaviours, descend, joined_axes, lift
from autopar.intra_op.costs import build_problem
from autopar.intra_op.problem import MemoryRow, Problem
from autopar.intra_op.setting import SHARD, Setting, check_setting
from autopar.intra_op.shard import shard
from autopar.intra_op.solve import solve
from autopar.intra_op.tying import of_classes
from autopar.ir.passes import run_passes
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh
from autopar.options import Options
from autopar.search import meshes
from autopar.search.one_mesh import shard_on
from autopar.search.planner import make_plan
from autopar.search.progress import silent
from autopar.search.request import Narrowed, Request
from autopar.tuning import TUNING
from tests import planned_mlp
from tests.tuned import tune

CLUSTER = Cluster.of("1x8 v100")
PROGRAM = trace_step(planned_mlp.train_step, planned_mlp.arguments(64, 32, 2))


@pytest.mark.parametrize(
    "fewer, more, axes",
    [
        ((2, 4), (2, 2, 2), {"x": ("x",), "y": ("y", "z")}),
        ((8,), (2, 2, 2), {"x": ("x", "y", "z")}),
        ((8, 8), (2, 4, 8), {"x": ("x", "y"), "y": ("z",)}),
        ((16, 4), (8, 2, 4), {"x": ("x", "y"), "y": ("z",)}),
        ((8, 8), (16, 2, 2), {}),
        ((4,), (2, 2, 2), {}),
        ((8, 2), (2, 2, 2), {}),
    ],
)
def test_axes_are_joined(fewer, more, axes):
    assert joined_axes(LogicalMesh(fewer), LogicalMesh(more)) == axes


def test_an_answer_is_lifted_as_it_is():
    """Each value lies in as many parts as before; what is new to the graph is kept whole."""
    roles = find_roles(PROGRAM, (1,))
    known, graph = (
        build_graph(PROGRAM.jaxpr, logical_mesh(CLUSTER, shape), roles.aliases, roles.batch)
        for shape in ((2, 4), (2, 2, 2))
    )
    problem = build_problem(known, CLUSTER.device, range(len(known.nodes)))
    answer = solve(problem)
    lifted = lift(answer.choices, known, graph)
    for before, now in zip(known.inputs, graph.inputs, strict=True):
        one, other = known.nodes[before], graph.nodes[now]
        parts = one.shardings[answer.choices[before]].num_shards(known.mesh)
        assert other.shardings[lifted[now]].num_shards(graph.mesh) == parts
    wider = build_problem(graph, CLUSTER.device, range(len(graph.nodes)))
    begun = wider.cost(lifted)
    assert begun <= 1.05 * answer.objective, "what differs is what collectives over several axes take"
    found = descend(wider, start=lifted, does=behaviours(graph, range(len(graph.nodes))))
    assert found.objective == pytest.approx(wider.cost(found.choices)) and found.objective <= begun
    assert found.bound <= solve(wider).objective <= found.objective


def test_an_answer_is_lifted_to_axes_of_other_sizes():
    """What everything does on each axis stays, where its lengths divide."""
    roles = find_roles(PROGRAM, (1,))
    known, graph = (
        build_graph(PROGRAM.jaxpr, logical_mesh(CLUSTER, shape), roles.aliases, roles.batch)
        for shape in ((2, 4), (4, 2))
    )
    choices = [0] * len(known.nodes)
    for index in known.inputs:
        shardings = known.nodes[index].shardings
        choices[index] = next((k for k, sharding in enumerate(shardings) if any(sharding.dims)), 0)
    lifted, split = lift(choices, known, graph), 0
    for before, now in zip(known.inputs, graph.inputs, strict=True):
        one = known.nodes[before].shardings[choices[before]]
        assert graph.nodes[now].shardings[lifted[now]] == one
        split += any(one.dims)
    assert split > 1


def random_problem(
    rng: np.random.Generator, nodes: int, axes: int
) -> tuple[Problem, tuple[tuple[np.ndarray, ...], ...]]:
    """A chain and two chords; each choice is one of two things on each axis."""
    size = 2**axes
    costs = [rng.random(size) for _ in range(nodes)]
    edges = {(k, k + 1): rng.random((size, size)) for k in range(nodes - 1)}
    edges |= {(0, nodes - 1): rng.random((size, size)), (1, nodes - 2): rng.random((size, size))}
    does = tuple((np.arange(size) >> axis & 1,) * nodes for axis in range(axes))
    return Problem(costs, edges), does


def test_every_block_is_at_its_best():
    """Whichever axis is held, no other choices of the rest cost less; and some answer of all is reached from somewhere."""
    rng = np.random.default_rng(0)
    problem, does = random_problem(rng, 6, 3)
    least, reached = solve(problem).objective, math.inf
    for _ in range(8):
        start = rng.integers(8, size=6)
        found = descend(problem, start=start, does=does)
        assert least * (1 - 1e-9) <= found.objective <= problem.cost(start)
        reached = min(reached, found.objective)
        for numbers in does:
            masks = [n == n[choice] for n, choice in zip(numbers, found.choices, strict=True)]
            costs = [np.where(mask, cost, np.inf) for mask, cost in zip(masks, problem.costs, strict=True)]
            assert solve(Problem(costs, problem.edges)).objective >= found.objective * (1 - 3e-3)
    assert reached == pytest.approx(least)


def test_no_block_is_solved_more_exactly_than_it_needs(monkeypatch):
    """Nothing is proved of the whole: the ILP may take half a minute for the last tenth of a percent of one block."""
    asked = []

    def recorded(problem, solver, seconds, gap, **how):
        asked.append(gap)
        return solve(problem, solver, seconds, gap, **how)

    monkeypatch.setattr(by_axes, "solve", recorded)
    problem, does = random_problem(np.random.default_rng(2), 6, 3)
    descend(problem, start=(0,) * 6, does=does)
    descend(problem, gap=0.1, start=(0,) * 6, does=does)
    assert set(asked) == {TUNING.stage_gap, 0.1}


def test_what_cannot_be_is_no_answer():
    problem, does = random_problem(np.random.default_rng(1), 4, 3)
    problem.costs[2] = np.full(8, np.inf)
    assert descend(problem, start=(0, 0, 0, 0), does=does).status == "infeasible"


def sharded(shape, **how):
    """A small step on a mesh."""
    roles, mesh = find_roles(PROGRAM, (1,)), logical_mesh(CLUSTER, shape)
    return shard(build_graph(PROGRAM.jaxpr, mesh, roles.aliases, roles.batch), CLUSTER.device, Options(), **how)


def test_the_best_on_three_axes_is_proved(monkeypatch):
    """Found two axes at a time, nothing is known of it; a bound of the whole is found even where no more is worth its time."""
    monkeypatch.setattr("autopar.intra_op.shard.num_pairs", lambda problem: math.inf)
    found = sharded((2, 2, 2), begin=[sharded((2, 4))])
    assert found.solution.gap > TUNING.rough_gap
    request = Request(PROGRAM, find_roles(PROGRAM, (1,)), CLUSTER, Auto(steps=1))
    tune(monkeypatch, meshes, untied_seconds=0.0)
    best = meshes.untie_best(request, meshes.Searched([found], []))
    assert best.choices == found.choices and best.solution.gap <= TUNING.rough_gap
    assert best.solution.bound <= solve(found.problem).objective <= best.solution.objective


def misjudged(monkeypatch):
    """An answer on three axes whose program takes twice what it was priced."""
    monkeypatch.setattr("autopar.intra_op.shard.num_pairs", lambda problem: math.inf)
    found = sharded((2, 2, 2), begin=[sharded((2, 4))])
    half = dataclasses.replace(found.solution, objective=found.own_priced_seconds / 2, bound=0.0)
    return dataclasses.replace(found, solution=half)


@pytest.mark.parametrize(
    "text, rows, known, again",
    [
        ("2x4 v100", 0, math.inf, True),
        ("1x8 v100", 0, math.inf, False),
        ("2x4 v100", 1, math.inf, False),
        ("2x4 v100", 0, 1e-9, False),
    ],
)
def test_the_best_mesh_of_several_hosts_is_planned_as_where_it_is_named(text, rows, known, again):
    """However little that may win, if its price misjudges it; but not where memory binds, which would take many times as
    long, or where a plan is known that is faster by far."""
    cluster, roles = Cluster.of(text), find_roles(PROGRAM, (1,))
    request = Request(PROGRAM, roles, cluster, Auto(steps=1e-6), narrowed=Narrowed(seconds=known))
    found = shard_on(dataclasses.replace(request, method=DataParallel()), logical_mesh(cluster, (2, 2, 2)))
    half = dataclasses.replace(found.solution, objective=found.step_seconds / 2)
    problem = dataclasses.replace(found.problem, rows=[MemoryRow("here", {}, 1.0)] * rows)
    searched = meshes.Searched([dataclasses.replace(found, solution=half, problem=problem)], [])
    meshes.search_unaided(request, searched, silent)
    named = make_plan(PROGRAM, roles, cluster, ShardParallel(mesh_shape=(2, 2, 2))).cost
    assert named.step_seconds < 0.99 * found.step_seconds
    assert (searched.untied is not None) == again and len(searched.results) == 1 + again
    if again:
        best = meshes.untie_best(request, searched)
        assert best is searched.untied and best.step_seconds == named.step_seconds
        assert best.graph is found.graph, "it is built once for a mesh"
        assert best.gap == pytest.approx(named.optimality_gap)


@pytest.mark.parametrize(("steps", "turns"), [(1, 1), (10**9, TUNING.around_turns)])
def test_the_best_is_solved_around_as_often_as_repays(monkeypatch, steps, turns):
    """A step of microseconds is known as well as may be after one turn; many steps of it repay more."""
    found, asked = misjudged(monkeypatch), []

    def settle(known, device, options, donated, turns, gap):
        asked.append(turns)
        return known

    monkeypatch.setattr(meshes, "settle", settle)
    meshes.untie_best(
        Request(PROGRAM, find_roles(PROGRAM, (1,)), CLUSTER, Auto(steps=steps)), meshes.Searched([found], [])
    )
    assert asked == [turns]


def test_no_bound_is_looked_for_that_cannot_leave_less(monkeypatch):
    """Half of the step is open, whatever is proved of prices that are half of what it takes: first it is priced anew."""
    found, asked = misjudged(monkeypatch), []
    assert found.least_gap == pytest.approx(0.5)
    near = dataclasses.replace(found, solution=found.solution.bounded(found.solution.objective))

    def proved(known):
        asked.append(known)
        return known

    monkeypatch.setattr(meshes, "proved", proved)
    monkeypatch.setattr(meshes, "settle", lambda *_: near)
    request = Request(PROGRAM, find_roles(PROGRAM, (1,)), CLUSTER, Auto())
    assert meshes.untie_best(request, meshes.Searched([found], [])) is near and not asked
    monkeypatch.setattr(meshes, "settle", lambda *_: found)  # of no use: then what may be known is asked for
    assert meshes.untie_best(request, meshes.Searched([found], [])) is found and asked == [found]


def test_no_further_descent_is_begun_that_has_to_win_much(monkeypatch):
    """Three of Llama-405B's were begun a fifth above what they had to beat, and won a thousandth each."""
    known, roles = sharded((8,)), find_roles(PROGRAM, (1,))
    graph = build_graph(PROGRAM.jaxpr, logical_mesh(CLUSTER, (2, 2, 2)), roles.aliases, roles.batch)
    setting = run_passes(SHARD, Setting(graph, CLUSTER.device, None), check_setting)
    asked, solve_block = [], by_axes.solve

    def solve(*how, **more):
        asked.append(how)
        return solve_block(*how, **more)

    monkeypatch.setattr(by_axes, "solve", solve)
    descended = by_axes.descend_from([known], graph, setting.class_of)
    problem = setting.priced.problem()
    first = descended(problem, "highs", 60.0, 1e-6, np.inf)
    assert first.objective < problem.cost(of_classes(setting.class_of, lift(known.choices, known.graph, graph)))
    for above, begun in ((1.02, True), (1.05, False)):
        asked.clear()
        found = descended(problem, "highs", 60.0, 1e-6, first.objective / above)
        assert found.status == "pruned" and found.objective <= first.objective and bool(asked) == begun


def test_a_large_problem_begins_where_it_is_told(monkeypatch):
    """The answer is no worse than the one it began at, by the same prices."""
    known = sharded((2, 4))
    monkeypatch.setattr("autopar.intra_op.shard.num_pairs", lambda problem: math.inf)
    found = sharded((2, 2, 2), begin=[known])
    assert "two axes at a time" in found.solution.solver
    begun = dict(zip(reversed(found.class_of), reversed(lift(known.choices, known.graph, found.graph)), strict=True))
    assert found.solution.objective <= found.problem.cost([begun[number] for number in range(len(begun))])
    assert found.solution.bound <= found.solution.objective
    again = sharded((2, 2, 2), begin=[known, found])
    assert again.solution.objective <= found.solution.objective * (1 + 1e-9), "it begins at the better one"

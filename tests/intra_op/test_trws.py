"""Message passing by levels, against its definition one node and one edge at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.intra_op import edge_batch, trws
from autopar.intra_op.batches import Layout, _padded
from autopar.intra_op.elimination import eliminate
from autopar.intra_op.problem import Problem
from autopar.intra_op.trws import Ascent
from autopar.tuning import TUNING
from tests.brute_force import brute_force
from tests.intra_op.test_solve import draw
from tests.tuned import tune


class OneByOne:
    """Kolmogorov 2006, fig. 4: a node after the other, each edge by itself."""

    def __init__(self, problem):
        self.costs, self.ends = problem.costs, list(problem.edges)
        self.tables = list(problem.edges.values())
        self.down = [np.zeros(t.shape[1]) for t in self.tables]
        self.up = [np.zeros(t.shape[0]) for t in self.tables]
        nodes = range(len(self.costs))
        self.later = [[k for k, (u, _) in enumerate(self.ends) if u == n] for n in nodes]
        self.earlier = [[k for k, (_, v) in enumerate(self.ends) if v == n] for n in nodes]

    def total(self, node):
        return (
            self.costs[node] + sum(self.down[k] for k in self.earlier[node]) + sum(self.up[k] for k in self.later[node])
        )

    def round(self):
        share = [1 / max(len(a), len(b), 1) for a, b in zip(self.later, self.earlier, strict=True)]
        for node in range(len(self.costs)):
            part = self.total(node) * share[node]
            for k in self.later[node]:
                message = (self.tables[k] + (part - self.up[k])[:, None]).min(axis=0)
                self.down[k] = message - message.min()
        lower = 0.0
        for node in reversed(range(len(self.costs))):
            total = self.total(node)
            lower += total.min()
            for k in self.earlier[node]:
                part = (total - total.min()) * share[node]
                message = (self.tables[k] + (part - self.down[k])[None, :]).min(axis=1)
                lower += message.min()
                self.up[k] = message - message.min()
        return lower


def test_levels_do_what_single_nodes_do():
    for seed in range(20):
        problem = draw(seed, forbidden=0.0, nodes=(4, 9), choices=(1, 6))
        ascent = Ascent(problem)
        reference = OneByOne(renumbered(problem, ascent.layout.order.tolist()))
        for _ in range(5):
            ascent._forward()
            assert ascent._backward() == pytest.approx(reference.round(), abs=1e-9), seed


def test_large_tables_are_computed_by_width(monkeypatch):
    """In pieces of columns that are alike, and to the last bit as all at once."""
    problem = draw(3, nodes=(30, 31), choices=(1, 9))
    at_once = Ascent(problem)
    tune(monkeypatch, edge_batch, message_small=0, message_chunk=40)
    in_pieces = Ascent(problem)
    assert max(len(batch.chunks) for level in in_pieces.layout.levels for batch in level.out) > 2
    at_once.run(12, gap=0.0)
    in_pieces.run(12, gap=0.0)
    assert at_once.lower == in_pieces.lower and at_once.best == in_pieces.best
    assert all(np.array_equal(a, b) for a, b in zip(at_once.excess, in_pieces.excess, strict=True))


def renumbered(problem, order):
    """The problem whose first node is the first of `order`."""
    new = {node: k for k, node in enumerate(order)}
    found = Problem([problem.costs[node] for node in order])
    for (u, v), table in problem.edges.items():
        found.add_edge(new[u], new[v], table)
    return found


def test_a_chain_is_solved_in_one_round_however_its_nodes_are_numbered():
    random = np.random.default_rng(0)
    chain = Problem([random.random(4) for _ in range(60)])
    for u in range(59):
        chain.add_edge(u, u + 1, random.random((4, 4)))
    bounds = Ascent(renumbered(chain, random.permutation(60).tolist())).run(1)
    assert bounds.lower == pytest.approx(bounds.upper) == eliminate(chain).constant


def test_assignments_are_read_as_they_cost():
    for seed in range(30):
        problem = draw(seed, forbidden=0.0)
        bounds = Ascent(problem).run(20)
        assert problem.cost(bounds.best) == pytest.approx(bounds.upper)
        assert bounds.lower <= brute_force(problem).objective + 1e-9 <= bounds.upper + 2e-9


def test_the_ascent_ends_where_it_is_told_to():
    problem = draw(7, forbidden=0.0, nodes=(6, 7), choices=(4, 5))
    full = Ascent(problem).run(100)
    some = Ascent(problem).run(100, enough=0.5 * full.lower)
    assert 0.5 * full.lower <= some.lower <= full.lower + 1e-9
    assert full.best and not some.best


@pytest.mark.parametrize("is_steady", [True, False])
def test_messages_end_where_the_bound_stands_still_and_the_same_assignment_is_read_again(is_steady, monkeypatch):
    """Wide ResNet's bound was reached in 5 to 8 rounds, and 20 were run, at each exposure that its clock showed. Assignments
    of equal cost that alternate are read as often as before: where three axes are descended from them, it matters which."""
    random, counted, number = np.random.default_rng(0), [], itertools.count()
    ring = Problem([random.random(4) for _ in range(15)])
    for u in range(15):
        ring.add_edge(u, (u + 1) % 15, 0.1 * random.random((4, 4)))
    ascent = Ascent(ring)
    turn, read = ascent._round, ascent._read
    monkeypatch.setattr(ascent, "_round", lambda: counted.append(turn()))
    if not is_steady:
        monkeypatch.setattr(ascent, "_read", lambda: ((next(number), *read()[0][1:]), read()[1]))
    bounds = ascent.run(60)
    assert bounds.lower == pytest.approx(bounds.upper, rel=1e-6) == eliminate(ring).constant
    assert len(counted) < TUNING.message_look if is_steady else len(counted) >= TUNING.message_look


def test_large_problems_are_looked_at_more_often(monkeypatch):
    """A round of theirs takes long, and the last ones win next to nothing."""
    problem, rounds, lower = draw(7, forbidden=0.0, nodes=(9, 10), choices=(4, 5)), [], []
    for huge in (TUNING.huge_core, 0):
        tune(monkeypatch, trws, huge_core=huge)
        ascent, counted = Ascent(problem), []
        monkeypatch.setattr(ascent, "_round", lambda run=ascent._round, counted=counted: counted.append(run()))
        lower.append(ascent.run(100).lower)
        rounds.append(len(counted))
    assert rounds[1] < rounds[0] and lower[1] == pytest.approx(lower[0], rel=1e-3)


def test_a_level_has_no_edges_inside():
    problem = draw(11, nodes=(6, 7))
    layout = Layout(problem, 1e6)
    level_of = {int(layout.order[n]): level.number for level in layout.levels for n in level.nodes}
    assert all(level_of[u] != level_of[v] for u, v in problem.edges)
    assert sum(len(b.begins) for level in layout.levels for b in level.out) == len(problem.edges)


def test_nodes_without_edges():
    problem = Problem([np.array([3.0, 1.0]), np.array([2.0])])
    bounds = Ascent(problem).run(3)
    assert bounds.best == (1, 0) and bounds.lower == pytest.approx(3.0)


def test_pads_are_few():
    assert [_padded(k) for k in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25)] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def test_the_bound_of_a_long_ladder_rises_in_few_rounds():
    """Forward and backward pass side by side, which share their layers' choices: each round by itself wins little there."""
    random, length, choices = np.random.default_rng(1), 60, 6
    ladder = Problem([random.random(choices) for _ in range(2 * length)])
    same = 1 - np.eye(choices)
    for u in range(length - 1):
        for side in (0, length):
            ladder.add_edge(u + side, u + 1 + side, 4 * random.random() * same)
    for u in range(length):
        ladder.add_edge(u, u + length, 2 * random.random() * same)
    least, alone = eliminate(ladder).constant, Ascent(ladder)
    assert max(alone._forward() or alone._backward() for _ in range(100)) < 0.9999 * least
    bounds = Ascent(ladder).run(40)
    assert bounds.lower == pytest.approx(least) == bounds.upper


def test_no_assignment_is_read_where_the_incumbent_is_near_enough(monkeypatch):
    """Reading one takes longer than the first round on a step of many layers."""
    problem = eliminate(draw(3, nodes=(7, 8), choices=(4, 5), forbidden=0.0)).problem
    best, reads = Ascent(problem).run(100).best, []
    for content in (True, False):
        ascent = Ascent(problem)
        ascent.offer(best)
        read = ascent._read
        monkeypatch.setattr(ascent, "_read", lambda content=content, read=read: (reads.append(content), read())[1])
        ascent.run(100, gap=0.5, content=content)
        assert ascent.upper - ascent.lower <= 0.5 * ascent.upper
    assert reads == [False]

"""Equal rows and columns of tables are computed once, to the last bit as all of them are."""

import numpy as np
import pytest

from autopar.intra_op import edge_batch
from autopar.intra_op.edge_batch import shrink
from autopar.intra_op.problem import Problem
from autopar.intra_op.trws import Ascent
from tests.tuned import tune


def repetitive(seed, nodes=8, choices=12):
    """Random costs; a table of each pair of nodes, in most of them equal rows or columns, and forbidden pairs."""
    random = np.random.default_rng(seed)
    problem = Problem([random.random(int(random.integers(1, choices))) for _ in range(nodes)])
    for u in range(nodes):
        for v in range(u + 1, nodes):
            lengths = len(problem.costs[u]), len(problem.costs[v])
            few = random.random([random.integers(1, length + 1) for length in lengths])
            few[1:, 1:][random.random(few[1:, 1:].shape) < 0.1] = np.inf
            places = [random.integers(0, count, length) for count, length in zip(few.shape, lengths, strict=True)]
            for at in places:
                at[0] = 0  # no choice is forbidden beside all others
            problem.add_edge(u, v, few[np.ix_(*places)])
    return problem


def widths(ascent):
    """The number of columns that are computed in a round."""
    return sum(batch.tables.shape[1] for level in ascent.layout.levels for batch in (*level.out, *level.into))


@pytest.mark.parametrize("chunk", [30, 10**6])
def test_equal_rows_and_columns_are_computed_once(chunk, monkeypatch):
    for seed in range(12):
        problem = repetitive(seed)
        each = Ascent(problem)
        with monkeypatch.context() as patch:
            tune(patch, edge_batch, message_small=0, message_chunk=chunk)
            once = Ascent(problem)
        assert widths(once) < widths(each)
        each.run(7, gap=0.0)
        once.run(7, gap=0.0)
        assert once.upper == each.upper and once.best == each.best
        assert once.lower == each.lower
        for a, b in zip(each.excess, once.excess, strict=True):
            assert np.array_equal(a.clip(max=100), b.clip(max=100)), "more is forbidden"


def test_what_differs_stays(monkeypatch):
    """A table without equal rows and columns, and one that is too small to look."""
    table = np.arange(6.0).reshape(2, 3)
    assert shrink(np.zeros((2, 2))).table.shape == (2, 2)
    tune(monkeypatch, edge_batch, message_small=0)
    same = shrink(table)
    assert np.array_equal(same.table, table) and same.rows is same.columns is None
    fewer = shrink(table[[0, 1, 0]][:, [2, 2, 0]])
    assert np.array_equal(fewer.table[fewer.rows][:, fewer.columns], table[[0, 1, 0]][:, [2, 2, 0]])
    assert fewer.table.shape == fewer.turned.table.shape == (2, 2)

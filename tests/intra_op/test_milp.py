"""Solvers of 0/1 programs against all assignments, on small programs drawn at random."""

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_array

from autopar.errors import SolverError
from autopar.intra_op import milp
from autopar.intra_op.milp import Ended, Model, solve_model


def drawn(seed):
    """Columns that are 0 or 1, and rows between bounds that some assignments keep, or none."""
    random = np.random.default_rng(seed)
    count, rows = int(random.integers(3, 8)), int(random.integers(1, 4))
    matrix = random.integers(-3, 4, (rows, count)).astype(float)
    lower = random.integers(-2, 4, rows).astype(float)
    return Model(random.integers(1, 7, count).astype(float), count, csr_array(matrix), lower, lower + 2.0)


def least(model):
    """The least cost of all assignments; None: none keeps the rows."""
    costs = [
        float(model.costs @ x)
        for x in map(np.array, itertools.product((0, 1), repeat=len(model.costs)))
        if (model.matrix @ x >= model.lower - 1e-9).all() and (model.matrix @ x <= model.upper + 1e-9).all()
    ]
    return min(costs, default=None)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_equals_trying_all(solver):
    refused = 0
    for seed in range(15):
        model = drawn(seed)
        wanted, found = least(model), solve_model(model, solver, 10.0, 0.0)
        if wanted is None:
            refused += 1
            assert found.values is None and not found.proved
            continue
        assert found.proved
        assert model.costs @ np.round(found.values) == pytest.approx(wanted)
        assert (model.matrix @ np.round(found.values) <= model.upper + 1e-6).all()
        assert found.bound <= wanted + 1e-6
    assert 0 < refused < 15


def test_columns_behind_the_binary_ones_are_numbers():
    model = Model(np.array([1.0, 3.0]), 1, csr_array([[1.0, 2.0]]), np.array([2.0]), np.array([np.inf]))
    for solver in ("highs", "cbc"):
        found = solve_model(model, solver, 10.0, 0.0)
        np.testing.assert_allclose(found.values, [1.0, 0.5], atol=1e-6)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_what_stops_early_is_a_solution_or_none(solver):
    """Half of every row is to be covered by columns of similar costs: the relaxation is easy, and whole numbers are hard."""
    random = np.random.default_rng(0)
    rows = random.integers(1, 20, (30, 60)).astype(float)
    costs = random.integers(5, 30, 60) + random.random(60)
    model = Model(costs, 60, csr_array(rows), rows.sum(1) / 2 + 0.5, np.full(30, np.inf))
    stopped = solve_model(model, solver, 0.0, 0.0)
    assert not stopped.proved
    if stopped.values is not None:  # HiGHS looks at its limit now and then, and may have found something
        assert np.abs(stopped.values - np.round(stopped.values)).max() < 1e-6
        assert (rows @ stopped.values >= model.lower - 1e-6).all()


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_what_a_solver_leaves_is_held_against_the_model(left, monkeypatch):
    """A CBC out of time may call zeros, or values of the relaxation, a solution."""
    model = Model(np.ones(2), 2, csr_array([[1.0, 1.0]]), np.array([1.0]), np.array([np.inf]))
    monkeypatch.setattr(milp, "_by_cbc", lambda *_: Ended(np.full(2, left), True, 0.25))
    ended = solve_model(model, "cbc", 0.0, 0.0)
    assert ended.values is None and not ended.proved and ended.bound == 0.25


def test_another_name_is_refused():
    with pytest.raises(SolverError, match="autopar knows 'highs', 'cbc'"):
        solve_model(drawn(0), "simplex", 1.0, 0.0)

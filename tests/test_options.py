"""Options refuse at once what no pass could use."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.errors import AutoparError, ConstraintError, SolverError
from autopar.options import Options


def test_defaults_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().solver = "cbc"


def test_constraints_may_be_left_none():
    assert Options(constraints=None).constraints == {}


def test_unknown_solver():
    with pytest.raises(SolverError, match="'highs', 'cbc'") as caught:
        Options(solver="gurobi")
    assert caught.value.solver == "gurobi"


def test_constraints_are_a_mapping():
    with pytest.raises(ConstraintError, match="it is of type list"):
        Options(constraints=[])


@pytest.mark.parametrize("name", ["solver_seconds", "memory_budget_bytes"])
def test_no_number(name):
    with pytest.raises(AutoparError, match=f"`{name}` must be a number"):
        Options(**{name: "80GB"})


@pytest.mark.parametrize("name", ["solver_seconds", "memory_budget_bytes"])
def test_not_positive(name):
    with pytest.raises(AutoparError, match=f"`{name}` must be a number, more than 0"):
        Options(**{name: 0})

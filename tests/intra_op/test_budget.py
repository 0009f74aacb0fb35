"""What a search within memory says when it ends without a sharding."""

import math

import numpy as np
import pytest

from autopar.errors import NoPlanFoundError
from autopar.intra_op.budget import BudgetSearch
from autopar.intra_op.floor import Floor
from autopar.intra_op.problem import MemoryRow, Problem
from autopar.intra_op.time_limit import TimeLimit
from autopar.mesh import Link, LogicalMesh

GAPS = {(0,): 70, (1,): 7, (2,): 700}


def test_the_budget_that_an_error_names_holds_the_gaps_of_the_smallest():
    """Its bytes alive and those between its arrays; of the assignments that were tried, the last is not the smallest."""
    row = MemoryRow("the end", {0: np.array([90.0, 60.0, 80.0])}, 50.0)
    mesh = LogicalMesh((1,), ("x",), (Link(0.0, 1e9),))
    search = BudgetSearch(50.0, mesh, lambda: Floor(40.0, "the end"), TimeLimit(60.0))
    for choice in range(3):
        search.note((choice,), [row])
    with pytest.raises(NoPlanFoundError) as caught:
        search.explain(Problem([np.zeros(3)], {}, [row]), lambda choices: GAPS[tuple(choices)])
    assert caught.value.needed_bytes == math.ceil(60 + 7)
    assert "memory_budget_bytes=67 will do" in caught.value.do

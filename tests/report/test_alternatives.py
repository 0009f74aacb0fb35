"""What is forced fits the memory with the gaps between arrays, as the plan does."""

import dataclasses

from autopar.report.alternatives import studies
from tests.intra_op import test_heap


def test_gaps_count():
    plan = test_heap.plan()
    (peak,) = plan.cost.peak_bytes
    (study,) = studies(dataclasses.replace(plan, budget_bytes=peak))
    assert study.solve_within_budget(study.problem) is not None
    (study,) = studies(dataclasses.replace(plan, budget_bytes=peak - 1))
    assert study.solve_within_budget(study.problem) is None

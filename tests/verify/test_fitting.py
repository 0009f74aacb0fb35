"""`memory="compiler"`: planned again until XLA's own buffers fit."""

import pytest

import autopar
from autopar import Cluster, ShardParallel
from autopar.errors import AutoparError, NoPlanFoundError
from autopar.verify import Verification, fitting
from tests.planned_mlp import arguments, train_step


def planned(memory, budget=None):
    method = ShardParallel(mesh_shape=(2, 4), memory=memory, memory_budget_bytes=budget)
    return autopar.parallelize(train_step, cluster=Cluster.local(), method=method).plan(*arguments())


@pytest.fixture(scope="module")
def free():
    return planned("predicted")


def compiler_that_takes(monkeypatch, bytes_of):
    """Budgets under which it is asked; what it takes of a plan says `bytes_of`."""
    budgets = []

    def verified(plan):
        budgets.append(plan.budget_bytes)
        (predicted,) = plan.cost.peak_bytes
        return Verification(plan.name, "toy", (), (predicted,), (bytes_of(predicted),), plan.budget_bytes)

    monkeypatch.setattr(fitting, "verify_plan", verified)
    return budgets


def test_the_plan_fits_by_the_compilers_count(free):
    budget = free.verify().compiled_bytes[0] - 1
    plan = planned("compiler", budget)
    found = plan.verify()
    assert found.ok and found.compiled_bytes[0] <= budget
    assert plan.budget_bytes == budget and f"memory_budget_bytes={budget}," in plan.method


def test_the_surplus_is_held_back(free, monkeypatch):
    budgets = compiler_that_takes(monkeypatch, lambda predicted: int(1.2 * predicted))
    (most,) = free.cost.peak_bytes
    plan = planned("compiler", most)
    assert 1.2 * plan.cost.peak_bytes[0] <= plan.budget_bytes == most
    assert budgets[0] == most and budgets[1] == most - (int(1.2 * most) - most)


def test_where_nothing_fits_it_says_so(free, monkeypatch):
    compiler_that_takes(monkeypatch, lambda predicted: 10**9)
    with pytest.raises(NoPlanFoundError, match="XLA's count for toy the smallest takes 1.00 GB") as caught:
        planned("compiler", free.cost.peak_bytes[0])
    assert caught.value.needed_bytes == 10**9


def test_another_judge_is_refused():
    with pytest.raises(AutoparError, match="memory='allocator'"):
        ShardParallel(memory="allocator")

"""What differs between two plans."""

from __future__ import annotations

import dataclasses
import math

from autopar import DataParallel, PipelineParallel


def test_equal_plans(plan):
    assert plan.diff(plan) == ""


def test_planning_time_is_no_difference(plan):
    assert plan.diff(dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, planning_seconds=99.0))) == ""


def test_two_methods(plan, make_step, types):
    text = plan.diff(make_step(DataParallel(zero=3)).plan(*types()))
    for words in (
        "DataParallel(zero=3)",
        "step time",
        "mesh",
        "state/params/layers/",
        "all-gather",
        "Activations",
    ):
        assert words in text
    assert "machine" not in text and "program" not in text


def test_two_programs(plan, make_step, types):
    text = plan.diff(make_step().plan(*types(num_layers=3)))
    assert "program" in text
    line = next(line for line in text.splitlines() if "layers/3/kernel" in line)
    assert "(not there)" in line


def test_activations_of_stages_are_not_called_absent(plan, make_step, types):
    text = plan.diff(make_step(PipelineParallel(num_stages=2, num_microbatches=2)).plan(*types()))
    assert "other is cut into stages, whose activations are not listed" in text
    assert "dot_general at" not in text


def test_no_budget(plan):
    assert "unlimited" in plan.diff(dataclasses.replace(plan, budget_bytes=math.inf))

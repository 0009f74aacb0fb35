"""Errors show the three parts in order, carry their facts, and travel between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from autopar import errors
from autopar.errors import AutoparError, InfeasibleError, NotBuiltYetError


def infeasible() -> InfeasibleError:
    return InfeasibleError(
        "no plan fits in memory.",
        given="memory_budget_bytes=100",
        wrong="the state alone is 250 bytes\non each device.",
        do="raise the budget to 250 bytes.",
        budget_bytes=100,
        needed_bytes=250,
    )


def test_message():
    assert str(infeasible()) == (
        "no plan fits in memory.\n"
        "  given:  memory_budget_bytes=100\n"
        "  wrong:  the state alone is 250 bytes\n"
        "          on each device.\n"
        "  do:     raise the budget to 250 bytes."
    )


def test_facts_are_fields():
    assert (infeasible().budget_bytes, infeasible().needed_bytes) == (100, 250)


def test_pickles():
    copy = pickle.loads(pickle.dumps(infeasible()))
    assert type(copy) is InfeasibleError and str(copy) == str(infeasible()) and copy.needed_bytes == 250


def test_a_whole_message_alone():
    assert str(AutoparError("what.\n  given:  x")) == "what.\n  given:  x"


def test_every_error_is_ours():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert len(kinds) > 10 and all(issubclass(kind, AutoparError) and kind.__doc__ for kind in kinds)


def test_not_built_yet_is_a_not_implemented_error():
    with pytest.raises(NotImplementedError):
        raise NotBuiltYetError("no pipelines yet.", feature="PipelineParallel")

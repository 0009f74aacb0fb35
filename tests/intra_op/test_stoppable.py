"""Ctrl-C ends a solver that has much of its time left; so does work that is done."""

from __future__ import annotations

import signal
import threading

import highspy
import numpy as np
import pytest

from autopar.intra_op.milp import run_stoppable


def hard_problem() -> highspy.Highs:
    """A multidimensional knapsack of which no solver proves the optimum in hours."""
    draw, model = np.random.RandomState(0), highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    items = [model.addBinary(obj=-float(value)) for value in draw.randint(50, 100, 400)]
    for weights in draw.randint(50, 100, (30, len(items))).tolist():
        model.addConstr(sum(w * x for w, x in zip(weights, items, strict=True)) <= sum(weights) // 3)
    return model


def test_ctrl_c(monkeypatch, request):
    model = hard_problem()
    look = threading.Thread.join

    def interrupted(self, timeout=None):
        look(self, timeout)
        if timeout is not None and self.is_alive():
            signal.raise_signal(signal.SIGINT)

    # A shell that runs this in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stoppable(model, 3600.0)
    assert "highs" not in [t.name for t in threading.enumerate()]


def test_the_time_is_that_of_work():
    model = hard_problem()
    run_stoppable(model, 0.1)
    assert model.getModelStatus() == highspy.HighsModelStatus.kTimeLimit

"""Ctrl-C ends a solver that has much of its time left."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pulp
import pytest

from autopar.intra_op.stoppable import StoppableHiGHS


def hard_problem() -> pulp.LpProblem:
    """A multidimensional knapsack of which no solver proves the optimum in hours."""
    draw, model = np.random.RandomState(0), pulp.LpProblem("hard", pulp.LpMaximize)
    items = [model.add_variable(f"x{k}", cat=pulp.LpBinary) for k in range(400)]
    model += pulp.lpDot(draw.randint(50, 100, len(items)).tolist(), items)
    for weights in draw.randint(50, 100, (30, len(items))).tolist():
        model += pulp.lpDot(weights, items) <= sum(weights) // 3
    return model


def test_ctrl_c(monkeypatch):
    model = hard_problem()
    look = threading.Thread.join

    def interrupted(self, timeout=None):
        look(self, timeout)
        if timeout is not None and self.is_alive():
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.solve(StoppableHiGHS(msg=False, timeLimit=3600, threads=1))
    assert "highs" not in [t.name for t in threading.enumerate()]

"""What planning shows while somebody waits, and how Ctrl-C ends it."""

from __future__ import annotations

import traceback

import pytest

from autopar.intra_op import shard


def test_ctrl_c_leaves_no_solver_behind(make_step, types, monkeypatch):
    step = make_step()

    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shard, "solve", interrupted)
        patched.setattr(shard, "solve_within", interrupted)
        with pytest.raises(KeyboardInterrupt, match="planning `train_step` was stopped") as caught:
            step.plan(*types(num_layers=1))
    shown = "".join(traceback.format_exception(caught.value))
    assert "intra_op" not in shown and "During handling" not in shown
    assert step.plan(*types(num_layers=1)).cost.step_seconds > 0, "it can be planned afterwards"

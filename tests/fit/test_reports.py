"""What a run tells: to loggers, in files, on a screen; and what the eval step says."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import autopar
from autopar.errors import AutoparError
from autopar.fit import reports
from autopar.fit.reports import Bar
from autopar.fit.state import scalars_of
from autopar.loggers import CSV, TensorBoard
from autopar.search.figures import amount_of


@jax.jit
def step(state, batch):
    state = state + batch["x"].sum()
    return state, {"loss": 10 - state, "grads": {"norm": jnp.bfloat16(0.5)}, "rows": batch["x"]}


def batches(count=6):
    return [{"x": np.full(2, k / 2, np.float32)} for k in range(count)]


@pytest.fixture
def clock(monkeypatch):
    """Time passes when it is looked at, a second each time."""
    seconds = iter(range(10**6))
    fake = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=None)
    monkeypatch.setattr(reports, "time", fake)


class Log:
    def __init__(self):
        self.rows = []

    def __call__(self, number, values):
        self.rows.append((number, dict(values)))


def test_loggers_hear_every_so_many_steps(clock):
    """The scalars of the step that was done last; seconds and a rate, but not of the first step, which compiles."""
    log, all_of_them = Log(), Log()
    autopar.fit(step, jnp.float32(0), batches(5), loggers=log, log_every=2)
    autopar.fit(step, jnp.float32(0), batches(5), loggers=[all_of_them])
    assert [number for number, _ in log.rows] == [2, 4, 5], "and the last"
    assert [values["loss"] for _, values in log.rows] == [9, 4, 0]
    assert log.rows[0][1]["grads/norm"] == 0.5 and "rows" not in log.rows[0][1]
    assert log.rows[1][1]["step_seconds"] > 0
    assert log.rows[1][1]["samples_per_second"] == 2 / log.rows[1][1]["step_seconds"]
    assert [number for number, _ in all_of_them.rows] == [1, 2, 3, 4, 5]
    assert ["step_seconds" in values for _, values in all_of_them.rows] == [False] + [True] * 4


def test_names_and_amounts():
    assert scalars_of(jnp.float32(2)) == {"loss": 2.0} and scalars_of((1, {"a": np.zeros(1)})) == {"0": 1.0}
    assert scalars_of(jax.random.key(0)) == {} and scalars_of(None) == {}
    assert amount_of({"ids": np.zeros((4, 8), np.int32), "mask": np.zeros((4, 8), bool)}) == (32, "tokens")
    assert amount_of((np.zeros((4, 8)), np.zeros(4, int))) == (4, "samples") and amount_of(1.0) == (0, "samples")


# The eval step.


def evaluate(state, batch):
    return {"loss": jnp.mean(batch["x"] * batch["mask"]) + state, "text": batch["x"]}


def test_evaluation_is_in_the_row_of_its_step():
    """The mean over all rows, also where the last batch has fewer, in the row of the steps that are done by then."""
    log = Log()
    rows = [{"x": np.float32([1, 3]), "mask": np.ones(2)}, {"x": np.float32([8]), "mask": np.ones(1)}]
    autopar.fit(
        step, jnp.float32(0), batches(5), loggers=log, log_every=3, eval_step=evaluate, eval_batches=rows, eval_every=2
    )
    assert [(number, values.get("eval/loss")) for number, values in log.rows] == [
        (2, 1 + 4),
        (3, None),
        (4, 6 + 4),
        (5, 10 + 4),
    ]
    assert "loss" in log.rows[1][1] and "loss" in log.rows[3][1] and "loss" not in log.rows[0][1]


def test_evaluation_counts_what_the_mask_lets_through():
    from autopar.fit.evaluate import Evaluation

    rows = [{"x": np.float32([1, 3]), "mask": np.ones(2)}, {"x": np.float32([8]), "mask": np.ones(1)}]
    masked_mean = lambda state, batch: (batch["x"] * batch["mask"]).sum() / batch["mask"].sum()  # noqa: E731
    assert Evaluation(masked_mean, rows, None, "pad").measure(None) == {"loss": pytest.approx(4.0)}


def test_what_evaluation_needs():
    with pytest.raises(AutoparError, match="without eval_batches"):
        autopar.fit(step, jnp.float32(0), batches(), eval_step=evaluate)
    with pytest.raises(AutoparError, match="only once"):
        autopar.fit(step, jnp.float32(0), batches(), eval_step=evaluate, eval_batches=iter([]))
    for name in ("log_every", "eval_every"):
        with pytest.raises(AutoparError, match=f"`{name}` must be"):
            autopar.fit(step, jnp.float32(0), batches(), **{name: 0})


# Files.


def read(path):
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_a_table(tmp_path):
    """One row for each number; what comes later gets a column; it can be read at any moment."""
    log = CSV(tmp_path / "logs" / "run.csv")
    log(1, {"loss": 0.5})
    log(2, {"loss": 0.25, "eval/loss": 1.0})
    log(3, {"loss": 0.125})
    assert read(log.path) == [
        {"step": "1", "loss": "0.5"},
        {"step": "2", "loss": "0.25", "eval/loss": "1.0"},
        {"step": "3", "loss": "0.125"},
    ]
    assert [path.name for path in log.path.parent.iterdir()] == ["run.csv"]


def test_a_table_of_a_run_that_goes_on(tmp_path):
    """Steps that are done again are in it once; a run that begins anew begins a table."""
    path = tmp_path / "run.csv"

    def run(num_steps, directory, on_step=None):
        options = {"checkpoint_dir": tmp_path / directory, "save_every": 2, "num_steps": num_steps, "on_step": on_step}
        return autopar.fit(step, jnp.float32(0), batches(), loggers=CSV(path), **options)

    def interrupt(number, _):
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(6, "a", interrupt)
    assert [row["step"] for row in read(path)] == ["1", "2", "3"], "what was done is told, however it ends"
    run(6, "a")
    assert [row["step"] for row in read(path)] == list("123456")
    assert [float(row["loss"]) for row in read(path)] == [10, 9, 7, 4, 0, -5]
    run(2, "b")
    assert [row["step"] for row in read(path)] == ["1", "2"]
    assert [row["step"] for row in read(tmp_path / "run.1.csv")] == list("123456"), "nothing is lost"


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    log = TensorBoard(tmp_path)
    for number in (1, 2):
        log(number, {"loss": 0.5 * number})
    log.resume(1)
    log(2, {"loss": 3.0})
    log.close()
    found = []
    for path in sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            found += [(event.step, "restart", 0)] if event.session_log.status == 1 else []
    assert found == [
        (1, "restart", 0),
        (1, "loss", 0.5),
        (2, "loss", 1.0),
        (2, "restart", 0),
        (2, "loss", 3.0),
    ], "TensorBoard leaves out what a file before a restart has of that step and later ones"


def test_without_tensorboard(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(AutoparError, match=r"pip install 'autopar\[tensorboard\]'"):
        TensorBoard(tmp_path)


# On a screen.


def shown(monkeypatch, terminal, wanted=None, total=5, **options):
    """What a run shows."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, force_jupyter=False, width=120)
    monkeypatch.setattr(reports, "Console", lambda file: console)
    autopar.fit(step, jnp.float32(0), batches(5), progress=wanted, num_steps=total, **options)
    return stream.getvalue()


def test_a_bar_on_a_terminal(monkeypatch):
    text = shown(monkeypatch, True)
    assert "5/5" in text and "loss 0" in text and "samples/s" in text and "grads/norm 0.5" in text
    assert "step: done: step 5 of 5, 5 of them now, in " in text
    assert "5 of them now" in shown(monkeypatch, True, total=None)


def test_lines_where_there_is_none(monkeypatch, clock):
    """One every ten seconds, with the time that is left; only if they are asked for."""
    assert shown(monkeypatch, False) == "" == shown(monkeypatch, True, wanted=False)
    rows = [{"x": np.float32([1]), "mask": np.ones(1)}]
    text = shown(monkeypatch, False, wanted=True, eval_step=evaluate, eval_batches=rows)
    lines = text.splitlines()
    assert lines[-1].startswith("step: done: step 5 of 5, 5 of them now, in ") and lines[-1].endswith("grads/norm 0.5")
    assert "step: after step 5 of 5  eval/loss 11" in lines
    assert any(" left" in line and "samples/s" in line for line in lines[:-2])


def test_a_run_that_fails_says_how_far_it_came(monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False, force_jupyter=False)
    monkeypatch.setattr(reports, "Console", lambda file: console)

    def fail(number, _):
        if number == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        autopar.fit(step, jnp.float32(0), batches(5), progress=True, on_step=fail)
    assert "step: ended by an error after step 2, 2 of them now" in stream.getvalue()


def test_a_finished_run_says_so(tmp_path):
    autopar.fit(step, jnp.float32(0), batches(3), checkpoint_dir=tmp_path)
    with pytest.warns(UserWarning, match="is finished: all its 3 steps are done, and none was done now"):
        state, metrics = autopar.fit(step, jnp.float32(0), batches(3), checkpoint_dir=tmp_path)
    assert state == 3 and metrics == {}


def test_durations():
    assert [reports._duration(s) for s in (1.25, 75.0, 3725.0)] == ["1.2 s", "1 min 15 s", "1 h 02 min"]
    bar = Bar("step", None, False)
    bar.show(1, {}, 0.0, "samples")
    bar.stop(1, {}, False)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_loader_that_fails_ends_no_run_quietly(prefetch):
    def failing():
        yield from batches(3)
        raise OSError("a file is gone")

    log = Log()
    with pytest.raises(OSError, match="gone"):
        autopar.fit(step, jnp.float32(0), failing(), loggers=log, prefetch=prefetch)
    with pytest.raises(AutoparError, match="`prefetch` must be"):
        autopar.fit(step, jnp.float32(0), batches(), prefetch=-1)


def test_the_first_error_is_the_one_that_is_raised():
    """A logger that fails passes; one that fails because of another error does not hide that."""

    def log(number, values):
        raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="full"):
        autopar.fit(step, jnp.float32(0), batches(), loggers=log)

    def fail(number, _):
        if number == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        autopar.fit(step, jnp.float32(0), batches(), loggers=log, on_step=fail)
    assert caught.value.__notes__ == ["Besides, the disk is full"]

"""`autopar.fit`: whatever breaks a run off, it goes on as if nothing had."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import PipelineParallel, ShardParallel, checkpoint
from autopar.errors import CheckpointError, NodeLostError, StructureChangedError, TraceError, WorkerError
from autopar.fit.batches import Batches, EndOfBatches, placed_for
from tests.checkpoint_model import batches, create_state, loss_fn, step_on, train_step
from tests.patience import PATIENCE_SECONDS

NUM_STEPS = 9


@pytest.fixture(scope="module")
def step():
    return step_on(2, ShardParallel())


@pytest.fixture(scope="module")
def undisturbed(step):
    """Losses of the run that nothing breaks off."""
    state, losses = create_state(), []
    for batch in batches(NUM_STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def as_list(metrics):
    assert list(metrics) == sorted(metrics)
    return [float(loss) for loss in metrics.values()]


def test_it_is_the_loop_one_would_write(step, undisturbed):
    state, metrics = autopar.fit(step, create_state(), batches(NUM_STEPS))
    assert as_list(metrics) == undisturbed and isinstance(metrics[0], np.ndarray) and state["step"] == NUM_STEPS


@pytest.mark.filterwarnings("ignore:the run in .* is finished")
@pytest.mark.parametrize(
    "source",
    [lambda n: iter(batches(n)), lambda n: lambda start: iter(batches(n)[start:])],
    ids=["iterator", "function"],
)
def test_a_run_in_pieces(step, undisturbed, tmp_path, source):
    losses = []
    for stop in (2, 7, NUM_STEPS, NUM_STEPS):
        options = {"num_steps": stop, "checkpoint_dir": tmp_path, "save_every": 3}
        state, metrics = autopar.fit(step, create_state(), source(NUM_STEPS), **options)
        losses += as_list(metrics)
    assert losses == undisturbed and state["step"] == NUM_STEPS
    assert checkpoint.steps(tmp_path) == [6, 7, 9], "the last three"


def test_it_resumes_under_another_plan(step, undisturbed, tmp_path):
    options = {"checkpoint_dir": tmp_path}
    autopar.fit(step, create_state(), batches(4), **options)
    other = step_on(4, PipelineParallel(num_stages=2, num_microbatches=2))
    state, metrics = autopar.fit(other, create_state(), batches(NUM_STEPS), **options)
    np.testing.assert_allclose(as_list(metrics), undisturbed[4:], rtol=1e-4)
    assert len(state["params"]["layers"]["w"].sharding.device_set) == 4


def test_a_plain_function_and_python_numbers(tmp_path):
    """Weakly typed numbers stay so: the dtype of the parameters is not changed by a break."""

    @jax.jit
    def decay(state, batch):
        return {"w": state["w"] * state["rate"] + batch, "rate": state["rate"]}

    state = {"w": jnp.ones(3, jnp.bfloat16), "rate": 0.5}
    source = [jnp.full(3, k, jnp.bfloat16) for k in range(6)]
    whole, metrics = autopar.fit(decay, state, source)
    assert metrics == dict.fromkeys(range(6))
    for stop in (2, 6):
        found, _ = autopar.fit(decay, state, source, num_steps=stop, checkpoint_dir=tmp_path)
    assert found["w"].dtype == jnp.bfloat16 and found["rate"].weak_type
    np.testing.assert_array_equal(np.asarray(found["w"], np.float32), np.asarray(whole["w"], np.float32))


def test_functions_among_the_leaves(tmp_path):
    """They are part of the program: not saved, and taken from the state that is passed."""

    def activate(state, batch):
        return {"w": state["f"](state["w"] + batch), "f": state["f"]}, state["w"]

    state = {"w": jnp.ones(3), "f": jnp.tanh}
    whole, _ = autopar.fit(activate, state, [1.0, 2.0, 3.0])
    for stop in (1, 3):
        found, metrics = autopar.fit(activate, state, [1.0, 2.0, 3.0], num_steps=stop, checkpoint_dir=tmp_path)
    assert found["f"] is jnp.tanh and list(metrics) == [1, 2]
    np.testing.assert_array_equal(found["w"], whole["w"])
    with pytest.raises(CheckpointError, match="s: 'text'"):
        autopar.fit(activate, {**state, "s": "text"}, [1.0], checkpoint_dir=tmp_path / "text")
    with pytest.raises(TraceError, match="state/f"):
        autopar.fit(autopar.parallelize(activate), state, [jnp.ones(3)])


SCRIPT = """
import os, signal, sys, json
import autopar
from tests.checkpoint_model import batches, create_state, step_on
directory, log, where, at = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def on_step(number, loss):
    with open(log, "a") as file:
        file.write(json.dumps([number, float(loss)]) + "\\n")
    if where == "between" and number == int(at):
        die()

module = sys.modules["autopar.checkpoint.save"]
write_manifest = module.write_manifest
def patched(folder, step, leaves, known):
    if where == "write_manifest" and step == int(at):
        die()
    write_manifest(folder, step, leaves, known)
module.write_manifest = patched

step = step_on(2, autopar.ShardParallel())
autopar.fit(step, create_state(), batches(9), checkpoint_dir=directory, save_every=2, on_step=on_step)
"""


def test_killed_and_started_again(undisturbed, tmp_path):
    """Killed in the middle of a save and between two: each step ever done has the loss of the undisturbed run."""
    log, resumed, lines = tmp_path / "log", [], []
    run = {"checkpoint_dir": tmp_path / "run", "save_every": 2}

    def logged():
        nonlocal lines
        known, lines = len(lines), [json.loads(line) for line in log.read_text().splitlines()]
        resumed.append(lines[known][0])

    for where, at in [("write_manifest", "4"), ("between", "6")]:
        words = [sys.executable, "-c", SCRIPT, str(run["checkpoint_dir"]), str(log), where, at]
        root = Path(__file__).parent.parent
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == -9, done.stderr
        logged()

    def on_step(number, loss):
        with log.open("a") as file:
            file.write(json.dumps([number, float(loss)]) + "\n")

    autopar.fit(step_on(2, autopar.ShardParallel()), create_state(), batches(NUM_STEPS), on_step=on_step, **run)
    logged()
    assert resumed[0] == 0 and resumed[1] == 2 and resumed[2] in (4, 6)
    assert all(loss == undisturbed[number] for number, loss in lines)
    assert lines[-1][0] == NUM_STEPS - 1 and checkpoint.latest(tmp_path / "run") == NUM_STEPS
    assert [p.name for p in sorted((tmp_path / "run").iterdir())] == ["6", "8", "9"], "nothing is left behind"


class Failing:
    """A step that fails at some calls; planned anew, it runs on fewer devices."""

    def __init__(self, step, fail_at, then):
        self.step, self.fail_at, self.then, self.calls = step, set(fail_at), list(then), 0
        self.compiled = step.compiled

    def __call__(self, state, batch):
        self.calls += 1
        if self.calls - 1 in self.fail_at:
            raise WorkerError(
                "a worker died.", worker="w1", stage=1, instruction="recv 3", microbatch=2, waited_for="w0"
            )
        return self.step(state, batch)

    def replan(self, cluster):
        self.cluster = cluster
        return self.then.pop(0)


def test_a_failure_is_survived(step, undisturbed, tmp_path):
    """Fails in the fifth step on two devices, goes on from step 3 on one; the iterator gives its batches again."""
    one = autopar.parallelize(train_step, cluster=autopar.Cluster.local(jax.devices()[:1]))
    failing = Failing(step, [4], [one])
    with pytest.warns(UserWarning, match=r"step 4 failed: a worker died.\s+Going on from step 3"):
        state, metrics = autopar.fit(
            failing,
            create_state(),
            iter(batches(NUM_STEPS)),
            checkpoint_dir=tmp_path,
            save_every=3,
            cluster=lambda: "what is left",
        )
    assert failing.cluster == "what is left"
    assert list(metrics) == list(range(NUM_STEPS))
    assert as_list(metrics)[:4] == undisturbed[:4]
    np.testing.assert_allclose(as_list(metrics), undisturbed, rtol=1e-5)
    assert state["params"]["in"].sharding.device_set == {jax.devices()[0]}


def test_a_failure_in_the_first_step(step, undisturbed, tmp_path):
    with pytest.warns(UserWarning, match="step 0 failed"):
        _, metrics = autopar.fit(Failing(step, [0], [step]), create_state(), batches(4), checkpoint_dir=tmp_path)
    assert as_list(metrics) == undisturbed[:4]


@pytest.mark.parametrize(
    "error, mended", [(WorkerError("it died.", given="w1", wrong="killed."), True), (OSError(28, "full"), False)]
)
def test_a_failure_while_the_last_checkpoint_is_written(step, undisturbed, tmp_path, monkeypatch, error, mended):
    """Who was to write it is lost, and the state with it: computed again. A disk that is full is no such failure."""
    module, failing = sys.modules["autopar.checkpoint.save"], [error]

    def write_manifest(folder, number, *rest, own=module.write_manifest):
        if number == 4 and failing:
            raise failing.pop()
        own(folder, number, *rest)

    monkeypatch.setattr(module, "write_manifest", write_manifest)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.warns(UserWarning, match="NOT written"))
        if not mended:
            stack.enter_context(pytest.raises(CheckpointError, match="full"))
        else:
            stack.enter_context(pytest.warns(UserWarning, match=r"step 4 failed: it died.(.*\n)*Going on from step 2"))
        _, metrics = autopar.fit(
            Failing(step, [], [step]), create_state(), batches(4), checkpoint_dir=tmp_path, save_every=2
        )
        assert as_list(metrics) == undisturbed[:4]
    assert checkpoint.latest(tmp_path) == (4 if mended else 2)


LOST = NodeLostError("a node of the cluster is lost.", node="10.0.0.7")


class Broken(Failing):
    """A step that cannot even be started; planned anew, the next of those there are."""

    def __init__(self, error, then):
        self.error, self.then = error, list(then)

    def compiled(self, *args):
        raise self.error


@pytest.fixture
def sleeps(monkeypatch):
    found = []
    monkeypatch.setattr(sys.modules["autopar.fit.loop"], "time", SimpleNamespace(sleep=found.append))
    return found


def test_a_failure_while_another_is_mended(step, undisturbed, tmp_path, sleeps):
    """The machine that is found right after a loss may still have what is lost: the second try takes what is left."""
    again = Failing(step, [2], [Broken(LOST, [Broken(WorkerError("it died."), [step])])])
    with pytest.warns(
        UserWarning, match=r"step 2 failed(.*\n)*.*failed: a node of(.*\n)*.*died.\s+Going on from step 0"
    ):
        _, metrics = autopar.fit(again, create_state(), batches(4), checkpoint_dir=tmp_path)
    assert as_list(metrics) == undisturbed[:4]
    assert sleeps == [1.0, 2.0], "the first is mended at once"


def test_a_failure_at_the_start(step, undisturbed, tmp_path, sleeps):
    """A run that is begun again on a machine of which a part has gone."""
    autopar.fit(step, create_state(), batches(3), checkpoint_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"step 3 failed: a node of the cluster is lost.(.*\n)*Going on from step 3"):
        _, metrics = autopar.fit(Broken(LOST, [step]), create_state(), batches(5), checkpoint_dir=tmp_path)
    assert as_list(metrics) == undisturbed[3:5]


def test_failures_while_others_are_mended_are_counted(step, tmp_path, sleeps):
    """Nothing is planned or started for a failure that is passed on."""
    broken = Broken(LOST, [])
    broken.then = [broken] * 9
    failing = Failing(step, [2], [broken])
    with pytest.raises(NodeLostError):
        autopar.fit(failing, create_state(), batches(4), checkpoint_dir=tmp_path, max_failures=3)
    assert len(broken.then) == 7 and sleeps == [1.0, 2.0]


def test_a_new_checkpoint_ends_a_row_of_failures(step, undisturbed, tmp_path, sleeps):
    steps = [Failing(step, [3], []) for _ in range(3)]
    for one, after in zip(steps, (*steps[1:], step), strict=True):
        one.then = [after]
    with pytest.warns(UserWarning, match="failed"):
        options = {"save_every": 2, "max_failures": 1}
        _, metrics = autopar.fit(steps[0], create_state(), batches(NUM_STEPS), checkpoint_dir=tmp_path, **options)
    assert as_list(metrics) == undisturbed and not sleeps


def test_failures_that_are_passed_on(step, tmp_path, sleeps):
    with pytest.raises(WorkerError) as caught:
        autopar.fit(Failing(step, [2], []), create_state(), batches(4), checkpoint_dir=tmp_path, on_failure="raise")
    assert (caught.value.worker, caught.value.stage, caught.value.waited_for) == ("w1", 1, "w0")
    with pytest.raises(WorkerError):
        autopar.fit(Failing(step, [2], [step]), create_state(), batches(4))
    again = Failing(step, range(9), [])
    again.then = [again] * 9
    with pytest.raises(WorkerError), pytest.warns(UserWarning):
        autopar.fit(again, create_state(), batches(4), checkpoint_dir=tmp_path / "again", max_failures=2)
    assert again.calls == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_the_users_own_errors_pass(step, undisturbed, tmp_path, error):
    def on_step(number, _):
        if number == 5:
            raise error

    options = {"checkpoint_dir": tmp_path, "save_every": 2}
    with pytest.raises(error):
        autopar.fit(step, create_state(), batches(NUM_STEPS), on_step=on_step, **options)
    assert checkpoint.latest(tmp_path) == 4
    _, metrics = autopar.fit(step, create_state(), batches(NUM_STEPS), **options)
    assert as_list(metrics) == undisturbed[4:]


def test_a_damaged_checkpoint_is_passed_over(step, undisturbed, tmp_path):
    options = {"checkpoint_dir": tmp_path, "save_every": 2}
    autopar.fit(step, create_state(), batches(6), **options)
    (tmp_path / "6" / "manifest.ocdbt").write_bytes(b"")
    with pytest.warns(UserWarning, match="manifest.ocdbt has 0 bytes"):
        _, metrics = autopar.fit(step, create_state(), batches(NUM_STEPS), **options)
    assert as_list(metrics) == undisturbed[4:] and checkpoint.latest(tmp_path) == NUM_STEPS


def test_a_checkpoint_that_cannot_be_written(step, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written here"):
        autopar.fit(step, create_state(), batches(2), checkpoint_dir=tmp_path / "file")


def test_a_step_of_another_form(tmp_path):
    with pytest.raises(StructureChangedError, match="cannot tell the state"):
        autopar.fit(lambda state, batch: {"new": state}, {"a": jnp.ones(2)}, [1, 2])


def test_batches_by_number():
    once = Batches(iter(range(10)))
    assert [once.at(3), once.at(1), once.at(5), once.at(0)] == [3, 1, 5, 0]
    once.forget(4)
    assert once.at(4) == 4
    with pytest.raises(CheckpointError, match="gone"):
        once.at(3)
    again = Batches({k: None for k in range(3)})
    assert [again.at(2), again.at(0), again.at(1)] == [2, 0, 1]
    for source in (again, Batches([0, 1, 2]), Batches(lambda start: iter(range(start, 3)))):
        with pytest.raises(EndOfBatches):
            source.at(3)


# Batches of all kinds.


class Loader:
    """Knows its position, as torchdata's loaders do, and counts what it reads."""

    def __init__(self):
        self.place, self.read = 0, 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        for batch in batches(NUM_STEPS)[self.place :]:
            self.place += 1
            self.read += 1
            yield batch


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_goes_where_it_was(step, undisturbed, tmp_path, prefetch):
    """Its position is in the checkpoint: a run that goes on reads nothing that was used before."""
    losses, read = [], []
    for stop in (5, NUM_STEPS):
        loader = Loader()
        options = {"checkpoint_dir": tmp_path, "save_every": 3, "prefetch": prefetch}
        _, metrics = autopar.fit(step, create_state(), loader, num_steps=stop, **options)
        losses += as_list(metrics)
        read.append(loader.read)
    assert losses == undisturbed and read == [5, NUM_STEPS - 5]
    (tmp_path / "9" / "manifest.ocdbt").write_bytes(b"")
    loader = Loader()
    with pytest.warns(UserWarning, match="is damaged"):
        _, metrics = autopar.fit(step, create_state(), loader, num_steps=NUM_STEPS, **options)
    assert as_list(metrics) == undisturbed[6:] and loader.read == NUM_STEPS - 6


def test_a_loader_after_a_failure(step, undisturbed, tmp_path):
    """It goes back to where it was at the checkpoint, in the same process."""
    loader = Loader()
    with pytest.warns(UserWarning, match=r"Going on from step 3"):
        _, metrics = autopar.fit(
            Failing(step, [4], [step]), create_state(), loader, checkpoint_dir=tmp_path, save_every=3, prefetch=2
        )
    assert as_list(metrics) == undisturbed


@pytest.mark.parametrize("method", [ShardParallel(), PipelineParallel(num_stages=2, num_microbatches=2)], ids=str)
def test_batches_are_placed_ahead(method):
    """Where the step wants them; the numbers are the same."""
    step = step_on(4, method)
    found = [as_list(autopar.fit(step, create_state(), batches(4), prefetch=n)[1]) for n in (0, 2)]
    assert found[0] == found[1]
    compiled = step.latest()
    batch = batches(1)[0] | {"more": np.zeros(3)}
    place = placed_for(step, batches(1)[0])
    assert place(batch) is batch, "of another structure: as it is"
    wanted = jax.tree.leaves(compiled.in_shardings[0][1])
    placed = jax.tree.leaves(place(batches(1)[0]))
    assert wanted and [x.sharding for x in placed] == wanted
    wide = {name: value.astype(np.float64) for name, value in batches(1)[0].items()}
    assert placed_for(step, wide)(wide)["x"].dtype == np.float64, "the step's own types are found from the user's"
    assert placed_for(train_step, batch)(batch) is batch


@pytest.mark.parametrize("method", [ShardParallel(), PipelineParallel(num_stages=2, num_microbatches=2)], ids=str)
def test_batches_are_placed_ahead_behind_a_state_with_none(method):
    """What is None in the state or in the batch has no sharding: those of the batch's arrays are found all the same."""

    def step(state, batch):
        inner, loss = train_step(state["inner"], {"x": batch["x"], "y": batch["y"]})
        return {"frozen": None, "inner": inner}, loss

    made = [batch | {"mask": None} for batch in batches(3)]
    parallel = step_on(4, method, step)
    _, metrics = autopar.fit(parallel, {"frozen": None, "inner": create_state()}, made)
    assert as_list(metrics) == as_list(autopar.fit(step_on(4, method), create_state(), batches(3))[1])
    placed, wanted = placed_for(parallel, made[0])(made[0]), parallel.latest().in_shardings[0][1]
    assert {name: placed[name].sharding for name in "xy"} == {name: wanted[name] for name in "xy"}


def masked_step(state, batch):
    def loss_fn(w):
        errors = (jnp.tanh(batch["x"] @ w) - batch["y"]).mean(axis=1) ** 2
        return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])

    loss, grad = jax.value_and_grad(loss_fn)(state)
    return state - 0.1 * grad, loss


@pytest.mark.parametrize("parallel", [False, True])
def test_a_padded_batch_counts_as_what_it_was(parallel):
    """Where the step weighs by the mask: as a step of fewer rows does, in one program."""
    rows = [batch | {"mask": np.ones(len(batch["x"]), np.float32)} for batch in batches(3)]
    rows[2] = {name: value[:3] for name, value in rows[2].items()}
    cluster = autopar.Cluster.local(jax.devices()[:2])
    step = autopar.parallelize(masked_step, cluster=cluster) if parallel else jax.jit(masked_step)
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    want, expected = weights, []
    for batch in rows:
        want, loss = jax.jit(masked_step)(want, batch)
        expected.append(float(loss))
    got, metrics = autopar.fit(step, weights, rows, remainder="pad")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(as_list(metrics), expected, rtol=1e-5)


def test_an_eval_step_follows_a_step_that_is_planned_anew(undisturbed, tmp_path):
    """It takes the state where it lies, before a failure and after it; the loss is that of the step."""
    two = autopar.Cluster.local(jax.devices()[:2])
    step, rows = autopar.parallelize(train_step, cluster=two), []
    fails = [True]

    def loss_of(state, batch):
        return loss_fn(state["params"], batch)

    def on_step(number, _):
        if number == 4 and fails:
            fails.clear()
            raise WorkerError("it died.")

    with pytest.warns(UserWarning, match="Going on from step 3"):
        _, metrics = autopar.fit(
            step,
            create_state(),
            batches(NUM_STEPS),
            checkpoint_dir=tmp_path,
            save_every=3,
            on_step=on_step,
            cluster=lambda: autopar.Cluster.local(jax.devices()[:1]),
            eval_step=autopar.follow(loss_of, step),
            eval_batches=[batches(NUM_STEPS)[3], batches(NUM_STEPS)[3]],
            loggers=lambda number, values: rows.append((number, values)),
        )
    measured = [(number, values["eval/loss"]) for number, values in rows if "eval/loss" in values]
    assert [number for number, _ in measured] == [3, 6, 9]
    np.testing.assert_allclose(measured[0][1], undisturbed[3], rtol=1e-5)
    np.testing.assert_allclose(as_list(metrics), undisturbed, rtol=1e-5)

"""`autopar.fit`: a training loop that saves checkpoints, and continues from them after a failure.

In:     a step, the initial state, the batches; a directory for checkpoints; what to evaluate and report.
Out:    the state after the last step, and the metrics of each step.
Method: checkpoint n is the state after n steps, and step n takes batch n, so only the number, and the position of a loader,
        must be saved. When a part of the machine fails, the step is planned anew for the devices that are left, and the
        newest complete checkpoint is read directly into the shardings of the new plan.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import jax

from autopar.checkpoint.folder import read_note, steps
from autopar.checkpoint.owner import hold
from autopar.checkpoint.restore import find_checkpoint, read_state
from autopar.checkpoint.save import Saving, begin_save
from autopar.errors import AutoparError, CheckpointError, NodeLostError, WorkerError, check_choice, check_number, warn
from autopar.fit.batches import Batches, EndOfBatches, Source, placed_for
from autopar.fit.evaluate import Evaluation
from autopar.fit.hosts import HostBatches
from autopar.fit.portions import ByHost, is_by_host
from autopar.fit.remainder import Remainder, check_remainder
from autopar.fit.reports import Bar, Reports
from autopar.fit.state import as_array, on_host, parts_of, type_of
from autopar.follow import Following
from autopar.frameworks import Shell, without_arrays
from autopar.loggers import Logger
from autopar.mesh import Cluster
from autopar.step import ParallelStep

BACK_OFF_SECONDS, MOST_SECONDS = 1.0, 60.0
"""Seconds to wait before recovering from a second failure in a row, doubled each time, up to `MOST_SECONDS`."""


def fit(
    step: Callable[..., Any],
    state: Any,
    batches: Source | ByHost,
    *,
    num_steps: int | None = None,
    checkpoint_dir: str | os.PathLike | None = None,
    save_every: int = 100,
    keep: int | None = 3,
    on_failure: Literal["replan", "raise"] = "replan",
    cluster: Callable[[], Cluster] | None = None,
    max_failures: int = 3,
    on_step: Callable[[int, Any], None] | None = None,
    eval_step: Callable[..., Any] | None = None,
    eval_batches: Source | None = None,
    eval_every: int | None = None,
    loggers: Logger | Sequence[Logger] = (),
    log_every: int = 1,
    progress: bool | None = None,
    prefetch: int = 1,
    remainder: Remainder = "keep",
) -> tuple[Any, dict[int, Any]]:
    """Run a step over batches; save checkpoints and resume from them; evaluate and log.

    Called again with the same directory, even after the process was killed, it continues from the newest complete
    checkpoint, and every step gives the same result as without the interruption.

    Args:
        step: `step(state, batch)` returns the new state, or a tuple of it and metrics; if it updates NNX objects in place,
            only metrics. Made by `parallelize`; any other function works, but cannot be planned anew.
        state: The initial state; not used if there is a checkpoint.
        batches: A list or dataset, whose first n batches are dropped when the run resumes after n steps; a loader that
            knows its position (`state_dict` and `load_state_dict`, as torchdata's, or `get_state` and `set_state`, as
            grain's), which is saved with each checkpoint; or a function from n to an iterator over the batches from n on.
            Must give the same batches each time. Or a function `batches(host, hosts)` (perhaps with `start`, the number
            of the first batch) that returns one of these, in which each batch is portion `host` of `hosts` equal,
            consecutive portions: on a Ray cluster each worker reads its own by this function, and only the first batch
            goes through this process, for planning; elsewhere there is one portion. Tensors of torch and TensorFlow are
            converted to NumPy arrays.
        num_steps: Total number of steps, including those before an interruption; None: until the batches end.
        checkpoint_dir: The directory of checkpoints; None: none are saved.
        save_every: Steps between checkpoints; there is also one of the initial and one of the final state.
        keep: How many checkpoints to keep; None: all.
        on_failure: `"replan"`: on a `WorkerError`, plan for the devices that are left, and continue from the newest
            checkpoint. `"raise"`: raise it.
        cluster: Called after a failure, returns the machine as it is then; None: as `step.replan` finds it.
        max_failures: The most failures in a row, without a new checkpoint between them, from which to recover; the next is
            raised. A failure during recovery counts too.
        on_step: Called after each step with its number, from 0, and its metrics, perhaps still being computed.
        eval_step: `eval_step(state, batch)` returns metrics, and does not change the state; a step made by
            `autopar.follow(..., step)` uses the state where it is, also after a failure. Its scalars are averaged over the
            eval batches, each weighted by its number of rows, or by the sum of its array `mask`, if it has one.
        eval_batches: As `batches`, but not an iterator, since they are iterated over each time.
        eval_every: Steps between evaluations; None: `save_every`. There is also one at the end.
        loggers: Functions of the number of steps done and a dict of floats: the scalars that the last of these steps
            returned, its time and rate, and `eval/...`. `autopar.loggers` has some.
        log_every: Steps between calls of the loggers.
        progress: Whether to show a bar, or lines if stderr is not a terminal; None: only on a terminal.
        prefetch: How many batches to draw ahead, and start to move to the devices while they work.
        remainder: How to treat a batch with fewer rows than the first. `"keep"`: the step is planned for it too. `"drop"`:
            it is left out, also in the middle, except from a function, where it ends the batches. `"pad"`: its last row
            is repeated, and its array `mask` is 0 for the copies: exact, if the step weights rows by the mask. `"error"`:
            it is refused.

    Returns:
        The state (new objects, if it has objects), and the metrics of each step that ran in this call, by its number, as
        NumPy arrays.

    Raises:
        AutoparError: A setting is invalid.
        CheckpointError: There are checkpoints, but all are damaged, or they are of another state; or one cannot be
            written; or another run that has not ended has its checkpoints in this directory.
        WorkerError: The machine failed, and `fit` did not recover.
        NodeLostError: The same, before the workers had started.
    """
    counts = {"save_every": save_every, "keep": keep, "eval_every": eval_every, "log_every": log_every}
    _check_settings(on_failure, prefetch, counts)
    check_remainder(remainder)
    state, shell = without_arrays(state)
    if shell is not None:
        step, eval_step = _on_arrays(step, eval_step, shell)
    feed = _feed(batches, num_steps, remainder, save_every, prefetch)
    bar = Bar(getattr(step, "__name__", "fit"), num_steps, progress)
    reports = Reports([loggers] if callable(loggers) else list(loggers), log_every, bar)
    evaluation = _evaluation(eval_step, eval_batches, eval_every or save_every, remainder)
    first = jax.tree.map(type_of, state)
    run = _Run(step, first, feed, checkpoint_dir, save_every, keep, on_step, evaluation, reports, prefetch)
    with hold(checkpoint_dir) if checkpoint_dir is not None else contextlib.nullcontext():
        final, metrics = _survive(run, state, on_failure, cluster, max_failures)
    return final if shell is None else shell.around(final), metrics


def _feed(
    batches: Source | ByHost, stop: int | None, remainder: Remainder, every: int, prefetch: int
) -> Batches | HostBatches:
    if is_by_host(batches):
        return HostBatches(cast(ByHost, batches), stop=stop, remainder=remainder, every=every, ahead=prefetch)
    return Batches(cast(Source, batches), stop=stop, remainder=remainder, every=every)


def _survive(
    run: _Run, state: Any, on_failure: str, cluster: Callable[[], Cluster] | None, max_failures: int
) -> tuple[Any, dict[int, Any]]:
    """Train to the end, and recover from failures."""
    failures, num_saved, failed = 0, -1, ""
    try:
        while True:
            try:
                if failed:
                    _back_off(failures)
                    run.replan(cluster() if cluster is not None else None)
                run.resume(state)
                if failed:
                    warn(f"{failed}\nGoing on from step {run.number}.")
                    failed = ""
                run.train()
                return run.state, run.metrics
            except (WorkerError, NodeLostError) as error:
                with contextlib.suppress(AutoparError):  # only complete checkpoints count
                    run.settle()
                if on_failure == "raise" or run.directory is None or not hasattr(run.step, "replan"):
                    raise
                failures = failures + 1 if run.num_saved == num_saved else 1
                num_saved = run.num_saved
                if failures > max_failures:
                    raise
                failed = f"{failed}\nGoing on failed: {error}" if failed else f"step {run.number} failed: {error}"
    except BaseException as error:
        for tidy_up in (lambda: run.reports.ended(failed=True), run.settle):
            try:
                tidy_up()
            except Exception as second:  # the first error is the one to raise
                error.add_note(f"Besides, {second}")
        raise


def _on_arrays(step: Any, eval_step: Any, shell: Shell) -> tuple[Any, Any]:
    """The steps on objects as steps on their arrays, which a run moves, saves and restores."""
    on_arrays = getattr(step, "on_arrays", None)
    step = on_arrays(shell, updates=True) if on_arrays is not None else shell.of_step(step, updates=True)
    match eval_step:
        case Following():
            eval_step = eval_step.on_arrays(shell, step)
        case ParallelStep():
            eval_step = eval_step.on_arrays(shell, updates=False)
        case _ if eval_step is not None:
            eval_step = shell.of_step(eval_step, updates=False)
    return step, eval_step


def _check_settings(on_failure: Any, prefetch: Any, counts: Mapping[str, Any]) -> None:
    do = "leave it out to plan anew for what is left, or pass 'raise'."
    check_choice("fit", "on_failure", on_failure, ("replan", "raise"), do=do)
    check_number("fit", "prefetch", prefetch, least=0, is_whole=True, do="pass 0 to draw none ahead, or leave it out.")
    for name, value in counts.items():
        if value is not None or name not in ("keep", "eval_every"):
            do = "pass such a number, or leave it out. Without checkpoint_dir nothing is saved."
            check_number("fit", name, value, least=1, is_whole=True, do=do)


def _evaluation(step: Any, batches: Any, every: int, remainder: Remainder) -> Evaluation | None:
    if (step is None) != (batches is None):
        missing = "eval_step" if step is None else "eval_batches"
        raise AutoparError(
            "there is nothing to evaluate with.",
            given="fit(eval_batches=...)" if step is None else "fit(eval_step=...)",
            wrong=f"without {missing} it has no meaning.",
            do=f"pass {missing}, too.",
        )
    return None if step is None else Evaluation(step, batches, every, remainder)


def _back_off(failures: int) -> None:
    """Wait after repeated failures: the machine may need time, and Ray must notice what is lost."""
    if failures > 1:
        time.sleep(min(BACK_OFF_SECONDS * 2.0 ** (failures - 2), MOST_SECONDS))


@dataclass(eq=False)
class _Run:
    """A training run: owns the state, the batches, and the checkpoint being written; other attributes as in `fit`.

    Attributes:
        first: Types of the initial state.
        number: Number of steps done.
        num_saved: Number of checkpoints written.
    """

    step: Any
    first: Any
    batches: Batches | HostBatches
    directory: str | os.PathLike | None
    save_every: int
    keep: int | None
    on_step: Callable[[int, Any], None] | None
    evaluation: Evaluation | None
    reports: Reports
    prefetch: int
    state: Any = None
    number: int = 0
    metrics: dict[int, Any] = field(default_factory=dict)
    num_saved: int = 0
    _saving: Saving | None = None
    _saved: int = -1
    _came: int = 0
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._serve()

    def replan(self, cluster: Cluster | None) -> None:
        """Plan the step anew, and an eval step that follows it."""
        self.step = self.step.replan(cluster)
        self._serve()
        if self.evaluation is not None:
            self.evaluation.follow(self.step)

    def _serve(self) -> None:
        """Have hosts read the portions that the plan of this step wants."""
        if isinstance(self.batches, HostBatches):
            self.batches.serve(self.step, self.first)

    def resume(self, state: Any) -> None:
        """Continue from the newest complete checkpoint; if there was none when the run began, from this state."""
        self.reports.paused()
        if self.directory is None or (not self._has_begun and not steps(self.directory)):
            # Convert numbers to arrays, as the first step does; otherwise the step would be planned for numbers first.
            self.state, self.number = jax.tree.map(as_array, state), 0
            self._save()
            self._has_begun = True
        else:
            manifest = find_checkpoint(self.directory)
            self.number, self._has_begun = manifest.step, True
            note = read_note(self.directory, manifest.step)
            self.batches.go_to(manifest.step, note.get("position"), note.get("rows"))
            compiled = None
            if hasattr(self.step, "compiled"):
                with contextlib.suppress(EndOfBatches):  # no steps are left
                    batch = self.batches.at(manifest.step)
                    self.batches.put_back(manifest.step, batch)
                    compiled = self.step.compiled(self.first, batch)
            self.state = read_state(self.directory, manifest, self.first, compiled)
            self._saved = manifest.step
            self.metrics = {number: m for number, m in self.metrics.items() if number < self.number}
        self._came = self.number
        self.reports.resumed(self.number)

    def train(self) -> None:
        """Train until the batches end, and wait for the last checkpoint."""
        first = self.number
        while True:
            try:
                batch = self.batches.at(self.number)
            except EndOfBatches:
                break
            self.state, metrics = parts_of(self.step(self.state, batch), self.first)
            self.metrics[self.number] = metrics
            self.reports.dispatched(self.number, batch)
            ahead = range(self.number + 1, self.number + 1 + self.prefetch)
            self.batches.fetch_ahead(ahead, placed_for(self.step, batch))
            # At most one step may be in flight while the next is dispatched: XLA's CPU client would starve.
            self._collect(self.number)
            if self.on_step is not None:
                self.on_step(self.number, metrics)
            self.number += 1
            if self.number % self.save_every == 0:
                self._save()
            if self.evaluation is not None and self.evaluation.is_due(self.number):
                self._evaluate(self.evaluation)
        self._save()
        if self.evaluation is not None and self.number > first and not self.evaluation.is_due(self.number):
            self._evaluate(self.evaluation)
        self.settle()
        if isinstance(self.batches, HostBatches):
            self.batches.close()
        if self.number == first and self.directory is not None and first:
            warn(
                f"the run in {os.fspath(self.directory)} is finished: all its {first} steps are done, and none was done now. "
                "Pass more batches, or a larger num_steps, to go on; another directory to begin anew."
            )
        self.reports.ended()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            WorkerError: A worker was lost before it had written its part.
            CheckpointError: It failed in another way.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.wait()
            except CheckpointError as error:
                if isinstance(error.__cause__, WorkerError):  # the state on it is lost: recover as from a failed step
                    raise error.__cause__ from None
                raise
            self.num_saved += 1
            self.batches.forget(saving.step)

    def _save(self) -> None:
        self._collect(self.number)
        if self.directory is None or self._saved == self.number:
            return
        with self.reports.aside():
            self.settle()
            # Overwrite: an existing checkpoint of this number is damaged, or of steps that were repeated.
            note = {"position": self.batches.position(self.number), "rows": self.batches.rows}
            self._saving = begin_save(
                self.directory, self.state, self.number, keep=self.keep, overwrite=True, note=note
            )
        self._saved = self.number

    def _evaluate(self, evaluation: Evaluation) -> None:
        self._collect(self.number)
        with self.reports.aside():
            self.reports.measured(evaluation.measure(self.state))

    def _collect(self, stop: int) -> None:
        """Wait for the steps before `stop`, and copy their metrics to the host."""
        while self._came < stop:
            number = self._came
            self.metrics[number] = jax.tree.map(on_host, self.metrics[number])
            self.reports.came(number, self.metrics[number])
            self._came += 1

"""One process owns a directory of checkpoints: while it lives no other writes there, and no longer."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import autopar
from autopar import checkpoint
from autopar.checkpoint import owner
from autopar.checkpoint.owner import PREFIX, claim, hold, release, start_of, this_process
from autopar.errors import CheckpointError
from tests.patience import PATIENCE_SECONDS

SCRIPT = """
import sys
from autopar import checkpoint
from autopar.checkpoint.owner import hold
checkpoint.save(sys.argv[2], {"a": 1}, 0).wait()
with hold(sys.argv[1]):
    print("here", flush=True)
    sys.stdin.readline()
print("there", flush=True)
"""
ANOTHER_MACHINE = "another kernel pid:[1]"


@pytest.fixture
def other():
    """Another process, which does nothing."""
    with subprocess.Popen([sys.executable, "-Sc", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Of two that come at once, none waits for the other: the tests bring them one after the other."""
    monkeypatch.setattr(owner, "TOGETHER_SECONDS", 0.0)


def add(state, batch):
    return state + batch


def run(directory, num_steps=3):
    return autopar.fit(add, np.float32(0), [1.0, 2.0, 3.0], num_steps=num_steps, checkpoint_dir=directory)


def write_mark(directory, **changed):
    found = dataclasses.replace(this_process(), **changed)
    mark = directory / found.mark
    mark.write_text(json.dumps(dataclasses.asdict(found)))
    return mark


def marks(directory):
    return [path.name for path in directory.glob(PREFIX + "*")]


def test_a_second_run_in_one_directory(tmp_path):
    """It is told of the first, of which nothing changes; when that has let go, or ended, it may."""
    first, second = tmp_path / "run", tmp_path / "saves"
    words = [sys.executable, "-c", SCRIPT, str(first), str(second)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=Path(__file__).parents[2], **pipes) as process:
        assert process.stdout.readline() == "here\n"
        for write in (run, lambda directory: checkpoint.save(directory, {"a": 1}, 60)):
            for directory in (first, second):
                with pytest.raises(CheckpointError, match=rf"process {process.pid} on .* has not ended") as caught:
                    write(directory)
                assert caught.value.path == str(directory) and len(marks(directory)) == 1
        assert checkpoint.steps(first) == [] and checkpoint.steps(second) == [0]
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "there\n"
        assert marks(first) == [], "a run that is done lets go"
        assert run(first)[0] == 6
    assert [path.name for path in sorted(first.iterdir())] == ["0", "3"]
    assert marks(second) == [], "what is saved alone is owned to the end of the process"


def test_who_was_killed_owns_nothing(tmp_path, other):
    mark = write_mark(tmp_path, pid=other.pid, started=start_of(other.pid))
    with pytest.raises(CheckpointError, match=f"process {other.pid} "):
        claim(tmp_path)
    assert marks(tmp_path) == [mark.name]
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # its number is not free yet
    claim(tmp_path)
    assert marks(tmp_path) == [this_process().mark]
    release(tmp_path)


def test_a_number_that_is_used_again_is_another_process(tmp_path, other):
    """The process of this number lives; it is not the one that made the mark."""
    (tmp_path / "run").mkdir()
    write_mark(tmp_path / "run", pid=other.pid, started="12")
    claim(tmp_path / "run")
    release(tmp_path / "run")
    assert start_of(other.pid) not in ("", "12", None)
    other.kill()
    other.wait()
    assert start_of(other.pid) == ""


def test_two_runs_of_one_process(tmp_path):
    with hold(tmp_path), pytest.raises(CheckpointError, match="another run of this process"):
        run(tmp_path)
    run(tmp_path)
    with hold(tmp_path):
        checkpoint.save(tmp_path, {"a": 1}, 4).wait()  # its own
    assert marks(tmp_path) == []


def test_the_dead_of_another_machine(tmp_path):
    """Only the age of its mark, by the disk's clock, tells."""
    mark = write_mark(tmp_path, machine=ANOTHER_MACHINE)
    now = mark.stat().st_mtime
    os.utime(mark, (now - 2 * owner.DEAD_SECONDS,) * 2)
    run(tmp_path)
    assert checkpoint.steps(tmp_path) == [0, 3]


def test_the_living_of_another_machine(tmp_path, monkeypatch):
    """A mark that is not old is looked at until it is renewed, or has become so."""
    mark = write_mark(tmp_path, machine=ANOTHER_MACHINE, host="far")

    def looks(number):
        looked.append(number)
        if len(looked) == 3 and renewed:
            os.utime(mark, (2e9, 2e9))
        elif len(looked) == 3:
            monkeypatch.setattr(owner, "DEAD_SECONDS", -1.0)

    monkeypatch.setattr(owner.time, "sleep", looks)
    for renewed in (True, False):
        looked = []
        with pytest.warns(UserWarning, match="waiting up to 60 s for a sign that it lives"):
            if renewed:
                with pytest.raises(CheckpointError, match="on far"):
                    claim(tmp_path)
            else:
                os.utime(mark)
                claim(tmp_path)
        assert len(looked) == 3
    release(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_mark_that_is_none(tmp_path):
    """Of a later version, or damaged: as good as its age."""
    mark = tmp_path / (PREFIX + "0")
    mark.write_text("{")
    os.utime(mark, (1e9, 1e9))
    claim(tmp_path)
    assert marks(tmp_path) == [this_process().mark]
    release(tmp_path)


def test_taken_over_while_it_slept(tmp_path, other, monkeypatch):
    """Whoever was taken for dead sees it before it commits, and what it has written is not there."""
    write_manifest = sys.modules["autopar.checkpoint.save"].write_manifest

    def slow(*arguments):
        write_manifest(*arguments)
        (tmp_path / this_process().mark).unlink()
        write_mark(tmp_path, pid=other.pid, started=start_of(other.pid))

    monkeypatch.setattr(sys.modules["autopar.checkpoint.save"], "write_manifest", slow)
    with pytest.warns(UserWarning, match="another run"), pytest.raises(CheckpointError, match=f"process {other.pid} "):
        checkpoint.save(tmp_path, {"a": 1}, 0).wait()
    assert checkpoint.steps(tmp_path) == []


def test_a_directory_that_is_removed_is_owned_anew(tmp_path):
    claim(tmp_path)
    (tmp_path / this_process().mark).unlink()
    checkpoint.save(tmp_path, {"a": 1}, 0).wait()
    assert marks(tmp_path) == [this_process().mark]
    release(tmp_path)


@pytest.mark.parametrize("mine_is_less", [True, False])
def test_two_that_come_at_once(tmp_path, other, monkeypatch, mine_is_less):
    """The one with the lesser name waits for the other to go; the other goes."""
    root = tmp_path / "run"
    root.mkdir()
    theirs = write_mark(root, pid=other.pid, started=start_of(other.pid))
    name = PREFIX + ("f" if mine_is_less else "0") * 16
    theirs = theirs.rename(root / name)
    monkeypatch.setattr(owner, "TOGETHER_SECONDS", 600.0)
    monkeypatch.setattr(owner.time, "sleep", lambda _: theirs.unlink(missing_ok=True))
    if mine_is_less:
        claim(root)
        assert marks(root) == [this_process().mark]
        release(root)
    else:
        with pytest.raises(CheckpointError, match=f"process {other.pid} "):
            claim(root)
        assert marks(root) == [name]


def test_marks_are_renewed(tmp_path, monkeypatch):
    """By a thread, as long as they are there."""
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    beats, renewed = owner._Beats(), threading.Event()
    mark = tmp_path / "mark"
    mark.touch()
    os.utime(mark, (1e9, 1e9))
    monkeypatch.setattr(owner.os, "utime", lambda path: renewed.set())
    beats.add(mark)
    assert renewed.wait(PATIENCE_SECONDS)
    beats.remove(mark)

"""Makes a process the owner of a directory of checkpoints: only one process writes there.

In:     the directory.
Out:    a mark in it that names this process; or an error that names the owner.
Method: a process first makes its mark and then looks for others, so that of two that start at the same time at least one sees
        the other; the one whose mark has the lesser name stays. A mark is valid while its process lives. On the same machine
        (kernel and process namespace) this is visible: a process with that id and start time; a reused id has another start
        time. For another machine only the age of the mark is visible: its process renews it every `BEAT_SECONDS`, and is
        taken for dead if it has not done so for `DEAD_SECONDS`, by the clock of the disk.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.errors import CheckpointError, warn

BEAT_SECONDS = 10.0
DEAD_SECONDS = 60.0
"""The age of a mark after which its process on another machine is taken for dead."""
TOGETHER_SECONDS = 2.0
"""How long one of two processes that start at the same time waits for the other to give up."""
LOOK_SECONDS = 0.1
PREFIX = ".autopar-owner-"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that made a mark.

    Attributes:
        host: The name of its host, for messages.
        machine: Its kernel and process namespace, in which `pid` is unique.
        pid: Its process id.
        started: Its start time, in the system's format.
        since: When it made the mark, for messages.
    """

    host: str
    machine: str
    pid: int
    started: str
    since: str

    @property
    def key(self) -> str:
        """A key that no other process has."""
        return hashlib.sha256(f"{self.machine}/{self.pid}/{self.started}".encode()).hexdigest()[:16]

    @property
    def mark(self) -> str:
        """The file name of its mark."""
        return PREFIX + self.key

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, there since {self.since}"


def claim(directory: str | os.PathLike) -> None:
    """Make this process the owner of a directory, until it ends or calls `release`.

    Raises `CheckpointError`: a living process owns it; or the directory cannot be written.
    """
    root, own = Path(directory).absolute(), this_process()
    mark = root / own.mark
    with _ONE_AT_A_TIME:
        with writing_in(root):
            if mark in _BEATS.marks and mark.exists():
                return
            root.mkdir(parents=True, exist_ok=True)
            _write(mark, own)
            try:
                _outlive_the_dead(mark, own)
            except BaseException:
                mark.unlink(missing_ok=True)
                raise
        _BEATS.add(mark)


@contextlib.contextmanager
def writing_in(root: Path) -> Iterator[None]:
    """Turn an `OSError` into an error that names the directory. Raises `CheckpointError`: instead of an `OSError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "checkpoints cannot be written here.",
            given=str(root),
            wrong=f"{error}.",
            do="pass a directory that this process may write to.",
            path=str(root),
        ) from error


def release(directory: str | os.PathLike) -> None:
    """Give up a directory of checkpoints that this process has written into, so that other processes may write there.

    This happens by itself when the process ends. First wait for checkpoints that are being written.
    """
    mark = Path(directory).absolute() / this_process().mark
    _BEATS.remove(mark)
    with contextlib.suppress(OSError):
        mark.unlink()


@contextlib.contextmanager
def hold(directory: str | os.PathLike) -> Iterator[None]:
    """Make one run of this process the owner of a directory, while the run lasts.

    Raises `CheckpointError`: as in `claim`; or another run of this process owns it.
    """
    root = Path(directory).absolute()
    if root in _RUNS:
        raise _taken(root, "another run of this process, in another thread, has not ended.")
    _RUNS.append(root)
    try:
        was_owner = root / this_process().mark in _BEATS.marks
        claim(root)
        try:
            yield
        finally:
            if not was_owner:
                release(root)
    finally:
        _RUNS.remove(root)


def this_process() -> Owner:
    """This process, as its mark names it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Owner(socket.gethostname(), _machine(), os.getpid(), start_of(os.getpid()) or "", since)


def start_of(pid: int) -> str | None:
    """The start time of a process on this machine, in the system's format; "": it does not exist; None: not visible."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]  # a zombie no longer writes
        except OSError:
            pass
    else:
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if told:
            return told
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass
    return None


def _machine() -> str:
    """The kernel and process namespace; containers may share a host's name and kernel, and each have a process 1."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _write(mark: Path, owner: Owner) -> None:
    """Write a mark atomically."""
    made = mark.with_name(f".autopar-{uuid.uuid4().hex}")
    made.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    os.rename(made, mark)


def _read(mark: Path) -> Owner | None:
    """The process that a mark names; None: the file is not a mark, or of another version."""
    text = mark.read_text(encoding="utf-8")
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class _Other:
    """The mark of another process; `lives`: whether the process lives; None: not known yet."""

    mark: Path
    name: str
    age_seconds: float
    lives: bool | None


def _outlive_the_dead(mark: Path, own: Owner) -> None:
    """Wait until there is no other mark; marks of dead processes are removed.

    Raises `CheckpointError`: the process of another mark lives.
    """
    seen: dict[Path, float] = {}
    give_way, is_told = time.monotonic() + TOGETHER_SECONDS, False
    while True:
        others = _others(mark, own, seen)
        for other in others:
            if other.lives is False:
                other.mark.unlink(missing_ok=True)
        alive = [other for other in others if other.lives]
        if alive and (mark > alive[0].mark or time.monotonic() > give_way):
            age = f"its last sign of life is {max(0.0, alive[0].age_seconds):.0f} s old"
            raise _taken(mark.parent, f"{alive[0].name}, has not ended; {age}.")
        unknown = [other for other in others if other.lives is None]
        if not alive and not unknown:
            return
        if unknown and not is_told:
            is_told = True
            told = f"waiting up to {DEAD_SECONDS:.0f} s for a sign that it lives"
            warn(f"the checkpoints in {mark.parent} are of {unknown[0].name}: {told}.")
        time.sleep(LOOK_SECONDS)


def _others(mark: Path, own: Owner, seen: dict[Path, float]) -> list[_Other]:
    """The other marks, by name; `seen`: the time of renewal of each when it was first seen; extended."""
    os.utime(mark)
    now = mark.stat().st_mtime  # the time on the disk's clock
    found = []
    for other in sorted(mark.parent.glob(PREFIX + "*")):
        try:
            owner, beat = _read(other), other.stat().st_mtime
        except FileNotFoundError:
            continue
        if other == mark:
            continue
        age = now - beat
        started = start_of(owner.pid) if owner is not None and owner.machine == own.machine else None
        if owner is not None and started is not None:
            lives: bool | None = started == owner.started
        else:
            lives = True if beat != seen.setdefault(other, beat) else False if age > DEAD_SECONDS else None
        found.append(_Other(other, str(owner or other.name), age, lives))
    return found


def _taken(root: Path, wrong: str) -> CheckpointError:
    return CheckpointError(
        "another run has its checkpoints in this directory.",
        given=str(root),
        wrong=wrong,
        do="end that one, or pass a directory of its own to each: two would remove and read each other's checkpoints.\n"
        "A process that only saves there now and then lets go of it by checkpoint.release(directory).",
        path=str(root),
    )


class _Beats:
    """Owns the thread that renews the marks of this process."""

    def __init__(self) -> None:
        self.marks: dict[Path, None] = {}
        self._thread: threading.Thread | None = None

    def add(self, mark: Path) -> None:
        """Start to renew a mark."""
        if self._thread is None or not self._thread.is_alive():  # a forked process has no thread
            self.marks.clear()
            self._thread = threading.Thread(target=self._run, daemon=True, name="autopar-owner")
            self.marks[mark] = None
            self._thread.start()
        self.marks[mark] = None

    def remove(self, mark: Path) -> None:
        """Stop renewing a mark."""
        self.marks.pop(mark, None)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            for mark in list(self.marks):
                with contextlib.suppress(OSError):  # removed: the next `claim` sees it
                    os.utime(mark)


_BEATS = _Beats()
_RUNS: list[Path] = []
_ONE_AT_A_TIME = threading.RLock()
"""Module state: the directories that this process owns."""


@atexit.register
def _release_all() -> None:
    own = this_process().mark
    for mark in list(_BEATS.marks):
        if mark.name == own:
            release(mark.parent)

"""Runs a probe in a process of its own, and ends it if it hangs.

In:     a command, and how long it may be silent.
Out:    `Answer`: what it reported before it ended, or was killed.
Method: the child writes JSON lines marked by a prefix, since libraries write to standard output too. Its process group is
        killed when it is silent for too long, so that nothing that it has started is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "@autopar-doctor "


@dataclass(slots=True)
class Answer:
    """What a probe reported, by name; the error, if it failed; and its other output."""

    reports: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    output: str = ""


def ask_probe(name: str, silence_seconds: float) -> Answer:
    """Run a function of `probe.py`."""
    # A probe must not take all of a GPU's memory from other processes.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return ask([sys.executable, "-m", "autopar.doctor.probe", name], silence_seconds, environment)


def ask(command: Sequence[str], silence_seconds: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run a command until it ends, and kill it if it is silent for too long."""
    answer = Answer()
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            # Otherwise Python's output arrives after its error.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
    except OSError as error:
        answer.error = str(error)
        return answer
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    try:
        while (line := lines.get(timeout=silence_seconds)) is not None:
            if line.startswith(MARK):
                answer.reports.update(json.loads(line.removeprefix(MARK)))
            else:
                answer.output += line
        status = process.wait(silence_seconds)
        if status:
            answer.error = _last_line(answer.output) or f"it ended with status {status}"
    except (queue.Empty, subprocess.TimeoutExpired):
        answer.error = f"no answer within {silence_seconds:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return answer


def _forward(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

"""A parallelized step keeps its signature: type checkers reject what the function itself would."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
import autopar
from typing import assert_type

@autopar.parallelize
def bare(state: dict[str, float], batch: int, *, scale: float = 1.0) -> tuple[dict[str, float], float]:
    return state, batch * scale

@autopar.parallelize(method=autopar.DataParallel(), donate_argnums=())
def called(state: str, batch: int) -> str:
    return state * batch

class Trainer:
    @autopar.parallelize
    def step(self, state: str, batch: int) -> str:
        return state * batch

assert_type(bare({}, 1, scale=2.0), tuple[dict[str, float], float])
assert_type(called("a", 1), str)
assert_type(Trainer().step("a", 1), str)
assert_type(autopar.parallelize(len)([1]), int)
bare.plan({}, 1).cost.step_seconds
called.replan().latest()

bare({}, "one")  # wrong
bare({})  # wrong
called("a", 1, 2)  # wrong
Trainer().step(1, 1)  # wrong
bare.pln({}, 1)  # wrong
called.plan("a", 1).cots  # wrong
"""
WRONG = [number for number, line in enumerate(SOURCE.splitlines(), 1) if line.endswith("# wrong")]


def needs(tool: str, program: str = sys.executable) -> pytest.MarkDecorator:
    missing = tool if importlib.util.find_spec(tool) is None else program
    found = missing != tool and shutil.which(program) is not None
    return pytest.mark.skipif(not found, reason=f"{missing} is not installed")


CONFIG = """
[mypy]
follow_imports = skip
[mypy-autopar.*]
follow_imports = silent
"""


def check(tool: str, folder: Path, *options: str) -> str:
    """What a type checker says of the source; it sees nothing of other packages than ours."""
    (folder / "step.py").write_text(SOURCE)
    (folder / "mypy.ini").write_text(CONFIG)
    root = str(Path(__file__).parent.parent)
    command = [sys.executable, "-m", tool, *options, "step.py"]
    environment = {**os.environ, "MYPYPATH": root, "PYTHONPATH": root}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


@needs("mypy")
def test_mypy(tmp_path):
    said = check("mypy", tmp_path, "--config-file", "mypy.ini", "--no-error-summary")
    found = [
        int(line.split(":")[1]) for line in said.splitlines() if line.startswith("step.py:") and ": error:" in line
    ]
    assert sorted(set(found)) == WRONG, said


@needs("pyright", program="node")  # without it, pyright would fetch one from a network
def test_pyright(tmp_path):
    said = check("pyright", tmp_path, "--outputjson")
    errors = [d for d in json.loads(said)["generalDiagnostics"] if d["severity"] == "error"]
    assert sorted({d["range"]["start"]["line"] + 1 for d in errors}) == WRONG, said

"""The benchmark suite runs: on a cluster that is only described, where it predicts, and so takes seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytest_benchmark") is None,
    reason="pytest-benchmark is not installed: pip install pytest-benchmark",
)


def run_suite(folder: Path, *options: str) -> tuple[int, str, dict[str, dict]]:
    """Exit status, output, and what the JSON file says of each benchmark."""
    found = folder / "found.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "benchmarks",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--benchmark-json={found}",
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}  # it is no part of this run
    options = ("--cluster", "4 h100", "--size", "small", "-k", "mlp", *options)
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    benchmarks = json.loads(found.read_text())["benchmarks"] if found.exists() else []
    return done.returncode, done.stdout + done.stderr, {each["extra_info"]["way"]: each for each in benchmarks}


def test_predicted(tmp_path):
    """Each way has its line, pytest-benchmark reports the predicted seconds, and a threshold fails the run."""
    status, said, found = run_suite(tmp_path, "--most-over-expert", "0.01")
    assert status == 1 and "too slow: mlp" in said
    assert {"autopar", "autopar fsdp", "by hand, data", "by hand, tensor", "jax.jit, one device"} <= set(found)
    for each in found.values():
        assert each["stats"]["median"] == pytest.approx(each["extra_info"]["predicted"], rel=1e-6)
    assert "one step, predicted on 4 h100" in said and "over the best by hand" in said
    assert "parallax" not in found, "it predicts nothing"
    seconds = {way: each["extra_info"]["predicted"] for way, each in found.items()}
    best, by_hand = (min(seconds[way] for way in seconds if way.startswith(whose)) for whose in ("autopar", "by hand"))
    assert best <= 1.02 * by_hand, "else it fails without a threshold, too"

"""`make gpu`, rehearsed: every part runs small on CPU devices; the command goes on where it stopped, and ends what hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_wheels  # noqa: E402

ONE_MODEL = "step: vit"
PARTS = [name for name in gpu_parts.PARTS if name == ONE_MODEL or not name.startswith(("step: ", "tests"))]


@pytest.mark.parametrize("name", PARTS)
def test_rehearsal(name, tmp_path, monkeypatch):
    devices = jax.devices()[: 1 if name == "two stages" else 2]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    row = gpu_parts.run_part(name, True, tmp_path)
    assert row["state"] == "well", row["why"]
    assert json.loads(json.dumps(row["figures"])) == row["figures"] and row["figures"]
    if name == "calibration":
        assert (tmp_path / gpu_parts.PROFILE).exists()
    if name.startswith("offload"):
        assert row["figures"]["planned host GB"] > 0


def test_models():
    """Each can be traced, and there is more of it on GPUs; nothing is allocated."""
    assert len(gpu_parts.MODELS) == 6
    for make in gpu_parts.MODELS.values():
        step, state, batch = make(True)
        new, loss = jax.eval_shape(step, state, batch)
        assert jax.tree.structure(new) == jax.tree.structure(state) and loss.shape == ()
        assert sum(x.size for x in jax.tree.leaves(make(False)[1])) > 10 * sum(x.size for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "said, status, state",
    [
        ("4 passed, 2 skipped in 3.1s", 0, "well"),
        ("SKIPPED [4] test_nccl.py:76: could not import 'cupy'\n4 skipped in 3.1s", 0, "left out"),
        ("1 failed, 3 passed in 3.1s", 1, "wrong"),
    ],
)
def test_tests_on_gpus(said, status, state, tmp_path, monkeypatch):
    def run(command, **_):
        assert any(word.endswith("test_nccl.py") for word in command)
        return subprocess.CompletedProcess(command, status, said, "")

    monkeypatch.setattr(gpu_parts.subprocess, "run", run)
    row = gpu_parts.run_part("tests", False, tmp_path)
    assert row["state"] == state and (row["figures"] or row["why"])
    if state == "well":
        assert row["figures"] == {"passed": 4, "skipped": 2}
    if state == "left out":
        assert "cupy" in row["why"]


def test_a_wrong_part_says_why(tmp_path, monkeypatch):
    def broken(small, folder):
        raise ValueError("no such thing")

    monkeypatch.setitem(gpu_parts.PARTS, "broken", broken)
    assert gpu_parts.run_part("broken", True, tmp_path)["why"] == "ValueError: no such thing"


def test_it_goes_on_where_it_stopped(tmp_path):
    file, states, ran = tmp_path / "gpu.json", {"a": "well", "b": "wrong", "c": "well"}, []

    def run(name):
        ran.append(name)
        if name == "c" and len(ran) == 3:
            raise KeyboardInterrupt
        return {"state": states[name], "figures": {"ratio": 1.2345}, "why": "", "seconds": 2.0}

    with pytest.raises(KeyboardInterrupt):
        gpu.run_parts(list(states), file, run)
    assert sorted(json.loads(file.read_text())) == ["a", "b"]
    states["b"] = "well"
    found = gpu.run_parts(list(states), file, run)
    assert ran == ["a", "b", "c", "b", "c"] and all(row["state"] == "well" for row in found.values())
    assert gpu.run_parts(["a"], file, run, again=True) and ran[-1] == "a"
    assert gpu.table(found, "all").row_count == 3 and gpu.figure_text(1.2345) == "1.23"


def test_a_part_that_hangs_is_ended(tmp_path):
    row = gpu.in_a_process("calibration", True, tmp_path, limit_seconds=0.2)
    assert (row["state"], row["why"]) == ("wrong", "ended after 0 s") and row["seconds"] < 30


def test_wheels_that_can_be_carried(tmp_path, monkeypatch):
    asked = gpu_wheels.command([*gpu_wheels.NEEDED], tmp_path, "3.12")
    assert "--no-deps" in asked and asked[-2:] == ["pulp>=3.3,<4", "highspy"]
    for name, size in (("small", 3), ("large", 5)):
        (tmp_path / f"{name}-1-py3-none-any.whl").write_bytes(bytes(size))
    assert sum(gpu_wheels.sizes(tmp_path).values()) == 8
    monkeypatch.setattr(gpu_wheels, "MOST_BYTES", 7)
    with pytest.raises(SystemExit, match="leave out large"):
        gpu_wheels.sizes(tmp_path)

"""Each example runs to its end, as a user runs it: a script in a process of its own, here with few steps."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import XLA_FLAGS
from tests.patience import PATIENCE_SECONDS

EXAMPLES = Path(__file__).parent.parent / "examples"
FRAMEWORKS = ("digits_cnn", "equinox_vit", "flax_nnx_transformer", "haiku_mlp", "keras_digits")


def run_example(name: str, folder: Path, num_steps: int) -> str:
    """What `examples/<name>.py --steps <num_steps>` prints, run in `folder`; XLA compiles it as it does in all tests."""
    devices, *quicker = XLA_FLAGS
    source = (EXAMPLES / f"{name}.py").read_text()
    assert f'"{devices}"' in source, "the script sets its devices itself"
    script = folder / f"{name}.py"
    script.write_text(source.replace(f'"{devices}"', f'"{" ".join((devices, *quicker))}"'))
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(script), "--steps", str(num_steps)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_train_gpt(tmp_path):
    """The script itself asserts that both runs lose alike."""
    printed = run_example("train_gpt", tmp_path, 3)
    assert "the runs differ by at most" in printed
    assert (tmp_path / "train_gpt.png").stat().st_size > 1000
    assert (
        str(tmp_path / "train_gpt.html") in printed
        and "Where the time goes" in (tmp_path / "train_gpt.html").read_text()
    )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_example(name, tmp_path):
    if name.startswith("keras"):
        if importlib.util.find_spec("keras") is None:
            pytest.skip("Keras is not installed: pip install keras")
    printed = run_example(name, tmp_path, 8)
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_generate(tmp_path):
    """The script itself asserts that the tokens are those of one device."""
    assert "each the same as on one device" in run_example("generate", tmp_path, 3)


def test_examples_are_short_and_all_run():
    """Under 150 lines each, and none that the tests above leave out."""
    sources = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(sources) == {"train_gpt", "generate", *FRAMEWORKS}
    for name, source in sources.items():
        assert source.count("\n") < 150, name
        assert "@autopar.parallelize" in source, name

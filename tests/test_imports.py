"""Importing autopar starts nothing and sets nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from tests.patience import PATIENCE_SECONDS

SCRIPT = """
import os, sys
import jax
environment, flags = dict(os.environ), dict(jax.config.values)
import autopar
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert dict(os.environ) == environment, "the environment was changed"
assert dict(jax.config.values) == flags, "a JAX flag was changed"
for name in ("ray", "cupy", "orbax", "tensorstore", "flax", "optax", "matplotlib"):
    assert name not in sys.modules, f"{name} was imported"
"""


def test_importing_autopar_starts_nothing():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr


def test_files_that_are_no_modules_are_packaged():
    root = Path(__file__).parent.parent
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["autopar"]
    package = root / "autopar"
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == {path for pattern in patterns for path in package.glob(pattern)}

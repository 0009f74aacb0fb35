"""Same input, same plan: in other processes, whose sets and hashes have another order, and whatever else the machine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANNED = """
import sys
sys.path.insert(0, "benchmarks")
import gpt, jax.numpy as jnp, autopar
step, *args = gpt.make_step(gpt.Config(2, 256, 4, vocabulary=1024, tokens=64, batch=64, experts=4, dtype=jnp.bfloat16))
parallel = autopar.parallelize(step, cluster=autopar.Cluster.of("8 h100"), batch_argnums=1)
parallel.plan(*args).save(sys.argv[1])
"""
TIMED = "planning_seconds", "pass_seconds"


def test_in_two_processes_at_once(tmp_path):
    """Experts, whose layers are tied and untied, on three meshes: were these in a set, the two processes would try them in
    different orders."""
    files = [tmp_path / f"{seed}.json" for seed in (1, 2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PLANNED, file],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": file.stem, "PYTHONPATH": str(ROOT)},
        )
        for file in files
    ]
    assert [process.wait() for process in running] == [0, 0]
    one, other = (json.loads(file.read_text(), object_hook=_untimed) for file in files)
    assert one == other


def _untimed(entries):
    return {name: value for name, value in entries.items() if name not in TIMED}

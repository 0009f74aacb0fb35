"""A table of one published run, for tests of how rows are read."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from published_runs import read_runs  # noqa: E402

ROW = {
    "source": "a stranger", "model": "Llama-tiny", "layers": "2", "hidden": "256", "heads": "4", "ffn": "512", "vocab": "1k",
    "seq": "512", "global_batch": "16", "gpus": "8", "gpu_type": "H100", "tp": "1", "pp": "1", "dp": "8", "microbatch": "1",
    "precision": "bf16", "recompute": "full", "zero": "3", "attention": "flash 2", "seconds_per_step": "1.5",
    "framework": "JAX",
}  # fmt: skip


def table_of(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(name="read")
def read_row(tmp_path):
    """The one run of a row that differs from `ROW`, or why it is left out."""

    def one(**cells):
        runs, left = read_runs(table_of(tmp_path / "runs.tsv", ROW | cells))
        return (*runs, *left)[0]

    return one

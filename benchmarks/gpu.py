"""Runs everything that has not been run for lack of GPUs: one command, on a machine with GPUs and without a network.

    make gpu        or    python benchmarks/gpu.py [gpu.json] [--only tests,offload] [--again] [--rehearse]

In:     the parts of `gpu_parts.py`; the file, with the results of earlier runs.
Out:    a table, and the same figures in the file. Exit status 1 if a part failed.
Method: each part runs in a process of its own, and is ended after 8 minutes. If the command is started again, it continues:
        parts that succeeded are not run again. `--rehearse` runs all parts small, on virtual CPU devices: this shows that they
        run, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LIMIT_SECONDS = 480.0
ROOT = Path(__file__).parent.parent
REHEARSING = {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
ON_GPUS = {"JAX_PLATFORMS": "cuda,cpu"}

Row = dict[str, Any]
"""Of a part: `state` ("well", "wrong", "left out"), `figures`, `seconds`, `why`."""


def run_parts(
    names: Sequence[str],
    file: Path,
    run: Callable[[str], Row],
    again: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Row]:
    """Run what did not go well before, and keep what is found after each part.

    Args:
        names: Of the parts.
        file: Holds what was found before; written anew behind each part.
        run: Runs one.
        again: Whether also what went well is run.
        tell: Takes a line of progress.
    """
    found: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        if not again and found.get(name, {}).get("state") == "well":
            continue
        tell(f"{name} ...")
        found[name] = run(name)
        written = file.with_suffix(".part")
        written.write_text(json.dumps(found, indent=1) + "\n")
        written.replace(file)
    return found


def in_a_process(name: str, rehearse: bool, folder: Path, limit_seconds: float = LIMIT_SECONDS) -> Row:
    """One part in a process of its own, which is ended, with all that it has started, when its time is up."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as own:
        result = Path(own) / "row.json"
        command = [sys.executable, str(Path(__file__).with_name("gpu_parts.py")), name, str(result), str(folder)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with (Path(own) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, *(["--rehearse"] if rehearse else [])],
                cwd=ROOT,
                env={**os.environ, **(REHEARSING if rehearse else ON_GPUS), "PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            said = log.read()
        row: Row = json.loads(result.read_text()) if result.exists() else {"state": "wrong", "figures": {}, "why": ""}
    if process.returncode == -signal.SIGKILL and not row["why"]:
        row["why"] = f"ended after {limit_seconds:.0f} s"
    if row["state"] == "wrong":
        row["why"] = row["why"] or f"exit status {process.returncode}"
        row["log"] = said[-3000:]
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def table(found: Mapping[str, Row], title: str) -> Table:
    """All parts."""
    made = Table(title=title, title_justify="left", box=None)
    for heading in ("part", "", "seconds", "figures"):
        made.add_column(heading, justify="right" if heading == "seconds" else "left", overflow="fold")
    for name, row in found.items():
        figures = ", ".join(f"{what} {figure_text(figure)}" for what, figure in row["figures"].items())
        made.add_row(name, row["state"], f"{row['seconds']:.0f}", "; ".join(filter(None, (row["why"], figures))))
    return made


def figure_text(figure: Any) -> str:
    """A number to three digits."""
    return f"{figure:.3g}" if isinstance(figure, float) else str(figure)


def main() -> None:
    """Run the parts, print the table."""
    sys.path.insert(0, str(ROOT))  # autopar need not be installed
    from gpu_parts import PARTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=Path("gpu.json"))
    parser.add_argument("--only", help="parts, with commas between")
    parser.add_argument("--again", action="store_true", help="run what went well before, too")
    parser.add_argument("--rehearse", action="store_true", help="small, on this machine's CPU")
    chosen = parser.parse_args()
    if not chosen.rehearse and not list(Path("/dev").glob("nvidia[0-9]*")):
        sys.exit("there is no NVIDIA GPU here: `--rehearse` runs the same on the CPU, small")
    names = chosen.only.split(",") if chosen.only else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    file = chosen.file.with_stem(f"{chosen.file.stem}-rehearsed") if chosen.rehearse else chosen.file
    console, folder = Console(width=160, highlight=False), file.resolve().parent
    found = run_parts(
        names, file, lambda name: in_a_process(name, chosen.rehearse, folder), chosen.again, console.print
    )
    console.print(table(found, f"autopar on {'this CPU, a rehearsal' if chosen.rehearse else 'GPUs'}"))
    wrong = [name for name in names if found[name]["state"] == "wrong"]
    sys.exit(f"wrong: {', '.join(wrong)}; {file} has what they said" if wrong else 0)


if __name__ == "__main__":
    main()

"""Cells of a table of correctness, in pieces that end and go on: what the sweeps have in common.

In:     cells, each a model's name and what else; a function from one to `Judged`; the arguments `add_arguments` knows.
Out:    a line for each cell that was run, and the number that failed of all.
Method: a model's cells come together, so that what jit says of it is made once, and what was compiled for it is dropped
        behind them. Every cell is a line of the record, too: run again, the sweep leaves out what was right there.
        Processes divide the models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.conftest import drop_programs

Cell = tuple[str, ...]


class Judged(NamedTuple):
    """Whether a cell is as it should be, and what is to be said of it."""

    is_right: bool
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which part is run, for how long, and where it is noted."""
    parser.add_argument("--record", type=Path, help="file of what was found; what it says is right is not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no cell is begun after so many")
    parser.add_argument("--part", default="1/1", help="K/N: only every Nth model, from the Kth on")
    parser.add_argument("--processes", type=int, default=1, help="so many at a time, each with a part of the models")


def run_cells(cells: Sequence[Cell], judge: Callable[[Cell], Judged], chosen: argparse.Namespace, module: str) -> int:
    """Run what the arguments choose of the cells; the exit status: 1 if one of those that were run or noted is wrong.

    Args:
        cells: All that there are, in the order in which they are run.
        judge: Runs one, and raises nothing.
        chosen: What `add_arguments` has added, parsed.
        module: The name under which a process of its own runs the same with the same arguments.
    """
    if chosen.processes > 1:
        with tempfile.TemporaryDirectory() as folder:
            record = chosen.record or Path(folder) / "record.jsonl"
            is_whole = run_processes(module, chosen.processes, record)
            return say_failures(cells, read_record(record)) or int(not is_whole)
    first, parts = map(int, chosen.part.split("/"))
    models = list(dict.fromkeys(cell[0] for cell in cells))[first - 1 :: parts]
    found, end = read_record(chosen.record), time.monotonic() + chosen.seconds
    for model in models:
        left = [cell for cell in cells if cell[0] == model and not (cell in found and found[cell].is_right)]
        for cell in left:
            if time.monotonic() < end:
                found[cell] = judge(cell)
                note(chosen.record, cell, found[cell])
                print(*(f"{word:8}" for word in cell), found[cell].text, flush=True)
        if left:
            drop_programs()
    return say_failures([cell for cell in cells if cell[0] in models], found)


def run_processes(module: str, count: int, record: Path) -> bool:
    """The same arguments in so many processes, each with its part of the models; whether each came to its end."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--processes", "1", "--record", str(record)]
    started = [subprocess.Popen([*command, "--part", f"{k}/{count}"]) for k in range(1, count + 1)]
    return all([process.wait() in (0, 1) for process in started])


def say_failures(cells: Sequence[Cell], found: dict[Cell, Judged]) -> int:
    """How many of these cells were run and are wrong, and which; the exit status: 1 if there are any."""
    known = [cell for cell in cells if cell in found]
    wrong = [cell for cell in known if not found[cell].is_right]
    print(f"{len(known)} of {len(cells)} cells, {len(wrong)} failures", *map(" ".join, wrong), sep="\n    ", flush=True)
    return 1 if wrong else 0


def read_record(record: Path | None) -> dict[Cell, Judged]:
    """What was found of each cell; the last time counts."""
    if record is None or not record.exists():
        return {}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {tuple(line["cell"]): Judged(line["is_right"], line["text"]) for line in lines}


def note(record: Path | None, cell: Cell, judged: Judged) -> None:
    """One more line of the record, which other processes write, too."""
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(json.dumps({"cell": cell, **judged._asdict()}) + "\n")

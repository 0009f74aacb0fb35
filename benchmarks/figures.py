"""The figures of the package, as JSON: predicted seconds and bytes of every model, and the size of the code.

    python benchmarks/figures.py figures_before.json [--seconds 240] [--models gpt,...]
    python benchmarks/figures.py figures_after.json --against figures_before.json

Plans every model of `tests/models` on two meshes and as two pipelines, for described machines: no device is touched. Results
that are in the file already are not computed again, so you can repeat the command, each time for `--seconds` CPU seconds.
`--against` prints which figures became worse by more than 0.1 %, and what can no longer be planned.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import autopar  # noqa: E402
from tests.models.registry import CASES  # noqa: E402

MICROBATCHES = 4
METHODS: dict[str, Any] = {
    "mesh 8": lambda: autopar.ShardParallel(mesh_shape=(8,)),
    "mesh 2x4": lambda: autopar.ShardParallel(mesh_shape=(2, 4)),
    "2 stages": lambda: autopar.PipelineParallel(submeshes=(4, 4), num_microbatches=MICROBATCHES),
    "4 stages": lambda: autopar.PipelineParallel(submeshes=(2,) * 4, num_microbatches=MICROBATCHES),
}
TOLERANCE = 1.001


def main() -> None:
    """Fill the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0, help="CPU seconds after which no further plan is begun")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--against", type=Path)
    chosen = parser.parse_args()
    found: dict[str, Any] = json.loads(chosen.file.read_text()) if chosen.file.exists() else {}
    found["code"] = code_figures(ROOT / "autopar")
    plans = found.setdefault("plans", {})
    for name in chosen.models.split(","):
        if time.process_time() > chosen.seconds:
            break
        todo = [method for method in METHODS if f"{name}, {method}" not in plans]
        case = CASES[name]() if todo else None
        for method in todo:
            plans[f"{name}, {method}"] = predicted(case, METHODS[method]())
        if todo:
            chosen.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    chosen.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    missing = sum(f"{name}, {method}" not in plans for name in CASES for method in METHODS)
    print(f"{len(plans)} plans; {missing} are left")
    if chosen.against:
        compare(json.loads(chosen.against.read_text()), found)


def predicted(case: Any, method: Any) -> dict[str, Any]:
    """What the plan of one model promises, and the CPU seconds that it took."""
    link = autopar.Link(1e-7, 1e9)
    device = autopar.Device("slow", 1e8, memory_bytes_per_second=1e9)
    cluster = autopar.Cluster(1, 8, device=device, intra=link, inter=link)
    started = time.process_time()
    try:
        plan = autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,)).plan(
            case.state, case.batches[0]
        )
    except autopar.errors.AutoparError as error:
        return {"refused": f"{type(error).__name__}: {error.summary}"}
    return {
        "step_seconds": plan.cost.step_seconds,
        "peak_bytes": list(plan.cost.peak_bytes)
        if isinstance(plan.cost.peak_bytes, list | tuple)
        else plan.cost.peak_bytes,
        "planning_cpu_seconds": round(time.process_time() - started, 2),
    }


def code_figures(package: Path) -> dict[str, Any]:
    """Lines, sizes of files and functions, and uses of `Any`, of a package."""
    sizes, functions, of_any = {}, [], 0
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        sizes[str(path.relative_to(package))] = len(text.splitlines())
        if path.is_relative_to(package / "ir"):
            of_any += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text)))
        functions += [
            node.end_lineno - node.lineno + 1
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
        ]
    functions.sort()
    return {
        "lines": sum(sizes.values()),
        "files": len(sizes),
        "median_file": statistics.median(sizes.values()),
        "files_above_400": {name: size for name, size in sizes.items() if size > 400},
        "functions": len(functions),
        "median_function": statistics.median(functions),
        "function_within_which_90_percent_are": functions[int(0.9 * len(functions))],
        "any_in_ir": of_any,
        "lines_of_folders": {
            folder.name: sum(n for name, n in sizes.items() if name.startswith(f"{folder.name}/"))
            for folder in sorted(package.iterdir())
            if folder.is_dir() and folder.name != "__pycache__"
        },
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print what has become worse."""
    seconds = [0.0, 0.0]
    same = 0
    for cell, old in before["plans"].items():
        new = after["plans"].get(cell)
        if new is None:
            continue
        if "refused" in old or "refused" in new:
            if old != new:
                print(f"{cell}: {old.get('refused', 'planned')} before, {new.get('refused', 'planned')} now")
            continue
        seconds[0] += old["planning_cpu_seconds"]
        seconds[1] += new["planning_cpu_seconds"]
        slower, fuller = new["step_seconds"] / old["step_seconds"], _peak(new) / _peak(old)
        if slower > TOLERANCE or fuller > TOLERANCE:
            print(f"{cell}: {slower:.4f} of the seconds, {fuller:.4f} of the bytes")
        elif slower < 2 - TOLERANCE or fuller < 2 - TOLERANCE:
            print(f"{cell}: better: {slower:.4f} of the seconds, {fuller:.4f} of the bytes")
        else:
            same += 1
    print(f"{same} are alike; planning took {seconds[1] / max(seconds[0], 1e-9):.3f} of the CPU seconds before")
    for name in ("lines", "median_file", "median_function", "function_within_which_90_percent_are", "any_in_ir"):
        print(f"{name}: {before['code'][name]} before, {after['code'][name]} now")


def _peak(plan: dict[str, Any]) -> float:
    found = plan["peak_bytes"]
    return max(found) if isinstance(found, list) else found


if __name__ == "__main__":
    main()

"""Steps with kernels, 8-bit floats, experts and offloading, under every method: planned, equal to jit, compiled for 8 H100.

    python benchmarks/kernels.py [kernels.json] [--seconds 240] [--steps flash,...] [--methods auto,...] [--target h100]
    python benchmarks/kernels.py kernels.json --seconds 0 --page

In:     the steps of `kernel_steps.py`; the file, with the results of earlier runs, so that the command can be repeated, each
        time for `--seconds` CPU seconds. Compiling for a GPU needs `pip install 'autopar[verify]'`; without it, it is left
        out.
Out:    a table. Equal: the largest difference of any leaf of state and loss to plain `jax.jit`, relative to the leaf's largest
        number, after one step on 8 virtual CPU devices, with the kernels interpreted (cuDNN's attention is replaced by plain
        attention). Compiled: XLA's peak memory over the predicted peak, whether collectives and copies to and from host memory
        move the planned bytes, and the number of kernels in the compiled programs (none of the interpreted ones). A part: the
        fraction of a kernel's arrays that one run on one device reads or writes, for the array that is divided least; for
        kernels that are found in the compiled program, the same for their results there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
from cases import Made
from kernel_steps import STEPS
from rich.console import Console
from rich.table import Table

import autopar
from autopar._jax import all_equations, with_cudnn_of
from autopar.errors import AutoparError
from autopar.mesh import ArrayType
from autopar.partition.task import abstract_mesh, device_program, jitted
from autopar.verify.targets import find_target

METHODS: dict[str, Callable[[], Any]] = {
    "auto": autopar.Auto,
    "ZeRO-3": lambda: autopar.DataParallel(zero=3),
    "3D": lambda: autopar.ThreeD(data=2, tensor=2, pipeline=2, num_microbatches=2),
    "2 stages": lambda: autopar.PipelineParallel(num_stages=2, num_microbatches=2),
}
KERNELS = {
    "pallas_call": "Pallas",
    "dot_product_attention_fwd_wrapper": "cuDNN forward",
    "dot_product_attention_bwd_wrapper": "cuDNN backward",
    "ragged_dot_general": "grouped product",
    "grouped_product": "grouped product",
}
CLOSE = 1e-5
INTERPRETED = (
    "Kernels for TPUs are interpreted, also where they are compiled for GPUs: XLA then has the interpreter's zeros in memory, "
    "too, which a real kernel has not, and the prediction does not count."
)
Row = dict[str, Any]
Place = tuple[str, int]
"""A kind of kernel, and which of its operands and results."""


def main() -> None:
    """Fill the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=240.0, help="CPU seconds after which nothing further is begun")
    parser.add_argument("--steps", default="", help="those whose names contain one of these words")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--target", default="h100")
    parser.add_argument("--page", action="store_true", help="print the table as a page of the documentation has it")
    parser.add_argument("--again", action="store_true", help="do what the file holds already again")
    chosen = parser.parse_args()
    found: dict[str, Row] = json.loads(chosen.file.read_text()) if chosen.file and chosen.file.exists() else {}
    can_compile = _is_there(chosen.target)
    words = chosen.steps.split(",")
    for step in (name for name in STEPS if any(word in name for word in words)):
        for method in chosen.methods.split(","):
            key = f"{step}; {method}"
            if time.process_time() < chosen.seconds and (chosen.again or key not in found):
                found[key] = row(STEPS[step], METHODS[method], chosen.target if can_compile else None)
                if chosen.file:
                    chosen.file.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.page:
        print(page(found))
        return
    rows = [f"{step}; {method}" for step in STEPS for method in METHODS]
    Console(width=170).print(table({key: found[key] for key in rows if key in found}, chosen.target))


def _is_there(target: str) -> bool:
    try:
        find_target(target, autopar.Cluster.of(f"8 {target}"))
    except AutoparError as error:
        print(error)
        return False
    return True


def row(make: Callable[[bool], Made], method: Callable[[], Any], target: str | None) -> Row:
    """What is found of a step under a method; what fails is told in its place."""
    found: Row = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, part in (("equal", equal), ("compiled", compiled)):
            try:
                if name == "equal" or target is not None:
                    found[name] = part(make, method(), target or "")
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
    told = [str(w.message).splitlines()[0] for w in caught]
    return found | {"whole": sorted({line for line in told if "computed whole" in line})}


def equal(make: Callable[[bool], Made], method: Any, target: str) -> Row:
    """One step on virtual devices, through autopar and through `jax.jit`."""
    step, *types = make(True)
    arguments = jax.tree_util.tree_map_with_path(_example, tuple(types))
    wanted = jax.jit(step)(*arguments)
    cluster = autopar.Cluster.local(jax.devices("cpu")[:8])
    split = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,), donate_argnums=())
    got, plan = split(*arguments), split.plan(*arguments)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return {
        "difference": max(_difference(np.asarray(a), np.asarray(b)) for a, b in pairs),
        "plan": _plan_text(plan),
        "part": _part(plan, "cpu"),
    }


def _example(path: Any, leaf: Any) -> Any:
    """Small numbers; scales and histories of largest numbers begin with one."""
    random = np.random.default_rng(math.prod(leaf.shape))
    name = jax.tree_util.keystr(path)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return random.integers(0, 64, leaf.shape).astype(leaf.dtype)
    if re.search("scale|history", name):
        return np.ones(leaf.shape, leaf.dtype)
    return (0.1 * random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)


def _difference(got: Any, wanted: Any) -> float:
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    return float(abs(got - wanted).max() / max(abs(wanted).max(), 1e-6))


def compiled(make: Callable[[bool], Made], method: Any, target: str) -> Row:
    """The plan for 8 such devices, compiled."""
    step, *types = make(False)
    cluster = autopar.Cluster.of(f"8 {target}")
    plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(*types)
    checked = plan.verify(target)
    own = [name for program in checked.programs for name in program.kernels if "[" in name]
    with with_cudnn_of((9, 10)):
        part = _part(plan, "cuda")
    eqns = all_equations(plan.attached.program.jaxpr)
    whole = max((eqn.outvars[0].aval.size for eqn in eqns if _kind(eqn)), default=0)
    return {
        "plan": _plan_text(plan),
        "predicted": list(checked.predicted_bytes),
        "compiled": list(checked.compiled_bytes),
        "planned": _total(checked.programs, "planned"),
        "emitted": _total(checked.programs, "emitted"),
        "kernels": sorted({name.split()[0] for name in own}),
        "part": part,
        "compiled part": max(map(_elements, own)) / whole if own and whole else None,
    }


def _plan_text(plan: Any) -> str:
    return str(plan.mesh) if plan.is_one_program else f"{len(plan.stages)} stages"


def _total(programs: Any, side: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for program in programs:
        for kind, count in getattr(program, side).items():
            found[kind] += program.runs * count
    return dict(+found)


def _part(plan: Any, platform: str) -> float | None:
    """Of what each kind of kernel reads and writes its largest array: how much of it one run on one device does, at most."""
    whole, here = _sizes(plan.attached.program.jaxpr), Counter[Place]()
    pipeline = plan.attached.pipeline
    for stage in pipeline.stages:
        places = abstract_mesh(stage.mesh)
        for task in stage.tasks:
            overwritten = pipeline.streams.overwritten[task.task.name]
            made = device_program(task, stage.mesh, places, overwritten, platform=platform)
            function, operands = jitted(made, partial(ArrayType.on, places=places))
            here |= _sizes(function.trace(*operands).jaxpr.jaxpr)
    largest = {place[0]: place for place in sorted(whole, key=whole.__getitem__)}  # of each kind the last one stays
    return max((here[place] / whole[place] for place in largest.values() if place in here), default=None)


def _sizes(jaxpr: Any) -> Counter[Place]:
    """Elements of each array that a kind of kernel reads or writes, at most."""
    found: Counter[Place] = Counter()
    for eqn in all_equations(jaxpr):
        kind = _kind(eqn)
        for k, var in enumerate((*eqn.invars, *eqn.outvars) if kind else ()):
            found[kind, k] = max(found[kind, k], var.aval.size)
    return found


def _kind(eqn: Any) -> str | None:
    """The kind of kernel that an equation runs; None: it runs none."""
    kind = KERNELS.get(eqn.primitive.name)
    if kind == "Pallas":
        return f"{kind} {eqn.params['name_and_src_info'].name if 'name_and_src_info' in eqn.params else ''}"
    if eqn.primitive.name == "dot_general" and all(v.aval.dtype.itemsize == 1 for v in eqn.invars):
        return "product of 8 bits"
    return kind


def _elements(kernel: str) -> int:
    return math.prod(int(n) for n in kernel[kernel.index("[") + 1 : kernel.index("]")].split(",") if n)


def table(found: dict[str, Row], target: str) -> Table:
    """All rows."""
    title = f"Steps with kernels on 8 CPU devices, and for 8 {target}"
    made = Table(title=title, title_justify="left", caption=INTERPRETED, caption_justify="left", box=None)
    for k, heading in enumerate(("step; method", "equal", "plan", "XLA over predicted", "bytes", "kernels", "a part")):
        made.add_column(heading, justify="right" if k in (1, 3, 6) else "left", no_wrap=k != 5)
    for key, row in found.items():
        made.add_row(key, _equal_text(row.get("equal", {})), *_compiled_texts(row.get("compiled"), row["whole"]))
    return made


def page(found: dict[str, Row]) -> str:
    """A line for each step: of each method the difference to jit, the part that a kernel does, XLA's memory over predicted."""
    lines = [f"| step | {' | '.join(METHODS)} |", "|---" * (1 + len(METHODS)) + "|"]
    lines += [f"| {step} | {' | '.join(_brief(found.get(f'{step}; {m}')) for m in METHODS)} |" for step in STEPS]
    return "\n".join([*lines, "", INTERPRETED])


def _brief(row: Row | None) -> str:
    if row is None or "error" in row.get("equal", {"error": ""}) or "error" in row.get("compiled", {"error": ""}):
        return "not run" if row is None else "FAILS"
    cell, whole = row["compiled"], "WHOLE " if row["whole"] else ""
    ratios = ", ".join(f"{b / a:.3f}" for a, b in zip(cell["predicted"], cell["compiled"], strict=True))
    bytes_text = "" if cell["planned"] == cell["emitted"] else "; BYTES DIFFER"
    return f"{row['equal']['difference']:.0e};{_part_text(cell['part']) or ' –'}; {whole}{ratios}{bytes_text}"


def _equal_text(cell: Row) -> str:
    if "error" in cell:
        return "FAILS: " + cell["error"][:40]
    where = f"{cell['plan']}{_part_text(cell['part'])}"
    return f"{cell['difference']:.0e}{'' if cell['difference'] <= CLOSE else ' DIFFERENT'}, {where}"


def _compiled_texts(cell: Row | None, whole: list[str]) -> tuple[str, ...]:
    if cell is None or "error" in cell:
        return ("not compiled" if cell is None else "FAILS: " + cell["error"][:60], "", "", "", "")
    ratios = [b / a for a, b in zip(cell["predicted"], cell["compiled"], strict=True)]
    return (
        cell["plan"],
        ", ".join(f"{ratio:.3f}" for ratio in ratios),
        "equal" if cell["planned"] == cell["emitted"] else "DIFFERENT",
        ", ".join(cell["kernels"]),
        ("WHOLE" if whole else "") + _part_text(cell["part"]) + _part_text(cell["compiled part"]),
    )


def _part_text(part: float | None) -> str:
    return "" if part is None else f" 1/{1 / part:.3g}"


if __name__ == "__main__":
    main()

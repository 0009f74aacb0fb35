"""The matrix of pipelines: every model x stages x schedule x microbatches, three steps, against plain `jax.jit`.

In:     `tests/models/registry.py`.
Out:    `check_pipeline`, used by the tests; `python -m tests.pipeline_sweep` runs the whole matrix and prints a table.
Method: leaf by leaf, relative to each leaf's scale, as `sweep.py`; and each program's collectives, in the traced program,
        against the plan's own list.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import tempfile
import time

import jax
import numpy as np

import autopar
from tests.cells import Judged, add_arguments, run_cells
from tests.models.case import Case
from tests.sweep import (
    QUICK,
    SLOW,
    Outcome,
    check_faithful,
    equal,
    failed,
    largest_error,
    reference,
    use_virtual_devices,
)

SUBMESHES: dict[str, tuple[int, ...]] = {
    "2": (4, 4),
    "4": (2, 2, 2, 2),
    "8": (1,) * 8,
    "3": (2, 2, 2),
    "1+1+2+4": (1, 1, 2, 4),
}
"""Stages: the devices of each."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
MICROBATCHES = (1, 4, 16)
TOO_FEW = "the step cannot be cut into so many stages."


def with_batch_for(case: Case, num_microbatches: int) -> Case:
    """The case, with every sample twice where its batch does not divide otherwise."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(case.batches[0])}
    fits = all(size % num_microbatches == 0 for size in sizes)
    if fits or case.fixed_batch or any(2 * size % num_microbatches for size in sizes):
        return case
    twice = tuple(jax.tree.map(lambda x: np.concatenate([x, x]), batch) for batch in case.batches)
    return dataclasses.replace(case, name=f"{case.name} twice", batches=twice)


def check_pipeline(case: Case, stages: str, schedule: str, num_microbatches: int) -> Outcome:
    """Run one cell.

    Raises:
        AssertionError: A leaf differs, or a program communicates something else than the plan says.
        MicrobatchError: The model is rightly refused.
    """
    started = time.perf_counter()
    case = with_batch_for(case, num_microbatches)
    expected = reference(case)
    submeshes = SUBMESHES[stages]
    cluster = autopar.Cluster.local(jax.devices()[: sum(submeshes)], device=SLOW, intra=QUICK)
    method = autopar.PipelineParallel(schedule=schedule, num_microbatches=num_microbatches, submeshes=submeshes)
    step = autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,))
    compiled = step.compile(case.state, case.batches[0])
    check_faithful(compiled)
    worst, where = largest_error(case, compiled, expected)
    cell = f"{case.name} {stages} {schedule} x{num_microbatches}"
    assert worst <= case.tolerance, f"{cell}: {where} differs by {worst:.2e} of its scale"
    return Outcome(worst, where, len(compiled.plan.cost.collectives), time.perf_counter() - started)


def main() -> int:
    """Run the matrix, or what the arguments choose of it, and print it as a table."""
    use_virtual_devices()
    from tests.models.registry import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="comma-separated names; default: all")
    parser.add_argument("--stages", default=",".join(SUBMESHES))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--microbatches", default=",".join(map(str, MICROBATCHES)))
    parser.add_argument("--sample", type=int, default=0, help="so many cells, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    add_arguments(parser)
    chosen = parser.parse_args()
    # Schedules share most of their programs: XLA compiles each once.
    compiled = tempfile.TemporaryDirectory(prefix="autopar-sweep-")
    jax.config.update("jax_compilation_cache_dir", compiled.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    cells = [
        (name, stages, schedule, count)
        for name in (chosen.models.split(",") if chosen.models else CASES)
        for stages in chosen.stages.split(",")
        for count in chosen.microbatches.split(",")
        for schedule in chosen.schedules.split(",")
    ]
    if chosen.sample:
        drawn = random.Random(chosen.seed).sample(range(len(cells)), min(chosen.sample, len(cells)))
        cells = [cells[k] for k in sorted(drawn)]
    case_of = functools.lru_cache(1)(lambda name: CASES[name]())
    return run_cells(cells, lambda cell: _judge(case_of(cell[0]), *cell[1:]), chosen, "tests.pipeline_sweep")


def _judge(case: Case, stages: str, schedule: str, num_microbatches: str) -> Judged:
    try:
        return equal(check_pipeline(case, stages, schedule, int(num_microbatches)))
    except autopar.errors.MicrobatchError as error:
        return Judged(bool(case.refused), f"n/a    {case.refused or error}")
    except autopar.errors.BatchError as error:
        return Judged(case.fixed_batch, f"n/a    {error.summary}")
    except autopar.errors.PipelineError as error:
        return Judged(error.summary == TOO_FEW, f"n/a    {error.summary}")
    except Exception as error:
        return failed(error)


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())

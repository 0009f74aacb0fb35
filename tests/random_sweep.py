"""Random small programs under random plans, against plain `jax.jit` on one device.

In:     numbers of programs (`random_programs.py`).
Out:    `check_group`, used by the tests; `python -m tests.random_sweep --first 0 --count 1000` prints what is wrong.
Method: a few programs make one step, so that one plan is drawn and one program compiled for all. Every result must be as
        near to jit's as stochastic arithmetic says that rounding allows, and not finite where and as jit's is not; and the
        step communicates what its plan says. Where jit itself is wrong (XLA joins slices of slices without clamping),
        the same in float64, without the pass that joins them, will do.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cells import Cell, Judged, add_arguments, run_cells
from tests.models.case import Case
from tests.random_programs import EPSILON, Arithmetic, Program, draw_program
from tests.sweep import check_faithful, compile_case, failed, use_virtual_devices

MESHES = ((8,), (2, 4), (2, 2, 2))
GROUP = 5
SAFETY = 8
"""How many times the largest error that a few runs of stochastic arithmetic show a result may be off."""
SEEDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
EXACTLY = {"xla_disable_hlo_passes": "algsimp"}
"""XLA's algebraic simplifier is what joins slices."""


def check_group(numbers: Sequence[int]) -> list[str]:
    """What is wrong with these programs under a random plan on one of the meshes; nothing if all is well."""
    programs = [draw_program(number) for number in numbers]
    case = case_of(programs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = jax.device_get(jax.jit(case.step)(case.state, case.batches[0]))
        compiled = compile_case(case, MESHES[numbers[0] // GROUP % 3], f"random{numbers[0]}")
        check_faithful(compiled)
        got = jax.device_get(compiled(case.state, case.batches[0]))
        bounds = rounding_errors(programs)
    found = []
    for program, ours, theirs, allowed in zip(programs, _by_program(got), _by_program(wanted), bounds, strict=True):
        problems = [
            f"{k}: {problem}"
            for k, leaves in enumerate(zip(ours, theirs, allowed, strict=True))
            if (problem := _difference(*leaves))
        ]
        if problems:
            found.append(f"{'; '.join(problems)}\n    {program}")
    return found


def case_of(programs: Sequence[Program]) -> Case:
    """All of them as one step."""

    def step(state: Any, batch: Any) -> Any:
        made = [p.run(s, b, Arithmetic()) for p, s, b in zip(programs, state, batch, strict=True)]
        return [new for new, _ in made], [results for _, results in made]

    state = [[jnp.asarray(x) for x in p.state] for p in programs]
    batch = [[jnp.asarray(x) for x in p.batch] for p in programs]
    return Case(f"random programs {programs[0].seed}", step, state, (batch,))


def _by_program(made: Any) -> list[list[np.ndarray]]:
    new_state, results = made
    return [[*own, *others] for own, others in zip(new_state, results, strict=True)]


def rounding_errors(programs: Sequence[Program]) -> list[list[tuple[np.ndarray, float]]]:
    """For each leaf of each program its exact value, and how far rounding may take it."""

    def all_of(state: Any, batch: Any, amount: Any, seed: Any) -> list[list[Any]]:
        made = [p.run(s, b, Arithmetic(amount, seed)) for p, s, b in zip(programs, state, batch, strict=True)]
        return [[*new, *results] for new, results in made]

    with jax.enable_x64(True):
        state, batch = ([[_wide(x) for x in getattr(p, part)] for p in programs] for part in ("state", "batch"))
        run = jax.jit(all_of).lower(state, batch, 0.0, 0.0).compile(compiler_options=EXACTLY)
        exact = jax.device_get(run(state, batch, 0.0, 0.0))
        noisy = [jax.device_get(run(state, batch, 1.0, seed)) for seed in SEEDS]
    return [
        [(leaf, max(_distance(other[p][k], leaf) for other in noisy)) for k, leaf in enumerate(leaves)]
        for p, leaves in enumerate(exact)
    ]


def _wide(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    return float(np.max(np.abs(np.where(both, a, 0) - np.where(both, b, 0)), initial=0.0))


def _difference(ours: np.ndarray, theirs: np.ndarray, allowed: tuple[np.ndarray, float]) -> str:
    """What is wrong with a leaf; nothing if it is as near to jit's, or to the truth, as rounding takes either."""
    exact, error = allowed
    problem = _off(ours, theirs, error, _distance(theirs, exact))
    if problem and np.shape(exact) == ours.shape and not _off(ours, exact.astype(ours.dtype), error, 0.0):
        return ""
    return problem


def _off(ours: np.ndarray, theirs: np.ndarray, error: float, their_error: float) -> str:
    """How two leaves differ by more than rounding allows, of which the second is off by that much."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{ours.shape} instead of {theirs.dtype}{theirs.shape}"
    if ours.dtype.name not in EPSILON:
        return "" if np.array_equal(ours, theirs) else f"{(ours != theirs).sum()} of {ours.size} integers differ"
    epsilon = EPSILON[ours.dtype.name]
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True) or not np.isfinite(ours[finite]).all():
        at = np.argwhere(~((ours == theirs) | np.isnan(ours) & np.isnan(theirs) | finite & np.isfinite(ours)))[0]
        return f"{ours[tuple(at)]} instead of {theirs[tuple(at)]} at {at}"
    scale = np.max(np.abs(theirs[finite]), initial=0.0)
    limit = SAFETY * error + 4 * epsilon * scale + 1e-30
    # Where jit is further from the truth than that, no more is asked of us.
    limit = max(limit, 2 * their_error)
    off = np.max(np.abs(ours[finite] - theirs[finite]), initial=0.0)
    return "" if off <= limit else f"off by {off:.2e}, {limit:.2e} allowed, of {scale:.2e}, jit by {their_error:.2e}"


def main() -> int:
    """Run many, group by group."""
    use_virtual_devices()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--count", type=int, default=1000, help="how many")
    add_arguments(parser)
    chosen = parser.parse_args()
    end = chosen.first + chosen.count
    cells = [(f"random {start}-{min(start + GROUP, end) - 1}",) for start in range(chosen.first, end, GROUP)]
    return run_cells(cells, _judge, chosen, "tests.random_sweep")


def _judge(cell: Cell) -> Judged:
    first, last = map(int, cell[0].removeprefix("random ").split("-"))
    began = time.process_time()
    try:
        found = check_group(range(first, last + 1))
    except Exception as error:
        return failed(error)
    return Judged(not found, "\n    ".join([f"{time.process_time() - began:5.1f} s", *found]))


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())

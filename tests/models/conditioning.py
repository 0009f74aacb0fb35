"""Which models can be judged at all: how far rounding alone moves the results of three plain steps.

In:     `CASES`; nothing of autopar is run.
Out:    a table: the largest difference relative to a leaf's scale, that leaf, seconds to compile, milliseconds a step.
Method: another order of summation is noise of a half ulp. The same noise is put on every number that goes into a step,
        and the results are compared with those of the clean steps. What it moves by more than 0.4 of the model's
        tolerance (a bias whose true gradient is zero, under Adam; a near tie of an argmax) is no fair test of a plan:
        the model should be changed, not the tolerance.

    python -m tests.models.conditioning [name ...]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.case import Case
from tests.models.registry import CASES
from tests.sweep import relative_error

DRAWS, SHARE = 3, 0.4
"""How often noise is drawn, and the part of the tolerance it may use up."""


@dataclass(frozen=True)
class Conditioning:
    """How a model answers to noise: the largest difference and its leaf; what plain `jax.jit` takes."""

    error: float
    where: str
    compile_seconds: float
    step_seconds: float


def conditioning(case: Case) -> Conditioning:
    """Measure one model."""
    started = time.perf_counter()
    step = jax.jit(case.step).lower(case.state, case.batches[0]).compile()
    compiled = time.perf_counter()
    clean = _three_steps(step, case, None)
    ended = time.perf_counter()
    worst, where = 0.0, ""
    for seed in range(DRAWS):
        noisy = _three_steps(step, case, np.random.default_rng(seed))
        for (path, want), (_, got) in zip(clean, noisy, strict=True):
            error = relative_error(got, want)
            if not error <= worst:
                worst, where = error, jax.tree_util.keystr(path)
    return Conditioning(worst, where, compiled - started, (ended - compiled) / len(case.batches))


def _three_steps(step: Any, case: Case, random: np.random.Generator | None) -> list[tuple[Any, np.ndarray]]:
    """(path, value) of state and metrics after each step."""
    state, found = case.state, []
    for batch in case.batches:
        if random is not None:
            state, batch = jax.tree.map(lambda leaf: _noisy(leaf, random), (state, batch))
        state, metrics = step(state, batch)
        found += jax.tree_util.tree_leaves_with_path((state, metrics))
    return [(path, _host(leaf)) for path, leaf in found]


def _noisy(leaf: Any, random: np.random.Generator) -> Any:
    """Up to half an ulp more or less; integers and keys as they are."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    half_ulp = float(jnp.finfo(leaf.dtype).eps) / 2
    noise = 1 + half_ulp * random.uniform(-1, 1, leaf.shape)
    return jnp.asarray(np.asarray(leaf, np.float64) * noise, leaf.dtype)


def _host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def main(names: list[str]) -> int:
    """Print the table; the number of models that noise moves too far."""
    failures = 0
    for name in names or CASES:
        case = CASES[name]()
        found = conditioning(case)
        good = found.error <= SHARE * case.tolerance
        failures += not good
        print(
            f"{name:28} {'ok ' if good else 'ILL'} {found.error:.1e} of {case.tolerance:.0e}  "
            f"{found.compile_seconds:5.1f} s {1e3 * found.step_seconds:7.1f} ms  {found.where}",
            flush=True,
        )
    print(f"{failures} ill conditioned")
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Batches of the test bed: three of 24 samples, from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

BATCH = 24


def batches(make: Callable[[np.random.Generator], Any], count: int = 3) -> tuple[Any, ...]:
    """`count` batches, each from a generator of its own."""
    return tuple(make(np.random.default_rng(seed)) for seed in range(count))


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal float32."""
    return random.normal(size=shape).astype(np.float32)


def tokens(random: np.random.Generator, *shape: int, vocabulary: int) -> np.ndarray:
    """Token numbers."""
    return random.integers(0, vocabulary, shape).astype(np.int32)


def dense(random: np.random.Generator, rows: int, columns: int, *lead: int, bias: bool = True) -> dict[str, np.ndarray]:
    """A dense layer's parameters; stacked if `lead` says so."""
    kernel = normal(random, *lead, rows, columns) / np.sqrt(rows).astype(np.float32)
    # Biases are not zero, as after some training: what starts at zero has no scale to compare with.
    return {"kernel": kernel, **({"bias": normal(random, *lead, columns) * np.float32(0.1)} if bias else {})}


def norm(width: int, *lead: int) -> dict[str, np.ndarray]:
    """A layer norm's parameters."""
    wave = np.sin(np.arange(np.prod((*lead, width), dtype=int), dtype=np.float32)).reshape(*lead, width)
    return {"scale": 1 + np.float32(0.1) * wave, "bias": np.float32(0.1) * wave}


def stirred(params: Any, seed: int = 0) -> Any:
    """A framework's initial parameters as after some training: its zero biases have no scale to compare with."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + np.float32(0.1) * normal(random, *leaf.shape), params)


def on_device(tree: Any) -> Any:
    """The same tree with JAX arrays."""
    return jax.tree.map(jax.numpy.asarray, tree)

"""All models of the test bed, by name.

Out:    `CASES`: name -> a function that builds the `Case`; `@case(name)` adds one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.models.case import Case

FILES = (
    "transformers",
    "attention",
    "frameworks",
    "lifted",
    "mixtures",
    "alignment",
    "vision",
    "recurrent",
    "generative",
    "optimizers",
    "edges",
)
CASES: dict[str, Callable[[], Case]] = {}


def case(name: str, **facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function, which returns (step, state, batches[, tolerance, why]), a case of this name."""

    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        if name in CASES:
            raise ValueError(f"there are two models called {name!r}.")
        CASES[name] = lambda: Case(name, *build(), **facts)
        return build

    return add


for file in FILES:
    importlib.import_module(f"tests.models.{file}")

"""Other numbers than planning has: for a module, as long as a test runs."""

import dataclasses
from types import ModuleType
from typing import Any

import pytest


def tune(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **numbers: Any) -> None:
    """Give one module other numbers (`autopar/tuning.py`)."""
    monkeypatch.setattr(module, "TUNING", dataclasses.replace(module.TUNING, **numbers))

"""Solves as if the tables of every problem were too large: what is left of it goes to the ILP solver."""

from unittest.mock import Mock

import pytest

from autopar.intra_op import solve as solving


def without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    monkeypatch.setattr(solving, "solve_by_tables", Mock(return_value=None))
    monkeypatch.setattr(solving, "elimination_order", Mock(return_value=None))

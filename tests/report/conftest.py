"""The MLP that these tests plan."""

from tests.planned_mlp import make_step, plan, types

__all__ = ["make_step", "plan", "types"]

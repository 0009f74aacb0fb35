"""Inter-operator parallelism: cuts the step into layers and stages, and derives the tasks that each stage runs."""

from autopar.inter_op.slicing import SlicedStage, Slicing, slice_stages

__all__ = ["SlicedStage", "Slicing", "slice_stages"]

"""Which operations run on which part of the machine: layers, stages, and what passes between them."""

from autopar.inter_op.slicing import SlicedStage, Slicing, slice_stages

__all__ = ["SlicedStage", "Slicing", "slice_stages"]

"""The placement of a value on one axis: replicated, split along a dim, or a partial result.

In:     (types only.)
Out:    `Placement`, and `Axis`: the loop over microbatches, or the parts of an unrolled scan. (A mesh axis reads the same
        strategies in `intra_op/strategies.py`, and needs collectives besides.)
Method: a mesh axis lies in space, the loop over microbatches in time, and the parts of a scan in the program; what one shard
        of a value is, is the same on all three. They differ in the number of the shard (a device asks for its position, a
        loop counts, a part has a literal), and in where shards can be joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar._jax import Aval, resized

Batch: TypeAlias = Sequence[int] | Mapping[int, int]
"""The inputs of a program that hold samples, along dim 0; or input -> the dim that runs over samples."""
Made: TypeAlias = Literal["once", "each", "own"]
Reduction: TypeAlias = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every shard has a whole value.

    Attributes:
        made: `"once"`: computed outside of the axis. `"each"`: every shard computes the same value. `"own"`: every shard
            computes a value of its own that stands for the joint one (local statistics).
    """

    made: Made = "once"

    def __str__(self) -> str:
        return {"once": "whole", "each": "made whole by each", "own": "of each its own"}[self.made]


@dataclass(frozen=True, slots=True)
class Split:
    """Shard k has the k-th part along `dim`; of several equal blocks there, the k-th part of each.

    Attributes:
        dim: The dim that is split.
        blocks: Number of blocks that the dim consists of, as in `concatenate([chosen, rejected])`.
    """

    dim: int
    blocks: int = 1

    def moved(self, by: int) -> Split:
        """The same split after `by` leading dims have been added."""
        return Split(self.dim + by, self.blocks)

    def __str__(self) -> str:
        return f"split along dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum (or maximum, or minimum) over all shards."""

    kind: Reduction = "sum"

    def __str__(self) -> str:
        return f"partial {self.kind}"


Placement: TypeAlias = Replicated | Split | Partial
REPLICATED, BY_EACH, OWN, SUM = Replicated(), Replicated("each"), Replicated("own"), Partial()


@dataclass(frozen=True, slots=True)
class Axis:
    """The shards of a program: microbatches, which one loop body processes in turn and is given their number; or parts of a
    scan over layers, which are all written out, with their numbers as literals.

    Attributes:
        count: Number of shards.
        length: Number of layers in all parts together, where `count` does not divide it; 0: shards are equal.
    """

    count: int
    length: int = 0

    @property
    def units(self) -> int:
        """Number of equal units that a split dim has: a shard is a run of whole units, as even as they allow."""
        return self.length or self.count

    @property
    def is_even(self) -> bool:
        """Whether shards are equal: one unit each."""
        return self.units == self.count


@dataclass(frozen=True, slots=True)
class Units:
    """The units of one shard: `size` of them, from number `first` on."""

    first: int
    size: int


def units_of_shard(number: int, count: int, units: int) -> Units:
    """The units of shard `number` of `count`, as even as `units` allow.

    Longer shards come first: the last stage computes the loss besides its layers, and meshes with several chunks
    (interleaved) get equal totals.
    """
    size, longer = divmod(units, count)
    return Units(number * size + min(number, longer), size + (number < longer))


def local_aval(aval: Aval, placement: Placement, units: int, size: int = 1) -> Aval:
    """Type of one shard that has `size` of the `units` units of a value's split dim."""
    shape = list(aval.shape)
    if isinstance(placement, Split):
        shape[placement.dim] = shape[placement.dim] // units * size
    return resized(aval, shape)


def sample_dims(batch: Batch) -> dict[int, int]:
    """Input -> the dim that runs over samples."""
    return dict(batch) if isinstance(batch, Mapping) else dict.fromkeys(batch, 0)

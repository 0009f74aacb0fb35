"""The placement of a value on one axis: replicated, split along a dim, or a partial result.

In:     (types only.)
Out:    `Placement`, and `Axis`: the loop over microbatches, or the parts of a scan that all stand in the program. (For a mesh
        axis `intra_op/strategies.py` reads the same strategies, and writes collectives.)
Method: what a mesh axis is in space, the loop is in time and the parts are in the program: what one shard of a value is
        does not depend on it. What does is which number a shard has (a device asks for it, the loop counts, of a part it
        is known), and whether shards can be put together again where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar._jax import Aval, resized

Made: TypeAlias = Literal["once", "each", "own"]
Reduction: TypeAlias = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every shard has the same, whole value.

    Attributes:
        made: `"once"`, outside of the axis; by `"each"` shard anew; or of each shard its `"own"`, which stands for that
            of all (its statistics).
    """

    made: Made = "once"

    def __str__(self) -> str:
        return {"once": "whole", "each": "made whole by each", "own": "of each its own"}[self.made]


@dataclass(frozen=True, slots=True)
class Split:
    """Shard k has the k-th part along `dim`, or of each of equal blocks that stand behind each other there.

    Attributes:
        dim: Along which.
        blocks: How many.
    """

    dim: int
    blocks: int = 1

    def moved(self, by: int) -> Split:
        """The same where `by` dims have come in front."""
        return Split(self.dim + by, self.blocks)

    def __str__(self) -> str:
        return f"split along dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum (or the largest, the smallest) of what all shards have."""

    kind: Reduction = "sum"

    def __str__(self) -> str:
        return f"partial {self.kind}"


Placement: TypeAlias = Replicated | Split | Partial
REPLICATED, BY_EACH, OWN, SUM = Replicated(), Replicated("each"), Replicated("own"), Partial()


@dataclass(frozen=True, slots=True)
class Axis:
    """The shards of a program: microbatches, done one after the other by one program that is given their number; or parts of a
    scan over layers, which stand in the program side by side, each with its number written in.

    Attributes:
        count: How many.
        length: How many layers parts are together, if `count` does not divide them; 0: shards are equal.
    """

    count: int
    length: int = 0

    @property
    def units(self) -> int:
        """What lengths that are split must be multiples of: shards are of whole units, as even as these allow."""
        return self.length or self.count

    @property
    def is_even(self) -> bool:
        """Whether shards are equal: one unit each."""
        return self.units == self.count


@dataclass(frozen=True, slots=True)
class Share:
    """What one shard has of a length in equal units: so many of them, behind the first so many."""

    first: int
    size: int


def share_of(number: int, count: int, units: int) -> Share:
    """What the number-th of `count` shards has: of `units` units as even a part as can be.

    The longer ones come first: behind the last layers comes what makes the loss, and meshes that take turns (every so many
    shards) have as even parts in all.
    """
    size, longer = divmod(units, count)
    return Share(number * size + min(number, longer), size + (number < longer))


def local_aval(aval: Aval, placement: Placement, units: int, size: int = 1) -> Aval:
    """Type of one shard of a value, which has `size` units of what is split in so many."""
    shape = list(aval.shape)
    if isinstance(placement, Split):
        shape[placement.dim] = shape[placement.dim] // units * size
    return resized(aval, shape)

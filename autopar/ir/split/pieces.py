"""One operation, worked through in equal pieces: what a piece of it needs, and what its results then are.

In:     an equation's rule and the number of pieces. The pieces stand one after the other in time (microbatches), as
        shards stand side by side on a mesh: a rule says of both the same.
Out:    `ways(rule, count)`: for each factor that can be cut, and each linear group, the share of every operand that
        piece k needs and the share of every result that it makes; `piece_program`: piece k as a flat program.
Method: the strategies of a mesh with one axis (`intra_op/strategies.py`), with the number of the piece, an input of the
        program, where a device would ask for its own position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, bind_eqn
from autopar.ir.rules import ShardingRule
from autopar.ir.rules.rule import Factor, LocalProgram, Shard, Term
from autopar.ir.trace.flatten import flat_function

AXIS = "piece"


@dataclass(frozen=True, slots=True)
class Whole:
    """Every piece sees the same, whole value."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Cut:
    """Piece k sees the k-th of equal parts along `dim`, or of each of equal blocks that stand behind each other there."""

    dim: int
    blocks: int = 1

    def moved(self, by: int) -> Cut:
        """The same where `by` dims have come in front."""
        return Cut(self.dim + by, self.blocks)

    def __str__(self) -> str:
        return f"cut along dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


@dataclass(frozen=True, slots=True)
class Sum:
    """The value is the sum over all pieces of what each makes."""

    def __str__(self) -> str:
        return "sum over pieces"


@dataclass(frozen=True, slots=True)
class Extreme:
    """The value is the largest (`"max"`) or smallest (`"min"`) over all pieces of what each makes."""

    kind: str

    def __str__(self) -> str:
        return f"{self.kind} over pieces"


@dataclass(frozen=True, slots=True)
class Same:
    """Every piece makes the same, whole value."""

    def __str__(self) -> str:
        return "made whole by each piece"


@dataclass(frozen=True, slots=True)
class Own:
    """Each piece has a value of its own that stands for the whole one."""

    def __str__(self) -> str:
        return "of each piece"


Share = Whole | Cut | Sum | Extreme | Same | Own
WHOLE, SUM, SAME, OWN = Whole(), Sum(), Same(), Own()


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do an operation in pieces.

    Attributes:
        factor: The factor that is cut; None: the operation is linear, and done on shares of sums.
        operands: The share of each operand that a piece needs.
        results: The share of each result that a piece makes.
        picks: The sums that it makes are of single elements: a piece has zeros for what others find.
        blocks: Of the factor: of each of so many parts of it that stand behind each other a piece has its part.
        local: The program of a piece where it is not that of the rule.
    """

    factor: Factor | None
    operands: tuple[Share, ...]
    results: tuple[Share, ...]
    picks: bool = False
    blocks: int = 1
    local: LocalProgram | None = field(default=None, compare=False)


def ways(rule: ShardingRule, count: int) -> list[Way]:
    """All ways to do an operation in `count` pieces, those that cut a factor first."""
    found = []
    for factor in rule.splittable():
        if rule.sizes[factor] % count == 0:
            found.append(way_along(rule, factor))
    for group in rule.linear:
        operands = tuple(SUM if k in group else WHOLE for k in range(len(rule.operands)))
        found.append(Way(None, operands, (SUM,) * len(rule.results)))
    return found


def way_along(rule: ShardingRule, factor: Factor, blocks: int = 1) -> Way:
    """The way that cuts a factor, or each of `blocks` equal parts of it that stand behind each other."""

    def share(term: Term, absent: Share) -> Share:
        for d, dim in enumerate(term):
            if factor in dim:
                return Cut(d, blocks * math.prod(rule.sizes[f] for f in dim[: dim.index(factor)]))
        return absent

    sums = rule.joined.get(factor, ())
    operands = tuple(SUM if k in sums else share(term, WHOLE) for k, term in enumerate(rule.operands))
    lost: Share = SUM if factor in rule.summed else WHOLE
    lost = Extreme(rule.reduced[factor]) if factor in rule.reduced else lost
    results = tuple(share(term, lost) for term in rule.results)
    return Way(factor, operands, results, factor in rule.picked, blocks)


class NoPositionError(Exception):
    """A local program asked where its part begins, and it has several."""


@dataclass(frozen=True, slots=True)
class _Piece(Shard):
    """Where a piece stands, as a device stands on a mesh."""

    number: Any = 0
    blocks: int = 1

    def index(self, factor: Factor) -> Any:
        """The number of the piece; 0 for a factor that is not cut.

        Raises:
            NoPositionError: The piece has its part of each of several blocks.
        """
        if not self.axes_of.get(factor):
            return 0
        if self.blocks > 1:
            raise NoPositionError(factor)
        return self.number


def piece_program(eqn: JaxprEqn, rule: ShardingRule, way: Way, count: int, shapes: Mapping[int, Any]) -> Jaxpr:
    """The flat program of one piece: (number of the piece, int32; operands) to results.

    Args:
        eqn: The operation.
        rule: Its rule.
        way: How it is done in pieces.
        count: How many.
        shapes: For each operand, the abstract value of a piece's share.

    Raises:
        NoPositionError: The operation depends on places along what is cut in blocks.
    """
    local = way.local or rule.local

    def program(number: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        axes = {way.factor: (AXIS,)} if way.factor is not None else {}
        piece = _Piece(axes, {AXIS: count}, rule.sizes, number, way.blocks)
        if local is not None:
            return list(local(eqn, piece, *operands))
        return bind_eqn(eqn, *operands)

    avals = [shapes[k] for k in range(len(eqn.invars))]
    return flat_function(program, jax.ShapeDtypeStruct((), jnp.int32), *avals)


def piece_aval(aval: Any, share: Share, count: int) -> Any:
    """Type of one piece's share of a value."""
    if not isinstance(share, Cut):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    shape = list(aval.shape)
    shape[share.dim] //= count
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)


@functools.cache
def slice_program(shape: tuple[int, ...], dtype: Any, share: Cut, count: int) -> Jaxpr:
    """(number, whole value) to the share of the number-th of `count` pieces, as a flat program."""

    def program(number: jax.Array, whole: jax.Array) -> jax.Array:
        return part_of(whole, share, number, count)

    return flat_function(program, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(shape, dtype))


def part_of(whole: jax.Array, share: Cut, number: Any, count: int) -> jax.Array:
    """What of a whole value the number-th of `count` pieces has."""
    dim, size = share.dim, whole.shape[share.dim] // (share.blocks * count)
    if share.blocks == 1:
        return jax.lax.dynamic_slice_in_dim(whole, number * size, size, dim)
    before, behind = whole.shape[:dim], whole.shape[dim + 1 :]
    blocks = jnp.reshape(whole, (*before, share.blocks, size * count, *behind))
    parts = jax.lax.dynamic_slice_in_dim(blocks, number * size, size, dim + 1)
    return jnp.reshape(parts, (*before, share.blocks * size, *behind))


@functools.cache
def mask_program(shape: tuple[int, ...], dtype: Any) -> Jaxpr:
    """(number, whole value) to the value in piece 0 and zeros in the others, whose sum it is."""

    def program(number: jax.Array, whole: jax.Array) -> jax.Array:
        return jnp.where(number == 0, whole, jnp.zeros_like(whole))

    return flat_function(program, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(shape, dtype))


@functools.cache
def scale_program(shape: tuple[int, ...], dtype: Any, count: int) -> Jaxpr:
    """(number, one piece's share of a sum) to what the sum would be if all pieces were like this one."""

    def program(number: jax.Array, part: jax.Array) -> jax.Array:
        return part * jnp.asarray(count, dtype)

    return flat_function(program, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(shape, dtype))

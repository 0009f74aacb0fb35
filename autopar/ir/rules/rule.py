"""Sharding rules: an operation in factors, its loop indices; all else about it is derived from them.

In:     an equation of the flat program.
Out:    `ShardingRule`: a name for each loop index of the operation, and the dims that it indexes in operands and results,
        as in einsum: `dot_general` is `ab,bc->ac {sum b}`.
Method: a dim is a tuple of factors, major to minor, so that `reshape` is a rule like any other: `a(bc)->abc`. A rule gives
        the shardings that an operation allows (`intra_op/strategies.py`), its FLOPs, and its per-device program. The
        notation is that of Shardy's op sharding rules and of einops.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
from jax import lax

from autopar._jax import JaxprEqn
from autopar.ir.split.placement import Reduction

Factor = str
Dim = tuple[Factor, ...]
"""Factors of one tensor dim, major to minor; `()` is a dim of size 1."""
Term = tuple[Dim, ...]
"""The dims of one operand or result."""


@dataclass(frozen=True, slots=True)
class Shard:
    """This device's shard of an equation: the mesh axes that split each factor, and their indices here.

    Valid only inside `shard_map`.
    """

    axes_of: Mapping[Factor, tuple[str, ...]]
    axis_sizes: Mapping[str, int]
    sizes: Mapping[Factor, int]
    platform: str = field(default="", kw_only=True)

    def num_shards(self, factor: Factor) -> int:
        """Into how many shards `factor` is split; 1 where it is whole."""
        return math.prod(self.axis_sizes[axis] for axis in self.axes_of.get(factor, ()))

    def local_size(self, factor: Factor) -> int:
        """Length of `factor` on one device."""
        return self.sizes[factor] // self.num_shards(factor)

    def index(self, factor: Factor) -> jax.Array | int:
        """Number of this device's shard of `factor`: a traced int32, or the int 0 where it is whole."""
        axes = self.axes_of.get(factor, ())
        return lax.axis_index(axes) if axes else 0

    def offset(self, factor: Factor) -> jax.Array | int:
        """First global position along `factor` that this device holds."""
        return self.index(factor) * self.local_size(factor)

    def local_dim(self, dim: Dim) -> int:
        """Length on one device of a dim made of these factors."""
        return math.prod(self.local_size(factor) for factor in dim)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Two factors of an operation that one axis may split at once: rows are sent to the devices of their groups and back.

    Attributes:
        part: The factor that numbers the parts of the rows.
        group: The factor that numbers the groups.
        along: For each operand and then each result, which of the two factors the axis splits; None: none, and no other axis
            splits it either.
    """

    part: Factor
    group: Factor
    along: tuple[Factor | None, ...]

    @property
    def exchanged(self) -> tuple[int, ...]:
        """The operands, and then results, whose rows are sent."""
        return tuple(k for k, factor in enumerate(self.along) if factor == self.part)

    def axes(self, axes_of: Mapping[Factor, tuple[str, ...]]) -> tuple[str, ...]:
        """The axes that split both factors, given those that split each factor."""
        return tuple(axis for axis in axes_of.get(self.group, ()) if axis in axes_of.get(self.part, ()))


class LocalProgram(Protocol):
    """The per-device program of an equation: local operands in, local results (not yet reduced) out."""

    def __call__(self, eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]: ...


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """An operation in factors.

    Attributes:
        operands: For each operand, its dims.
        results: For each result, its dims.
        sizes: Global length of each factor.
        summed: Factors that the result is a sum over: if one is split, the result is a partial sum.
        one_hot: Those of them of which all addends but one are zeros, as in a gather.
        reduced: The same for other reductions, by name (`"max"`, `"min"`): if one is split, the result is reduced at once.
        whole: Factors that may not be split (a sorted dim, a window, a dim that is sliced).
        linear: Groups of operands in which the operation is linear: if all of one group are partial sums over an
            axis and the other operands are replicated over it, so are the results. `mul` has ((0,), (1,)), `add` ((0, 1),).
        moves_data: Every element of a result equals one element of a `linear` operand, or is 0.
        accumulators: For a summed factor, the operands that are added to the sum and lack the factor (`scatter_add`'s
            operand): they must be partial over the axes that split it.
        flops: FLOPs of the whole operation, on one device.
        local: Per-device program; None: the primitive itself on local operands.
        host_call: It calls into the host: one device runs it and sends its results to all.
        transposed: Operands that kernels want with their dims in another order: an argument of the step is copied for them.
        exchange: Rows may be sent to the devices of their groups; None: they may not.
        reused: Operands whose memory results of their type take where they are read for the last time, the state's first.
        selected: Of a scatter to the elements that windows select: the operand that these are of, and what is scattered.
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    sizes: Mapping[Factor, int]
    summed: tuple[Factor, ...] = ()
    one_hot: tuple[Factor, ...] = ()
    reduced: Mapping[Factor, Reduction] = field(default_factory=dict)
    whole: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    moves_data: bool = False
    accumulators: Mapping[Factor, tuple[int, ...]] = field(default_factory=dict)
    flops: float = 0.0
    local: LocalProgram | None = None
    host_call: bool = False
    transposed: tuple[int, ...] = ()
    exchange: RowExchange | None = None
    reused: tuple[int, ...] = ()
    selected: tuple[int, int] | None = None

    def splittable(self) -> tuple[Factor, ...]:
        """Factors that may be split over mesh axes, in order of appearance: not whole, and leading in every dim with them."""
        leading: dict[Factor, bool] = {}
        seen: dict[Factor, None] = {}
        for term in self.operands + self.results:
            for dim in term:
                for position, factor in enumerate(dim):
                    seen[factor] = None
                    leading[factor] = leading.get(factor, True) and position == 0
        return tuple(f for f in seen if leading[f] and f not in self.whole and self.sizes[f] > 1)

    def form(self, num_devices: int) -> Hashable:
        """What the rule's strategies on so many devices depend on: operations with equal forms have equal strategies.

        Of a factor's length that is the part that the devices may divide; of none it is 1, as no device splits it.
        """
        parts = {factor: math.gcd(max(size, 1), num_devices) for factor, size in self.sizes.items()}
        maps = (parts, self.reduced, self.accumulators)
        others = self.summed, self.one_hot, self.whole, self.linear, self.exchange, self.host_call
        return self.operands, self.results, *(tuple(each.items()) for each in maps), *others

    def __str__(self) -> str:
        def term(dims: Term) -> str:
            return "".join(_dim_text(dim) for dim in dims)

        notes = [f"{name} {' '.join(factors)}" for name, factors in self._notes() if factors]
        body = ",".join(map(term, self.operands)) + "->" + ",".join(map(term, self.results))
        return body + (f" {{{', '.join(notes)}}}" if notes else "")

    def _notes(self) -> Iterator[tuple[str, list[Factor]]]:
        yield "sum", list(self.summed)
        for kind in sorted(set(self.reduced.values())):
            yield kind, [f for f, k in self.reduced.items() if k == kind]
        yield "whole", list(self.whole)


def _dim_text(dim: Dim) -> str:
    return "1" if not dim else dim[0] if len(dim) == 1 else f"({''.join(dim)})"


def factor_names() -> Iterator[Factor]:
    """Fresh factor names: a, b, ..., z, A, ..., Z, a1, b1, ..."""
    yield from string.ascii_letters
    for number in itertools.count(1):
        for letter in string.ascii_letters:
            yield f"{letter}{number}"


def infer_sizes(
    terms: Sequence[Term],
    shapes: Sequence[Sequence[int]],
    what: str = "rule",
    known_sizes: Mapping[Factor, int] | None = None,
) -> dict[Factor, int]:
    """Infer the length of each factor from the shapes; in a dim of several factors at most one may be unknown elsewhere."""
    if len(terms) != len(shapes) or any(len(t) != len(s) for t, s in zip(terms, shapes, strict=False)):
        raise ValueError(f"{what}: does not fit the shapes {[tuple(s) for s in shapes]}.")
    sizes = dict(known_sizes or {})
    compound = []
    for term, shape in zip(terms, shapes, strict=True):
        for dim, size in zip(term, shape, strict=True):
            if len(dim) == 1:
                if sizes.setdefault(dim[0], size) != size:
                    raise ValueError(
                        f"{what}: factor `{dim[0]}` is {sizes[dim[0]]} in one place and {size} in another."
                    )
            elif len(dim) > 1:
                compound.append((dim, size))
            elif size != 1:
                raise ValueError(f"{what}: a dim written 1 has length {size}.")
    for dim, size in compound:
        unknown = [f for f in dim if f not in sizes]
        known = math.prod(sizes[f] for f in dim if f in sizes)
        if len(unknown) > 1 or size % known or (not unknown and known != size):
            raise ValueError(f"{what}: cannot factor a dim of length {size} as ({' '.join(dim)}), knowing {sizes}.")
        if unknown:
            sizes[unknown[0]] = size // known
    return sizes


def num_elements(shape: Sequence[int]) -> int:
    """Elements of an array of this shape."""
    return math.prod(map(int, shape))

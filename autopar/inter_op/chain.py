"""Cuts the program of one microbatch into a chain of segments, the smallest units that pipeline stages are made of.

In:     the flat program of one microbatch, forward and backward (`ir/split/microbatches/microbatch.py`).
Out:    `Chain`: the segment of every equation; the work of each segment; the bytes that cross each border.
Method: a segment is a run of forward equations, in program order, between two places where few bytes cross. A backward
        equation joins its operands: the last segment that has its parameters and residuals and does not come after the
        segments that make its cotangents; then an earlier one, if that sends fewer bytes. An equation of a later forward
        pass joins the first segment that has its parameters and does not come before its operands. Cheap equations of
        small inputs (masks, counters, random bits) are light: they belong to no segment, and every reader repeats them.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, Var, copies_to_or_from_host
from autopar.inter_op.pass_order import PassOrder
from autopar.ir.dataflow import inputs_of
from autopar.ir.signature import equation_signature
from autopar.ir.work import Work, num_bytes, num_elements_of
from autopar.tuning import TUNING


@dataclass(frozen=True, eq=False)
class Chain:
    """A program of one microbatch in segments.

    Attributes:
        loop: The program.
        passes: Per equation, the number of its pass (`pass_order.py`); odd passes are backward.
        segment: Per equation, its segment; -1: light, repeated by every reader.
        num_segments: Number of segments.
        work_of: Per equation, its operations; after `weigh.py`, its seconds.
        cut_bytes: Per border between segments (`num_segments + 1`, the ends included): bytes sent over it, both ways.
        marks: Borders at which the user placed `mark_stage`.
        kinds: Per segment, a number for the operations around its beginning: equal at the same place of equal layers.
    """

    loop: Jaxpr
    passes: tuple[int, ...]
    segment: tuple[int, ...]
    num_segments: int
    work_of: tuple[float, ...]
    cut_bytes: np.ndarray
    marks: tuple[int, ...]
    kinds: tuple[int, ...] = ()

    @functools.cached_property
    def work(self) -> np.ndarray:
        """Per segment, the work of its forward and backward equations."""
        return self._work(np.array(self.segment) >= 0)

    def work_of_pass(self, number: int) -> np.ndarray:
        """Per segment, the work of its equations in the pass of this number."""
        return self._work((np.array(self.segment) >= 0) & (np.array(self.passes) == number))

    def _work(self, inside: np.ndarray) -> np.ndarray:
        segment = np.array(self.segment, int)  # which may be empty, as then `inside` is
        return np.bincount(segment[inside], np.array(self.work_of, float)[inside], self.num_segments)

    @property
    def backward(self) -> tuple[bool, ...]:
        """Per equation, whether it runs in a backward pass."""
        return tuple(number % 2 == 1 for number in self.passes)

    @property
    def num_rounds(self) -> int:
        """How often a microbatch goes forwards and backwards through the stages."""
        return max(self.passes, default=0) // 2 + 1


def make_chain(loop: Jaxpr, fixed_inputs: Sequence[Var], order: PassOrder) -> Chain:
    """Cut a program into segments.

    `fixed_inputs`: inputs that are the same for every microbatch: parameters and values computed from them.
    `order`: the pass of each equation.
    """
    facts = _Facts(loop, fixed_inputs, order)
    places = facts.candidates()
    segment = facts.place_first(places)
    available = facts.with_pass({}, 0, segment)
    for number in range(1, max(order.passes, default=0) + 1):
        available = facts.with_beside(available, number, segment)
        segment = facts.place(number, segment, available, num_segments=len(places) + 1)
        if number % 2:
            segment = facts.move_earlier(number, segment, available)
        if number > 1:
            available = facts.with_pass(available, number, segment)
    num_segments = len(places) + 1
    return Chain(
        loop,
        tuple(order.passes),
        tuple(segment),
        num_segments,
        tuple(facts.work),
        facts.crossing(segment, num_segments),
        facts.marks(segment, num_segments),
        facts.kinds([0, *places]),
    )


_Segments = Sequence[int]
"""Per equation, its segment; -1: it is light, or not placed yet."""
_Available = Mapping[Var, Sequence[int]]
"""Value -> the segments that make or read it in the passes so far, in order."""


class _Facts:
    """What is known of a loop before it is cut; its methods return what they find."""

    def __init__(self, loop: Jaxpr, fixed_inputs: Sequence[Var], order: PassOrder):
        self.loop, self.eqns = loop, loop.eqns
        largest = max((num_elements_of(var) for var in fixed_inputs), default=0)
        shared = min(TUNING.shared_elements, TUNING.shared_part * largest)
        self.fixed = {var for var in fixed_inputs if num_elements_of(var) > shared}
        self.parameters = set(fixed_inputs)
        self.work = Work().of_equations(loop.eqns)
        self.passes, self.beside = order.passes, order.beside
        self.light = self.find_light()
        self.made_by = {var: k for k, eqn in enumerate(self.eqns) for var in eqn.outvars}
        self.forward = self.of_pass(0)

    def of_pass(self, number: int) -> list[int]:
        """The equations of a pass that are not light."""
        return [k for k in range(len(self.eqns)) if self.passes[k] == number and not self.light[k]]

    def find_light(self) -> list[bool]:
        limit = TUNING.repeated_work * sum(self.work)
        light = {var for var in self.loop.invars if var not in self.fixed}
        found = []
        for eqn, work in zip(self.eqns, self.work, strict=True):
            is_light = work <= limit and not eqn.effects and all(a in light for a in inputs_of(eqn))
            if is_light:
                light.update(eqn.outvars)
            found.append(is_light)
        return found

    def candidates(self) -> list[int]:
        """Positions in forward order at which segments begin: per stretch of equal work, where the fewest bytes cross."""
        count = len(self.forward)
        crossing = np.zeros(count + 1)
        position = {k: order for order, k in enumerate(self.forward)}
        last: dict[Var, int] = {}
        for k in self.forward:
            for var in inputs_of(self.eqns[k]):
                if self.made_by.get(var) in position:
                    last[var] = position[k]
        for var, end in last.items():
            start = position[self.made_by[var]]
            crossing[start + 1 : end + 1] += num_bytes(var)
        marks = [order + 1 for order, k in enumerate(self.forward) if self.eqns[k].primitive.name == "mark_stage"]
        if count <= TUNING.max_segments:
            return list(range(1, count))
        done = np.cumsum([self.work[k] for k in self.forward])
        stretch = np.minimum((done / done[-1] * TUNING.max_segments).astype(int), TUNING.max_segments - 1)
        found: dict[int, int] = {}
        for order in range(1, count):
            window = int(stretch[order - 1])
            if window not in found or crossing[order] < crossing[found[window]]:
                found[window] = order
        return sorted({*found.values(), *(m for m in marks if 0 < m < count)})

    def place_first(self, places: Sequence[int]) -> list[int]:
        """Segments of the first forward pass, which begin at `places`."""
        segment = [-1] * len(self.eqns)
        for order, k in enumerate(self.forward):
            segment[k] = at = bisect.bisect_right(places, order)
            if copies_to_or_from_host(self.eqns[k]):  # a value is copied by the segment that makes it
                made_by = [self.made_by[var] for var in inputs_of(self.eqns[k]) if var in self.made_by]
                segment[k] = min([at, *(segment[maker] for maker in made_by if not self.light[maker])])
        return segment

    def with_pass(self, available: _Available, number: int, segment: _Segments) -> _Available:
        """`available`, with the segments in which a pass makes or reads each value."""
        found = {var: {*segments} for var, segments in available.items()}
        for k in self.of_pass(number):
            for var in (*inputs_of(self.eqns[k]), *self.eqns[k].outvars):
                found.setdefault(var, set()).add(segment[k])
        return {var: sorted(segments) for var, segments in found.items()}

    def with_beside(self, available: _Available, number: int, segment: _Segments) -> _Available:
        """`available`, with the values made between the passes before `number`: beside a parameter or a gradient."""
        found = dict(available)
        for var, at in self.beside.items():
            maker = self.made_by.get(at)
            if maker is None and at in found:
                found.setdefault(var, found[at])
            elif maker is not None and self.passes[maker] < number and not self.light[maker]:
                found.setdefault(var, [segment[maker]])
        return found

    def place(self, number: int, segment: _Segments, available: _Available, num_segments: int) -> list[int]:
        """The segments, with those of a later pass.

        A backward equation joins the last segment that has its operands and does not come after its cotangents; one of a
        forward pass the first that has its operands and does not come before those of its own pass. Pieces of the batch are
        everywhere; but the gradient of what only they are multiplied with joins the segment that reads them.
        """
        found = list(segment)
        for k in self.of_pass(number):
            own, earlier, pieces = self.operands(k, found)
            if number % 2:
                at = min(own, default=num_segments - 1)
                for var in earlier or pieces:
                    at = max((s for s in available.get(var, ()) if s <= at), default=at)
            else:
                at = max(own, default=0)
                for var in earlier:
                    at = min((s for s in available.get(var, ()) if s >= at), default=at)
            found[k] = at
        return found

    def operands(self, k: int, segment: _Segments) -> tuple[list[int], list[Var], list[Var]]:
        """Segments of the operands that the equation's own pass makes; its earlier operands, parameters first; its pieces."""
        segments, earlier, pieces = [], list[Var](), list[Var]()
        for var in inputs_of(self.eqns[k]):
            maker = self.made_by.get(var)
            if maker is None:
                (earlier if var in self.parameters or var in self.beside else pieces).append(var)
            elif self.passes[maker] < self.passes[k] and not self.light[maker]:
                earlier.append(var)
            elif not self.light[maker]:
                segments.append(segment[maker])
        return segments, sorted(earlier, key=lambda var: var not in self.parameters), pieces

    def move_earlier(self, number: int, segment: _Segments, available: _Available) -> list[int]:
        """The segments, with backward equations read only by earlier ones there, if their operands are smaller than their
        results."""
        found = list(segment)
        reader: dict[Var, int] = {}
        for k in reversed(self.of_pass(number)):
            eqn = self.eqns[k]
            target = max((reader[var] for var in eqn.outvars if var in reader), default=found[k])
            if target < found[k]:
                sent = sum(
                    num_bytes(var) for var in set(inputs_of(eqn)) if not self.is_at(var, target, found, available)
                )
                if sent <= sum(num_bytes(var) for var in eqn.outvars if var in reader):
                    found[k] = target
            for var in inputs_of(eqn):
                reader[var] = max(reader.get(var, found[k]), found[k])
        return found

    def is_at(self, var: Var, at: int, segment: _Segments, available: _Available) -> bool:
        """Whether a segment has a value without receiving it."""
        maker = self.made_by.get(var)
        if maker is None:
            return var not in self.parameters or at in available.get(var, ())
        if self.light[maker]:
            return True
        return segment[maker] == at if self.passes[maker] % 2 else at in available.get(var, ())

    def crossing(self, segment: _Segments, num_segments: int) -> np.ndarray:
        """Bytes that cross each border: forward values to later segments, cotangents to earlier ones."""
        bytes_over = np.zeros(num_segments + 1)
        furthest: dict[tuple[Var, int], int] = {}
        for k, eqn in enumerate(self.eqns):
            if segment[k] < 0:
                continue
            for var in inputs_of(eqn):
                maker = self.made_by.get(var)
                if maker is None or segment[maker] < 0 or self.passes[maker] != self.passes[k]:
                    continue
                key, here = (var, self.passes[k]), segment[k]
                far = furthest.get(key, segment[maker])
                furthest[key] = min(far, here) if self.passes[k] % 2 else max(far, here)
        for (var, _), far in furthest.items():
            low, high = sorted((segment[self.made_by[var]], far))
            bytes_over[low + 1 : high + 1] += num_bytes(var)
        return bytes_over

    def marks(self, segment: _Segments, num_segments: int) -> tuple[int, ...]:
        found = [segment[k] + 1 for k in self.forward if self.eqns[k].primitive.name == "mark_stage"]
        return tuple(sorted({s for s in found if s < num_segments}))

    def kinds(self, places: Sequence[int]) -> tuple[int, ...]:
        """A number per place, equal where the operations around it are."""
        signatures = [equation_signature(self.eqns[k]) for k in self.forward]
        number: dict[Hashable, int] = {}
        around = [tuple(signatures[max(0, at - TUNING.around_border) : at + TUNING.around_border]) for at in places]
        return tuple(number.setdefault(what, len(number)) for what in around)

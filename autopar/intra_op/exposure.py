"""Estimates the exposed fraction of conversions: the part of their seconds that no kernel hides.

In:     a sharded program and the exposed seconds of each of its collectives (`lanes.py`).
Out:    `Exposure`: for each kind of conversion, the fraction of its seconds that counts.
Method: conversions of one kind (of samples or not; read by the forward pass, the backward pass, the update or a result;
        as often per step) overlap with the same kernels, such as gradients with the rest of the backward pass, or a layer's
        parameters with the layer before. A kind's exposed fraction on the clock, over all programs seen, is taken for every
        conversion of the kind. Kinds that no program has shown yet are taken to be hidden, unless samples wait for them.
        With these fractions as weights the choice problem is solved again (`shard.py`), to a fixed point. In the end the
        best program alone decides, and its small conversions are told apart: the price of one assumes that it is fused with
        others; if it was sent alone, more than its price counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost import collective_seconds
from autopar.cost.steps import step_kind
from autopar.grouping import summed
from autopar.intra_op.fuse import sent_together, small_bytes
from autopar.intra_op.graph import Edge, Graph, Phase
from autopar.intra_op.sharded import Body, Fused, Move, move_bytes, sent_by
from autopar.ir.work import num_bytes
from autopar.mesh import LogicalMesh

Seen = tuple[bool, Phase, float]
"""Whether the value has samples or samples wait for it, the phase of its readers, executions per step."""
Kind = tuple[bool, Phase, float, bool]
"""The same, and whether the conversion is priced as one of several that are fused."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """The fraction of a conversion's seconds that counts, by kind.

    Attributes:
        least: Fraction of a fully hidden conversion: it slows down the kernels beside it.
        seen: Kind, fused or not -> seconds in all programs put on the clock, and the exposed ones of these.
        unseen: Fraction of conversions that samples wait for, of kinds that no program has shown.
    """

    least: float
    seen: Mapping[Seen, tuple[float, float]] = field(default_factory=dict)
    unseen: float = 1.0

    def of(self, kind: Kind) -> float:
        """The fraction that counts for a kind of conversion."""
        seconds, exposed = self.seen.get(kind[:3], (0.0, 0.0))
        if not seconds:
            return self.unseen if kind[0] else self.least
        return min(1.0, max(self.least, exposed / seconds))

    def after(self, shown: Sequence[Shown]) -> Exposure:
        """The exposure after one more program was put on the clock."""
        more = ((one.kind[:3], (one.seconds, one.exposed_seconds)) for one in shown if one.kind is not None)
        return Exposure(self.least, summed((*self.seen.items(), *more)))

    def as_in(self, shown: Sequence[Shown], before: Exposure) -> OwnExposure:
        """The same, except that for the kinds of conversions in some programs, these alone decide.

        `before`: the exposure when the first of them was found.
        """
        own = summed((one.kind, (one.priced_seconds, one.exposed_seconds)) for one in shown if one.kind is not None)
        parts = {kind: max(self.least, exposed / priced) for kind, (priced, exposed) in own.items() if priced}
        return OwnExposure(self.least, self.seen, self.unseen, own=parts, before=before)

    def hopeful(self) -> Exposure:
        """The same, with all kinds hidden that no program has shown."""
        return dataclasses.replace(self, unseen=self.least)

    def in_microbatches(self, before: int, after: int) -> Exposure:
        """Guess the exposure with `after` microbatches from that with `before`: execution counts within the loop scale."""

        def scaled(kind: Seen) -> Seen:
            is_sample, phase, times = kind
            is_inside = times % before == 0 if before > 1 else phase in ("f", "b")
            return is_sample, phase, times / before * after if is_inside else times

        return Exposure(self.least, summed((scaled(kind), seconds) for kind, seconds in self.seen.items()))

    def seconds_of(self, shown: Sequence[Shown]) -> float:
        """Seconds that a program's collectives count, all together."""
        return sum(self._counted_seconds(one) * (1.0 if one.kind is None else self.of(one.kind)) for one in shown)

    def misjudges(self, shown: Sequence[Shown]) -> float:
        """Seconds by which the prices of a program's conversions, under this exposure, differ from those under its own."""
        own = self.as_in(shown, self)
        return abs(sum((self.of(one.kind) - own.of(one.kind)) * one.priced_seconds for one in shown if one.kind))

    def _counted_seconds(self, one: Shown) -> float:
        return one.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnExposure(Exposure):
    """The exposure in the best program, and in those found from it.

    Attributes:
        own: Kind -> exposed seconds as a fraction of the price, in these programs; other kinds as in `seen`.
        before: The exposure when the best one was found, by which other programs are compared.
    """

    own: Mapping[Kind, float]
    before: Exposure

    def of(self, kind: Kind) -> float:
        """The fraction that counts for a kind of conversion."""
        return self.own[kind] if kind in self.own else Exposure.of(self, kind)

    def doubtful(self) -> OwnExposure:
        """The same, if half of what hides in these programs did not: another may leave it less room."""
        return dataclasses.replace(self, own={kind: max(part, (1 + part) / 2) for kind, part in self.own.items()})

    def _counted_seconds(self, one: Shown) -> float:
        return one.priced_seconds if one.kind in self.own else one.seconds


@dataclass(frozen=True, slots=True)
class Shown:
    """What the clock showed of a conversion.

    Attributes:
        kind: Kind of the conversion; None: an operation's immediate reduction.
        seconds: Its seconds as emitted; if it was fused with others, its share.
        exposed_seconds: The exposed ones of these.
        priced_seconds: Its price in the problem if it counts in full.
    """

    kind: Kind | None
    seconds: float
    exposed_seconds: float
    priced_seconds: float = 0.0


def kind_of(edge: Edge, small: float) -> Kind:
    """The kind of the conversions on an edge; `small`: bytes up to which they are fused (`small_bytes`)."""
    return edge.is_sample, edge.phase, float(edge.weight), is_sent_with_others(edge, small)


def is_sent_with_others(edge: Edge, small: float) -> bool:
    """Whether the conversions on an edge are priced as fused with others."""
    return not edge.is_sample and num_bytes(edge.var) <= small


def show(graph: Graph, body: Body, exposed: Sequence[float]) -> tuple[Shown, ...]:
    """Read off the exposed seconds of a program's conversions; cached in the graph.

    `graph`: its decision graph. `exposed`: exposed seconds of each of its collectives (`collectives_of`).
    """
    return graph.cached(("shown", body, tuple(exposed)), lambda: tuple(_shown_in(graph, body, exposed)))


def _shown_in(graph: Graph, body: Body, exposed: Sequence[float]) -> Iterator[Shown]:
    samples, small = graph.samples, small_bytes(graph.mesh)
    for (instruction, sent), seconds_exposed in zip(sent_by(body, graph.mesh), exposed, strict=True):
        seconds = sent.times * collective_seconds(sent.kind, sent.bytes, sent.axes, graph.mesh)
        if not isinstance(instruction, Move | Fused):
            yield Shown(None, seconds, seconds_exposed, seconds)
            continue
        moves = instruction.moves
        for move in moves:
            share = move_bytes(move, graph.mesh) / sent.bytes if sent.bytes else 1 / len(moves)
            is_small = move.var not in samples and num_bytes(move.var) <= small
            kind = (move.var in samples, move.phase, float(sent.times), is_small)
            priced = sent.times * _priced(move, is_small, graph.mesh) if len(moves) > 1 or is_small else seconds
            yield Shown(kind, share * seconds, share * seconds_exposed, priced)


def _priced(move: Move, is_small: bool, mesh: LogicalMesh) -> float:
    """The price of one run of a move, as if it were fused with an unknown number of others."""
    kind = step_kind(move.step)
    assert kind is not None, "only collectives are priced"
    as_seen = sent_together(mesh, num_bytes(move.var)) if is_small else mesh
    return collective_seconds(kind, move_bytes(move, mesh), move.step.axes, as_seen)

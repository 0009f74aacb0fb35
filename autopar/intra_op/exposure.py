"""Which part of a conversion's seconds nothing hides: what makes seconds of communication seconds of a step.

In:     a sharded program and what is exposed of each of its collectives (`lanes.py`).
Out:    `Exposure`: by kind of conversion, the part of its seconds that counts.
Method: conversions of one kind (of samples or not; for the forward pass, the backward pass, the update or a result; as
        often in a step) have the same room to hide in, such as gradients behind the rest of the backward pass, or a
        layer's parameters behind the layer before. What a kind's collectives show on the clock, those of all programs
        seen together, is taken for every conversion of that kind; what no program has shown yet is taken to hide, but
        where samples wait for it.
        With these parts as weights the choice problem is solved again (`shard.py`), until they are what its answer shows.
        In the end the best program alone decides, of which small conversions are told apart: the price of one supposes
        others that are sent with it; where it was sent alone, more than all of its price counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.cost import collective_seconds
from autopar.cost.steps import step_kind
from autopar.intra_op.fuse import sent_together, small_bytes
from autopar.intra_op.graph import Edge, Graph, Phase
from autopar.intra_op.sharded import Body, Fused, Move, move_bytes, sent_by
from autopar.ir.work import num_bytes
from autopar.mesh import LogicalMesh

Seen = tuple[bool, Phase, float]
"""Whether samples own the value or wait for it, the phase of its readers, executions in one step."""
Kind = tuple[bool, Phase, float, bool]
"""The same, and whether the conversion is priced as one of several that are sent together."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """Which part of the seconds of a conversion counts.

    Attributes:
        least: The part that counts of what is hidden as well as can be: it slows down the kernels beside it.
        seen: Of each kind, small ones or not, the seconds of all programs that were put on the clock, and how many of them
            were exposed.
        unseen: The part that counts where samples wait for a conversion of a kind that no program has shown.
        sent: Of the kinds that one program has, the part of their prices that counts as that program sends them.
        before: What was known before that program alone decided; None: it does not. Other programs are rather compared so.
    """

    least: float
    seen: Mapping[Seen, tuple[float, float]] = field(default_factory=dict)
    unseen: float = 1.0
    sent: Mapping[Kind, float] = field(default_factory=dict)
    before: Exposure | None = None

    def of(self, kind: Kind) -> float:
        """The part for a kind of conversions."""
        if kind in self.sent:
            return self.sent[kind]
        seconds, exposed = self.seen.get(kind[:3], (0.0, 0.0))
        if not seconds:
            return self.unseen if kind[0] else self.least
        return min(1.0, max(self.least, exposed / seconds))

    def after(self, shown: Sequence[Shown]) -> Exposure:
        """What is known once one more program was put on the clock."""
        seen = dict(self.seen)
        for one in shown:
            if one.kind is not None:
                seconds, exposed = seen.get(one.kind[:3], (0.0, 0.0))
                seen[one.kind[:3]] = seconds + one.seconds, exposed + one.exposed_seconds
        return Exposure(self.least, seen)

    def as_in(self, shown: Sequence[Shown], before: Exposure) -> Exposure:
        """The same, but of the kinds of conversions that one program has, what this one showed counts alone.

        `before`: what was known when that program was found.
        """
        own: dict[Kind, tuple[float, float]] = {}
        for one in shown:
            if one.kind is not None:
                priced, exposed = own.get(one.kind, (0.0, 0.0))
                own[one.kind] = priced + one.priced_seconds, exposed + one.exposed_seconds
        parts = {kind: max(self.least, exposed / priced) for kind, (priced, exposed) in own.items() if priced}
        return dataclasses.replace(self, sent=parts, before=before)

    def hopeful(self) -> Exposure:
        """The same, if all hides that no program has shown."""
        return dataclasses.replace(self, unseen=self.least)

    def in_microbatches(self, before: int, after: int) -> Exposure:
        """What is known of a step in some number of microbatches, said of it in another one: what runs for each runs as much
        oftener. A guess, to begin with."""
        seen: dict[Seen, tuple[float, float]] = {}
        for (is_sample, phase, times), (seconds, exposed) in self.seen.items():
            is_inside = times % before == 0 if before > 1 else phase in ("f", "b")
            kind = is_sample, phase, times / before * after if is_inside else times
            known = seen.get(kind, (0.0, 0.0))
            seen[kind] = known[0] + seconds, known[1] + exposed
        return Exposure(self.least, seen)

    def seconds_of(self, shown: Sequence[Shown]) -> float:
        """What a program's collectives count, all together."""
        counted = ((one.priced_seconds if one.kind in self.sent else one.seconds, one.kind) for one in shown)
        return sum(seconds * (1.0 if kind is None else self.of(kind)) for seconds, kind in counted)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the clock showed of a conversion; of a reduction that an operation does at once, the kind is None.

    Attributes:
        kind: Of the conversion.
        seconds: It takes, as it was emitted: of several that were sent together, its share.
        exposed_seconds: Of these, those that nothing hides.
        priced_seconds: What it is priced if all of it counts.
    """

    kind: Kind | None
    seconds: float
    exposed_seconds: float
    priced_seconds: float = 0.0


def kind_of(edge: Edge, small: float) -> Kind:
    """The kind of the conversions on an edge of a graph on whose mesh so many bytes are `small` (`small_bytes`)."""
    return edge.is_sample, edge.phase, float(edge.weight), is_sent_with_others(edge, small)


def is_sent_with_others(edge: Edge, small: float) -> bool:
    """Whether a conversion is priced as one of several that are sent together."""
    return not edge.is_sample and num_bytes(edge.var) <= small


def show(graph: Graph, body: Body, exposed: Sequence[float]) -> list[Shown]:
    """What is exposed of a program's conversions.

    `graph`: its decisions. `exposed`: of each of its collectives (`collectives_of`), the seconds that nothing hides.
    """
    found: list[Shown] = []
    samples, small = graph.samples, small_bytes(graph.mesh)
    for (instruction, sent), seconds_exposed in zip(sent_by(body, graph.mesh), exposed, strict=True):
        seconds = sent.times * collective_seconds(sent.kind, sent.bytes, sent.axes, graph.mesh)
        if not isinstance(instruction, Move | Fused):
            found.append(Shown(None, seconds, seconds_exposed, seconds))
            continue
        moves = instruction.moves if isinstance(instruction, Fused) else (instruction,)
        for move in moves:
            share = move_bytes(move, graph.mesh) / sent.bytes if sent.bytes else 1 / len(moves)
            is_small = move.var not in samples and num_bytes(move.var) <= small
            kind = (move.var in samples, move.phase, float(sent.times), is_small)
            priced = sent.times * _priced(move, is_small, graph.mesh) if len(moves) > 1 or is_small else seconds
            found.append(Shown(kind, share * seconds, share * seconds_exposed, priced))
    return found


def _priced(move: Move, is_small: bool, mesh: LogicalMesh) -> float:
    """What a move is priced once, of which it is not known with which others it is sent."""
    kind = step_kind(move.step)
    assert kind is not None, "what is sent is a collective"
    as_seen = sent_together(mesh, num_bytes(move.var)) if is_small else mesh
    return collective_seconds(kind, move_bytes(move, mesh), move.step.axes, as_seen)

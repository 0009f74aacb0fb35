"""Which part of a conversion's seconds nothing hides: what makes seconds of communication seconds of a step.

In:     a sharded program and what is exposed of each of its collectives (`lanes.py`).
Out:    `Exposure`: by kind of conversion, the part of its seconds that counts.
Method: conversions of one kind (of samples or not; for the forward pass, the backward pass, the update or a result; as
        often in a step; small ones, which are sent with others, or not) have the same room to hide in, such as gradients
        behind the rest of the backward pass, or a layer's parameters behind the layer before. What a kind's collectives
        show on the clock, those of all programs seen together, is taken for every conversion of that kind; what no program
        has shown yet is taken to hide, but where samples wait for it. The price of a small one supposes others that are
        sent with it: where it is sent alone, more than all of its price counts.
        With these parts as weights the choice problem is solved again (`shard.py`), until they are what its answer shows.
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

Kind = tuple[bool, Phase, float, bool]
"""Whether samples own the value or wait for it, the phase of its readers, executions in one step, whether it is priced as one
of several that are sent together."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """Which part of the seconds of a conversion counts.

    Attributes:
        least: The part that counts of what is hidden as well as can be: it slows down the kernels beside it.
        seen: Of each kind what its conversions in all programs that were put on the clock are priced, and how many seconds of
            them were exposed.
        unseen: The part that counts where samples wait for a conversion of a kind that no program has shown.
    """

    least: float
    seen: Mapping[Kind, tuple[float, float]] = field(default_factory=dict)
    unseen: float = 1.0

    def of(self, kind: Kind) -> float:
        """The part for a kind of conversions."""
        seconds, exposed = self.seen.get(kind, (0.0, 0.0))
        if not seconds:
            return self.unseen if kind[0] else self.least
        return max(self.least, exposed / seconds)

    def after(self, shown: Sequence[Shown]) -> Exposure:
        """What is known once one more program was put on the clock."""
        seen = dict(self.seen)
        for one in shown:
            if one.kind is not None:
                seconds, exposed = seen.get(one.kind, (0.0, 0.0))
                seen[one.kind] = seconds + one.seconds, exposed + one.exposed_seconds
        return Exposure(self.least, seen)

    def as_in(self, shown: Sequence[Shown]) -> Exposure:
        """The same, but of the kinds of conversions that one program has, what this one showed counts alone."""
        own = Exposure(self.least).after(shown).seen
        return Exposure(self.least, {**self.seen, **own})

    def hopeful(self) -> Exposure:
        """The same, if all hides that no program has shown."""
        return dataclasses.replace(self, unseen=self.least)

    def in_microbatches(self, before: int, after: int) -> Exposure:
        """What is known of a step in some number of microbatches, said of it in another one: what runs for each runs as much
        oftener. A guess, to begin with."""
        seen: dict[Kind, tuple[float, float]] = {}
        for (is_sample, phase, times, is_small), (seconds, exposed) in self.seen.items():
            is_inside = times % before == 0 if before > 1 else phase in ("f", "b")
            kind = is_sample, phase, times / before * after if is_inside else times, is_small
            known = seen.get(kind, (0.0, 0.0))
            seen[kind] = known[0] + seconds, known[1] + exposed
        return Exposure(self.least, seen)

    def seconds_of(self, shown: Sequence[Shown]) -> float:
        """What a program's collectives count, all together."""
        return sum(one.seconds * (1.0 if one.kind is None else self.of(one.kind)) for one in shown)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the clock showed of a conversion; of a reduction that an operation does at once, the kind is None.

    Attributes:
        kind: Of the conversion.
        seconds: What it is priced if all of it counts.
        exposed_seconds: Of what it takes as it was emitted, with others or alone, those that nothing hides.
    """

    kind: Kind | None
    seconds: float
    exposed_seconds: float


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
    samples, small = {edge.var for edge in graph.edges if edge.is_sample}, small_bytes(graph.mesh)
    for (instruction, sent), seconds_exposed in zip(sent_by(body, graph.mesh), exposed, strict=True):
        seconds = sent.times * collective_seconds(sent.kind, sent.bytes, sent.axes, graph.mesh)
        if not isinstance(instruction, Move | Fused):
            found.append(Shown(None, seconds, seconds_exposed))
            continue
        moves = instruction.moves if isinstance(instruction, Fused) else (instruction,)
        for move in moves:
            share = move_bytes(move, graph.mesh) / sent.bytes if sent.bytes else 1 / len(moves)
            is_small = move.var not in samples and num_bytes(move.var) <= small
            kind = (move.var in samples, move.phase, float(sent.times), is_small)
            priced = sent.times * _priced(move, is_small, graph.mesh) if len(moves) > 1 or is_small else seconds
            found.append(Shown(kind, priced, share * seconds_exposed))
    return found


def _priced(move: Move, is_small: bool, mesh: LogicalMesh) -> float:
    """What a move is priced once, of which it is not known with which others it is sent."""
    kind = step_kind(move.step)
    assert kind is not None, "what is sent is a collective"
    as_seen = sent_together(mesh, num_bytes(move.var)) if is_small else mesh
    return collective_seconds(kind, move_bytes(move, mesh), move.step.axes, as_seen)

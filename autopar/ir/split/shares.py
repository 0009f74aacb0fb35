"""Which share of every value one microbatch has, and how each equation is done in pieces.

In:     (types only; `share_analysis.py` fills them.)
Out:    `Shares`; `Ways`: the ways of each equation, looked up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar._jax import JaxprEqn, Literal, Var
from autopar.ir.rules import rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.split.blocks import block_ways
from autopar.ir.split.pieces import OWN, WHOLE, Cut, Share, Way, ways


@dataclass(eq=False, slots=True)
class Shares:
    """How each part of a program is done in pieces.

    Attributes:
        count: Number of microbatches.
        made: For each value that the loop makes, the share that one microbatch makes of it; others are whole.
        way_of: How each plain equation of the loop is done, by identity; absent: as it stands.
        phase: `"before"`, `"loop"` or `"after"` for each top-level equation, by identity.
        early: Top-level equations, by identity, that run before the loop on the whole batch, whatever else they do.
        taken_whole: Values that the loop makes in parts and reads whole from before it.
        own_trips: Scans over samples, by identity, of which each microbatch does its own trips: its share of them.
        stand_ins: Values of which each microbatch takes its own for that of the whole batch.
    """

    count: int
    made: dict[Var, Share] = field(default_factory=dict)
    way_of: dict[int, Way] = field(default_factory=dict)
    phase: dict[int, str] = field(default_factory=dict)
    early: dict[int, None] = field(default_factory=dict)
    taken_whole: dict[Var, None] = field(default_factory=dict)
    own_trips: dict[int, Cut] = field(default_factory=dict)
    stand_ins: dict[Var, None] = field(default_factory=dict)

    def share(self, atom: Any) -> Share:
        """The share of a value that a reader in the loop finds."""
        if isinstance(atom, Literal) or atom in self.taken_whole:
            return WHOLE
        if atom in self.stand_ins:
            return OWN
        return self.made.get(atom, WHOLE)


class Ways:
    """In which ways equations can be done in pieces; equal ones are looked up once."""

    def __init__(self, count: int):
        self.count = count
        self.signatures: dict[int, object] = {}
        self.plain: dict[object, list[Way]] = {}
        self.in_blocks: dict[object, list[Way]] = {}

    def of(self, eqn: JaxprEqn, shares: Sequence[Share | None]) -> list[Way]:
        """The ways of a plain equation.

        Args:
            eqn: The equation.
            shares: Of its operands, then of its results, as far as they are known: they may be cut in blocks.
        """
        signature = self.signatures.get(id(eqn))
        if signature is None:
            signature = self.signatures[id(eqn)] = equation_signature(eqn)
        if signature not in self.plain:
            self.plain[signature] = ways(rule_for(eqn), self.count)
        cuts = tuple(share if isinstance(share, Cut) else None for share in shares)
        if (signature, cuts) not in self.in_blocks:
            self.in_blocks[signature, cuts] = block_ways(eqn, rule_for(eqn), self.count, cuts) if any(cuts) else []
        return self.plain[signature] + self.in_blocks[signature, cuts]

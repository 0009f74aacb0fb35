"""Puts the equations of the update that a stage runs in rounds, between which values cross stages.

In:     equations between passes of the loop and after it, each with its stage.
Out:    `UpdateRound`s of each stage.
Method: an equation is in the first round after its pass in which its stage has all of its operands: a round later than those
        that other stages make.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import JaxprEqn, Var
from autopar.ir.dataflow import read_by, with_makers

AFTER_LOOP = 2**31
"""Greater than the number of any pass of the loop."""
_Round = tuple[int, int]
"""The pass after which the round runs, and its number there."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateRound:
    """Equations that a stage runs together, after a pass of all microbatches.

    Attributes:
        after_pass: The pass of the loop after which it runs; `AFTER_LOOP`: after all of them.
        number: Index among the rounds after that pass.
        eqns: The equations, in order; there may be none.
    """

    after_pass: int
    number: int
    eqns: tuple[JaxprEqn, ...]


class Rounds:
    """Builds the rounds of each stage: all equations are added, then the values that stages want, then rounds are read."""

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        num_stages: int,
        arguments: Collection[Var],
        stage_of: Mapping[Var, int],
        floating: Mapping[Var, JaxprEqn],
    ):
        """`eqns`: those of the update, in order; `arguments`: of the step; `stage_of`, `floating`: see `update.py`."""
        self.arguments, self.stage_of, self.floating = arguments, stage_of, floating
        self.order = {eqn: k for k, eqn in enumerate(eqns)}
        self.round_of: dict[Var, _Round] = {}
        self.eqns: list[dict[_Round, list[JaxprEqn]]] = [{} for _ in range(num_stages)]
        self.wanted: list[dict[_Round, list[Var]]] = [{} for _ in range(num_stages)]

    def add(self, eqn: JaxprEqn, at: int, after_pass: int) -> None:
        """Add an equation to the first round in which a stage has its operands; call it in order of equations."""
        number = self.number_at(self.makers_of([eqn], ()), at, after_pass)
        self.round_of.update(dict.fromkeys(eqn.outvars, (after_pass, number)))
        self.eqns[at].setdefault((after_pass, number), []).append(eqn)

    def want(self, var: Var, at: int, after_pass: int) -> None:
        """Let a stage make a floating value for itself."""
        number = self.number_at(self.makers_of((), [var]), at, after_pass)
        self.wanted[at].setdefault((after_pass, number), []).append(var)

    def makers_of(
        self, eqns: Sequence[JaxprEqn], wanted: Sequence[Var], done: Collection[JaxprEqn] = ()
    ) -> list[JaxprEqn]:
        return with_makers(eqns, wanted, self.floating, self.order, done)

    def number_at(self, eqns: Sequence[JaxprEqn], at: int, after_pass: int) -> int:
        """The first round after a pass in which a stage has all operands of equations."""
        number, stage_of = 0, self.stage_of
        for var in read_by(eqns):
            if var in stage_of and var not in self.arguments:
                before, so_far = self.round_of.get(var, (after_pass, 0))
                if var not in self.round_of and stage_of[var] != at:
                    self.eqns[stage_of[var]].setdefault((after_pass, 0), [])  # an empty round, from which it is sent
                if before == after_pass:
                    number = max(number, so_far + (stage_of[var] != at))
        return number

    def of_stage(self, stage: int) -> tuple[UpdateRound, ...]:
        """A stage's rounds, in order; numbers after a pass are contiguous from 0, so some may be empty."""
        own, wanted = self.eqns[stage], self.wanted[stage]
        most: dict[int, int] = {}
        for after_pass, number in own.keys() | wanted:
            most[after_pass] = max(number, most.get(after_pass, 0))
        done: dict[JaxprEqn, None] = {}
        found = []
        for place in ((after_pass, number) for after_pass in sorted(most) for number in range(most[after_pass] + 1)):
            eqns = self.makers_of(own.get(place, ()), wanted.get(place, ()), done)
            done.update(dict.fromkeys(eqns))
            found.append(UpdateRound(*place, tuple(eqns)))
        return tuple(found)

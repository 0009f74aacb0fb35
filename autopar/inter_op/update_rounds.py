"""Puts the equations of the update that a stage runs in rounds, between which values cross stages.

In:     equations between passes of the loop and after it, each with its stage.
Out:    `UpdateRound`s of each stage.
Method: an equation is in the first round after its pass in which its stage has all of its operands: a round later than those
        that other stages make. After the loop, an elementwise one that only later rounds of its stage read is in the first of
        these, which fuses it (`b1 * mu`, where gradients are clipped by their norm), unless more would be kept for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import JaxprEqn, Var, copies_to_or_from_host
from autopar.inter_op.residuals import can_run_again
from autopar.ir.dataflow import inputs_of, read_by, with_makers
from autopar.ir.work import num_bytes, num_elements_of

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
        results: Collection[Var],
    ):
        """`eqns`: of the update, in order; `arguments`, `results`: of the step; `stage_of`, `floating`: see `update.py`."""
        self.stay, self.leaving = {*arguments, *results}, set(results)  # and what other stages read
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
                if stage_of[var] != at:
                    self.leaving.add(var)
                before, so_far = self.round_of.get(var, (after_pass, 0))
                if var not in self.round_of and stage_of[var] != at:
                    self.eqns[stage_of[var]].setdefault((after_pass, 0), [])  # an empty round, from which it is sent
                if before == after_pass:
                    number = max(number, so_far + (stage_of[var] != at))
        return number

    def of_stage(self, stage: int) -> tuple[UpdateRound, ...]:
        """A stage's rounds, in order; numbers after a pass are contiguous from 0, so some may be empty."""
        own, wanted = self.late(stage), self.wanted[stage]
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

    def late(self, stage: int) -> dict[_Round, list[JaxprEqn]]:
        """A stage's equations by rounds, those in their readers' round that may be."""
        own, wanted = self.eqns[stage], self.wanted[stage]
        found: dict[_Round, list[JaxprEqn]] = {place: [] for place in own}
        first: dict[Var, _Round] = {}  # the rounds that first and last read a value
        last: dict[Var, _Round] = {}

        def put(eqn: JaxprEqn, place: _Round) -> None:
            for var in read_by(self.makers_of([eqn], ())):
                first[var], last[var] = min(place, first.get(var, place)), max(place, last.get(var, place))

        for place in sorted(own.keys() | wanted.keys(), reverse=True):
            for eqn in self.makers_of((), wanted.get(place, ())):
                put(eqn, place)
            for eqn in reversed(own.get(place, ())):
                reader = min((first[var] for var in eqn.outvars if var in first), default=place)
                is_late = place[0] == AFTER_LOOP and reader > place and self.may_wait(eqn, reader, last)
                put(eqn, reader if is_late else place)
                found[reader if is_late else place].append(eqn)
        return found

    def may_wait(self, eqn: JaxprEqn, reader: _Round, last: Mapping[Var, _Round]) -> bool:
        """Whether an equation may be in its reader's round: it is elementwise, and no more bytes are kept until then.

        `last`: the last round that reads each value, as far as that is known.
        """
        most = max(map(num_elements_of, eqn.outvars))
        operands = dict.fromkeys(inputs_of(eqn))
        if any(num_elements_of(var) > most for var in operands) or not self.leaving.isdisjoint(eqn.outvars):
            return False
        kept = [var for var in operands if var not in self.stay and (var not in last or last[var] < reader)]
        is_light = can_run_again(eqn) or copies_to_or_from_host(eqn)
        return is_light and sum(map(num_bytes, kept)) <= sum(map(num_bytes, eqn.outvars))

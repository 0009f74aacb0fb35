"""Divides a step among pipeline stages: which equations each runs before the loop, forward, backward, and in the update.

In:     a step in phases (`ir/split/microbatches/microbatch.py`), its loop as a chain of segments, the first segment of each
        stage.
Out:    `Tasks`: for each stage the equations before the loop, of its forward and backward passes over one microbatch,
        between passes and of the update, in rounds; and the home stage of every value of the step.
Method: an equation of the loop runs on the stage of its segment; light ones on every stage that reads them. The update runs
        at the home of its parameter. A value that joins stages (global norm, loss scale) is small and made by the last
        stage, of partial results made within each stage; values are sent between two rounds. Where a backward is split into
        what other stages wait for and the gradients of weights, so are its scans: the first half has the carries that the
        awaited results depend on; the second recomputes cheap equations of the first, and for the rest the fewest bytes are
        stacked (`residuals.py`), such as the cotangents of products. Qi et al., "Zero bubble pipeline parallelism", ICLR
        2024, do this by hand for each kind of layer.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr
from autopar.inter_op.backward import Backward, Passes, backward_at, find_levels
from autopar.inter_op.chain import Chain
from autopar.inter_op.cut import CutStep
from autopar.inter_op.residuals import CHEAP, Kept, can_run_again, choose_residuals
from autopar.inter_op.stage import StepKind
from autopar.inter_op.update import Update, place_update
from autopar.ir.build import rebuilt_apart
from autopar.ir.dataflow import inputs_of, makers, needed, read_by, variables, with_makers
from autopar.ir.region import Binding, Region, kind_of, region_of, rows_in, rows_out
from autopar.ir.split.microbatches.microbatch import Microbatches

BackwardSplit = Literal["nowhere", "outside loops", "everywhere"]
"""Where a backward pass is split into two tasks: what other stages wait for (B), and weight gradients (W)."""


class Made(NamedTuple):
    """The task that makes a value of the loop: its kind, the round and the stage."""

    kind: StepKind
    round: int
    stage: int


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A stage's part of one round: of one forward and one backward pass of a microbatch through the stages.

    Attributes:
        forward: Equations of the forward pass, in order.
        passes: The stage's equations before recomputation is decided.
        backward: The backward pass at the chosen recomputation level.
    """

    forward: tuple[JaxprEqn, ...]
    passes: Passes
    backward: Backward

    @property
    def by_kind(self) -> dict[StepKind, tuple[JaxprEqn, ...]]:
        """The equations of tasks F, B and W; B and W include recomputed forward equations."""
        return {"F": self.forward, "B": self.backward.eqns, "W": self.backward.weight}


@dataclass(frozen=True, eq=False)
class Tasks:
    """A step cut into stages.

    Attributes:
        cut: The step.
        split: Its phases, with backward scans in halves where the backward is split so.
        borders: First segment of each stage.
        rounds: Per stage, its part of the loop.
        before: Per stage, equations before the loop, in order.
        update: Stages of the equations between passes and after the loop, and homes of values.
        made_at: Value of the loop -> the task that makes it; values of light equations are left out.
    """

    cut: CutStep
    split: Microbatches
    borders: tuple[int, ...]
    rounds: tuple[tuple[Round, ...], ...]
    before: tuple[tuple[JaxprEqn, ...], ...]
    update: Update
    made_at: Mapping[Var, Made]

    @property
    def jaxpr(self) -> Jaxpr:
        """The whole step."""
        return self.cut.program.jaxpr

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.borders)

    @functools.cached_property
    def readers(self) -> dict[Var, set[int]]:
        """Value -> the stages whose part of the loop reads it without making it."""
        found: dict[Var, set[int]] = {}
        for stage in range(self.num_stages):
            eqns = self.in_loop(stage)
            for var in read_by(eqns).keys() - makers(eqns).keys():
                found.setdefault(var, set()).add(stage)
        return found

    @functools.cached_property
    def left_behind_loop(self) -> list[dict[Var, int]]:
        """Per stage, its values that other stages read between passes or after the loop -> the pass after which they are
        first read, as in `UpdateRound.after_pass`."""
        found: list[dict[Var, int]] = [{} for _ in range(self.num_stages)]
        for stage, rounds in enumerate(self.update.rounds):
            for each in rounds:
                for var in (*read_by(each.eqns), *self.late_constants(stage, each.after_pass)):
                    home = self.update.stage_of.get(var, stage)
                    if home != stage:
                        found[home][var] = min(each.after_pass, found[home].get(var, each.after_pass))
        return found

    def late_constants(self, stage: int, after_pass: int) -> dict[Var, None]:
        """Values made after a pass that a stage's part of the loop reads."""
        read = self.split.read_outside(self.in_loop(stage))
        return {var: None for var in read if self.cut.after_pass.get(var) == after_pass}

    def in_loop(self, stage: int) -> list[JaxprEqn]:
        """The equations of the loop that a stage runs; recomputed ones are there again in the backward."""
        return [eqn for each in self.rounds[stage] for eqns in each.by_kind.values() for eqn in eqns]

    def kept(self, stage: int) -> tuple[Kept, ...]:
        """Per round, the residuals of a stage."""
        return tuple(each.backward.kept for each in self.rounds[stage])

    @property
    def levels(self) -> tuple[float, ...]:
        """Per stage, its recomputation level (`residuals.py`)."""
        return tuple(rounds[0].backward.level for rounds in self.rounds)

    def levels_of(self, stage: int) -> list[float]:
        """The levels at which the residuals of a stage change."""
        return sorted({level for each in self.rounds[stage] for level in find_levels(each.passes)})

    def at_level(self, stage: int, level: float) -> Tasks:
        """The same tasks with another recomputation level for one stage."""
        if self.levels[stage] == level:
            return self
        changed = tuple(replace(each, backward=backward_at(each.passes, level)) for each in self.rounds[stage])
        return replace(self, rounds=(*self.rounds[:stage], changed, *self.rounds[stage + 1 :]))


def make_tasks(
    cut: CutStep, borders: Sequence[int], split_backward: BackwardSplit = "nowhere", levels: Sequence[float] = ()
) -> Tasks:
    """Cut a step into stages.

    Args:
        cut: The step in phases.
        borders: First segment of each stage, from 0.
        split_backward: Where work that no other stage waits for becomes a task of its own (W).
        levels: Per stage, its recomputation level; (): `CHEAP`.
    """
    chain, jaxpr = cut.chain, cut.program.jaxpr
    num_stages = len(borders)
    own, light = _by_stage(chain, borders)
    _place_light_results(cut, own, light)
    made_at = {
        var: Made("B" if number % 2 else "F", number // 2, stage)
        for (number, stage), eqns in own.items()
        for eqn in eqns
        for var in eqn.outvars
    }
    passes, halves = _passes(cut.split, own, light, made_at, split_backward, num_stages)
    position = {eqn: k for k, eqn in enumerate(chain.loop.eqns)}
    rounds = []
    for s, of_stage in enumerate(passes):
        found = []
        for r, each in enumerate(of_stage):
            made_at |= dict.fromkeys(makers(each.at_once), Made("B", r, s))
            made_at |= dict.fromkeys(makers(each.later), Made("W", r, s))
            forward = with_makers(own[2 * r, s], (), light, position)
            found.append(Round(tuple(forward), each, backward_at(each, levels[s] if levels else CHEAP)))
        rounds.append(tuple(found))
    split = _in_halves(cut.split, halves)
    in_loop = [[e for each in of_stage for eqns in each.by_kind.values() for e in eqns] for of_stage in rounds]
    update = place_update(jaxpr, split, in_loop, made_at, cut.roles.aliases, cut.after_pass)
    before = [tuple(_before(jaxpr, split, s, in_loop[s], update)) for s in range(num_stages)]
    return Tasks(cut, split, tuple(borders), tuple(rounds), tuple(before), update, made_at)


_Own = dict[tuple[int, int], list[JaxprEqn]]
"""(pass, stage) -> its equations of the loop, in order."""


def _by_stage(chain: Chain, borders: Sequence[int]) -> tuple[_Own, dict[Var, JaxprEqn]]:
    """The equations of the loop by the stages of their segments; and the light equations, by their results."""
    num_stages = len(borders)
    stage_of = [max(s for s, first in enumerate(borders) if first <= k) for k in range(chain.num_segments)]
    own: _Own = {(number, s): [] for number in range(2 * chain.num_rounds) for s in range(num_stages)}
    light: dict[Var, JaxprEqn] = {}
    for eqn, segment, number in zip(chain.loop.eqns, chain.segment, chain.passes, strict=True):
        if segment < 0:
            light.update(dict.fromkeys(eqn.outvars, eqn))
        else:
            own[number, stage_of[segment]].append(eqn)
    return own, light


def _place_light_results(cut: CutStep, own: _Own, light: Mapping[Var, JaxprEqn]) -> None:
    """Let the first stage make results of the loop that light equations make, in the earliest pass; `own` is extended."""
    position = {eqn: k for k, eqn in enumerate(cut.chain.loop.eqns)}
    for eqn in dict.fromkeys(light[a] for a in variables(cut.chain.loop.outvars) if a in light):
        number = cut.chain.passes[position[eqn]] if cut.after_pass else 0
        own[number, 0] = sorted([*own[number, 0], eqn], key=lambda each: position[each])


def _passes(
    split: Microbatches,
    own: _Own,
    light: Mapping[Var, JaxprEqn],
    made_at: Mapping[Var, Made],
    split_backward: BackwardSplit,
    num_stages: int,
) -> tuple[list[list[Passes]], dict[JaxprEqn, tuple[JaxprEqn, JaxprEqn]]]:
    """The passes of each stage, per round; and the scans that were split, with their halves."""
    light_eqns = list(dict.fromkeys(light.values()))
    halves: dict[JaxprEqn, tuple[JaxprEqn, JaxprEqn]] = {}
    found = []
    for s in range(num_stages):
        free = {*light, *split.loop.invars}
        of_stage = []
        for r in range(len(own) // num_stages // 2):
            forward, at_once, later = own[2 * r, s], own[2 * r + 1, s], list[JaxprEqn]()
            received = {a for a in read_by(forward) if a in made_at and made_at[a].stage != s}
            if split_backward != "nowhere":
                in_halves = halves if split_backward == "everywhere" else None
                others = [own[2 * r + 1, other] for other in range(num_stages) if other != s]
                at_once, later = _waited_for(at_once, others, in_halves)
            pieces = list(split.piece_of)
            of_stage.append(Passes(forward, at_once, later, received, light_eqns, set(free), pieces))
            free.update(makers((*forward, *at_once, *later)))  # later rounds have the values of this one
        found.append(of_stage)
    return found, halves


def _waited_for(
    eqns: Sequence[JaxprEqn],
    others: Sequence[Sequence[JaxprEqn]],
    halves: dict[JaxprEqn, tuple[JaxprEqn, JaxprEqn]] | None,
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Split a stage's backward pass into the equations that other stages wait for, and the rest.

    `others`: the same pass of the other stages. `halves` is extended by the scans that are split; None: scans stay whole.
    """
    waited = set(read_by(eqn for own in others for eqn in own))
    at_once, later = [], []
    for eqn in reversed(eqns):
        if not eqn.effects and waited.isdisjoint(eqn.outvars):
            later.append(eqn)
            continue
        both = None if halves is None else scan_halves(eqn, waited)
        if halves is not None and both is not None:
            halves[eqn] = both
            later.append(both[1])
        first = eqn if both is None else both[0]
        at_once.append(first)
        waited.update(inputs_of(first))
    return at_once[::-1], later[::-1]


def _in_halves(split: Microbatches, halves: Mapping[JaxprEqn, Sequence[JaxprEqn]]) -> Microbatches:
    """Replace scans of the loop by their halves."""
    if not halves:
        return split
    loop = split.loop
    eqns = [half for eqn in loop.eqns for half in halves.get(eqn, (eqn,))]
    return replace(split, loop=make_jaxpr(loop.invars, loop.outvars, eqns))


def _before(
    jaxpr: Jaxpr, split: Microbatches, stage: int, in_loop: Sequence[JaxprEqn], update: Update
) -> list[JaxprEqn]:
    """Equations before the loop that a stage needs; they are repeated in every stage that does."""
    results = [a for a, at in zip(jaxpr.outvars, update.outputs, strict=True) if at == stage]
    later = read_by((eqn for each in update.rounds[stage] for eqn in each.eqns), results)
    return needed(split.before, split.read_outside(in_loop) | later, effects=False)


def scan_halves(eqn: JaxprEqn, waited: Collection[Var]) -> tuple[JaxprEqn, JaxprEqn] | None:
    """Split a scan in two, the first making the results in `waited`; None: `eqn` is no scan, or the second would do
    nothing heavy."""
    if kind_of(eqn) != "scan" or eqn.effects:
        return None
    region = region_of(eqn)
    first, eqns = _carries_waited_for(region, waited)
    second = [b for b in region.bindings if b.result is not None and b not in first]
    done, values = set(eqns), variables(b.value for b in second)
    own = [e for e in needed(region.bodies[0].eqns, values, effects=False) if e not in done]
    if all(map(can_run_again, own)):
        return None
    made = {*makers(eqns), *(b.var for b in first if b.role == "carry")}
    read = [var for var in read_by(own, values) if var in made]
    kept = choose_residuals(eqns, read, {b.var for b in region.of_role("const", "xs")})
    rows = {var: region.new_stack(var) for var in kept.values}
    stacked = [rows_out(var, row) for var, row in rows.items()]
    arriving = [rows_in(row, var) for var, row in rows.items()]
    return _part(region, [*first, *stacked], eqns), _part(region, [*second, *arriving], [*kept.again, *own])


def _carries_waited_for(region: Region, waited: Collection[Var]) -> tuple[list[Binding], list[JaxprEqn]]:
    """The awaited results with all carries they depend on, and the equations of the body that make them."""
    found = [b for b in region.bindings if b.result in waited]
    while True:
        values = variables(b.value for b in found)
        eqns = needed(region.bodies[0].eqns, values, effects=False)
        read = read_by(eqns, values)
        further = [b for b in region.carries if b.var in read and b not in found]
        if not further:
            return found, eqns
        found += further


def _part(region: Region, bindings: Sequence[Binding], eqns: Sequence[JaxprEqn]) -> JaxprEqn:
    """A scan of these results and equations, over the inputs of the whole scan that they read."""
    read = read_by(eqns, [b.value for b in bindings if b.result is not None])
    entering = [b for b in region.of_role("const", "xs") if b.var in read]
    return rebuilt_apart(region, [*entering, *bindings], [eqns])

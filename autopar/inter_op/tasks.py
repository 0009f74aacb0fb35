"""The tasks of a pipeline: which equations each stage runs in its forward, its backward and its update.

In:     a step in phases (`ir/split/microbatch.py`), its loop as a chain of segments, the first segment of each stage.
Out:    `Tasks`: for each stage the equations of its forward and backward pass over one microbatch, of what comes before
        and of the update in rounds; and where every value of the step lives.
Method: an equation of the loop runs where its segment is. Light ones run wherever they are read. The update runs where
        the parameter lives; a value that joins stages (global norm, loss scale) is small and made by the last stage,
        after sums over several stages have been added up within each; between two rounds values are sent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr
from autopar.inter_op.backward import Backward, Passes, backward_at
from autopar.inter_op.chain import Chain
from autopar.inter_op.cut import CutStep
from autopar.inter_op.residuals import CHEAP, Kept
from autopar.inter_op.scan_halves import scan_halves
from autopar.inter_op.update import Update, place_update
from autopar.ir.dataflow import inputs_of, makers, needed, read_by, variables, with_makers
from autopar.ir.split.microbatch import Microbatches

BackwardSplit = Literal["nowhere", "outside loops", "everywhere"]
"""Where a backward pass is made two tasks: what other stages wait for (B), and the gradients of weights (W)."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """A step cut into stages.

    Attributes:
        cut: The step.
        split: Its phases; with both halves of scans where its own have these.
        borders: First segment of each stage.
        forward: Per stage, equations of the loop, in order.
        passes: Per stage, its own equations of the loop.
        behind: Per stage, its backward pass at the level of recomputation that was chosen for it.
        before: Per stage, equations before the loop, in order.
        between: Per stage, equations between the forward and the backward passes, in order.
        update: Where each equation after the loop runs, and where values live.
        made_at: Stage and kind (`"F"`, `"B"`) of each value of the loop that no light equation makes.
    """

    cut: CutStep
    split: Microbatches
    borders: tuple[int, ...]
    forward: tuple[tuple[JaxprEqn, ...], ...]
    passes: tuple[Passes, ...]
    behind: tuple[Backward, ...]
    before: tuple[tuple[JaxprEqn, ...], ...]
    between: tuple[tuple[JaxprEqn, ...], ...]
    update: Update
    made_at: Mapping[Var, tuple[str, int]]

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
        """The stages whose part of the loop reads each value without making it."""
        found: dict[Var, set[int]] = {}
        for stage in range(self.num_stages):
            eqns = list(itertools.chain.from_iterable(self.in_loop(stage).values()))
            for var in read_by(eqns).keys() - makers(eqns).keys():
                found.setdefault(var, set()).add(stage)
        return found

    @functools.cached_property
    def left_behind_loop(self) -> list[dict[Var, None]]:
        """Per stage, what lives there and other stages read behind the loop, in the order of these."""
        found: list[dict[Var, None]] = [{} for _ in range(self.num_stages)]
        for stage, rounds in enumerate(self.update.rounds):
            for var in read_by(eqn for eqns in rounds for eqn in eqns):
                home = self.update.stage_of.get(var, stage)
                if home != stage:
                    found[home][var] = None
        return found

    def joined_for_others(self, stage: int) -> list[Var]:
        """What a stage's forward passes make and other stages need between theirs and their backward passes."""
        others = [eqns for number, eqns in enumerate(self.between) if number != stage]
        read = read_by(eqn for eqns in others for eqn in eqns)
        return [var for var in self.update.results[stage] if var in read]

    def in_loop(self, stage: int) -> dict[str, tuple[JaxprEqn, ...]]:
        """The equations of the loop that a stage runs, in order, by the kind of task; forward ones run again in backward."""
        return {"F": self.forward[stage], "B": self.behind[stage].eqns, "W": self.behind[stage].weight}

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Per stage, what passes from forward to backward."""
        return tuple(b.kept for b in self.behind)

    @property
    def levels(self) -> tuple[float, ...]:
        """Per stage, how much it runs again (`residuals.py`)."""
        return tuple(b.level for b in self.behind)

    def at_level(self, stage: int, level: float) -> Tasks:
        """The same tasks, but for how much one stage runs again."""
        if self.behind[stage].level == level:
            return self
        changed = backward_at(self.passes[stage], level)
        return dataclasses.replace(self, behind=(*self.behind[:stage], changed, *self.behind[stage + 1 :]))


def make_tasks(
    cut: CutStep, borders: Sequence[int], split_backward: BackwardSplit = "nowhere", levels: Sequence[float] = ()
) -> Tasks:
    """Cut a step into stages.

    Args:
        cut: The step in phases.
        borders: First segment of each stage, from 0.
        split_backward: Where what no other stage waits for is made a task of its own.
        levels: Per stage, how much it runs again; (): what is cheap.
    """
    chain, jaxpr = cut.chain, cut.program.jaxpr
    num_stages = len(borders)
    own, light = _by_stage(chain, borders)
    made_at = {var: at for at, eqns in own.items() for eqn in eqns for var in eqn.outvars}
    light_results = [a for a in variables(chain.loop.outvars) if a in light]
    made_at |= dict.fromkeys(light_results, ("F", 0))
    position = {eqn: k for k, eqn in enumerate(chain.loop.eqns)}
    forward = [with_makers(own["F", s], light_results if s == 0 else (), light, position) for s in range(num_stages)]
    passes, halves = _passes(cut.split, own, light, made_at, split_backward, num_stages)
    for s, each in enumerate(passes):
        made_at |= dict.fromkeys(makers(each.at_once), ("B", s)) | dict.fromkeys(makers(each.later), ("W", s))
    split = _in_halves(cut.split, halves)
    behind = tuple(backward_at(p, level) for p, level in zip(passes, levels or [CHEAP] * num_stages, strict=True))
    loop_behind = [(*b.eqns, *b.weight) for b in behind]
    in_loop = [(*f, *b) for f, b in zip(forward, loop_behind, strict=True)]
    update = place_update(jaxpr, split, in_loop, made_at, cut.roles.aliases)
    between = [tuple(needed(split.between, split.read_outside(eqns), effects=False)) for eqns in loop_behind]
    before = [tuple(_before(jaxpr, split, s, in_loop[s], between[s], update)) for s in range(num_stages)]
    return Tasks(
        cut,
        split,
        tuple(borders),
        tuple(map(tuple, forward)),
        tuple(passes),
        behind,
        tuple(before),
        tuple(between),
        update,
        made_at,
    )


_Own = Mapping[tuple[str, int], Sequence[JaxprEqn]]
"""Equations of the loop by kind (`"F"`, `"B"`) and stage, in order."""


def _by_stage(chain: Chain, borders: Sequence[int]) -> tuple[_Own, dict[Var, JaxprEqn]]:
    """The equations of the loop where their segments are; and the light ones by what they make, which run anywhere."""
    num_stages = len(borders)
    stage_of = [max(s for s, first in enumerate(borders) if first <= k) for k in range(chain.num_segments)]
    own: dict[tuple[str, int], list[JaxprEqn]] = {(kind, s): [] for kind in "FB" for s in range(num_stages)}
    light: dict[Var, JaxprEqn] = {}
    for eqn, segment, is_behind in zip(chain.loop.eqns, chain.segment, chain.backward, strict=True):
        if segment < 0:
            light.update(dict.fromkeys(eqn.outvars, eqn))
        else:
            own["B" if is_behind else "F", stage_of[segment]].append(eqn)
    return own, light


def _passes(
    split: Microbatches,
    own: _Own,
    light: Mapping[Var, JaxprEqn],
    made_at: Collection[Var],
    split_backward: BackwardSplit,
    num_stages: int,
) -> tuple[list[Passes], dict[JaxprEqn, tuple[JaxprEqn, JaxprEqn]]]:
    """The passes of each stage; and the scans of which these have the halves, with them."""
    light_eqns, free = list(dict.fromkeys(light.values())), {*light, *split.loop.invars}
    halves: dict[JaxprEqn, tuple[JaxprEqn, JaxprEqn]] = {}
    found = []
    for s in range(num_stages):
        made = makers(own["F", s])
        received = {var for var in read_by(own["F", s]) if var in made_at and var not in made}
        at_once, later = list(own["B", s]), list[JaxprEqn]()
        if split_backward != "nowhere":
            in_halves = halves if split_backward == "everywhere" else None
            at_once, later = _waited_for(own["B", s], s, own, num_stages, in_halves)
        found.append(Passes(own["F", s], at_once, later, received, light_eqns, free, list(split.piece_of)))
    return found, halves


def _waited_for(
    eqns: Sequence[JaxprEqn],
    stage: int,
    own: _Own,
    num_stages: int,
    halves: dict[JaxprEqn, tuple[JaxprEqn, JaxprEqn]] | None,
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """A stage's backward in two: what other stages wait for, and the rest.

    `halves` is extended by scans that are both; None: those stay whole.
    """
    waited = set(read_by(eqn for s in range(num_stages) if s != stage for eqn in own["B", s]))
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
    """The phases with both halves of scans where these were."""
    if not halves:
        return split
    loop = split.loop
    eqns = [half for eqn in loop.eqns for half in halves.get(eqn, (eqn,))]
    return dataclasses.replace(split, loop=make_jaxpr(loop.invars, loop.outvars, eqns))


def _before(
    jaxpr: Jaxpr,
    split: Microbatches,
    stage: int,
    in_loop: Sequence[JaxprEqn],
    between: Sequence[JaxprEqn],
    update: Update,
) -> list[JaxprEqn]:
    """Equations before the loop whose values a stage reads; repeated in every stage that does."""
    results = [a for a, at in zip(jaxpr.outvars, update.outputs, strict=True) if at == stage]
    behind = read_by((eqn for eqns in (between, *update.rounds[stage]) for eqn in eqns), results)
    return needed(split.before, split.read_outside(in_loop) | behind, effects=False)

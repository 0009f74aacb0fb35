"""Schedules the backward pass of a stage at a level of recomputation: which residuals it keeps, what it recomputes, when.

In:     the equations of one stage (`Passes`), a recomputation level (`residuals.py`).
Out:    `Backward`; `find_levels`: the levels with distinct sets of residuals.
Method: each equation is recomputed just before its first reader, so that with only layer inputs kept, the activations of
        one layer are alive at a time. Where the backward is split into B and W, heavy equations are recomputed in B, which
        passes W the values it needs of them. Levels are the corners of the lower envelope of bytes kept over operations
        recomputed, found from its ends inwards (Eisner and Severance, "Mathematical techniques for efficient record
        segmentation", JACM 1976).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import JaxprEqn, Var, new_var
from autopar.inter_op.residuals import ALL, CHEAP, Kept, can_run_again, choose_residuals
from autopar.ir.dataflow import inputs_of, makers, needed, read_by
from autopar.ir.work import Work
from autopar.tuning import TUNING

Gates = dict[JaxprEqn, tuple[Var, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The equations of one stage in one round, before recomputation is decided.

    Attributes:
        forward: The stage's forward equations, in order.
        at_once: Its backward equations that other stages wait for, in order; all of them if the backward is not split.
        later: Its other backward equations, in order.
        received: Forward values received from other stages.
        light: Cheap equations that every reader repeats for itself, in order.
        free: Values available to both passes at no cost.
        pieces: The free values that differ between microbatches.
    """

    forward: Sequence[JaxprEqn]
    at_once: Sequence[JaxprEqn]
    later: Sequence[JaxprEqn]
    received: Collection[Var]
    light: Sequence[JaxprEqn]
    free: Collection[Var]
    pieces: Collection[Var]

    def kept(self, level: float) -> Kept:
        """The residuals that the forward pass keeps at a level."""
        return choose_residuals(self.forward, self.wanted((*self.at_once, *self.later)), self.free, level)

    def wanted(self, eqns: Iterable[JaxprEqn]) -> list[Var]:
        """The forward values that the equations read."""
        available = {*makers(self.forward), *self.received}
        return [var for var in read_by(eqns) if var in available]


@dataclass(frozen=True, slots=True, eq=False)
class Backward:
    """The backward pass of one stage.

    Attributes:
        level: The recomputation level.
        kept: The residuals, passed from forward to backward.
        eqns: Equations of task B, in order.
        weight: Equations of task W, in order.
        passed: Forward values that B recomputes and W reads: value -> the variable of B's copy.
        gates: For tasks B and W: recomputed equation -> (awaited, *delayed). From that equation on, readers of the delayed
            values wait for the awaited value.
    """

    level: float
    kept: Kept
    eqns: tuple[JaxprEqn, ...]
    weight: tuple[JaxprEqn, ...]
    passed: Mapping[Var, Var]
    gates: Mapping[str, Gates]


def backward_at(passes: Passes, level: float) -> Backward:
    """Build the backward pass at a level of recomputation."""
    kept = passes.kept(level)
    heavy, again = set(kept.heavy), kept.again
    passed: tuple[Var, ...] = ()
    if heavy and passes.at_once:
        # W recomputes only cheap equations again; for the rest, B passes it the fewest bytes that suffice.
        for_weights = choose_residuals(again, passes.wanted(passes.later), {*passes.free, *kept.values})
        passed, again = for_weights.values, for_weights.again
    gates: dict[str, Gates] = {"B": {}, "W": {}}
    gated = {*kept.values, *passes.pieces}
    eqns = _interleaved([*passes.light, *kept.again], passes.at_once, passed, heavy, gated, gates["B"])
    weight = _interleaved([*passes.light, *again], passes.later, (), heavy, gated, gates["W"])
    return Backward(level, kept, tuple(eqns), tuple(weight), {var: new_var(var.aval) for var in passed}, gates)


def _interleaved(
    helpers: Sequence[JaxprEqn],
    eqns: Sequence[JaxprEqn],
    wanted: Sequence[Var],
    heavy: Collection[JaxprEqn],
    gated: Collection[Var],
    gates: Gates,
) -> list[JaxprEqn]:
    """Interleave `helpers` with `eqns`: each helper runs just before the first equation that needs it.

    Compilers would hoist helpers to the front, where their operands are ready. So if a group of helpers contains a heavy
    one, its `gated` operands wait for the last heavy backward operation before the group; `gates` is extended.
    """
    found: list[JaxprEqn] = []
    left = list(helpers)
    missing = {var for helper in helpers for var in helper.outvars}
    latest: Var | None = None
    for wants, eqn in (*((inputs_of(eqn), eqn) for eqn in eqns), (wanted, None)):
        group = needed(left, wants, effects=False) if not missing.isdisjoint(wants) else []
        if group:
            chosen = set(group)
            left = [helper for helper in left if helper not in chosen]
            made = {var for helper in group for var in helper.outvars}
            missing -= made
            if latest is not None and not chosen.isdisjoint(heavy):
                read = dict.fromkeys(a for helper in group for a in inputs_of(helper) if a in gated)
                gates |= {group[0]: (latest, *read)} if read else {}
            found += group
        if eqn is not None:
            found.append(eqn)
            if heavy and eqn.outvars and not can_run_again(eqn):
                latest = eqn.outvars[0]
    return found


def find_levels(passes: Passes) -> tuple[float, ...]:
    """The levels at which the residuals of a stage change, from `CHEAP` to the one that keeps least."""
    work = Work()

    def corner(level: float) -> tuple[float, int, float]:
        kept = passes.kept(level)
        return level, kept.num_bytes, sum(work.of_equations(kept.heavy))

    ends = corner(CHEAP), corner(ALL)
    if ends[0][1] == ends[1][1]:
        return (CHEAP,)
    found, waiting = list(ends), [ends]
    while waiting and len(found) < TUNING.recompute_levels:
        # Refine first the interval that saves the most bytes.
        waiting.sort(key=lambda pair: pair[1][1] - pair[0][1])
        first, last = waiting.pop(0)
        between = corner(float(f"{(last[2] - first[2]) / (first[1] - last[1]):.3g}"))
        if first[1] > between[1] > last[1]:
            found.append(between)
            waiting += [(first, between), (between, last)]
    return tuple(level for level, _, _ in sorted(found))

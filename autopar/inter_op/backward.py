"""A stage's backward pass at a level of recomputation: what it keeps, what it runs again, and when.

In:     the equations of one stage (`Passes`), a level (`residuals.py`).
Out:    `Backward`; `find_levels`: the levels that make a difference.
Method: what runs again does so as late as its first reader allows, so that of layers whose inputs are kept one is alive
        at a time. Where the backward is split into B and W, heavy equations run again in B, which passes on what W
        needs of them. Levels are the corners of the lower envelope of bytes kept over operations run again, found from
        its ends inwards (Eisner and Severance, "Mathematical techniques for efficient record segmentation", JACM 1976).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import JaxprEqn, Var, new_var
from autopar.inter_op.residuals import ALL, CHEAP, Kept, choose_residuals
from autopar.ir.structure import inputs_of
from autopar.ir.work import Work

MAX_LEVELS = 6
"""At most so many levels of a stage are told apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The equations of one stage, before it is decided what runs again.

    Attributes:
        forward: Its own forward equations, in order.
        at_once: Its own backward equations that other stages wait for, or all of them, in order.
        later: Its other backward equations, in order.
        received: Forward values that it has from other stages.
        light: Equations that run wherever they are read, in order.
        free: Values that are at hand in both passes at no cost.
    """

    forward: Sequence[JaxprEqn]
    at_once: Sequence[JaxprEqn]
    later: Sequence[JaxprEqn]
    received: Collection[Var]
    light: Sequence[JaxprEqn]
    free: Collection[Var]

    def kept(self, level: float) -> Kept:
        """What the forward pass keeps at a level."""
        return choose_residuals(
            self.forward, self.wanted((*self.at_once, *self.later)), self.free, self.received, level
        )

    def wanted(self, eqns: Iterable[JaxprEqn]) -> list[Var]:
        """Forward values that equations read."""
        at_hand = {var for eqn in self.forward for var in eqn.outvars}.union(self.received)
        return list(dict.fromkeys(a for eqn in eqns for a in inputs_of(eqn) if a in at_hand))


@dataclass(frozen=True, slots=True, eq=False)
class Backward:
    """The backward pass of one stage.

    Attributes:
        level: Of recomputation.
        kept: What passes from forward to backward.
        eqns: Those of its task B, in order.
        weight: Those of its task W, in order.
        passed: Forward values that B runs again and W reads: value -> the name of B's copy.
    """

    level: float
    kept: Kept
    eqns: tuple[JaxprEqn, ...]
    weight: tuple[JaxprEqn, ...]
    passed: Mapping[Var, Var]


def backward_at(passes: Passes, level: float) -> Backward:
    """The backward pass at a level of recomputation."""
    kept = passes.kept(level)
    again = kept.again
    passed: tuple[Var, ...] = ()
    if passes.at_once and kept.heavy:
        # Only what is cheap is run again once more; of the rest the fewest bytes pass from B to W.
        for_weights = choose_residuals(again, passes.wanted(passes.later), {*passes.free, *kept.values})
        passed, again = for_weights.values, for_weights.again
    return Backward(
        level,
        kept,
        tuple(_late((*passes.light, *kept.again), passes.at_once, passed)),
        tuple(_late((*passes.light, *again), passes.later)),
        {var: new_var(var.aval) for var in passed},
    )


def _late(helpers: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn], wanted: Sequence[Var] = ()) -> list[JaxprEqn]:
    """Equations in order, each behind those of the helpers that it is the first to need."""
    made_by = {var: (k, eqn) for k, eqn in enumerate(helpers) for var in eqn.outvars}
    done: set[int] = set()
    found: list[JaxprEqn] = []

    def make(values: Iterable[Var]) -> None:
        missing: dict[int, JaxprEqn] = {}
        waiting = list(values)
        while waiting:
            k, maker = made_by.get(waiting.pop(), (-1, None))
            if maker is not None and k not in done and k not in missing:
                missing[k] = maker
                waiting += inputs_of(maker)
        done.update(missing)
        found.extend(missing[k] for k in sorted(missing))

    for eqn in eqns:
        make(inputs_of(eqn))
        found.append(eqn)
    make(wanted)
    return found


def find_levels(passes: Passes) -> tuple[float, ...]:
    """The levels at which a stage keeps something else, from the cheapest to the one that keeps least.

    Args:
        passes: The stage's equations.
    """
    work = Work()

    def corner(level: float) -> tuple[float, int, float]:
        kept = passes.kept(level)
        return level, kept.num_bytes, sum(work.of_equations(kept.heavy))

    ends = corner(CHEAP), corner(ALL)
    if ends[0][1] == ends[1][1]:
        return (CHEAP,)
    found, waiting = list(ends), [ends]
    while waiting and len(found) < MAX_LEVELS:
        # The stretch over which most bytes are saved first.
        waiting.sort(key=lambda pair: pair[1][1] - pair[0][1])
        first, last = waiting.pop(0)
        between = corner(float(f"{(last[2] - first[2]) / (first[1] - last[1]):.3g}"))
        if first[1] > between[1] > last[1]:
            found.append(between)
            waiting += [(first, between), (between, last)]
    return tuple(level for level, _, _ in sorted(found))

"""The share of every value that one microbatch has: the analysis that decides whether a step can be worked through in parts.

In:     a flat program, the inputs that are the batch, the number of microbatches.
Out:    `Shares`: for each equation whether it runs *before* the loop over microbatches (it needs no sample, or is cheap and
        needed of the whole batch, such as a mask's denominator or shuffled samples), *in* it (and in which way,
        `pieces.py`), or *after* it (it needs a sum over all samples).
Method: forward propagation of shares through the rules; loops inside the program are followed to a fixed point. An
        operation whose operands fit none of its ways ends the loop: it needs what all microbatches make together. That
        is right for the update and for metrics. If the gradient of single samples waits for it (batch statistics, a
        contrastive loss), the program cannot be split exactly: an error names the operation, or, if the user has
        said so, each microbatch takes its own value for that of the whole batch: in all that reads it, so that what is
        returned is the mean of the microbatches' losses, of which the gradient is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.errors import MicrobatchError
from autopar.ir.source import is_backward
from autopar.ir.split.late_cuts import cut_late, sink
from autopar.ir.split.pieces import OWN, SAME, SUM, WHOLE, Cut, Extreme, Own, Same, Share, Sum, Way, Whole
from autopar.ir.split.refusal import Cause, refusal
from autopar.ir.split.shares import Shares, Ways
from autopar.ir.split.stand_ins import sums_behind
from autopar.ir.split.up_front import CHEAP, UpFront
from autopar.ir.structure import (
    ScanParts,
    body_jaxprs,
    inputs_of,
    is_done_apart,
    is_structured,
    scan_parts,
    sum_carries,
    trip_count,
    variables,
    while_parts,
)
from autopar.ir.work import Work


def find_shares(
    jaxpr: Jaxpr, count: int, batch: Sequence[int], per_microbatch: bool = False, apart: bool = False
) -> Shares:
    """Decide how a program is worked through in `count` microbatches.

    Args:
        jaxpr: Flat program.
        count: Number of microbatches, at least 2; it divides the batch.
        batch: Inputs whose leading dim runs over samples.
        per_microbatch: Where samples wait for a sum over the batch, let each microbatch take its own.
        apart: Add up the parts of a gradient (of a tied weight) one by one, and join them after the loop.

    Raises:
        MicrobatchError: Samples wait for what all of them make together; names the operation and the user's line.
    """
    return _Analysis(jaxpr, count, per_microbatch, apart).run(batch)


class _Stuck(Exception):
    """An equation that fits no way."""

    def __init__(self, cause: Cause):
        super().__init__()
        self.cause = cause


class _Analysis:
    def __init__(self, jaxpr: Jaxpr, count: int, per_microbatch: bool, apart: bool):
        self.jaxpr, self.count, self.per_microbatch, self.apart = jaxpr, count, per_microbatch, apart
        self.shares = Shares(count)
        self.ways = Ways(count)
        self.late: dict[Var, Cause] = {}
        self.zeros: dict[Var, None] = {}
        self.first_reader: dict[Var, int] = {}
        for k, eqn in enumerate(jaxpr.eqns):
            for var in inputs_of(eqn):
                self.first_reader.setdefault(var, k)
        self.position = {id(eqn): k for k, eqn in enumerate(jaxpr.eqns)}
        self.uneven: dict[Var, None] = {}
        self.cost = Work().of_equations(jaxpr.eqns)
        self.up_front = UpFront(jaxpr, self.shares, self.cost, self.late)

    def run(self, batch: Sequence[int]) -> Shares:
        for position in batch:
            self.shares.made[self.jaxpr.invars[position]] = Cut(0)
        matters = feeds_backward(self.jaxpr)
        at = 0
        while at < len(self.jaxpr.eqns):
            at = self.visit(at, matters)
        self.check_early_work()
        self.check_late_work()
        cut_late(self.jaxpr, self.shares, self.ways)
        sink(self.jaxpr, self.shares, self.apart)
        return self.shares

    # Forward.

    def visit(self, at: int, matters: Sequence[bool]) -> int:
        """Decide equation number `at`; returns the number of the equation to go on with."""
        eqn, shares = self.jaxpr.eqns[at], self.shares
        self.forget(eqn)
        late = [a for a in eqn.invars if not isinstance(a, Literal) and a in self.late]
        if late:
            cause = self.late[late[0]]
            return self.end_loop(at, matters[at], cause)
        if all(isinstance(shares.share(a), Whole) for a in eqn.invars):
            shares.phase[id(eqn)] = "before"
            self.up_front.follow(eqn)
            if _is_zero(eqn):
                self.zeros.update(dict.fromkeys(eqn.outvars))
            return at + 1
        if not matters[at] and self.asks_own(eqn):
            return self.end_loop(at, False, Cause(eqn, inputs_of(eqn)[0]))
        try:
            made = self.equation(eqn, inside=False)
        except _Stuck as stuck:
            if self.up_front.rearrange(eqn):
                return at + 1
            if self.up_front.take_whole(eqn):
                return self.visit(at, matters)
            return self.end_loop(at, matters[at], stuck.cause)
        way = shares.way_of.get(id(eqn))
        if way is not None and way.picks and self.up_front.rearrange(eqn, all_cut=True):
            return at + 1
        shares.phase[id(eqn)] = "loop"
        shares.made.update(zip(eqn.outvars, made, strict=True))
        return at + 1

    def forget(self, eqn: JaxprEqn) -> None:
        for var in eqn.outvars:
            self.late.pop(var, None)
            self.uneven.pop(var, None)
            self.shares.made.pop(var, None)
        self.shares.way_of.pop(id(eqn), None)
        self.shares.own_trips.pop(id(eqn), None)

    def end_loop(self, at: int, matters: bool, cause: Cause) -> int:
        """The equation runs after the loop, unless samples wait for it."""
        eqn, shares = self.jaxpr.eqns[at], self.shares
        has_samples = any(isinstance(shares.share(a), Cut) for a in eqn.invars)
        # A sum that samples wait for, or that is part of what is differentiated: its gradient would need a second pass.
        if matters and (has_samples or not is_backward(eqn)):
            if not self.per_microbatch or not self.can_stand_in(cause.operand):
                raise self.refusal(cause, eqn)
            # All that is made of the sums over samples reads the stand-ins: the loss is the one whose gradient is taken.
            sums = sums_behind(self.jaxpr, shares, cause.operand)
            shares.stand_ins.update(dict.fromkeys(sums))
            return min(self.position.get(id(cause.eqn), at), *(self.first_reader.get(var, at) for var in sums))
        shares.phase[id(eqn)] = "after"
        self.late.update(dict.fromkeys(eqn.outvars, cause))
        return at + 1

    def can_stand_in(self, var: Var) -> bool:
        """Whether a microbatch has something like the value: part of a sum over samples, not of what single ones are."""
        return isinstance(self.shares.share(var), Sum | Extreme) and var not in self.uneven

    def refusal(self, cause: Cause, eqn: JaxprEqn) -> MicrobatchError:
        return refusal(cause, eqn, self.shares.share(cause.operand), self.count, self.can_stand_in(cause.operand))

    def asks_own(self, eqn: JaxprEqn) -> bool:
        """Whether it makes a flag or a number of values that each microbatch has of its own: it is asked of their mean."""
        own = any(isinstance(self.shares.share(a), Own) for a in eqn.invars)
        has_samples = any(isinstance(self.shares.share(a), Cut) for a in eqn.invars)
        return own and not has_samples and not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)

    # One equation, anywhere.

    def equation(self, eqn: JaxprEqn, inside: bool) -> list[Share]:
        """Shares of an equation's results.

        Raises:
            _Stuck: It fits no way.
        """
        if is_structured(eqn):
            return self.structured(eqn)
        shares = [self.shares.share(a) for a in eqn.invars]
        if all(isinstance(s, Whole) for s in shares):
            self.shares.way_of.pop(id(eqn), None)
            if _is_zero(eqn):
                self.zeros.update(dict.fromkeys(eqn.outvars))
            return [WHOLE] * len(eqn.outvars)
        if all(isinstance(s, Whole | Same | Own) for s in shares):
            self.shares.way_of.pop(id(eqn), None)
            return [OWN if OWN in shares else SAME] * len(eqn.outvars)
        best: tuple[int, Way] | None = None
        for way in self.ways.of(eqn, shares):
            converted = 0
            for atom, have, want in zip(eqn.invars, shares, way.operands, strict=True):
                cost = self.conversion(atom, have, want, inside)
                if cost is None:
                    break
                converted += cost
            else:
                if best is None or converted < best[0]:
                    best = converted, way
        if best is not None:
            self.shares.way_of[id(eqn)] = best[1]
            self.mark_uneven(eqn, best[1], shares)
            return list(best[1].results)
        raise _Stuck(self.blame(eqn, shares))

    def mark_uneven(self, eqn: JaxprEqn, way: Way, shares: Sequence[Share]) -> None:
        """Note sums to which one microbatch gives what others do not: of elements by index, with what is added once."""
        parts = list(zip(eqn.invars, shares, way.operands, strict=True))
        added_once = any(want == SUM != have and not self.is_zero(a) for a, have, want in parts)
        if way.picks or added_once or any(a in self.uneven for a in inputs_of(eqn)):
            self.uneven.update(dict.fromkeys(eqn.outvars))

    def is_zero(self, atom: Any) -> bool:
        return atom.val == 0 if isinstance(atom, Literal) else atom in self.zeros

    def conversion(self, atom: Any, have: Share, want: Share, inside: bool) -> int | None:
        """How many conversions, 0 or 1, make one share the other; None: none does."""
        if have == want or (isinstance(have, Own | Same) and isinstance(want, Whole)):
            return 0
        if isinstance(have, Whole | Same | Own) and isinstance(want, Cut):
            return 1
        if isinstance(have, Whole | Same) and isinstance(want, Sum):
            if self.is_zero(atom):
                return 0
            return 1 if inside or isinstance(have, Same) else None
        return None

    def blame(self, eqn: JaxprEqn, shares: Sequence[Share]) -> Cause:
        """The operand that keeps an equation out of the loop: a sum before a part."""
        order = {Sum: 0, Extreme: 0, Cut: 1}
        ranked = [(order[type(s)], k) for k, s in enumerate(shares) if type(s) in order]
        return Cause(eqn, eqn.invars[min(ranked)[1]])

    def body(self, jaxpr: Jaxpr, entering: Sequence[Share]) -> list[Share]:
        """Shares of a body's results, its inputs in these."""
        made = self.shares.made
        made.update(zip(jaxpr.invars, entering, strict=True))
        for eqn in jaxpr.eqns:
            while True:
                try:
                    results = self.equation(eqn, inside=True)
                    break
                except _Stuck as stuck:
                    operand = stuck.cause.operand
                    if not self.per_microbatch or not self.can_stand_in(operand):
                        raise
                    self.shares.stand_ins[operand] = None
            made.update(zip(eqn.outvars, results, strict=True))
        return [self.shares.share(a) for a in jaxpr.outvars]

    # Loops and branches.

    def structured(self, eqn: JaxprEqn) -> list[Share]:
        bodies = body_jaxprs(eqn)
        if any(a in self.uneven for a in inputs_of(eqn)):
            self.uneven.update(dict.fromkeys(var for body in bodies for var in body.invars))
        results = self.parts(eqn)
        if any(a in self.uneven for body in bodies for a in variables(body.outvars)):
            self.uneven.update(dict.fromkeys(eqn.outvars))
        return results

    def parts(self, eqn: JaxprEqn) -> list[Share]:
        match eqn.primitive.name:
            case "scan":
                return self.scan(eqn)
            case "while":
                return self.while_loop(eqn)
            case "cond":
                return self.cond(eqn)
            case _:
                return [self.shares.share(a) for a in eqn.invars]

    def scan(self, eqn: JaxprEqn) -> list[Share]:
        parts = scan_parts(eqn)
        trips = [s for s in (self.shares.share(outer) for outer, _ in parts.xs) if isinstance(s, Cut) and s.dim == 0]
        if trips:
            return self.scan_over_samples(eqn, parts, trips[0])
        consts = [self.enter(eqn, outer, self.shares.share(outer)) for outer, _ in parts.consts]
        xs = []
        for outer, _ in parts.xs:
            share = self.shares.share(outer)
            xs.append(self.enter(eqn, outer, share.moved(-1) if isinstance(share, Cut) else share))
        carries = [self.enter(eqn, outer, self.shares.share(outer)) for outer, *_ in parts.carries]
        while True:
            results = self.body(parts.body, [*consts, *carries, *xs])
            grown = [
                self.join(eqn, a, b, inside)
                for (_, _, inside, _), a, b in zip(parts.carries, carries, results[: len(carries)], strict=True)
            ]
            if grown == carries:
                break
            carries = grown
        ys = [s.moved(1) if isinstance(s, Cut) else _in_loop(s) for s in results[len(carries) :]]
        for (inside, _), share in zip(parts.ys, ys, strict=True):
            if isinstance(share, Extreme):
                raise _Stuck(Cause(eqn, inside))
        return [*map(_in_loop, carries), *ys]

    def scan_over_samples(self, eqn: JaxprEqn, parts: ScanParts, trips: Cut) -> list[Share]:
        """A microbatch does the trips of its own samples, if nothing but sums goes from trip to trip."""
        whole, of_trips = (Whole, Same, Own), [outer for outer, _ in parts.xs]
        sums = sum_carries(parts)
        allowed: list[tuple[Any, tuple[type, ...]]] = [(outer, whole) for outer, _ in parts.consts]
        for (outer, inside, *_), is_sum in zip(parts.carries, sums, strict=True):
            if is_sum is None:
                raise _Stuck(Cause(eqn, inside))
            allowed.append((outer, (Whole, Same, Sum) if is_sum else whole))
        allowed += [(outer, (Whole, Same, Cut)) for outer in of_trips]
        for outer, kinds in allowed:
            share = self.shares.share(outer)
            if not isinstance(share, kinds) or (isinstance(share, Cut) and share != trips):
                raise _Stuck(Cause(eqn, outer))
        if trip_count(eqn) % (self.count * trips.blocks):
            raise _Stuck(Cause(eqn, next(outer for outer in of_trips if self.shares.share(outer) == trips)))
        self.shares.own_trips[id(eqn)] = trips
        for (outer, inside, _, result), is_sum in zip(parts.carries, sums, strict=True):
            if is_sum:
                self.shares.made[inside] = SUM
                if self.shares.share(outer) != SUM and not self.is_zero(outer):
                    self.uneven[result] = None
        return [*(SUM if is_sum else SAME for is_sum in sums), *(trips for _ in parts.ys)]

    def while_loop(self, eqn: JaxprEqn) -> list[Share]:
        parts = while_parts(eqn)
        tests = [self.enter(eqn, outer, self.shares.share(outer)) for outer, _ in parts.cond_consts]
        consts = [self.enter(eqn, outer, self.shares.share(outer)) for outer, _ in parts.body_consts]
        carries = [self.enter(eqn, outer, self.shares.share(outer)) for outer, *_ in parts.carries]
        while True:
            results = self.body(parts.body, [*consts, *carries])
            grown = [
                self.join(eqn, a, b, inside)
                for (_, _, _, inside, _), a, b in zip(parts.carries, carries, results, strict=True)
            ]
            if grown == carries:
                break
            carries = grown
        (test,) = self.body(parts.cond_body, [*tests, *carries])
        if isinstance(test, Extreme) and is_done_apart(parts):
            self.shares.stand_ins[parts.predicate] = None
        elif not isinstance(test, Whole | Same | Own):
            raise _Stuck(Cause(eqn, parts.predicate))
        return list(map(_in_loop, carries))

    def cond(self, eqn: JaxprEqn) -> list[Share]:
        index = self.shares.share(eqn.invars[0])
        if not isinstance(index, Whole | Same | Own):
            raise _Stuck(Cause(eqn, eqn.invars[0]))
        operands = [self.enter(eqn, a, self.shares.share(a)) for a in eqn.invars[1:]]
        joined: list[Share] = [WHOLE] * len(eqn.outvars)
        for branch in body_jaxprs(eqn):
            results = self.body(branch, operands)
            joined = [self.join(eqn, a, b, var) for a, b, var in zip(joined, results, branch.outvars, strict=True)]
        return list(map(_in_loop, joined))

    def enter(self, eqn: JaxprEqn, outer: Any, share: Share) -> Share:
        """A value enters a body as it is; the largest of all samples enters none."""
        if isinstance(share, Extreme):
            raise _Stuck(Cause(eqn, outer))
        return share

    def join(self, eqn: JaxprEqn, a: Share, b: Share, inside: Any) -> Share:
        """The share that can be made of either."""
        if a == b or (isinstance(b, Whole | Same) and not isinstance(a, Whole)):
            return a
        if isinstance(a, Whole | Same) and not isinstance(b, Extreme):
            return a if isinstance(b, Whole) else b
        raise _Stuck(Cause(eqn, inside))

    # Work.

    def check_early_work(self) -> None:
        """Where inputs are taken whole, so may be all that is made of them: then nothing is left to work through."""
        cause = self.up_front.gathered
        if cause is not None:
            of_phase = dict.fromkeys(("before", "loop", "after"), 0.0)
            for eqn, cost in zip(self.jaxpr.eqns, self.cost, strict=True):
                of_phase[self.shares.phase[id(eqn)]] += cost
            if of_phase["before"] > of_phase["loop"]:
                self.shares.taken_whole.pop(cause.operand, None)
                raise self.refusal(cause, cause.eqn)

    def check_late_work(self) -> None:
        """After the loop, little is done on single samples: all of them are in memory then."""
        limit = CHEAP * sum(self.cost)
        late: dict[Var, None] = {}
        total = 0.0
        for eqn, cost in zip(self.jaxpr.eqns, self.cost, strict=True):
            if self.shares.phase[id(eqn)] == "after":
                gathered = [
                    a
                    for a in eqn.invars
                    if not isinstance(a, Literal) and (a in late or isinstance(self.shares.share(a), Cut))
                ]
                if gathered:
                    late.update(dict.fromkeys(eqn.outvars))
                    total += cost
                    if total > limit and cost > limit / 2:
                        raise self.refusal(self.late[eqn.outvars[0]], eqn)


def _in_loop(share: Share) -> Share:
    """What is whole inside a loop of the program is made anew by each piece."""
    return SAME if isinstance(share, Whole) else share


def feeds_backward(jaxpr: Jaxpr) -> list[bool]:
    """For each equation, whether it is of the backward pass or something of that waits for it."""
    waited: dict[Var, None] = {}
    found = []
    for eqn in reversed(jaxpr.eqns):
        matters = is_backward(eqn) or any(var in waited for var in eqn.outvars)
        if matters:
            waited.update(dict.fromkeys(inputs_of(eqn)))
        found.append(matters)
    return found[::-1]


def _is_zero(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    value = eqn.invars[0]
    return isinstance(value, Literal) and value.val == 0

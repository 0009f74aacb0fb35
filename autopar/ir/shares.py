"""Which share of every value one microbatch has: the analysis that decides whether a step can be worked through in parts.

In:     a flat program, the inputs that are the batch, the number of microbatches.
Out:    `Shares`: for each equation whether it runs *before* the loop over microbatches (it needs no sample, or is cheap
        and needed of the whole batch, such as a mask's denominator), *in* it (and in which way, `pieces.py`), or *after*
        it (it needs a sum over all samples).
Method: forward propagation of shares through the rules; loops inside the program are followed to a fixed point. An
        operation whose operands fit none of its ways ends the loop: it needs what all microbatches make together. That
        is right for the update and for metrics. If the gradient of single samples waits for it (batch statistics, a
        contrastive loss), the program cannot be split exactly: an error names the operation, or, if the user has
        said so, each microbatch takes its own value for that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.borders import border_shares, operand_shares
from autopar.ir.pieces import OWN, SAME, WHOLE, Cut, Extreme, Own, Same, Share, Sum, Way, Whole, ways
from autopar.ir.refusal import Cause, refusal
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.source import is_backward
from autopar.ir.structure import body_jaxprs, inputs_of, is_structured, scan_parts, while_parts
from autopar.ir.work import Work, num_bytes

CHEAP = 0.02
"""What is needed of the whole batch is computed up front if it takes at most this part of the step's work."""


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
        stand_ins: Values of which each microbatch takes its own for that of the whole batch.
    """

    count: int
    made: dict[Var, Share] = field(default_factory=dict)
    way_of: dict[int, Way] = field(default_factory=dict)
    phase: dict[int, str] = field(default_factory=dict)
    early: dict[int, None] = field(default_factory=dict)
    taken_whole: dict[Var, None] = field(default_factory=dict)
    stand_ins: dict[Var, None] = field(default_factory=dict)

    def share(self, atom: Any) -> Share:
        """The share of a value that a reader in the loop finds."""
        if isinstance(atom, Literal) or atom in self.taken_whole:
            return WHOLE
        if atom in self.stand_ins:
            return OWN
        return self.made.get(atom, WHOLE)


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
        self.rules: dict[object, tuple[ShardingRule, list[Way]]] = {}
        self.rule_of: dict[int, tuple[ShardingRule, list[Way]]] = {}
        self.late: dict[Var, Cause] = {}
        self.origin = {var: k for k, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self.zeros: dict[Var, None] = {}
        self.position = {id(eqn): k for k, eqn in enumerate(jaxpr.eqns)}
        self.gathered: Cause | None = None
        self.cost = Work().of_equations(jaxpr.eqns)

    def run(self, batch: Sequence[int]) -> Shares:
        for position in batch:
            self.shares.made[self.jaxpr.invars[position]] = Cut(0)
        matters = feeds_backward(self.jaxpr)
        at = 0
        while at < len(self.jaxpr.eqns):
            at = self.visit(at, matters)
        self.check_early_work()
        self.check_late_work()
        uses: dict[Any, dict[Share, None]] = {
            atom: {WHOLE: None}
            for atom in self.jaxpr.outvars
            if not isinstance(atom, Literal) and atom not in self.shares.made
        }
        self.cut_late(self.jaxpr, uses, top=True)
        self.sink()
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
            if _is_zero(eqn):
                self.zeros.update(dict.fromkeys(eqn.outvars))
            return at + 1
        try:
            made = self.equation(eqn, inside=False)
        except _Stuck as stuck:
            if self.take_whole(eqn):
                return self.visit(at, matters)
            return self.end_loop(at, matters[at], stuck.cause)
        shares.phase[id(eqn)] = "loop"
        shares.made.update(zip(eqn.outvars, made, strict=True))
        return at + 1

    def forget(self, eqn: JaxprEqn) -> None:
        for var in eqn.outvars:
            self.late.pop(var, None)
            self.shares.made.pop(var, None)
        self.shares.way_of.pop(id(eqn), None)

    def end_loop(self, at: int, matters: bool, cause: Cause) -> int:
        """The equation runs after the loop, unless samples wait for it."""
        eqn, shares = self.jaxpr.eqns[at], self.shares
        has_samples = any(isinstance(shares.share(a), Cut) for a in eqn.invars)
        # A sum that samples wait for, or that is part of what is differentiated: its gradient would need a second pass.
        if matters and (has_samples or not is_backward(eqn)):
            can_stand_in = isinstance(shares.share(cause.operand), Sum | Extreme)
            if not self.per_microbatch or not can_stand_in:
                raise refusal(cause, eqn, shares.share(cause.operand), self.count)
            shares.stand_ins[cause.operand] = None
            return min(at, self.position.get(id(cause.eqn), at))
        shares.phase[id(eqn)] = "after"
        self.late.update(dict.fromkeys(eqn.outvars, cause))
        return at + 1

    def take_whole(self, eqn: JaxprEqn) -> bool:
        """Compute operands up front, of the whole batch, if that is cheap; whether any was."""
        shares = self.shares
        operands = inputs_of(eqn)
        for kinds in ((Sum, Extreme), (Cut,)):
            news = False
            for var in operands:
                if isinstance(shares.share(var), kinds):
                    cone = self.cone(var)
                    if cone is not None:
                        if self.gathered is None and kinds == (Cut,):
                            self.gathered = Cause(eqn, var)
                        shares.early.update(dict.fromkeys(cone))
                        shares.taken_whole[var] = None
                        news = True
            if news:
                return True
        return False

    def cone(self, var: Var) -> list[int] | None:
        """Equations, by identity, that make `var` from the step's inputs, if together they are cheap."""
        found: dict[int, None] = {}
        limit, total, waiting = CHEAP * sum(self.cost), 0.0, [var]
        while waiting:
            at = self.origin.get(waiting.pop())
            if at is None or at in found:
                continue
            eqn = self.jaxpr.eqns[at]
            found[at] = None
            if self.shares.phase[id(eqn)] != "before" and id(eqn) not in self.shares.early:
                total += self.cost[at]
            if total > limit or any(not isinstance(a, Literal) and a in self.late for a in eqn.invars):
                return None
            waiting += inputs_of(eqn)
        return [id(self.jaxpr.eqns[at]) for at in sorted(found)]

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
        for way in self.ways(eqn)[1]:
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
            return list(best[1].results)
        raise _Stuck(self.blame(eqn, shares))

    def conversion(self, atom: Any, have: Share, want: Share, inside: bool) -> int | None:
        """How many conversions, 0 or 1, make one share the other; None: none does."""
        if have == want or (isinstance(have, Own | Same) and isinstance(want, Whole)):
            return 0
        if isinstance(have, Whole | Same | Own) and isinstance(want, Cut):
            return 1
        if isinstance(have, Whole | Same) and isinstance(want, Sum):
            if atom.val == 0 if isinstance(atom, Literal) else atom in self.zeros:
                return 0
            return 1 if inside or isinstance(have, Same) else None
        return None

    def blame(self, eqn: JaxprEqn, shares: Sequence[Share]) -> Cause:
        """The operand that keeps an equation out of the loop: a sum before a part."""
        order = {Sum: 0, Extreme: 0, Cut: 1}
        ranked = [(order[type(s)], k) for k, s in enumerate(shares) if type(s) in order]
        return Cause(eqn, eqn.invars[min(ranked)[1]])

    def ways(self, eqn: JaxprEqn) -> tuple[ShardingRule, list[Way]]:
        known = self.rule_of.get(id(eqn))
        if known is None:
            signature = equation_signature(eqn)
            known = self.rules.get(signature)
            if known is None:
                rule = rule_for(eqn)
                known = self.rules[signature] = rule, ways(rule, self.count)
            self.rule_of[id(eqn)] = known
        return known

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
                    if not self.per_microbatch or not isinstance(self.shares.share(operand), Sum | Extreme):
                        raise
                    self.shares.stand_ins[operand] = None
            made.update(zip(eqn.outvars, results, strict=True))
        return [self.shares.share(a) for a in jaxpr.outvars]

    # Loops and branches.

    def structured(self, eqn: JaxprEqn) -> list[Share]:
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
        consts = [self.enter(eqn, outer, self.shares.share(outer)) for outer, _ in parts.consts]
        xs = []
        for outer, _ in parts.xs:
            share = self.shares.share(outer)
            if share == Cut(0):
                raise _Stuck(Cause(eqn, outer))
            xs.append(self.enter(eqn, outer, Cut(share.dim - 1) if isinstance(share, Cut) else share))
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
        ys = [Cut(s.dim + 1) if isinstance(s, Cut) else _in_loop(s) for s in results[len(carries) :]]
        for (inside, _), share in zip(parts.ys, ys, strict=True):
            if isinstance(share, Extreme):
                raise _Stuck(Cause(eqn, inside))
        return [*map(_in_loop, carries), *ys]

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
        if not isinstance(test, Whole | Same | Own):
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

    # Backward.

    def cut_late(self, jaxpr: Jaxpr, uses: dict[Any, dict[Share, None]], top: bool) -> None:
        """What is whole and only read in parts (a mask, random bits) is made in parts, from its own operands' parts."""
        for eqn in reversed(jaxpr.eqns):
            if top and self.shares.phase[id(eqn)] == "after":
                wants: Sequence[Share] = [WHOLE] * len(eqn.invars)
            elif is_structured(eqn):
                wants = self.cut_late_inside(eqn, uses, top)
            else:
                wants = self.wanted_by(eqn, uses, top)
            early = top and id(eqn) in self.shares.early
            for atom, want in zip(eqn.invars, wants, strict=True):
                if not isinstance(atom, Literal):
                    uses.setdefault(atom, {})[want] = None
                    if early:
                        uses[atom][WHOLE] = None

    def wanted_by(self, eqn: JaxprEqn, uses: dict[Any, dict[Share, None]], top: bool) -> Sequence[Share]:
        shares = self.shares
        if id(eqn) in shares.way_of:
            return shares.way_of[id(eqn)].operands
        own = any(isinstance(shares.made.get(var, WHOLE), Own) for var in eqn.outvars)
        wanted = [uses.get(var, {}) for var in eqn.outvars]
        cut = [next(iter(w)) if len(w) == 1 else None for w in wanted]
        in_parts = any(wanted) and all(isinstance(c, Cut) for c, w in zip(cut, wanted, strict=True) if w)
        if in_parts and not own and not eqn.effects:
            for way in self.ways(eqn)[1]:
                fits = all(not w or c == made for c, w, made in zip(cut, wanted, way.results, strict=True))
                cuts_only = not any(isinstance(want, Sum) for want in way.operands)
                if fits and cuts_only and way.factor is not None:
                    shares.way_of[id(eqn)] = way
                    shares.made.update(zip(eqn.outvars, way.results, strict=True))
                    if top:
                        shares.phase[id(eqn)] = "loop"
                    return way.operands
        return [WHOLE] * len(eqn.invars)

    def cut_late_inside(self, eqn: JaxprEqn, uses: dict[Any, dict[Share, None]], top: bool) -> list[Share]:
        """The same in the bodies of an equation of the loop; what it wants of its operands."""
        if top and self.shares.phase[id(eqn)] == "before":
            return [WHOLE] * len(eqn.invars)
        made, name = self.shares.made, eqn.primitive.name
        if name in ("scan", "optimization_barrier"):
            first = len(scan_parts(eqn).carries) if name == "scan" else 0
            lowest = 1 if name == "scan" else 0
            for var in eqn.outvars[first:]:
                self.cut_whole(var, uses, lowest)
        for body, outside in zip(body_jaxprs(eqn), border_shares(eqn, made), strict=True):
            inner: dict[Any, dict[Share, None]] = {}
            for atom, want in zip(body.outvars, outside, strict=True):
                if not isinstance(atom, Literal):
                    inner.setdefault(atom, {})[want] = None
            self.cut_late(body, inner, top=False)
            if name == "scan":
                parts = scan_parts(eqn)
                for _, var in (*parts.consts, *parts.xs):
                    self.cut_whole(var, inner)
        return operand_shares(eqn, made)

    def cut_whole(self, var: Var, uses: dict[Any, dict[Share, None]], lowest: int = 0) -> None:
        """A value that passes a border whole, and of which each piece reads its part, passes in parts."""
        wants = list(uses.get(var, ()))
        if isinstance(self.shares.share(var), Whole | Same) and len(wants) == 1:
            match wants[0]:
                case Cut(dim) if dim >= lowest:
                    self.shares.made[var] = wants[0]

    def sink(self) -> None:
        """What is done on sums alone, and does not make them smaller, is done once, after the loop."""
        shares = self.shares
        needed: dict[Var, bool] = {}
        for eqn in reversed(self.jaxpr.eqns):
            phase = shares.phase[id(eqn)]
            if phase == "loop" and not is_structured(eqn) and not eqn.effects:
                sums = [a for a in eqn.invars if isinstance(shares.share(a), Sum) and not isinstance(a, Literal)]
                rest = [a for a in eqn.invars if not isinstance(shares.share(a), Sum)]
                only_sums = sums and all(isinstance(shares.share(a), Whole) for a in rest)
                is_join = self.apart and eqn.primitive.name in ("add", "add_any")
                smaller = is_join or sum(map(num_bytes, dict.fromkeys(sums))) <= sum(map(num_bytes, eqn.outvars))
                if only_sums and smaller and not any(needed.get(var) for var in eqn.outvars):
                    shares.phase[id(eqn)] = phase = "after"
                    for var in eqn.outvars:
                        shares.made.pop(var, None)
            if phase == "loop":
                needed.update((a, True) for a in eqn.invars if not isinstance(a, Literal))

    # Work.

    def check_early_work(self) -> None:
        """Where inputs are taken whole, so may be all that is made of them: then nothing is left to work through."""
        if self.gathered is not None:
            of_phase = dict.fromkeys(("before", "loop", "after"), 0.0)
            for eqn, cost in zip(self.jaxpr.eqns, self.cost, strict=True):
                of_phase[self.shares.phase[id(eqn)]] += cost
            if of_phase["before"] > of_phase["loop"]:
                self.shares.taken_whole.pop(self.gathered.operand, None)
                raise refusal(self.gathered, self.gathered.eqn, self.shares.share(self.gathered.operand), self.count)

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
                        raise refusal(
                            self.late[eqn.outvars[0]],
                            eqn,
                            self.shares.share(self.late[eqn.outvars[0]].operand),
                            self.count,
                        )


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

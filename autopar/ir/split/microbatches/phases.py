"""The phases of a step in microbatches: the policy that makes a loop of the solver's answer.

In:     a flat program, the inputs that are the batch, the number of microbatches.
Out:    `LoopSolution`: whether each equation runs *before* the loop over microbatches (it needs no sample, or is cheap and
        needs the whole batch, such as a mask's denominator or a shuffle), *in* it, and by which strategy, or *after* it (it
        needs a sum over all samples).
Method: placements are propagated forwards (`solver.py`). An equation that fits no strategy runs after the loop, on the joint
        result of all microbatches; that is right for the update and for metrics. If a gradient of single samples waits for
        it (batch statistics, a contrastive loss), the program cannot be split exactly: an error names the operation. If the
        user allows local statistics, each microbatch uses its own value in place of the joint one wherever that is read; the
        loss is then the mean of the microbatches' losses, and the gradient is that of this loss.
        Then demand is propagated backwards, and operations on sums alone are sunk behind the loop.
        Where samples are cut in the middle (the first half has labels, each of the second has its pair in the first), the
        batch is split in the blocks between such cuts, if that will do.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp

from autopar._jax import Jaxpr, JaxprEqn, Var, on_host
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import descendants, inputs_of, readers_of, variables
from autopar.ir.gradient import feeds_backward, is_backward, made_by_backward
from autopar.ir.region import is_region
from autopar.ir.rewrite.views import copies_of_arguments
from autopar.ir.split.blocks import blocks_between_cuts
from autopar.ir.split.demand import Demand, Uses
from autopar.ir.split.microbatches.hoist import Hoist
from autopar.ir.split.microbatches.local_statistics import SampleSums
from autopar.ir.split.microbatches.refusal import no_telling, refusal
from autopar.ir.split.microbatches.sink import sink
from autopar.ir.split.microbatches.waiting import SamplesWaitError
from autopar.ir.split.placement import (
    BY_EACH,
    OWN,
    REPLICATED,
    Axis,
    Batch,
    Partial,
    Placement,
    Split,
    sample_dims,
)
from autopar.ir.split.solution import LoopSolution, Strategies
from autopar.ir.split.solver import Cause, Solver, StuckError
from autopar.ir.work import Work
from autopar.tuning import TUNING


def find_phases(
    jaxpr: Jaxpr,
    count: int,
    batch: Batch,
    per_microbatch: bool = False,
    apart: bool = False,
    joins: Collection[JaxprEqn] | None = None,
    whole: Collection[JaxprEqn] = (),
    drawn: Mapping[Var, int] = MappingProxyType({}),
    own: Iterable[Var] = (),
    pairs: Iterable[int] = (),
) -> LoopSolution:
    """Assign the equations of a program in `count` microbatches to phases.

    Args:
        count: Number of microbatches, at least 2; it divides the batch.
        batch: The inputs that hold samples.
        per_microbatch: Use local statistics where samples wait for a sum over the batch.
        apart: For stages: accumulate the terms of a gradient (of a tied weight) one by one, and add them after the loop; and
            copy in the loop what gradients read in host memory.
        joins: Copies of joint results of all forward passes, which the backward passes read (`rounds/joins.py`); equations
            between these passes may wait for all samples. None: the loop has no such place.
        whole: Loops that have microbatches of their own, and read all samples (`rounds/turns.py`).
        drawn: Values that are samples, too (`drawn.py`), each with its dim that runs over them.
        own: Sums that have been found to be local statistics, in the program of which this one is a round.
        pairs: How many samples of all microbatches the forward pass reads at once, which an earlier round has collected.

    Raises:
        SamplesWaitError: Samples wait for joint results; names them, so that the caller can have them computed before.
        MicrobatchError: Too much work would be done on the whole batch at once.
    """

    def begin() -> _Phases:
        found = _Phases(jaxpr, count, per_microbatch, joins, whole, apart, drawn, pairs)
        found.solution.read_as |= dict.fromkeys(own, OWN)
        return found

    policy = begin()
    try:
        policy.run(batch)
    except (SamplesWaitError, MicrobatchError):
        policy = _in_blocks(policy, begin, batch)
    solution = policy.solution
    uses: Uses = {var: {REPLICATED: None} for var in variables(jaxpr.outvars) if var not in solution.placement_of}
    _LoopDemand(solution, policy.solver.strategies, joins or ()).program(jaxpr, uses)
    sink(jaxpr, solution, apart)
    return solution


def _in_blocks(refused: _Phases, begin: Callable[[], _Phases], batch: Batch) -> _Phases:
    """The same with each microbatch's part of every block of samples, in which a policy that was refused was cut.

    Raises:
        What is being handled: it was not cut, or that does not do either.
    """
    blocks, avals = refused.blocks, {k: refused.jaxpr.invars[k].aval for k in batch}
    sizes = [avals[k].shape[dim] for k, dim in sample_dims(batch).items()]
    if blocks > 1 and all(size % (blocks * refused.solution.count) == 0 for size in sizes):
        policy = begin()
        with contextlib.suppress(SamplesWaitError, MicrobatchError):
            policy.run(batch, blocks)
            return policy
    raise


class _Phases:
    def __init__(
        self,
        jaxpr: Jaxpr,
        count: int,
        per_microbatch: bool,
        joins: Collection[JaxprEqn] | None,
        whole: Collection[JaxprEqn],
        apart: bool,
        drawn: Mapping[Var, int],
        pairs: Iterable[int],
    ):
        self.drawn, self.pairs = drawn, set(pairs)
        self.jaxpr, self.per_microbatch, self.joins, self.whole = jaxpr, per_microbatch, joins or (), whole
        self.of_backward = None if joins is None else made_by_backward(jaxpr)
        self.between: dict[Var, None] = {}
        self.solution = LoopSolution(Axis(count))
        policy = weakref.proxy(self)  # cycles are not freed while planning
        self.solver = Solver(self.solution, lambda cause: policy.take_own(cause))
        self.late: dict[Var, Cause] = {}
        self.readers, self.sums = readers_of(jaxpr.eqns), SampleSums(jaxpr)
        self.position = {eqn: k for k, eqn in enumerate(jaxpr.eqns)}
        self.cost = Work().of_equations(jaxpr.eqns)
        self.hoist = Hoist(jaxpr, self.solution, self.cost, self.late)
        self.of_samples: dict[JaxprEqn, float] = {}  # the work of what depends on samples
        self.waiting: dict[JaxprEqn, Cause] = {}
        self.error: MicrobatchError | None = None  # of the first of them
        self.copies = copies_of_arguments(jaxpr) if apart else {}
        self.copied = {var for eqn in self.copies for var in eqn.outvars}
        self.blocks = 1  # that all cuts which samples wait for have whole ones of

    def run(self, batch: Batch, blocks: int = 1) -> None:
        on_samples = descendants(self.jaxpr.eqns, given=[*(self.jaxpr.invars[k] for k in batch), *self.drawn])
        for eqn, cost in zip(self.jaxpr.eqns, self.cost, strict=True):
            if any(a in on_samples for a in inputs_of(eqn)):
                self.of_samples[eqn] = cost
        self.hoist.limit = TUNING.hoisted_work * sum(self.of_samples.values())
        for position, dim in sample_dims(batch).items():
            var = self.jaxpr.invars[position]
            self.solution.placement_of[var] = Split(dim, blocks)
        matters = feeds_backward(self.jaxpr)
        at = 0
        while at < len(self.jaxpr.eqns):
            after = self.visit(at, matters[at])
            if after <= at:
                self.hoist.look_again()
            at = after
        self.check_waiting()
        self.check_early_work()
        self.check_late_work()
        self.check_waiting(late_work=True)

    def visit(self, at: int, matters: bool) -> int:
        """Assign equation number `at` to a phase; returns the number of the equation to visit next."""
        eqn, solution = self.jaxpr.eqns[at], self.solution
        self.forget(eqn)
        if eqn in self.joins:
            solution.phase[eqn] = "between"
            self.between.update(dict.fromkeys(eqn.outvars))
            self.note_pairs(inputs_of(eqn)[0], eqn)
            return at + 1
        late = [a for a in inputs_of(eqn) if a in self.late]
        if eqn in self.whole:
            return self.take_samples(at, late)
        if late:
            return self.end_loop(at, matters, self.late[late[0]])
        if matters and eqn in self.copies:
            solution.phase[eqn] = "loop"  # and before it: the update may read the same copy
            solution.early[eqn] = None
            solution.placement_of.update(dict.fromkeys(eqn.outvars, BY_EACH))
            return at + 1
        if all(solution.of(a) == REPLICATED or a in self.copied for a in eqn.invars):
            solution.phase[eqn] = "before"
            self.hoist.follow(eqn)
            if any(a in self.between for a in inputs_of(eqn)):
                solution.phase[eqn] = "between"
                self.between.update(dict.fromkeys(eqn.outvars))
            if not is_region(eqn):
                self.solver.equation(eqn, inside=False)
            solution.placement_of.update((var, Split(self.drawn[var])) for var in eqn.outvars if var in self.drawn)
            return at + 1
        if not matters and (self.asks_own(eqn) or self.is_handed_out(eqn)):
            return self.end_loop(at, False, self.reads_samples(eqn))
        try:
            made = self.solver.equation(eqn, inside=False)
        except StuckError as stuck:
            if self.hoist.rearrange(eqn):
                return at + 1
            if self.hoist.take_whole(eqn, self.may_take_own):
                return self.visit(at, matters)
            added = self.added_up(at, matters)
            if added is None:
                return self.end_loop(at, matters, stuck.cause)
            made = added
        strategy = solution.strategy_of.get(eqn)
        if strategy is not None and strategy.is_one_hot and self.hoist.rearrange(eqn, all_split=True):
            return at + 1
        solution.phase[eqn] = "loop"
        solution.placement_of.update(zip(eqn.outvars, made, strict=True))
        if any(a in self.between for a in inputs_of(eqn)):  # a barrier, whose replicated values pass one of their own
            self.between.update((var, None) for var, p in zip(eqn.outvars, made, strict=True) if p == REPLICATED)
        return at + 1

    def take_samples(self, at: int, late: Sequence[Var]) -> int:
        """A loop of training steps runs before the loop over microbatches if its operands can, and else after it."""
        eqn = self.jaxpr.eqns[at]
        ready = not late and self.hoist.take_up_front(inputs_of(eqn))
        self.solution.phase[eqn] = "before" if ready else "after"
        if not ready:
            cause = self.late[late[0]] if late else self.reads_samples(eqn)
            self.late.update(dict.fromkeys(eqn.outvars, cause))
        return at + 1

    def added_up(self, at: int, matters: bool) -> list[Placement] | None:
        """Split an equation that adds samples to a whole value (counts of visited states) and is too much work for all samples
        at once: the first microbatch adds to that value, the others to zeros. None: it is not such a one."""
        if matters or self.cost[at] <= self.hoist.limit / 2:
            return None
        with contextlib.suppress(StuckError):
            return self.solver.equation(self.jaxpr.eqns[at], inside=True)
        return None

    def forget(self, eqn: JaxprEqn) -> None:
        self.solution.forget(eqn)
        for var in eqn.outvars:
            self.late.pop(var, None)
            self.solver.uneven.pop(var, None)

    def end_loop(self, at: int, matters: bool, cause: Cause) -> int:
        """Run the equation after the loop; or if samples wait for it, use local statistics, or note the refusal."""
        eqn, solution = self.jaxpr.eqns[at], self.solution
        has_samples = any(isinstance(solution.of(a), Split) for a in eqn.invars)
        if matters:
            self.note_pairs(cause.operand, eqn)
        sums = self.own_terms(cause.operand, eqn) if matters and (has_samples or not is_backward(eqn)) else []
        if sums:
            # Every reader of such a sum uses the local one, so that the loss is the one whose gradient is taken.
            solution.read_as |= dict.fromkeys(sums, OWN)
            first = [cause.eqn, *(reader for var in sums for reader in self.readers.get(var, ())[:1])]
            return min(self.position.get(reader, at) for reader in first)
        joined_later = self.of_backward is not None and not any(var in self.of_backward for var in eqn.outvars)
        if matters and has_samples and not joined_later:
            self.note_waiting(cause, eqn)
            placement = solution.of(cause.operand)
            if isinstance(placement, Split) and cause.operand is cause.eqn.invars[0] and not is_region(cause.eqn):
                blocks = blocks_between_cuts(cause.eqn, placement.dim)
                self.blocks = math.lcm(self.blocks, blocks // math.gcd(blocks, placement.blocks))
        solution.phase[eqn] = "after"
        self.late.update(dict.fromkeys(eqn.outvars, cause))
        return at + 1

    def has_own(self, var: Var) -> bool:
        """Whether a microbatch has a statistic to use for the value: its term of a sum whose terms are alike."""
        return isinstance(self.solution.of(var), Partial) and var not in self.solver.uneven

    def may_take_own(self, var: Var) -> bool:
        """Whether a microbatch may use its own value for the joint one: it has one, and the user has asked for it."""
        return self.per_microbatch and self.has_own(var)

    def own_terms(self, var: Var, reader: JaxprEqn) -> list[Var]:
        """The sums over samples of which a microbatch may use its own for the joint value that `reader` waits for.

        Raises `MicrobatchError`: one may be of the gradient of a loss over pairs of samples, parts of which give no gradient.
        """
        sums = self.sums.terms_of(self.solution, var) if self.may_take_own(var) else []
        if self.solution.count == 1 or not is_backward(reader):
            return sums
        own = [value for value, how in self.solution.read_as.items() if how is OWN]
        found, unclear = self.sums.of_local(sums, own, self.pairs)
        if unclear:
            raise no_telling(self.solution.count, reader, unclear[0])
        return found

    def note_pairs(self, var: Var, eqn: JaxprEqn) -> None:
        """Note that an equation of the forward pass reads a value whole: if it is one of samples, pairs of them may meet."""
        placement = self.solution.of(var)
        if isinstance(placement, Split) and not is_backward(eqn):
            self.pairs.add(var.aval.shape[placement.dim])

    def take_own(self, cause: Cause) -> bool:
        """Use local statistics for the cause of a stuck equation in a body, if allowed; whether it was."""
        if not self.may_take_own(cause.operand):
            return False
        self.solution.read_as[cause.operand] = OWN
        return True

    def refusal(self, cause: Cause, eqn: JaxprEqn) -> MicrobatchError:
        return refusal(self.jaxpr, self.solution, cause, eqn, self.has_own(cause.operand))

    def note_waiting(self, cause: Cause, eqn: JaxprEqn) -> None:
        """Note that samples wait; only the first error is told, and each takes a walk through the whole program."""
        self.error = self.error or self.refusal(cause, eqn)
        self.waiting[eqn] = cause

    def reads_samples(self, eqn: JaxprEqn) -> Cause:
        """The cause of an equation that no strategy was tried for: the first operand that a microbatch does not have whole."""
        return Cause(eqn, next(a for a in inputs_of(eqn) if self.solution.of(a) != REPLICATED))

    def is_handed_out(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes a result in host memory, where the rows of microbatches cannot be reordered or added up."""
        return any(on_host(var.aval) and var not in self.readers for var in eqn.outvars)

    def asks_own(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes a flag or an integer of local statistics: it must be computed from their mean."""
        placements = [self.solution.of(a) for a in eqn.invars]
        has_samples = any(isinstance(p, Split) for p in placements)
        of_numbers = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
        return OWN in placements and not has_samples and not of_numbers

    def check_waiting(self, late_work: bool = False) -> None:
        """Raise if samples wait for joint results; with `late_work`, if too much work is left for all samples at once."""
        if self.error is not None:
            uneven = self.solver.uneven
            raise SamplesWaitError(self.jaxpr, self.solution, self.error, self.waiting, self.late, late_work, uneven)

    # Work.

    def check_early_work(self) -> None:
        """Raise if reading inputs whole has left less of the work on samples in the loop than before it."""
        cause = self.hoist.gathered
        if cause is not None:
            of_phase = dict.fromkeys(("before", "loop", "between", "after"), 0.0)
            for eqn, cost in self.of_samples.items():
                of_phase["loop" if eqn in self.whole else self.solution.phase[eqn]] += cost
            if of_phase["before"] > of_phase["loop"]:
                self.solution.read_as.pop(cause.operand, None)
                raise self.refusal(cause, cause.eqn)

    def check_late_work(self) -> None:
        """Note a refusal if much work on samples is left for after the loop, or between its halves: it holds all of them in
        memory at once."""
        limit = (TUNING.hoisted_work if self.of_backward is None else TUNING.joined_work) * sum(self.cost)
        late: dict[Var, None] = {}
        total = 0.0
        for eqn, cost in zip(self.jaxpr.eqns, self.cost, strict=True):
            phase = self.solution.phase[eqn]
            gathered = [a for a in inputs_of(eqn) if a in late or isinstance(self.solution.of(a), Split)]
            if eqn in self.whole:
                continue
            if gathered and phase in ("between", "after"):
                late.update(dict.fromkeys(eqn.outvars))
                total += cost
                if total > limit and (cost > limit / 2 or self.of_backward is not None):
                    causes = [
                        self.late[var] for var in eqn.outvars if var in self.late
                    ]  # a callback may have no result
                    cause = causes[0] if causes else Cause(eqn, gathered[0])
                    self.note_waiting(cause, eqn)


class _LoopDemand(Demand):
    """Demand in a step: equations outside of the loop read whole values."""

    solution: LoopSolution

    def __init__(self, solution: LoopSolution, strategies: Strategies, joins: Collection[JaxprEqn]):
        super().__init__(solution, strategies)
        self.joins = joins

    def program(self, jaxpr: Jaxpr, uses: Uses) -> None:
        """Propagate demand through the step; `uses` are those of its results."""
        phase = self.solution.phase
        for eqn in reversed(jaxpr.eqns):
            outside = phase[eqn] == "after" or eqn in self.joins or (phase[eqn] != "loop" and is_region(eqn))
            wants: Sequence[Placement] = [REPLICATED] * len(eqn.invars)
            if not outside:
                wants = self.wants(eqn, uses)
            if eqn in self.solution.strategy_of and not outside:
                phase[eqn] = "loop"
            self.read(eqn.invars, wants, uses)
            if eqn in self.solution.early:
                self.read(eqn.invars, [REPLICATED] * len(eqn.invars), uses)

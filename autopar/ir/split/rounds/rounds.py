"""Rounds: where samples wait for a joint result, one loop over microbatches computes it, and the next loop reads it.

In:     a flat program, its batch inputs, the number of microbatches.
Out:    a flat program with the same inputs and outputs, in which each round is a scan that accumulates (`accumulate.py`).
Method: the program is cut at the values that samples wait for, into one that makes them and one that reads them; each is
        split into microbatches, or cut again. Equations that both need are computed in both. So the second update of a GAN
        sees the first, a gradient is taken at a point to which another has led (sharpness-aware minimization), and a
        contrastive loss sees the embeddings of the whole batch, whose activations are never in memory together. Batch
        statistics in every layer would need a round for each, with all earlier layers in it: that is refused. Statistics of
        a few values per sample (decorrelated embeddings) are computed on the whole batch, once a round has collected them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, make_jaxpr, new_var, replace_eqn
from autopar.debug import check_after
from autopar.errors import MicrobatchError
from autopar.grouping import grouped
from autopar.ir.build import Equations
from autopar.ir.dataflow import descendants, inputs_of, needed, read_by, variables
from autopar.ir.split.microbatches.accumulate import accumulate
from autopar.ir.split.microbatches.drawn import drawn_at_once
from autopar.ir.split.microbatches.microbatch import check_divides, check_phases, write_phases
from autopar.ir.split.microbatches.phases import find_phases
from autopar.ir.split.microbatches.waiting import SamplesWaitError
from autopar.ir.split.placement import OWN, Batch, Split
from autopar.ir.split.rounds.forward_sums import with_forward_sums
from autopar.ir.split.rounds.turns import split_turns
from autopar.ir.split.solution import LoopSolution
from autopar.ir.split.sorted_rows.sorted_parts import sort_in_parts
from autopar.ir.work import Work, num_bytes
from autopar.tuning import TUNING

Decide: TypeAlias = Callable[..., LoopSolution]
"""`find_phases` of a program, with its other arguments bound."""


@dataclass(frozen=True, slots=True)
class _Round:
    """A program of one round.

    Attributes:
        jaxpr: Its inputs are the step's, then values of earlier rounds; its results are the step's, or values for later rounds.
        gathered: Inputs that hold a value of every sample, collected by an earlier round.
        own: Sums that each microbatch reads its own of, in all rounds alike.
        pairs: How many samples each of `gathered` holds.
        solution: Its phases; None: not known yet.
    """

    jaxpr: Jaxpr
    gathered: tuple[Var, ...] = ()
    own: tuple[Var, ...] = ()
    pairs: frozenset[int] = frozenset()
    solution: LoopSolution | None = None


def accumulate_in_rounds(
    jaxpr: Jaxpr, count: int, batch: Batch, per_microbatch: bool = False, name: str = "the batch"
) -> Jaxpr:
    """Write a program that processes its microbatches in as many rounds as needed; arguments as of `split_at_joins`.

    Raises:
        BatchError: There is no batch, or it does not divide.
        MicrobatchError: Too much work would be done more than once.
    """
    check_divides(jaxpr, count, batch, name)
    decide = partial(find_phases, count=count, batch=batch, per_microbatch=per_microbatch)
    try:
        rounds = _rounds_of_drawn(jaxpr, decide, batch)
    except MicrobatchError as error:

        def of_turn(body: Jaxpr, rows: Batch) -> Jaxpr:
            return accumulate_in_rounds(body, count, rows, per_microbatch, name)

        jaxpr, loops = split_turns(jaxpr, count, batch, of_turn)
        if not loops:
            raise error from None
        rounds = _best_rounds(jaxpr, partial(decide, whole=loops))
    made: dict[Var, Atom] = {var: var for var in jaxpr.invars}
    eqns = Equations()
    for each in rounds:
        assert each.solution is not None
        split = write_phases(each.jaxpr, each.solution)
        check_after("microbatch", check_phases(each.jaxpr), split)
        program = accumulate(each.jaxpr, split)
        if len(rounds) == 1:
            return program
        outvars = eqns.substitute(program, [made[var] for var in each.jaxpr.invars])
        made |= {var: atom for var, atom in zip(each.jaxpr.outvars, outvars, strict=True) if isinstance(var, Var)}
    return make_jaxpr(jaxpr.invars, outvars, eqns)


def _rounds_of_drawn(jaxpr: Jaxpr, decide: Callable[..., LoopSolution], batch: Batch) -> list[_Round]:
    """The best rounds; with drawn samples in microbatches, too, if that leaves less work for all of them at once."""
    found = _best_rounds(jaxpr, decide)
    drawn = drawn_at_once(jaxpr, batch, map(_outside, found))
    if not drawn:
        return found
    with contextlib.suppress(MicrobatchError):
        other = _best_rounds(jaxpr, partial(decide, drawn=drawn))
        return min(found, other, key=lambda way: sum(sum(Work().of_equations(_outside(each))) for each in way))
    return found


def _outside(each: _Round) -> list[JaxprEqn]:
    """The equations of a round that run on all samples at once."""
    assert each.solution is not None
    phase = each.solution.phase
    return [eqn for eqn in each.jaxpr.eqns if phase[eqn] != "loop"]


def rows_are_samples(jaxpr: Jaxpr, groups: Mapping[int, Sequence[int]]) -> list[int]:
    """Of `groups`, the leading dims whose rows are independent samples: in one round, or if there is none, in several.

    `groups`: leading dim -> positions of the inputs that have it.

    Layers of a stack and rows of a frozen weight are no samples: other rows depend on them. Nor are points in time that are
    all read before anything else happens, or rows through which next to no work goes one by one.
    """
    for rounds in (_one_round, _best_rounds):
        found = [size for size, inputs in groups.items() if size > 1 and _goes_apart(jaxpr, size, inputs, rounds)]
        if found:
            return found
    return []


def sizes_of_most_work(jaxpr: Jaxpr, groups: Mapping[int, Sequence[int]]) -> list[int]:
    """Of leading dims that each may be the samples', those by which most work goes row by row; as in `rows_are_samples`.

    Weights of classes or losses have fewer: gradients are linear in them, but the forward pass does not read them.
    """
    work = {size: _work_by_samples(jaxpr, inputs) for size, inputs in groups.items()}
    most = max(work.values(), default=0.0)
    return [size for size in work if work[size] >= (1 - TUNING.work_of_samples) * most]


def first_of_samples(jaxpr: Jaxpr, ways: Sequence[Mapping[int, int]]) -> Mapping[int, int] | None:
    """The first of some ways to say which dims of the inputs run over samples, if any is right; as in `rows_are_samples`."""
    for rounds in (_one_round, _best_rounds):
        for way in ways:
            if _goes_apart(jaxpr, min(jaxpr.invars[k].aval.shape[dim] for k, dim in way.items()), way, rounds):
                return way
    return None


def samples_among(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Of inputs of several leading dims, those whose rows are independent samples: one round reads none of them whole.

    Inputs without which as much work is done by microbatches (weights of classes, a mask, positions) are read whole. If not
    all of them may be samples, some are if most of the work is theirs.
    """
    by_size = grouped((jaxpr.invars[k].aval.shape[0], k) for k in inputs)
    groups = sorted(by_size.values(), key=lambda group: sum(num_bytes(jaxpr.invars[k]) for k in group))
    most = _work_by_samples(jaxpr, inputs)
    enough = 0.0 if most else sum(Work().of_equations(jaxpr.eqns)) / 2
    while len(groups) > 1:
        ways = [[other for other in groups if other is not group] for group in groups]
        works = [_work_by_samples(jaxpr, list(itertools.chain(*way))) for way in ways]
        best = works.index(max(works))
        if works[best] < (1 - TUNING.work_of_samples) * most:
            break
        groups, most = ways[best], works[best]
    return sorted(itertools.chain(*groups)) if most > enough else []


def _work_by_samples(jaxpr: Jaxpr, inputs: Sequence[int]) -> float:
    """The work of the loop over microbatches whose samples are the rows of these inputs; 0 if it reads one whole."""
    size = math.gcd(*(jaxpr.invars[k].aval.shape[0] for k in inputs))
    if size < 2:
        return 0.0
    count = _least_divisor(size)
    jaxpr = sort_in_parts(jaxpr, 1, count)
    try:
        found = find_phases(jaxpr, count, inputs)
    except (MicrobatchError, SamplesWaitError):
        return 0.0
    whole = _Round(jaxpr, solution=found)
    if not all(_reads_samples(whole, [k]) and jaxpr.invars[k] not in found.read_as for k in inputs):
        return 0.0
    return _work_in_loop(whole)


def _work_in_loop(each: _Round) -> float:
    assert each.solution is not None
    phase = each.solution.phase
    return sum(Work().of_equations([eqn for eqn in each.jaxpr.eqns if phase[eqn] == "loop"]))


def _goes_apart(jaxpr: Jaxpr, size: int, inputs: Batch, rounds: Callable[[Jaxpr, Decide], list[_Round]]) -> bool:
    count = _least_divisor(size)
    try:
        found = rounds(sort_in_parts(jaxpr, 1, count), partial(find_phases, count=count, batch=inputs))
    except (MicrobatchError, SamplesWaitError):
        return False
    if not any(_reads_samples(each, inputs) for each in found):
        return False
    on_samples = descendants(jaxpr.eqns, given=[jaxpr.invars[k] for k in inputs])
    whole = sum(Work().of_equations([eqn for eqn in jaxpr.eqns if any(a in on_samples for a in inputs_of(eqn))]))
    return sum(map(_work_in_loop, found)) > TUNING.work_apart * whole


def _least_divisor(size: int) -> int:
    return next(k for k in range(2, size + 1) if size % k == 0)


def _reads_samples(each: _Round, inputs: Batch) -> bool:
    """Whether an equation of the loop reads these inputs."""
    assert each.solution is not None
    samples, phase = {each.jaxpr.invars[k] for k in inputs}, each.solution.phase
    return any(not samples.isdisjoint(inputs_of(eqn)) for eqn in each.jaxpr.eqns if phase[eqn] == "loop")


def _one_round(jaxpr: Jaxpr, decide: Decide) -> list[_Round]:
    return [_Round(jaxpr, solution=decide(jaxpr))]


def _best_rounds(jaxpr: Jaxpr, decide: Decide) -> list[_Round]:
    """Rounds of the program as it is, or with its sums moved to the forward pass, or cut at samples instead of sums."""
    try:
        return _rounds(jaxpr, decide)
    except MicrobatchError as error:
        brought = _with_forward_sums(jaxpr, decide)
        others = [(jaxpr, True)] if brought is jaxpr else [(brought, False), (jaxpr, True)]
        for program, by_rows in others:
            with contextlib.suppress(MicrobatchError):
                return _rounds(program, decide, by_rows)
        raise error from None


def _with_forward_sums(jaxpr: Jaxpr, decide: Decide) -> Jaxpr:
    """The program with the sums that samples wait for moved to the forward pass."""
    while True:
        try:
            decide(jaxpr)
            return jaxpr
        except MicrobatchError:
            return jaxpr
        except SamplesWaitError as waits:
            better = with_forward_sums(jaxpr, waits.is_sum)
            if better is jaxpr:
                return jaxpr
            jaxpr = better


def _rounds(jaxpr: Jaxpr, decide: Decide, by_rows: bool = False) -> list[_Round]:
    """Rounds in order; the results of the last are the program's. `by_rows`: cut at split values instead of at sums."""
    rounds, at = [_Round(jaxpr)], 0
    first: SamplesWaitError | None = None
    while at < len(rounds):
        this = rounds[at]
        current = this.jaxpr
        try:
            rounds[at] = replace(this, solution=decide(current, own=this.own, pairs=this.pairs))
            at += 1
        except SamplesWaitError as waits:
            first = first or waits.with_traceback(None)
            rows = waits.rows if by_rows else waits.samples
            own = tuple(var for var, how in waits.solution.read_as.items() if how is OWN)
            cuts = [rows if by_rows else waits.sums + rows]
            if waits.sums and not by_rows:  # also at gradients of other layers, which the same pass makes
                cuts.append((*cuts[0], *(var for var in waits.complete if var not in (*cuts[0], *own))))
            halves = _best_halves(current, cuts, partial(decide, own=own))
            sizes = (var.aval.shape[p.dim] for var in rows if isinstance(p := waits.solution.of(var), Split))
            of_halves = ((this.gathered, own, this.pairs), (this.gathered + rows, own, this.pairs.union(sizes)))
            rounds[at : at + 1] = [_Round(half, *rest) for half, rest in zip(halves, of_halves, strict=False)]
            if not halves or len(rounds) > TUNING.most_rounds or not _is_worth_it(jaxpr, rounds):
                raise first.error from None
    if first is not None and not _is_worth_it(jaxpr, rounds):
        raise first.error
    return rounds


def _best_halves(jaxpr: Jaxpr, cuts: Sequence[Sequence[Var]], decide: Decide) -> list[Jaxpr]:
    """The halves of least work; or, if samples wait in their second one, others where none does: that saves a round."""
    ways = sorted((_halves(jaxpr, cut) for cut in cuts), key=_work_of)
    if len(ways) == 1 or not ways[0]:
        return ways[0]
    return next((halves for halves in ways if halves and not _samples_wait(halves[-1], decide)), ways[0])


def _samples_wait(jaxpr: Jaxpr, decide: Decide) -> bool:
    try:
        decide(jaxpr)
    except (MicrobatchError, SamplesWaitError):
        return True
    return False


def _halves(jaxpr: Jaxpr, values: Sequence[Var]) -> list[Jaxpr]:
    """The program that makes `values`, and the one that reads them; none, if an effect would happen twice."""
    inputs = set(jaxpr.invars)
    values = [var for var in values if var not in inputs]
    earlier = needed(jaxpr.eqns, values, effects=False)
    later = needed(jaxpr.eqns, variables(jaxpr.outvars), given=values)
    twice = set(earlier) & set(later)
    if not values or any(eqn.effects for eqn in twice) or len(later) == len(jaxpr.eqns):
        return []
    given = set(values)
    # An equation of the second half that also makes a given value does so under another name.
    later = [
        replace_eqn(eqn, outvars=[new_var(v.aval) if v in given else v for v in eqn.outvars])
        if given.intersection(eqn.outvars)
        else eqn
        for eqn in later
    ]
    read = read_by(later, jaxpr.outvars)
    return [
        make_jaxpr(jaxpr.invars, list(values), earlier),
        make_jaxpr([*jaxpr.invars, *(var for var in values if var in read)], jaxpr.outvars, later),
    ]


def _work_of(halves: Sequence[Jaxpr]) -> float:
    """The work of both halves; infinite, if there are none."""
    work = Work()
    return sum(sum(work.of_equations(half.eqns)) for half in halves) if halves else math.inf


def _is_worth_it(jaxpr: Jaxpr, rounds: Sequence[_Round]) -> bool:
    """Whether little work is repeated; once all phases are known, also whether loops do more work than runs on all samples."""
    work = Work()
    whole = sum(work.of_equations(jaxpr.eqns))
    again = sum(sum(work.of_equations(each.jaxpr.eqns)) for each in rounds) - whole
    in_loops = at_once = 0.0
    for each in rounds:
        if each.solution is None:
            return again <= TUNING.repeated_rounds * whole
        of_all = set(each.gathered)
        for eqn in each.jaxpr.eqns:
            match each.solution.phase[eqn]:
                case "loop":
                    in_loops += work.of(eqn)
                case "before" if not of_all.isdisjoint(inputs_of(eqn)):
                    of_all.update(eqn.outvars)
                    at_once += work.of(eqn)
    return again <= TUNING.repeated_rounds * whole and at_once <= in_loops

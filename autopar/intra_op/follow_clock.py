"""Solve again by what the clock showed of an answer: its conversions are exposed in part.

In:     the program on its mesh (`instance.py`), the answers so far.
Out:    the fastest answer on the clock.
Method: prices count the exposed part of each kind of conversion that programs showed (`exposure.py`), to a fixed point; those
        of the best program alone; those with unseen kinds hidden; and where prices are far off, within fewer bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.intra_op.by_axes import lift
from autopar.intra_op.exposure import Exposure, OwnExposure, show
from autopar.intra_op.instance import Instance
from autopar.intra_op.problem import num_pairs, planning_seconds
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.tying import of_classes
from autopar.tuning import TUNING


def is_behind(sharded: Sharded, fastest: float) -> bool:
    """Whether an answer is slower than the fastest step known by more than its price is off: that is what the clock may win."""
    return sharded.step_seconds - fastest > max(TUNING.known_far * fastest, _seconds_off(sharded))


def follow_clock(
    instance: Instance, first: Sharded, tried: list[tuple[int, ...]], fastest: float = np.inf
) -> tuple[Sharded, Sharded]:
    """Solve again with the exposure that the clock showed of the answer before, until both agree, or memory rows leave most of
    what is between an answer and its bound.

    Args:
        instance: The program on its mesh.
        first: The first answer.
        tried: Choices that were read off; extended.
        fastest: As in `shard`.

    Returns:
        The fastest on the clock, and the last.
    """
    best = last = first
    for _ in range(1, TUNING.exposure_turns):
        if instance.limit.is_over or not _misjudged(last) or not _repays_turn(instance, last):
            break
        if last is not first and not _is_small(last) and _is_left_by_rows(last):
            break
        exposure = exposure_after(last)
        problem, solution = instance.solve_under(exposure, (1 + TUNING.known_far) * min(best.step_seconds, fastest))
        if not solution.choices or solution.status == "pruned":
            break
        if solution.choices in tried:
            if instance.nodes(solution.choices) == best.choices:
                best = dataclasses.replace(best, problem=problem, solution=solution, exposure=exposure)
            break
        tried.append(solution.choices)
        last = instance.read_off(problem, solution, exposure)
        best = min(best, last, key=lambda sharded: sharded.step_seconds)
    return best, last


def explore_unseen(
    instance: Instance, best: Sharded, last: Sharded, tried: list[tuple[int, ...]]
) -> tuple[Sharded, Sharded]:
    """Solve as if all kinds of conversion were hidden that no program has shown; the resulting program then shows them.

    Otherwise a plan unlike those seen before (experts over devices, where all seen so far split samples) would be priced
    with its conversions exposed in full. Arguments and results as in `follow_clock`.
    """
    if last.exposure is None or instance.limit.is_over:
        return best, last
    exposure = exposure_after(last).hopeful()
    problem, solution = instance.solve_under(exposure, (1 - TUNING.exposure_same) * best.step_seconds)
    if not solution.choices or solution.status == "pruned" or solution.choices in tried:
        return best, last
    tried.append(solution.choices)
    found, last = follow_clock(instance, instance.read_off(problem, solution, exposure), tried)
    found = min(best, found, key=lambda sharded: sharded.step_seconds)
    # Price it by the latest exposure, as the meshes will be that it is compared with.
    return found.repriced(last.problem, last.solution.bound, last.exposure), last


def solve_as_begun(
    instance: Instance, best: Sharded, begin: Sequence[Sharded], tried: list[tuple[int, ...]]
) -> Sharded:
    """Solve under the exposure by which the answer to begin with was found, if that is another than meshes are compared by.

    What hides in that program hides in those near it, and the other exposure says so of none of them. Where the descent ended
    much slower than it began, the answers to begin with are taken as they are. Arguments as in `shard` and `follow_clock`.
    """
    exposure, began = begin[0].exposure, min(sharded.step_seconds for sharded in begin)
    if instance.limit.is_over:
        return best
    if best.step_seconds > (1 + TUNING.third_axis_worse) * began:
        return min([best, *_lifted(instance, best, begin)], key=lambda sharded: sharded.step_seconds)
    if not isinstance(exposure, OwnExposure):
        return best
    problem, solution = instance.solve_under(exposure)
    if not solution.choices or solution.choices in tried:
        return best
    tried.append(solution.choices)
    found = instance.read_off(problem, solution, exposure)
    fits = found.fits(instance.budget_search.budget)
    return min(best, found, key=lambda sharded: sharded.step_seconds) if fits else best


def _lifted(instance: Instance, best: Sharded, begin: Sequence[Sharded]) -> Iterator[Sharded]:
    """The answers to begin with as they are on this mesh, those that fit; priced as `best` is."""
    for sharded in begin:
        choices = of_classes(instance.class_of, lift(sharded.choices, sharded.graph, instance.graph))
        seconds = best.problem.cost(choices)
        if np.isfinite(seconds):
            solution = dataclasses.replace(best.solution, choices=choices, objective=seconds)
            found = instance.read_off(best.problem, solution, best.exposure)
            if found.fits(instance.budget_search.budget):
                yield found


def solve_around(
    instance: Instance,
    best: Sharded,
    last: Sharded,
    tried: list[tuple[int, ...]],
    turns: int,
    gap: float = TUNING.rough_gap,
    budget: float = np.inf,
) -> Sharded:
    """Solve with the exposure that the best program alone shows, then with that of it and the programs so found.

    The exposure shown by several programs is true of none: the best may look slower than it is, and others faster.
    Ends where the best leaves a small gap by its own exposure, and what is off is no exposure: collectives that the program
    shares, which its choices pay one by one; and where memory rows leave much of the gap. No solve is given up by its bound:
    what is exposed of another program may differ by more. Arguments as in `follow_clock`, turns, the gap to end at, and a
    memory budget.
    Returns the fastest, priced by its own exposure if that leaves a smaller gap."""
    shown, before, doubted = show(best.graph, best.body, best.exposed_seconds), best.exposure, False
    first, is_small, judged = best.step_seconds, _is_small(best), best
    for turn in range(turns):
        off = _seconds_off(judged) if turn < TUNING.exposure_turns else 0.0
        is_true = judged.gap <= gap and off <= gap * best.step_seconds
        is_stuck = (turn > 0 or not is_small) and _is_left_by_rows(judged)
        if before is None or is_true or is_stuck or instance.limit.is_over:
            break
        exposure = exposure_after(last).as_in(shown, before)
        problem, solution = instance.solve_under(exposure)
        if not solution.choices:
            break
        judged = best.repriced(problem, solution.bound, exposure)
        best = min(best, judged, key=lambda sharded: sharded.gap)
        if solution.choices in tried and not doubted:
            doubted, exposure = True, exposure.doubtful()  # it may be one of several such answers
            problem, solution = instance.solve_under(exposure)
        if not solution.choices or solution.choices in tried:
            break
        tried.append(solution.choices)
        last = instance.read_off(problem, solution, exposure)
        shown += show(last.graph, last.body, last.exposed_seconds)
        if last.fits(budget) and last.step_seconds < best.step_seconds:
            best = judged = last
        elif best.step_seconds < first and not is_small:
            break  # a turn after one that won seldom wins once another did not
    return best


def solve_in_less(instance: Instance, best: Sharded, last: Sharded, tried: list[tuple[int, ...]]) -> Sharded:
    """Solve within fewer bytes than the best answer takes, where the problem is small and its price far from the clock.

    What fits less memory fits more; of answers that cost nearly the same, the clock may find these faster. Arguments as in
    `follow_clock`.
    """
    small = num_pairs(best.problem) <= TUNING.small_core and _is_small(best)
    budget = instance.budget_search.budget
    for part in TUNING.less_memory if small and best.exposure is not None else ():
        won = TUNING.hoped * best.gap * best.step_seconds
        takes = max(1, len(best.problem.rows)) * num_pairs(best.problem) / TUNING.solver_pairs_per_second
        if best.gap <= TUNING.rough_gap or not instance.limit.repays(won, takes):
            break
        exposure = exposure_after(last)
        problem, solution = instance.solve_within(part * best.peak_bytes, exposure, best.step_seconds)
        if not solution.choices or solution.status == "pruned" or solution.choices in tried:
            break
        tried.append(solution.choices)
        found = instance.read_off(problem, solution, exposure)
        if found.step_seconds < best.step_seconds and found.fits(budget):
            bounded = solution.bounded(instance.bound_under(exposure, problem))
            problem.rows.extend(best.problem.rows)
            best = dataclasses.replace(found, solution=bounded)
    return best


def exposure_after(sharded: Sharded) -> Exposure:
    """The exposure after this program was seen."""
    assert sharded.exposure is not None, "conversions counted in full"
    return sharded.exposure.after(show(sharded.graph, sharded.body, sharded.exposed_seconds))


def _seconds_off(sharded: Sharded) -> float:
    """Seconds by which the prices of a program's conversions are off, and another exposure may put right.

    Of a small problem all that its price is off by: to see whether other prices help takes no time.
    """
    if sharded.exposure is None:
        return 0.0
    if _is_small(sharded):
        return abs(sharded.solution.objective - sharded.step_seconds)
    return sharded.exposure.misjudges(show(sharded.graph, sharded.body, sharded.exposed_seconds))


def _repays_turn(instance: Instance, sharded: Sharded) -> bool:
    """Whether a part of what a program's price is off by repays another solve."""
    won = TUNING.hoped * abs(sharded.solution.objective - sharded.step_seconds)
    return _is_small(sharded) or instance.limit.repays(won, TUNING.solve_share * planning_seconds(sharded.problem))


def _misjudged(sharded: Sharded) -> bool:
    """Whether a program's step differs from its objective because its exposure differs from the one assumed."""
    if sharded.exposure is None:
        return False
    shown = show(sharded.graph, sharded.body, sharded.exposed_seconds)
    much = TUNING.exposure_same * sharded.step_seconds
    now, before = sharded.exposure.after(shown), sharded.exposure
    wrong = sum(abs(now.of(one.kind) - before.of(one.kind)) * one.seconds for one in shown if one.kind is not None)
    return wrong > much and abs(sharded.solution.objective - sharded.step_seconds) > much


def _is_left_by_rows(sharded: Sharded) -> bool:
    """Whether much of what is left between an answer and its bound is of memory rows: no exposure closes that."""
    return bool(sharded.problem.rows) and sharded.solution.gap > TUNING.rough_gap


def _is_small(sharded: Sharded) -> bool:
    """Whether a problem has so few nodes that it is solved again in next to no time."""
    return len(sharded.graph.nodes) <= TUNING.untied_nodes

"""Shards one program on one logical mesh.

In:     a program's decision graph (`build_graph.py`), the device, restrictions, options.
Out:    `Sharded` (`read_off.py`): the choices, the sharded program, and its predicted time and memory.
Method: the passes of `SHARD` (`setting.py`), once; then solve, lower and simulate, and solve again with the exposure that
        the clock showed, to a fixed point; then the well-known plans, if one may be as fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.intra_op.by_axes import descend_from, lift
from autopar.intra_op.exposure import Exposure, OwnExposure, show
from autopar.intra_op.graph import Graph
from autopar.intra_op.instance import Instance
from autopar.intra_op.liveness import ONE_PROGRAM, Waiting
from autopar.intra_op.memory_constrained import is_far_over
from autopar.intra_op.problem import PROVED, Problem, Solution, num_pairs
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.restrict import Restrict, narrowed_problem
from autopar.intra_op.setting import SHARD, Setting, check_setting
from autopar.intra_op.solve import pass_messages, solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.intra_op.tying import of_classes
from autopar.ir.passes import run_passes
from autopar.mesh import Device
from autopar.options import Options
from autopar.tuning import TUNING


class Pruned(Exception):
    """A mesh was abandoned: no plan on it takes less than `seconds`, and the incumbent is better."""

    def __init__(self, seconds: float):
        super().__init__(f"no plan takes less than {seconds} s")
        self.seconds = seconds


def shard(
    graph: Graph,
    device: Device,
    options: Options,
    restrict: Restrict | None = None,
    donated: Sequence[bool] = (),
    known: Sequence[Restrict] = (),
    beat: float = np.inf,
    gap: float = PROVED,
    waiting: Waiting = ONE_PROGRAM,
    exposure: Exposure | None = None,
    begin: Sequence[Sharded] = (),
    explore: bool = False,
    misled: float = 0.0,
) -> Sharded:
    """Find the cheapest sharding of a program on one mesh.

    Args:
        graph: The decision graph of the program on the mesh.
        device: Rates and memory of one device.
        options: Solver, time limit, memory budget.
        restrict: Forbids choices (pins, data parallelism).
        donated: Per input, whether its memory may be reused.
        known: Well-known ways to shard, as restrictions; the best plan under each is compared with the one found, if it
            may be as fast.
        beat: Objective of the incumbent on another mesh, under the same `exposure`.
        gap: Relative optimality gap at which the solver may stop.
        waiting: For a pipeline stage, how its memory differs from that of one program.
        exposure: Exposure known from other meshes; the problem is then solved again with what its answer shows, and the
            fastest program on the clock is taken. None: every collective counts in full, and the problem is solved once.
        begin: Answers on meshes whose axes are products of this one's, or that have as many: a large problem is then not
            solved as a whole but improved from the best of them (`by_axes.py`), without a bound.
        explore: Whether to solve, too, as if all kinds of conversion were hidden that no program has shown.
        misled: Part by which the price of a well-known plan was too high on another mesh, where it is the fastest: here such
            plans may be priced as much above the best and are compared nevertheless.

    Raises:
        InfeasibleError: A pin or the memory budget cannot be met, or was not in time; says which and by how much.
        ConstraintError: A pin does not fit the array or the mesh.
        Pruned: Nothing here is better than `beat`, or nothing better was found from `begin`.
    """
    setting = run_passes(SHARD, Setting(graph, device, restrict), check_setting)
    is_large = bool(begin) and num_pairs(setting.priced.problem()) > TUNING.small_mesh_pairs
    solve_one = descend_from(begin, graph, setting.class_of) if is_large else solve
    instance = Instance(setting, options, donated, waiting, gap, solve_one)
    problem, solution = instance.solve_under(exposure, beat)
    if solution.status == "pruned":
        raise Pruned(solution.bound)
    tried = [solution.choices]
    best = last = instance.read_off(problem, solution, exposure) if solution.choices else None
    if best is not None:
        best, last = _follow_clock(instance, best, tried)
        best, last = _explore(instance, best, last, tried) if explore else (best, last)
        if is_large:
            best = _as_begun(instance, best, begin, tried)
        else:
            best = _around(instance, best, last, tried, TUNING.around_turns)
        best = _in_less(instance, best, last, tried)
    elif not problem.rows or instance.budget_search.is_hopeless():
        instance.budget_search.explain(problem, instance.gaps_of)
    expected = exposure if last is None or last.exposure is None else _shown(last)
    wider = instance.prices.problem(expected) if known else problem
    for other in known if best is not None or not is_far_over(problem) else ():
        best = _with_known(instance, best, other, wider, expected, tried, misled)
    while best is None and not instance.limit.is_over and instance.send_less(problem):
        solution = instance.solve(problem)
        if solution.choices:
            best, _ = _follow_clock(instance, instance.read_off(problem, solution, exposure), [solution.choices])
    if best is None:
        instance.budget_search.explain(problem, instance.gaps_of)
    return best


def _follow_clock(instance: Instance, first: Sharded, tried: list[tuple[int, ...]]) -> tuple[Sharded, Sharded]:
    """Solve again with the exposure that the clock showed of the answer before, until both agree.

    Args:
        instance: The program on its mesh.
        first: The first answer.
        tried: Choices that were read off; extended.

    Returns:
        The fastest on the clock, and the last.
    """
    best = last = first
    for _ in range(1, TUNING.exposure_turns):
        if instance.limit.is_over or not _misjudged(last):
            break
        exposure = _shown(last)
        problem, solution = instance.solve_under(exposure, (1 + TUNING.known_far) * best.step_seconds)
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


def _explore(instance: Instance, best: Sharded, last: Sharded, tried: list[tuple[int, ...]]) -> tuple[Sharded, Sharded]:
    """Solve as if all kinds of conversion were hidden that no program has shown; the resulting program then shows them.

    Otherwise a plan unlike those seen before (experts over devices, where all seen so far split samples) would be priced
    with its conversions exposed in full. Arguments and results as in `_follow_clock`.
    """
    if last.exposure is None or instance.limit.is_over:
        return best, last
    exposure = _shown(last).hopeful()
    problem, solution = instance.solve_under(exposure, (1 - TUNING.exposure_same) * best.step_seconds)
    if not solution.choices or solution.status == "pruned" or solution.choices in tried:
        return best, last
    tried.append(solution.choices)
    found, last = _follow_clock(instance, instance.read_off(problem, solution, exposure), tried)
    found = min(best, found, key=lambda sharded: sharded.step_seconds)
    # Price it by the latest exposure, as the meshes will be that it is compared with.
    return found.repriced(last.problem, last.solution.bound, last.exposure), last


def _as_begun(instance: Instance, best: Sharded, begin: Sequence[Sharded], tried: list[tuple[int, ...]]) -> Sharded:
    """Solve under the exposure by which the answer to begin with was found, if that is another than meshes are compared by.

    What hides in that program hides in those near it, and the other exposure says so of none of them. Where the descent ended
    much slower than it began, the answers to begin with are taken as they are. Arguments as in `shard` and `_follow_clock`.
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


def settle(
    sharded: Sharded,
    device: Device,
    options: Options,
    donated: Sequence[bool],
    turns: int,
    gap: float = TUNING.rough_gap,
) -> Sharded:
    """Refine an answer that was found two axes at a time with `_around`, by message passing over all axes together.

    This takes long, and is for the best answer of all meshes. `gap`: the largest that may be left. Other arguments as in
    `shard` and `_around`.
    """
    setting = Setting(sharded.graph, device, None, sharded.allowed, sharded.class_of)
    # Memory is checked by `_around`, and not priced.
    endless = dataclasses.replace(options, memory_budget_bytes=np.inf)
    setting, start = run_passes(SHARD[-1:], setting, check_setting), sharded.solution.choices
    instance = Instance(
        setting, endless, donated, ONE_PROGRAM, PROVED, lambda problem, *_: pass_messages(problem, start)
    )
    tried, budget = [start], options.budget_bytes(device.memory_bytes)
    return _around(instance, sharded, sharded, tried, turns, gap, budget)


def _around(
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
    Arguments as in `_follow_clock`, turns, the gap to end at, and a memory budget. Returns the fastest, priced by its own
    exposure if that leaves a smaller gap."""
    shown, before, doubted = show(best.graph, best.body, best.exposed_seconds), best.exposure, False
    for turn in range(turns):
        off = abs(1 - best.solution.objective / best.step_seconds) if turn < TUNING.exposure_turns else 0.0
        if before is None or max(best.gap, off) <= gap or instance.limit.is_over:
            break
        exposure = _shown(last).as_in(shown, before)
        problem, solution = instance.solve_under(exposure)
        if not solution.choices:
            break
        other = best.repriced(problem, solution.bound, exposure)
        best = min(best, other, key=lambda sharded: sharded.gap)
        if solution.choices in tried and not doubted:
            doubted, exposure = True, exposure.doubtful()  # it may be one of several such answers
            problem, solution = instance.solve_under(exposure)
        if not solution.choices or solution.choices in tried:
            break
        tried.append(solution.choices)
        last = instance.read_off(problem, solution, exposure)
        shown += show(last.graph, last.body, last.exposed_seconds)
        if last.fits(budget):
            best = min(best, last, key=lambda sharded: sharded.step_seconds)
        if problem.rows and solution.gap > TUNING.rough_gap:
            break  # what is left is of the memory rows: no exposure closes it
    return best


def _in_less(instance: Instance, best: Sharded, last: Sharded, tried: list[tuple[int, ...]]) -> Sharded:
    """Solve within fewer bytes than the best answer takes, where the problem is small and its price far from the clock.

    What fits less memory fits more; of answers that cost nearly the same, the clock may find these faster. Arguments as in
    `_follow_clock`.
    """
    small = num_pairs(best.problem) <= TUNING.small_core and len(best.graph.nodes) <= TUNING.untied_nodes
    budget = instance.budget_search.budget
    for part in TUNING.less_memory if small and best.exposure is not None else ():
        if best.gap <= TUNING.rough_gap or instance.limit.is_over:
            break
        exposure = _shown(last)
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


def _shown(sharded: Sharded) -> Exposure:
    """The exposure after this program was seen."""
    assert sharded.exposure is not None, "conversions counted in full"
    return sharded.exposure.after(show(sharded.graph, sharded.body, sharded.exposed_seconds))


def _misjudged(sharded: Sharded) -> bool:
    """Whether a program's step differs from its objective because its exposure differs from the one assumed."""
    if sharded.exposure is None:
        return False
    shown = show(sharded.graph, sharded.body, sharded.exposed_seconds)
    much = TUNING.exposure_same * sharded.step_seconds
    now, before = sharded.exposure.after(shown), sharded.exposure
    wrong = sum(abs(now.of(one.kind) - before.of(one.kind)) * one.seconds for one in shown if one.kind is not None)
    return wrong > much and abs(sharded.solution.objective - sharded.step_seconds) > much


def _with_known(
    instance: Instance,
    best: Sharded | None,
    known: Restrict,
    wider: Problem,
    exposure: Exposure | None,
    tried: list[tuple[int, ...]],
    misled: float,
) -> Sharded | None:
    """Compare the best answer with the best one under a well-known plan's restrictions, if that may win.

    Args:
        instance: The program on its mesh.
        best: The best answer so far; None: none fits.
        known: The plan, as restrictions.
        wider: The problem without its restrictions.
        exposure: The exposure after all answers.
        tried: Choices that were read off; extended.
        misled: Part by which it may be faster than its price.
    """
    narrowed = narrowed_problem(wider, instance.graph, instance.class_of, known)
    found = None if narrowed is None else _faster_within(instance, best, narrowed, exposure, tried, misled)
    if found is None:
        return best
    bound = instance.bound_under(exposure, wider)
    return dataclasses.replace(found, problem=wider, solution=found.solution.bounded(bound))


def _faster_within(
    instance: Instance,
    best: Sharded | None,
    narrowed: Problem,
    exposure: Exposure | None,
    tried: list[tuple[int, ...]],
    misled: float,
) -> Sharded | None:
    """The best answer of a well-known plan's problem, if it is faster than the best of all on the clock; else None."""
    may_win = misled > 0 and not instance.limit.is_over
    is_open, free = True, None
    if best is not None and not may_win:
        is_open, free = _may_win(narrowed, best, instance.solver, instance.limit)
    if not is_open:
        return None
    # Within memory each takes several solves, whose bounds show on the way that it is not worth the rest.
    is_short = best is not None and bool(best.problem.rows) and not best.is_off_price
    beat = np.inf
    if best is not None and (is_short or may_win):
        beat = (1 + TUNING.known_far + misled) * best.step_seconds
    least = np.inf if best is None else best.step_seconds * (1 - 1e-9)
    with instance.limit.thorough(not is_short):  # as if the user asked for this plan by name
        free = free or instance.solve_freely(narrowed, beat)
        if free.choices and free.status != "pruned" and free.choices not in tried:
            if instance.read_off(narrowed, free, exposure).step_seconds >= least:
                tried.append(free.choices)
                return None  # its answers within memory are priced no lower, and are taken to be as slow
        solution = instance.solve(narrowed, beat, free=free)
    if not solution.choices or solution.status == "pruned" or solution.choices in tried:
        return None
    tried.append(solution.choices)
    candidate = instance.read_off(narrowed, solution, exposure)
    return candidate if candidate.step_seconds < least else None


def _may_win(problem: Problem, best: Sharded, solver: str, limit: TimeLimit) -> tuple[bool, Solution | None]:
    """Whether an answer of a problem may be faster than the best, by its price, and there is time to see; and the least
    answer, if it was found out."""
    if limit.is_over or best.is_off_price:
        return not limit.is_over, None
    if num_pairs(problem) <= TUNING.small_core and len(best.graph.nodes) <= TUNING.untied_each:
        return True, None  # solving takes no longer than finding out
    if np.isfinite(problem.cost(best.solution.choices)):
        return False, None  # the best answer meets these restrictions already
    least = (1 + TUNING.known_far) * best.step_seconds
    answer = solve(problem, solver, limit, TUNING.rough_gap, least)
    wins = bool(answer.choices) and answer.status != "pruned" and answer.objective <= least
    return wins, answer if wins and answer.status == "optimal" else None

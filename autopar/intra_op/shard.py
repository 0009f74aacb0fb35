"""Shards one program on one logical mesh.

In:     a program's decision graph (`build_graph.py`), the device, restrictions, options.
Out:    `Sharded` (`read_off.py`): the choices, the sharded program, and its predicted time and memory.
Method: the passes of `SHARD` (`setting.py`), once; then solve, lower and simulate, and solve again with the exposure that
        the clock showed, to a fixed point; then the well-known plans, if one may be as fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.intra_op.by_axes import descend_from
from autopar.intra_op.exposure import Exposure
from autopar.intra_op.follow_clock import (
    explore_unseen,
    exposure_after,
    follow_clock,
    is_behind,
    solve_around,
    solve_as_begun,
    solve_in_less,
)
from autopar.intra_op.graph import Graph
from autopar.intra_op.instance import Instance
from autopar.intra_op.liveness import ONE_PROGRAM, Waiting
from autopar.intra_op.memory_constrained import is_far_over
from autopar.intra_op.problem import PROVED, Problem, Solution, num_pairs, planning_seconds
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.restrict import Restrict, narrowed_problem
from autopar.intra_op.setting import SHARD, Setting, check_setting
from autopar.intra_op.solve import pass_messages, solve
from autopar.intra_op.time_limit import TimeLimit
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
    fastest: float = np.inf,
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
        fastest: Seconds of the fastest step known elsewhere: where the answer is behind by more than its price is off, the
            clock is not followed.

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
    if best is not None and last is not None:
        may_win = not is_behind(best, fastest)
        if may_win:
            best, last = follow_clock(instance, best, tried, fastest)
        best, last = explore_unseen(instance, best, last, tried) if explore else (best, last)
        if is_large:
            best = solve_as_begun(instance, best, begin, tried)
        elif may_win:
            best = solve_around(instance, best, last, tried, TUNING.around_turns)
        best = solve_in_less(instance, best, last, tried)
    elif not problem.rows or instance.budget_search.is_hopeless():
        instance.budget_search.explain(problem, instance.gaps_of)
    expected = exposure if last is None or last.exposure is None else exposure_after(last)
    wider = instance.prices.problem(expected) if known else problem
    for other in known if best is not None or not is_far_over(problem) else ():
        best = _with_known(instance, best, other, wider, expected, tried, misled)
    while _may_win_in_less(instance, best) and instance.send_less(to_fit=best is None):
        problem = Problem(problem.costs, problem.edges)
        solution = instance.solve(problem)
        if solution.choices:
            found, _ = follow_clock(instance, instance.read_off(problem, solution, exposure), [solution.choices])
            if best is not None and best.step_seconds <= found.step_seconds:
                break
            best = found
    if best is None:
        instance.budget_search.explain(problem, instance.gaps_of)
    return best


def _may_win_in_less(instance: Instance, best: Sharded | None) -> bool:
    """Whether smaller messages may win: nothing fits, or memory costs the best answer so much that another solve repays."""
    if best is None or not best.problem.rows:
        return best is None and not instance.limit.is_over
    won, takes = TUNING.hoped * best.gap * best.step_seconds, TUNING.solve_share * planning_seconds(best.problem)
    return best.gap > TUNING.rough_gap and instance.limit.repays(won, takes)


def settle(
    sharded: Sharded,
    device: Device,
    options: Options,
    donated: Sequence[bool],
    turns: int,
    gap: float = TUNING.rough_gap,
) -> Sharded:
    """Refine an answer that was found two axes at a time with `solve_around`, by message passing over all axes together.

    This takes long, and is for the best answer of all meshes. `gap`: the largest that may be left. Other arguments as in
    `shard` and `solve_around`.
    """
    setting = Setting(sharded.graph, device, None, sharded.allowed, sharded.class_of)
    # Memory is checked by `solve_around`, and not priced.
    endless = dataclasses.replace(options, memory_budget_bytes=np.inf)
    setting, start = run_passes(SHARD[-1:], setting, check_setting), sharded.solution.choices
    instance = Instance(
        setting, endless, donated, ONE_PROGRAM, PROVED, lambda problem, *_: pass_messages(problem, start)
    )
    tried, budget = [start], options.budget_bytes(device.memory_bytes)
    return solve_around(instance, sharded, sharded, tried, turns, gap, budget)


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

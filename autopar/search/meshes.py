"""Shards the step on every logical mesh that may repay planning, and unties the best answer.

In:     a step (in microbatches), the meshes that the method allows, fewer axes first.
Out:    `Searched`: the plan on each mesh, and what was tried or left out, and why.
Method: the best plan so far bounds the next mesh, which is abandoned early if it cannot win. A mesh of three axes, which
        takes many times as long to plan, starts from the best answer on fewer or as many axes, and only if it can win as
        much as that costs. Where prices mislead, well-known plans are compared on more meshes than the first. Where its
        price misjudges it, the best mesh is then planned once more as if it were the only one. Equal layers share their
        choices throughout; the best answer is then untied (`intra_op/untie.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError, needed_bytes
from autopar.intra_op.by_axes import joined_axes
from autopar.intra_op.exposure import Exposure, OwnExposure
from autopar.intra_op.graph import Graph
from autopar.intra_op.problem import Problem, num_pairs, planning_seconds
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.shard import Pruned, settle
from autopar.intra_op.time_limit import TimeLimit
from autopar.intra_op.untie import proved, untie
from autopar.mesh import LogicalMesh
from autopar.options import Options
from autopar.search.one_mesh import shard_on
from autopar.search.progress import Report, silent
from autopar.search.request import Request
from autopar.tuning import TUNING


@dataclass(slots=True)
class Searched:
    """The outcome of a search over meshes.

    Attributes:
        results: The plan on each mesh that has one.
        tried: What was tried or left out: (what, its seconds or why not).
        failure: Why a mesh has no plan: of the failures the one that needs least memory, or the last.
        pruned: Meshes that were abandoned, since no plan on them beats the best.
        compared: Meshes on which well-known plans were compared.
        unaided: The first plan, if the search on its mesh began without what other plans had shown.
        untied: The plan of the best mesh as if it were the only one, its ties undone.
    """

    results: list[Sharded]
    tried: list[tuple[str, str]]
    failure: AutoparError | None = None
    pruned: list[LogicalMesh] = field(default_factory=list)
    compared: list[LogicalMesh] = field(default_factory=list)
    unaided: Sharded | None = None
    untied: Sharded | None = None

    @property
    def best(self) -> Sharded:
        """The fastest; ties go to fewer axes."""
        return min(self.results, key=_rank)


def _rank(sharded: Sharded) -> tuple[float, int]:
    """Sort key of plans: seconds, then number of axes."""
    return sharded.step_seconds, len(sharded.mesh.shape)


def search_meshes(
    request: Request,
    meshes: Sequence[LogicalMesh],
    report: Report,
    searched: Searched,
    beat: float = math.inf,
    exposure: Exposure | None = None,
    like: Graph | None = None,
) -> None:
    """Shard the step on each of the meshes; extends `searched` along the way.

    Until the first plan is found, `beat` is the objective to beat, `exposure` what it was priced by, and `like` a graph of the
    program on a mesh.
    """
    by_hosts = request.cluster.hosts, request.cluster.devices_per_host
    for number, mesh in enumerate(meshes):
        reason = _not_worth_it(request, searched, mesh) if len(meshes) > 1 or searched.results else ""
        if reason:
            searched.tried.append((str(mesh), reason))
            continue
        text = f"sharding {request.program.name} on mesh {mesh}"
        report(text, number / len(meshes), *_best_known(searched))
        # Data parallelism over all axes is the same on every mesh of one host: compare once, and on the mesh of hosts; but
        # where prices mislead, ZeRO over one of two axes may be missed.
        misled = _misled(searched.best, mesh) if searched.results else 0.0
        compare = not searched.results or mesh.shape == by_hosts or misled > 0
        if searched.results:
            best = searched.best.as_compared(request.cluster.device)
            beat, exposure = _to_beat(best, mesh), best.exposure
        try:
            like = searched.results[0].graph if searched.results else like
            begin, explore = _begin(searched, mesh), not searched.results
            asked = dataclasses.replace(request, beat=min(request.beat, _best_known(searched)[0]))
            sharded = shard_on(asked, mesh, compare, beat, exposure, like, begin, explore, misled)
        except Pruned as pruned:
            searched.pruned.append(mesh)
            searched.tried.append((str(mesh), f"at least {pruned.seconds:.3e} s"))
        except AutoparError as error:
            searched.failure = min(error.kept(), searched.failure or error, key=needed_bytes)
            searched.tried.append((str(mesh), error.summary))
        else:
            searched.unaided = sharded if exposure is None else searched.unaided
            searched.compared += [mesh] * compare
            searched.results.append(sharded)
            searched.tried.append((str(mesh), f"{sharded.step_seconds:.3e} s"))
    report("", 1.0, *_best_known(searched))


def _best_known(searched: Searched) -> tuple[float, float]:
    """Seconds of the best step, and its gap."""
    return (searched.best.step_seconds, searched.best.gap) if searched.results else (math.inf, math.nan)


def _to_beat(best: Sharded, mesh: LogicalMesh) -> float:
    """The objective that another mesh has to beat: a little more than that of the best plan, where trying costs little.

    Prices are not simulated times: of two plans with equal objectives on different meshes, either may be faster.
    """
    small = _is_small(best.problem)
    descends = not small and len(mesh.shape) > 2
    return best.solution.objective * (1 + small * TUNING.clock_doubt + descends * TUNING.descent_doubt)


def _is_small(problem: Problem) -> bool:
    return num_pairs(problem) <= TUNING.small_mesh_pairs


def _misled(best: Sharded, mesh: LogicalMesh) -> float:
    """By what part of its seconds the fastest plan's price exceeds the clock, if it is not the cheapest on its mesh.

    It is then a well-known plan: on other meshes of few axes, such plans may be as much faster than their prices.
    """
    is_misled = len(mesh.shape) < 3 and best.is_off_price and best.solution.gap > TUNING.known_far
    return max(0.0, best.solution.objective / best.step_seconds - 1) if is_misled else 0.0


def _begin(searched: Searched, mesh: LogicalMesh) -> list[Sharded]:
    """Starting points for a mesh of three axes: the fastest answer on a mesh whose axes are products of its axes, and the
    fastest on a mesh with as many axes."""
    if len(mesh.shape) < 3:
        return []
    known = sorted(searched.results, key=lambda sharded: sharded.step_seconds)
    joined = [sharded for sharded in known if joined_axes(sharded.mesh, mesh)]
    alike = [sharded for sharded in known if len(sharded.mesh.shape) == len(mesh.shape)]
    return [*joined[:1], *alike[:1]] if joined else []


def search_unaided(request: Request, searched: Searched, report: Report) -> None:
    """Plan the step once more on the best meshes, each as if it were the only one, if that may win: extends `searched`.

    A search that begins with what plans on other meshes have shown may end elsewhere than one that begins with nothing: on the
    best mesh if its price misjudges it; on that and those nearly as fast also where it takes next to no time, or together a
    part of the time that all meshes took, or any gain repays any time, and prices depend on what hides behind kernels. On
    several hosts the best mesh is planned as thoroughly as if the user named it, unless memory binds, where prices of bytes
    make it many times as long; then those nearly as fast that are priced below it, or are as fast but for next to nothing and
    leave a gap. On one host so is the best on three axes that leaves one, where that is short beside all steps.
    """
    best, hosts, hides = searched.best, request.cluster.hosts, request.cluster.device.achieved.overlap > 0
    known = request.narrowed.seconds if request.narrowed else math.inf
    if not best.step_seconds or (1 - TUNING.untied_near) * best.step_seconds > known:
        return
    misjudged = abs(1 - best.solution.objective / best.step_seconds)
    is_short = any(sharded.problem.rows for sharded in searched.results)
    near = (1 + TUNING.untied_near) * best.step_seconds if hides else 0.0
    # The others were not solved as a whole, as they would be now.
    whole = [s.problem for s in searched.results if len(s.mesh.shape) < 3 or _is_small(s.problem)]
    all_seconds = sum(map(planning_seconds, whole))
    left = min(TUNING.finalists_part * all_seconds, TUNING.finalists_seconds)
    left = math.inf if request.options.repaying_steps == math.inf else left
    left_named = TUNING.named_seconds
    for sharded in sorted(searched.results, key=_rank):
        takes, worth = planning_seconds(sharded.problem), TUNING.unaided_part * best.step_seconds
        # Where nothing hides, plans on other meshes have shown nothing.
        is_aided = hides or sharded.mesh not in searched.compared
        is_asked = sharded is best and misjudged > TUNING.misjudged and not _is_priced_as(best, searched.unaided)
        is_near = sharded.step_seconds <= near
        is_quick = is_near and takes <= TUNING.untied_seconds
        repaid = takes <= TUNING.unaided_seconds and request.options.repays(worth, takes)
        # The best may have become faster than what others are priced at.
        is_cheaper = sharded.solution.objective < (1 - TUNING.misjudged) * searched.best.step_seconds
        is_close = sharded.step_seconds <= (1 + TUNING.misjudged) * best.step_seconds and sharded.gap > TUNING.rough_gap
        is_doubted = is_asked or (sharded is not best and is_near and (is_cheaper or is_close))
        if hosts == 1:
            part = TUNING.named_part * request.options.repaying_steps * best.step_seconds
            is_doubted = sharded is best and is_close and len(best.mesh.shape) > 2 and takes <= part
        thorough = is_doubted and not is_short and takes <= left_named
        chosen = (is_asked or is_quick) and is_aided and repaid or thorough or (is_near and takes <= left)
        if sharded is searched.unaided or not chosen:
            continue
        left -= takes
        left_named -= takes
        report(f"planning {request.program.name} on mesh {sharded.mesh} alone", None, best.step_seconds, best.gap)
        asked, alone = dataclasses.replace(request, thorough=thorough), Searched([], [])
        search_meshes(asked, [sharded.mesh], silent, alone, like=sharded.graph)
        if alone.results and sharded is best:
            alone.results = [untie_best(asked, alone)]
            searched.untied = alone.results[0]
        searched.results += alone.results


def _is_priced_as(sharded: Sharded, unaided: Sharded | None) -> bool:
    """Whether an answer was found by what alone the plan shows with which a search that began with nothing ended."""
    own = unaided.exposure if unaided is not None else None
    return isinstance(own, OwnExposure) and sharded.exposure == own


def untie_best(request: Request, searched: Searched) -> Sharded:
    """Untie the best plan; for small programs, also those that are nearly as fast. What takes long is done if it repays."""
    best, options, budget, device = searched.best, request.options, request.budget_bytes, request.cluster.device
    small = len(best.graph.nodes) <= TUNING.untied_each

    def settled(sharded: Sharded) -> Sharded:
        # On fewer axes `shard` has refined it already.
        if len(sharded.mesh.shape) < 3:
            return sharded
        # If the program takes longer than its choices were priced, bounds by these prices cannot close the gap.
        misjudged = sharded.least_gap > TUNING.rough_gap
        known = sharded if misjudged else proved(sharded)
        is_quick = TUNING.solve_share * planning_seconds(known.problem) <= TUNING.settled_quickly
        gap = TUNING.large_gap if is_quick else TUNING.rough_gap
        if known.gap <= gap:
            return known
        around = settle(known, device, options, request.roles.donated, _turns(known, options), gap)
        if misjudged and around.choices == known.choices and around.gap > known.least_gap:
            return min(around, proved(known), key=lambda sharded: sharded.gap)
        return around

    def untied(sharded: Sharded) -> Sharded:
        if sharded is searched.untied:
            return sharded
        takes = TUNING.solve_share * planning_seconds(sharded.problem)
        at_once = sharded is best and takes <= TUNING.untied_seconds
        if not at_once and not options.repays(TUNING.untied_near * sharded.step_seconds, takes):
            is_quick = sharded is best and takes <= TUNING.proved_seconds
            return settled(sharded) if is_quick else sharded
        limit = TimeLimit(options.solver_seconds, options.repaying_steps, options.ends)
        how = device, request.roles.donated, lambda sharded: sharded.fits(budget), options.solver, limit
        alone = untie(sharded, *how)
        # By what is exposed in other programs, too: by what is in its own, others may look dear that are faster.
        compared = sharded.as_compared(device) if small else sharded
        if compared is not sharded:
            alone = min(alone, untie(compared, *how), key=_rank)
        return settled(alone)

    near = (1 + TUNING.untied_near) * best.step_seconds
    others = [s for s in searched.results if s is not best and len(s.mesh.shape) < 3 and s.step_seconds <= near]
    found = [] if searched.untied is None else [searched.untied]
    # Three axes last: their answers still need a bound, unless they are beaten by then.
    for sharded in sorted([best, *(others if small else ())], key=lambda sharded: len(sharded.mesh.shape)):
        beaten = any(known.step_seconds <= sharded.step_seconds for known in found)
        if not (beaten and len(sharded.mesh.shape) > 2):
            found.append(untied(sharded))
    return min(found, key=_rank)


def _turns(sharded: Sharded, options: Options) -> int:
    """Number of turns of `settle`: once to bound the answer, and more often if that repays."""
    each, worth = TUNING.solve_share * planning_seconds(sharded.problem), TUNING.settled_part * sharded.step_seconds
    turns = [n for n in range(1, TUNING.around_turns + 1) if n * each <= TUNING.settled_seconds]
    return max((n for n in turns if options.repays(worth, n * each)), default=1)


def _not_worth_it(request: Request, searched: Searched, mesh: LogicalMesh) -> str:
    """Why a mesh is left out; "": it is not."""
    options = request.options
    if searched.failure and options.is_over:
        return "left out: planning was to end"
    if not searched.results:
        # There is no starting point, and a step that does not fit on two axes seldom fits on three.
        needed = needed_bytes(searched.failure)
        is_far = TUNING.third_axis_bytes * request.budget_bytes < needed < math.inf
        is_long = len(request.program.jaxpr.eqns) > TUNING.third_axis_equations or is_far
        return "left out: nothing fits on fewer axes" if searched.failure and is_long and len(mesh.shape) > 2 else ""
    widest, best = max(searched.results, key=lambda sharded: len(sharded.mesh.shape)), searched.best
    takes = planning_seconds(widest.problem, len(mesh.shape), len(widest.mesh.shape))
    won = best.step_seconds - best.shared_seconds
    too_long = f"left out: it would take longer to plan than {options.repaying_steps:.0f} steps can win"
    # A mesh of three axes tells of others over the same links: to split the hosts in two is not to split each of them.
    alike = [sharded for sharded in searched.results if len(sharded.mesh.shape) < 3 or sharded.mesh.links == mesh.links]
    by_axes: dict[int, float] = {}
    for sharded in alike:
        axes = len(sharded.mesh.shape)
        by_axes[axes] = min(by_axes.get(axes, math.inf), sharded.step_seconds)
    for known in searched.pruned:
        if len(known.shape) < 3 or known.links == mesh.links:
            by_axes.setdefault(len(known.shape), best.step_seconds)
    if len(mesh.shape) < 3 or (len(by_axes) < 2 and 1 in by_axes):
        return "" if options.repays(won, takes) else too_long
    if won <= TUNING.third_axis_gain * best.step_seconds:
        return f"left out: no plan takes less than {best.shared_seconds:.3e} s"
    if options.repaying_steps == math.inf or _is_quick_descent(widest, by_axes, options.repaying_steps):
        return ""  # what follows says that it wins little, not that it wins nothing
    if by_axes.get(2, math.inf) > (1 - TUNING.second_axis_gain) * by_axes.get(1, math.inf):
        return "left out: the second axis won next to nothing"
    fewer = min(by_axes.get(1, math.inf), by_axes.get(2, math.inf))
    if by_axes.get(3, -math.inf) > (1 - TUNING.third_axis_gain) * fewer:
        return "left out: a third axis won next to nothing elsewhere"
    finer = [sharded.step_seconds for sharded in alike if len(sharded.mesh.shape) > 2]
    if finer and min(finer[-2:]) > min(finer):
        return "left out: the last two meshes of three axes were slower than one before"
    if finer and finer[-1] > (1 + TUNING.third_axis_worse) * min(finer):
        return "left out: the last mesh of three axes was much slower than one before"
    if 1 in by_axes and 2 in by_axes:  # a third axis wins less than the second did
        won = min(won, by_axes[1] - by_axes[2])
    return "" if options.repays(won, takes) else too_long


def _is_quick_descent(widest: Sharded, by_axes: Mapping[int, float], steps: float) -> bool:
    """Whether a first mesh of three axes is planned whatever it may win: the second axis won, and it takes little time.

    It only descends from the answer on two axes, which takes as long as a few meshes like that. It also has to be short beside
    the `steps` that are planned for.
    """
    takes = TUNING.descent_meshes * planning_seconds(widest.problem) + len(widest.graph.nodes) * TUNING.descent_node
    return (
        by_axes.keys() == {1, 2}
        and by_axes[2] < (1 - TUNING.axis_gain) * by_axes[1]
        and takes <= min(TUNING.descent_seconds, TUNING.descent_part * steps * by_axes[2])
    )

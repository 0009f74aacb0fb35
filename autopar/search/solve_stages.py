"""Shards stages on their meshes: equal stages once, parts of one stack alike.

In:     stage programs, logical meshes.
Out:    `StagePlan`s.
Method: equal programs have equal keys (`ir/signature.py`) and share their choices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar._jax import Jaxpr
from autopar.errors import AutoparError, ConstraintError, InfeasibleError
from autopar.inter_op.cut import CutStep
from autopar.inter_op.equal_stages import take_over
from autopar.inter_op.stage import StageProgram
from autopar.inter_op.stage_plan import StagePlan, peak_bytes_here, plan_stage, stage_graph
from autopar.inter_op.stage_program import stage_program
from autopar.inter_op.tasks import BackwardSplit, Tasks, make_tasks
from autopar.intra_op.costs import build_problem
from autopar.intra_op.graph import Graph, Tables
from autopar.intra_op.lower import lower
from autopar.intra_op.problem import Solution
from autopar.intra_op.read_off import Sharded, read_off
from autopar.intra_op.restrict import Allowed, Restrict
from autopar.intra_op.tying import of_classes, tie_nodes
from autopar.ir.signature import canonical_key
from autopar.mesh import Cluster, LogicalMesh, Sharding
from autopar.options import Options
from autopar.plan.decision import Cost, Stage
from autopar.search.pins import RestrictStage
from autopar.tuning import TUNING


@dataclass(slots=True)
class Solved:
    """Caches of a search over pipelines.

    Attributes:
        known: Key of a stage and its terms -> its plan.
        counted: Key of a stage and a budget -> its plan with all memory counted (not `all_again`), and the `in_flight` of it.
        graphs: Program -> its graph on some mesh, to reuse what does not depend on the mesh.
        tables: Mesh -> caches shared by all programs on it.
        pieces: Cut step, borders, ... -> the tasks and programs of its stages, shared by schedules.
        key_of: `canonical_key`, cached.
    """

    known: dict[Hashable, StagePlan] = field(default_factory=dict)
    counted: dict[Hashable, tuple[StagePlan, int]] = field(default_factory=dict)
    graphs: dict[StageProgram, Graph] = field(default_factory=dict)
    tables: dict[LogicalMesh, Tables] = field(default_factory=dict)
    pieces: dict[Hashable, tuple[Tasks, list[StageProgram]]] = field(default_factory=dict)
    key_of: Callable[[Jaxpr], Hashable] = field(default_factory=lambda: functools.cache(canonical_key))

    def pieces_of(
        self, cut: CutStep, borders: Sequence[int], splits: BackwardSplit, levels: Sequence[float]
    ) -> tuple[Tasks, list[StageProgram]]:
        """The tasks and programs of the stages between borders, cached; `splits` and `levels` as in `make_tasks`."""
        key = cut, tuple(borders), splits, tuple(levels)
        if key not in self.pieces:
            tasks = make_tasks(cut, borders, splits, levels)
            self.pieces[key] = tasks, [stage_program(tasks, k) for k in range(len(borders))]
        return self.pieces[key]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The terms on which stages are sharded.

    Attributes:
        cluster: The cluster.
        options: Solver, time limit, memory budget.
        solved: Caches; extended.
        gap: As in `plan_stage`.
        all_again: As in `plan_stage`.
        in_flight: As in `plan_stage`.
    """

    cluster: Cluster
    options: Options
    solved: Solved
    gap: float = TUNING.stage_gap
    all_again: bool = False
    in_flight: int = 1

    @property
    def budget_bytes(self) -> float:
        """Memory budget of one device, bytes."""
        return self.options.budget_bytes(self.cluster.device.memory_bytes)


def best_stage(
    program: StageProgram, candidates: Sequence[LogicalMesh], terms: Terms, restrict: RestrictStage
) -> StagePlan:
    """Shard a stage on the logical mesh on which it is fastest.

    Raises:
        InfeasibleError: It fits on no mesh.
        ConstraintError: No mesh has the axes that the user's constraints name.
    """
    found: list[StagePlan] = []
    failure: AutoparError | None = None
    for mesh in candidates:
        try:
            further, key = restrict(program, mesh)
            found.append(solve_stage(program, mesh, terms, further, key))
        except (InfeasibleError, ConstraintError) as error:
            failure = error.kept()
    if not found:
        assert failure is not None, "a stage has at least one mesh to try"
        raise failure
    return min(found, key=lambda s: (stage_seconds(s), len(s.mesh.shape)))


def solve_stage(
    program: StageProgram, mesh: LogicalMesh, terms: Terms, restrict: Restrict | None, pins: Hashable
) -> StagePlan:
    """Shard a stage, or reuse the choices of an equal one; `pins`: key of the restriction.

    Raises `InfeasibleError`: it does not fit.
    """
    options, solved, gap, all_again = terms.options, terms.solved, terms.gap, terms.all_again
    in_flight = terms.in_flight if mesh.num_devices > 1 else 1  # on one device there is nothing to choose
    same = (
        solved.key_of(program.jaxpr),
        tuple(sorted(program.aliases.items())),
        tuple(sorted((k, tuple(sorted(d))) for k, d in program.batch.items())),
        len(program.stacked),
        mesh,
        restrict is None,
        pins,
        gap,
        tuple(sorted(str(var.aval) for var in program.kept)),
    )
    key = *same, options.memory_budget_bytes, all_again, in_flight
    endless = solved.known.get((*same, math.inf, False, 1))
    if key not in solved.known and endless is not None:
        # The best plan with unlimited memory is the best one within the budget if it fits.
        counted = solved.counted.get((*same, options.memory_budget_bytes)) if all_again else None
        if peak_bytes_here(endless, all_again, in_flight) <= terms.budget_bytes:
            solved.known[key] = endless
        elif counted is not None and (_is_near(counted[0], endless, gap) or _counts_alike(*counted, in_flight)):
            solved.known[key] = counted[0]
    device = terms.cluster.device
    if key in solved.known:
        return take_over(program, solved.known[key], device, solved.key_of)
    tables = solved.tables.setdefault(mesh, Tables())
    graph = stage_graph(program, mesh, solved.graphs.get(program), tables)
    made = plan_stage(program, graph, device, options, restrict, all_again, gap, in_flight)
    solved.known[key] = made
    if not all_again:
        solved.counted[*same, options.memory_budget_bytes] = made, in_flight
    solved.graphs.setdefault(program, graph)
    return made


def _is_near(stage: StagePlan, endless: StagePlan, gap: float) -> bool:
    """Whether a stage costs at most `gap` more than with unlimited memory."""
    return stage.sharded.solution.objective <= (1 + gap) * endless.sharded.solution.objective


def _counts_alike(stage: StagePlan, counted: int, in_flight: int) -> bool:
    """Whether nothing that may be recomputed takes part in the peak of a stage planned with so many microbatches `counted`."""
    return counted == in_flight and peak_bytes_here(stage, True, in_flight) == peak_bytes_here(stage, False, in_flight)


def given_choices(
    program: StageProgram,
    cluster: Cluster,
    stage: Stage,
    cost: Cost,
    restrict: Restrict | None = None,
) -> Sharded:
    """Lower a stage's joint program under the choices of a saved stage, one per node of its graph.

    `cost`: the step's cost when the choices were found. `restrict`: the restrictions then.

    Raises `AssertionError`: they are not choices of this program.
    """
    graph, choices = stage_graph(program, stage.logical_mesh), stage.choices
    fitting = len(graph.nodes) == len(choices) and all(
        k < node.num_choices for k, node in zip(choices, graph.nodes, strict=True)
    )
    assert fitting, f"{len(choices)} choices for {len(graph.nodes)} decisions, or one out of range"
    allowed = Allowed()
    if restrict is not None:
        restrict(graph, allowed)
    class_of = tie_nodes(graph, allowed.keys)
    chosen = of_classes(class_of, choices)
    if any(chosen[c] != k for c, k in zip(class_of, choices, strict=True)):
        class_of, chosen = list(range(len(graph.nodes))), tuple(choices)  # found with other ties, as under other pins
    problem = build_problem(graph, cluster.device, class_of, allowed.masks)
    seconds = problem.cost(chosen)
    solution = Solution(chosen, seconds, seconds * (1 - cost.optimality_gap), cost.solver_status, "file")
    how = problem, solution, allowed, cluster.device, program.donated, lower(graph, choices, stage.bucket_bytes)
    return read_off(graph, choices, class_of, *how)


def stage_seconds(stage: StagePlan) -> float:
    """Seconds of all runs of a stage's tasks in one step."""
    return sum(t.seconds * (stage.program.count if t.task.is_in_loop else 1) for t in stage.tasks)


class SameStacks:
    """Has equal parts of a stack sharded alike on their stages, so that the user has one array."""

    def __init__(self, cut: CutStep):
        arguments = cut.program.jaxpr.invars
        self.stack_of = {
            arguments[at]: k
            for k, parts in enumerate(cut.stacks.inputs)
            if len(parts) > 1 and len({arguments[at].aval.shape for at in parts}) == 1
            for at in parts
        }
        self.chosen: dict[int, tuple[LogicalMesh, Sharding]] = {}

    def pins(self, program: StageProgram, stage: StagePlan) -> dict[int, Sharding]:
        """Arguments of a stage -> the shardings of earlier parts of their stacks; {} if none differs, or meshes do."""
        known = {
            at: self.chosen[self.stack_of[var]]
            for at, var in program.arguments.items()
            if self.stack_of.get(var, -1) in self.chosen
        }
        same_mesh = all(mesh == stage.mesh for mesh, _ in known.values())
        differs = any(sharding != stage.sharded.input_sharding(at) for at, (_, sharding) in known.items())
        return {at: sharding for at, (_, sharding) in known.items()} if same_mesh and differs else {}

    def mesh_of(self, program: StageProgram) -> LogicalMesh | None:
        """The mesh of earlier parts of a stage's stacks; None: there are none, or they are on several meshes."""
        stacks = [self.stack_of.get(var, -1) for var in program.arguments.values()]
        meshes = [self.chosen[stack][0] for stack in stacks if stack in self.chosen]
        return meshes[0] if meshes and all(mesh == meshes[0] for mesh in meshes) else None

    def add(self, program: StageProgram, stage: StagePlan) -> None:
        """Record the shardings of the parts of stacks in a stage."""
        for at, var in program.arguments.items():
            if var in self.stack_of and at in program.aliases.values():
                self.chosen.setdefault(self.stack_of[var], (stage.mesh, stage.sharded.input_sharding(at)))


def pinned(pins: Mapping[int, Sharding], further: Restrict | None, reason: str = "its stack is sharded so") -> Restrict:
    """A restriction to given shardings of arguments, by position, combined with a `further` one."""

    def restrict(graph: Graph, allowed: Allowed) -> None:
        for at, sharding in pins.items():
            node = graph.nodes[graph.inputs[at]]
            allowed.only(node, [s == sharding for s in node.shardings], ("pinned", sharding), reason)
        if further is not None:
            further(graph, allowed)

    return restrict

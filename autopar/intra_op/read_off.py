"""Predicts time and memory of a sharded program.

In:     a program's decision graph, a choice per node, the solution that these come from, the program lowered under them.
Out:    `Sharded`.
Method: list the collectives, simulate the program (`lanes.py`), compute its memory (`liveness.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost import collective_seconds
from autopar.intra_op.costs import OperationSeconds, build_problem
from autopar.intra_op.exposure import Exposure, OwnExposure, show
from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.heap import gap_bytes
from autopar.intra_op.held import held_values
from autopar.intra_op.kernels import is_contraction
from autopar.intra_op.lanes import run_lanes
from autopar.intra_op.liveness import Liveness, measure_liveness, overwriting
from autopar.intra_op.problem import PROVED, Problem, Solution
from autopar.intra_op.restrict import Allowed
from autopar.intra_op.sharded import Body, Collective, collectives_of
from autopar.intra_op.strategies import split_fraction
from autopar.intra_op.tying import of_classes
from autopar.mesh import Device, LogicalMesh, Sharding
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """A program sharded on one mesh.

    Attributes:
        graph: The decision graph.
        choices: The choice of each node.
        class_of: Class of each node in the problem.
        problem: The problem solved.
        solution: Its solution, per class.
        allowed: The choices that were allowed.
        body: The sharded program.
        known_liveness: Its memory on one device; None: not asked for yet.
        collectives: All collectives of one step.
        compute_seconds: Seconds of its kernels.
        communication_seconds: Seconds of its collectives.
        exposed_seconds: Exposed seconds of each collective.
        donated: Per input, whether its memory may be reused.
        exposure: The fraction of each conversion that counted in the problem; None: all.
    """

    graph: Graph
    choices: tuple[int, ...]
    class_of: tuple[int, ...]
    problem: Problem
    solution: Solution
    allowed: Allowed
    body: Body
    known_liveness: Liveness | None
    collectives: tuple[Collective, ...]
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: tuple[float, ...]
    donated: tuple[bool, ...]
    exposure: Exposure | None = None

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh."""
        return self.graph.mesh

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step: kernels and exposed collectives."""
        return self.compute_seconds + sum(self.exposed_seconds)

    @property
    def liveness(self) -> Liveness:
        """Its memory on one device; cached in the graph."""
        if self.known_liveness is not None:
            return self.known_liveness
        return _liveness_in(self.graph, self.body, self.donated)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on one device, with those that are lost to gaps between arrays."""
        return self.liveness.peak_bytes + gaps_in(self.graph, self.body, self.donated, self.liveness)

    def fits(self, budget: float) -> bool:
        """Whether it takes no more than so many bytes; gaps do not double what is alive."""
        alive = self.liveness.peak_bytes
        return 2 * alive <= budget or (alive <= budget and self.peak_bytes <= budget)

    @property
    def is_off_price(self) -> bool:
        """Whether prices are unreliable, as where many small collectives are fused."""
        return abs(self.solution.objective - self.step_seconds) > TUNING.known_far * self.step_seconds

    @property
    def shared_seconds(self) -> float:
        """Lower bound on the step of any plan: all devices share every operation, and nothing is communicated.

        Contractions count as fully shared even if this mesh cannot split them (64 rows on 6 devices): other meshes may.
        """
        known: dict[tuple[int, int], float] = {}  # equal operations have one array of costs
        total = 0.0
        for node, costs in zip(of_classes(self.class_of, self.graph.nodes), self.problem.costs, strict=True):
            same = node.signature, id(costs)
            seconds = known.get(same)
            if seconds is None:
                seconds = known[same] = self._shared(node, costs)
            total += seconds
        return total

    def _shared(self, node: Node, costs: np.ndarray) -> float:
        seconds = float(costs.min())
        if node.kind != "op" or not is_contraction(node.rule):
            return seconds
        mesh = self.graph.mesh
        parts = 1 / split_fraction(node.strategies[int(costs.argmin())], mesh.axis_sizes)
        return seconds * parts / mesh.num_devices

    def priced_seconds(
        self, body: Body, exposed: Sequence[float], compute_seconds: float, sent_seconds: float
    ) -> float:
        """The cost of a program of these choices, with collectives counted as in the problem.

        Args:
            body: The program.
            exposed: Exposed seconds of each of its collectives.
            compute_seconds: Seconds of its kernels.
            sent_seconds: Seconds of its collectives.
        """
        if self.exposure is None:
            return compute_seconds + sent_seconds
        return compute_seconds + self.exposure.seconds_of(show(self.graph, body, exposed))

    def gap_of(self, seconds: float) -> float:
        """The relative gap between a program of these choices, at so many priced seconds, and the problem's bound.

        At least the gap of the solution: a program that came out cheaper than its choices were priced proves nothing.
        """
        gap = max(self.solution.gap, 1 - self.solution.bound / seconds) if seconds > 0 else 0.0
        return gap if gap > PROVED else 0.0

    @property
    def gap(self) -> float:
        """The gap of the lowered program, as opposed to that of its choices in the problem."""
        return self.gap_of(self.own_priced_seconds)

    @property
    def least_gap(self) -> float:
        """The least that `gap` can become by better bounds, since none exceeds the objective of its choices."""
        return 1 - self.solution.objective / self.own_priced_seconds if self.own_priced_seconds > 0 else 0.0

    @property
    def own_priced_seconds(self) -> float:
        """The cost of the program itself, with collectives counted as in the problem."""
        taken = self.compute_seconds, self.communication_seconds
        return self.priced_seconds(self.body, self.exposed_seconds, *taken)

    def as_compared(self, device: Device) -> Sharded:
        """The same program priced by the exposure before it alone decided that, so that others can be priced alike."""
        if not isinstance(self.exposure, OwnExposure):
            return self
        before = self.exposure.before
        problem = build_problem(self.graph, device, self.class_of, self.allowed.masks, before)
        least = sum(float(costs.min()) for costs in problem.costs)
        return self.repriced(dataclasses.replace(problem, rows=self.problem.rows), least, before)

    def repriced(self, problem: Problem, bound: float, exposure: Exposure | None) -> Sharded:
        """The same program with the costs and the bound of another problem."""
        choices = of_classes(self.class_of, self.choices)
        priced = Solution(choices, problem.cost(choices), bound, "feasible", self.solution.solver).bounded(bound)
        return dataclasses.replace(self, problem=problem, solution=priced, exposure=exposure)

    def input_sharding(self, position: int) -> Sharding:
        """The sharding of an input."""
        node = self.graph.inputs[position]
        return self.graph.nodes[node].shardings[self.choices[node]]


def gaps_in(graph: Graph, body: Body, donated: Sequence[bool], liveness: Liveness | None = None) -> int:
    """Bytes that a program of a graph loses to gaps between arrays; cached in the graph. `liveness` is reused if given."""
    return graph.cached(
        ("gaps", body, tuple(donated)),
        lambda: gap_bytes(body, graph.mesh, held_values(graph), overwriting(body, donated).keys(), liveness),
    )


def _liveness_in(graph: Graph, body: Body, donated: Sequence[bool]) -> Liveness:
    return graph.cached(
        ("liveness", body, tuple(donated)),
        lambda: measure_liveness(body, graph.mesh, held_values(graph), donated),
    )


def read_off(
    graph: Graph,
    choices: Sequence[int],
    class_of: Sequence[int],
    problem: Problem,
    solution: Solution,
    allowed: Allowed,
    device: Device,
    donated: Sequence[bool],
    body: Body,
    exposure: Exposure | None = None,
    liveness: Liveness | None = None,
) -> Sharded:
    """Predict time and memory of choices that are lowered to `body`; `liveness` is reused if given."""
    collectives = tuple(collectives_of(body, graph.mesh))
    communication = sum(c.times * collective_seconds(c.kind, c.bytes, c.axes, graph.mesh) for c in collectives)
    lanes = run_lanes(body, OperationSeconds(graph, choices, device).of, graph.mesh, device)
    own_bytes = 0
    if device.achieved.waits_for_memory:
        liveness = liveness or _liveness_in(graph, body, donated)
        own_bytes = max(0, liveness.peak_bytes - liveness.argument_bytes)
    besides = device.achieved.program_seconds(own_bytes, len(body.inputs) + len(body.outputs))
    return Sharded(
        graph,
        tuple(choices),
        tuple(class_of),
        problem,
        solution,
        allowed,
        body,
        liveness,
        collectives,
        lanes.compute_seconds + besides,
        communication,
        lanes.exposed,
        tuple(donated),
        exposure,
    )

"""The plan of choices that nobody solved for: of all plans that there are, not only of good ones."""

from collections.abc import Sequence

from autopar.intra_op.costs import build_problem
from autopar.intra_op.graph import Graph
from autopar.intra_op.lower import lower
from autopar.intra_op.problem import Solution
from autopar.intra_op.read_off import read_off
from autopar.intra_op.restrict import Allowed
from autopar.ir.program import Program
from autopar.report.plan import Plan
from autopar.search.describe import describe_plan
from autopar.search.methods import count_of
from autopar.search.request import Request
from autopar.streams.assemble import assemble_step


def plan_of_choices(request: Request, program: Program, graph: Graph, choices: Sequence[int]) -> Plan:
    """The plan of given choices, one per node of `graph`; nothing is solved, and nothing is known of its optimality.

    The graph is that of `program`, the step in the method's number of microbatches (`in_microbatches`).
    """
    roles, device = request.roles, request.cluster.device
    class_of = list(range(len(graph.nodes)))
    problem = build_problem(graph, device, class_of)
    solution = Solution(tuple(choices), problem.cost(choices), 0.0, "feasible", "given")
    how = problem, solution, Allowed(), device, roles.donated, lower(graph, choices)
    sharded = read_off(graph, choices, class_of, *how)
    planned = assemble_step(program, roles, count_of(request.method), sharded)
    return describe_plan(request, planned, 0.0)

"""The least assignment of a choice problem by trying all: the oracle of every solver."""

import itertools

from autopar.intra_op.problem import Problem, Solution


def brute_force(problem: Problem) -> Solution:
    """The least assignment by trying all: the oracle of the tests."""
    best, best_cost = None, float("inf")
    for choices in itertools.product(*(range(len(c)) for c in problem.costs)):
        cost = problem.cost(choices)
        if cost < best_cost and problem.fits(choices):
            best, best_cost = choices, cost
    if best is None:
        return Solution((), float("inf"), float("inf"), "infeasible", "brute force")
    return Solution(best, best_cost, best_cost, "optimal", "brute force")

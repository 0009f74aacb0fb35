"""Heuristic searches over the choice problem, for comparison with message passing and the ILP.

In:     `Problem` without memory rows, a number of steps.
Out:    an assignment, without a bound.
Method: one small function each, by name in `SEARCHES`: those that surveys of automatic parallelism list.
        MCMC: Jia et al., "FlexFlow", MLSys 2019; tree search: Kocsis and Szepesvari, "Bandit based Monte-Carlo planning",
        ECML 2006; breadth-first search is a dynamic program over the choices that later nodes see, cut at a number of
        states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from autopar.intra_op.problem import Neighbours, Problem

Choices = tuple[int, ...]
Search = Callable[[Neighbours, int, np.random.Generator], Choices]


def drawn(of: Neighbours, steps: int, random: np.random.Generator) -> Choices:
    """The best of `steps / nodes` random assignments."""
    some = (tuple(int(random.integers(len(cost))) for cost in of.costs) for _ in range(max(1, steps // len(of.costs))))
    return min(some, key=of.problem.cost)


def greedy(of: Neighbours, steps: int, random: np.random.Generator) -> Choices:
    """Node by node, the cheapest choice given those before it."""
    choices: list[int] = []
    for node in range(len(of.costs)):
        choices.append(int(of.beside(node, choices, earlier=True).argmin()))
    return tuple(choices)


def beam(of: Neighbours, steps: int, random: np.random.Generator, merged: bool = False) -> Choices:
    """Beam search: node by node, keep the best few partial assignments.

    `merged`: those that look the same to all later nodes are merged into the cheapest (breadth-first search).
    """
    width = max(1, steps // len(of.costs))
    last = [max([node, *(v for v, _ in of.around[node])]) for node in range(len(of.costs))]
    states: list[tuple[float, Choices]] = [(0.0, ())]
    for node in range(len(of.costs)):
        found: dict[Choices, tuple[float, Choices]] = {}
        seen = [n for n in range(node + 1) if last[n] > node]
        for cost, begun in states:
            for k, more in enumerate(of.beside(node, begun, earlier=True)):
                state = (cost + float(more), (*begun, k))
                key = tuple(state[1][n] for n in seen) if merged else state[1]
                if key not in found or state < found[key]:
                    found[key] = state
        states = sorted(found.values())[:width]
    return states[0][1]


def halving(of: Neighbours, steps: int, random: np.random.Generator) -> Choices:
    """Divide and conquer: improve halves of the program recursively, each with the rest fixed."""
    choices = list(greedy(of, steps, random))

    def better(first: int, end: int) -> None:
        if end - first > 1:
            middle = (first + end) // 2
            better(first, middle)
            better(middle, end)
        of.descend(choices, range(first, end))

    better(0, len(choices))
    return tuple(choices)


def mcmc(of: Neighbours, steps: int, random: np.random.Generator) -> Choices:
    """Simulated annealing: random changes of single nodes, accepted the less often the dearer and the later they are."""
    choices = list(greedy(of, steps, random))
    cost = of.problem.cost(choices)
    best, least = tuple(choices), cost
    warm = 0.02 * abs(cost) if math.isfinite(cost) else 1.0
    for step in range(steps):
        node = int(random.integers(len(choices)))
        total, now = of.beside(node, choices), choices[node]
        other = int(random.integers(len(total)))
        more = float(total[other] - total[now]) if math.isfinite(total[now]) else -math.inf
        heat = warm * (1 - step / steps) ** 3 + 1e-300
        if more <= 0 or (math.isfinite(more) and random.random() < math.exp(-min(more / heat, 700.0))):
            choices[node] = other
            cost = cost + more if math.isfinite(cost) and math.isfinite(more) else of.problem.cost(choices)
            if cost < least:
                best, least = tuple(choices), cost
    return best


def tree_search(of: Neighbours, steps: int, random: np.random.Generator) -> Choices:
    """Monte-Carlo tree search over partial assignments (UCT), with greedy, slightly randomized rollouts."""
    best = greedy(of, steps, random)
    least = of.problem.cost(best)
    scale = abs(least) if math.isfinite(least) and least else 1.0
    visits: dict[Choices, list[float]] = {}
    for _ in range(max(1, steps // len(of.costs))):
        choices: list[int] = []
        path: list[Choices] = []
        for node in range(len(of.costs)):
            at = tuple(choices)
            total = of.beside(node, choices, earlier=True)
            if at in visits or not path or path[-1] in visits:
                parent = visits.get(at, [1.0, 0.0])[0]
                values = [visits.get((*at, k)) for k in range(len(total))]
                order = [
                    (v[1] / v[0] + math.sqrt(2 * math.log(parent + 1) / v[0])) if v else 10.0 - float(total[k]) / scale
                    for k, v in enumerate(values)
                ]
                choice = max((k for k in range(len(total))), key=lambda k: (order[k], -k))
                path.append((*at, choice))
            else:
                tempted = random.random() < 0.1 and np.isfinite(total).any()
                choice = int(random.choice(np.flatnonzero(np.isfinite(total)))) if tempted else int(total.argmin())
            choices.append(choice)
        cost = of.problem.cost(choices)
        if cost < least:
            best, least = tuple(choices), cost
        reward = scale / max(cost, 1e-300) if math.isfinite(cost) else 0.0
        for place in ((), *path):
            known = visits.setdefault(place, [0.0, 0.0])
            known[0], known[1] = known[0] + 1, known[1] + reward
    return best


SEARCHES: dict[str, Search] = {
    "random": drawn,
    "greedy": greedy,
    "beam": beam,
    "bfs": functools.partial(beam, merged=True),
    "halving": halving,
    "mcmc": mcmc,
    "mcts": tree_search,
}
"""By the names that `solver=` takes."""


def search(problem: Problem, name: str, steps: int) -> Choices:
    """Search for an assignment of a problem without rows.

    Args:
        problem: Costs in seconds.
        name: Key of `SEARCHES`.
        steps: Rough number of evaluations of a node's choices.
    """
    return SEARCHES[name](Neighbours(problem), steps, np.random.default_rng(0)) if problem.costs else ()

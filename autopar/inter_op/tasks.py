"""The tasks of a pipeline: which equations each stage runs in its forward, its backward and its update.

In:     a step in phases (`ir/microbatch.py`), its loop as a chain of segments, the first segment of each stage.
Out:    `Tasks`: for each stage the equations of its forward and backward pass over one microbatch, of what comes before
        and of the update in rounds; and where every value of the step lives.
Method: an equation of the loop runs where its segment is. Light ones run wherever they are read. The update runs where
        the parameter lives; a value that joins stages (global norm, loss scale) is small and made by the last stage,
        after sums over several stages have been added up within each; between two rounds values are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.inter_op.chain import Chain
from autopar.inter_op.residuals import Kept, choose_residuals
from autopar.inter_op.update import Update, place_update
from autopar.ir.microbatch import Microbatches
from autopar.ir.structure import inputs_of, variables


@dataclass(frozen=True, eq=False)
class Tasks:
    """A step cut into stages.

    Attributes:
        jaxpr: The whole step.
        split: Its phases.
        num_stages: Number of stages.
        forward: Per stage, equations of the loop, in order.
        backward: Per stage, equations of the loop in order; those that run again first.
        weight: Per stage, the part of its backward that no other stage waits for, where the backward is split; else ().
        kept: Per stage, what passes from forward to backward.
        before: Per stage, equations before the loop, in order.
        update: Where each equation after the loop runs, and where values live.
        made_at: Stage and kind (`"F"`, `"B"`) of each value of the loop that no light equation makes.
    """

    jaxpr: Jaxpr
    split: Microbatches
    num_stages: int
    forward: tuple[tuple[JaxprEqn, ...], ...]
    backward: tuple[tuple[JaxprEqn, ...], ...]
    weight: tuple[tuple[JaxprEqn, ...], ...]
    kept: tuple[Kept, ...]
    before: tuple[tuple[JaxprEqn, ...], ...]
    update: Update
    made_at: Mapping[Var, tuple[str, int]]


def make_tasks(
    jaxpr: Jaxpr, split: Microbatches, chain: Chain, borders: Sequence[int], split_backward: bool = False
) -> Tasks:
    """Cut a step into stages.

    Args:
        jaxpr: The whole step, flat.
        split: Its phases; `chain` is of its loop.
        chain: Segments.
        borders: First segment of each stage, from 0.
        split_backward: Make what no other stage waits for (the gradients of weights) a task of its own.
    """
    num_stages = len(borders)
    stage_of = [max(s for s, first in enumerate(borders) if first <= k) for k in range(chain.num_segments)]
    eqns = chain.loop.eqns
    own: dict[tuple[str, int], list[JaxprEqn]] = {(kind, s): [] for kind in "FB" for s in range(num_stages)}
    made_at: dict[Var, tuple[str, int]] = {}
    light: dict[Var, JaxprEqn] = {}
    for eqn, segment, is_behind in zip(eqns, chain.segment, chain.backward, strict=True):
        if segment < 0:
            light.update(dict.fromkeys(eqn.outvars, eqn))
            continue
        at = ("B" if is_behind else "F", stage_of[segment])
        own[at].append(eqn)
        made_at.update(dict.fromkeys(eqn.outvars, at))
    position = {id(eqn): k for k, eqn in enumerate(eqns)}
    results = variables(chain.loop.outvars)

    def with_light(task: Iterable[JaxprEqn], wanted: Iterable[Var] = ()) -> list[JaxprEqn]:
        found = {id(eqn): eqn for eqn in task}
        waiting = [*(a for eqn in found.values() for a in inputs_of(eqn)), *wanted]
        while waiting:
            maker = light.get(waiting.pop())
            if maker is not None and id(maker) not in found:
                found[id(maker)] = maker
                waiting += inputs_of(maker)
        return sorted(found.values(), key=lambda eqn: position[id(eqn)])

    light_results = [a for a in results if a in light]
    made_at.update(dict.fromkeys(light_results, ("F", 0)))
    forward = [with_light(own["F", s], light_results if s == 0 else ()) for s in range(num_stages)]
    backward, weight, kept = [], [], []
    free = {*light, *chain.loop.invars}
    for s in range(num_stages):
        made = {var for eqn in own["F", s] for var in eqn.outvars}
        received = {a for eqn in own["F", s] for a in inputs_of(eqn) if a in made_at and a not in made}
        at_hand = made | received
        wanted = dict.fromkeys(a for eqn in own["B", s] for a in inputs_of(eqn) if a in at_hand)
        choice = choose_residuals(own["F", s], list(wanted), free, received)
        kept.append(choice)
        at_once, later = _waited_for(own["B", s], s, own, num_stages) if split_backward else (own["B", s], [])
        made_at.update((var, ("W", s)) for eqn in later for var in eqn.outvars)
        backward.append(with_light([*_again_for(at_once, choice.again), *at_once]))
        weight.append(with_light([*_again_for(later, choice.again), *later]))
    behind = [[*b, *w] for b, w in zip(backward, weight, strict=True)]
    update = place_update(jaxpr, split, num_stages, forward, behind, made_at)
    before = []
    for s in range(num_stages):
        before.append(tuple(_before(jaxpr, split, s, forward[s], behind[s], update)))
    return Tasks(
        jaxpr,
        split,
        num_stages,
        tuple(map(tuple, forward)),
        tuple(map(tuple, backward)),
        tuple(map(tuple, weight)),
        tuple(kept),
        tuple(before),
        update,
        made_at,
    )


def _waited_for(
    eqns: Sequence[JaxprEqn], stage: int, own: Mapping[tuple[str, int], Sequence[JaxprEqn]], num_stages: int
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """A stage's backward in two: what other stages wait for, and the rest."""
    waited = {a for s in range(num_stages) if s != stage for eqn in own["B", s] for a in inputs_of(eqn)}
    at_once, later = [], []
    for eqn in reversed(eqns):
        if eqn.effects or any(var in waited for var in eqn.outvars):
            at_once.append(eqn)
            waited.update(inputs_of(eqn))
        else:
            later.append(eqn)
    return at_once[::-1], later[::-1]


def _again_for(eqns: Sequence[JaxprEqn], again: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Those of the forward equations that run again which these equations need."""
    wanted = {a for eqn in eqns for a in inputs_of(eqn)}
    found = []
    for eqn in reversed(again):
        if any(var in wanted for var in eqn.outvars):
            found.append(eqn)
            wanted.update(inputs_of(eqn))
    return found[::-1]


def _before(
    jaxpr: Jaxpr,
    split: Microbatches,
    stage: int,
    forward: Sequence[JaxprEqn],
    backward: Sequence[JaxprEqn],
    update: Update,
) -> list[JaxprEqn]:
    """Equations before the loop whose values a stage reads; repeated in every stage that does."""
    count = len(split.invariants)
    outer_of = dict(zip(split.loop.invars[1 : 1 + count], split.invariants, strict=True))
    outer_of |= dict(zip(split.loop.invars[1 + count :], split.pieces, strict=True))
    wanted = {outer_of[a] for eqn in (*forward, *backward) for a in inputs_of(eqn) if a in outer_of}
    wanted |= {a for eqns in update.rounds[stage] for eqn in eqns for a in inputs_of(eqn)}
    wanted |= {a for a, at in zip(jaxpr.outvars, update.outputs, strict=True) if at == stage and isinstance(a, Var)}
    found = []
    for eqn in reversed(split.before):
        if any(var in wanted for var in eqn.outvars):
            found.append(eqn)
            wanted.update(inputs_of(eqn))
    return found[::-1]

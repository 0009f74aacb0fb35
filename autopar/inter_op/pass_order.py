"""Assigns each equation of the loop to a pass: forward, backward, and both again in later rounds.

In:     a step in phases (`ir/split/microbatches/microbatch.py`).
Out:    `PassOrder`: the pass of every equation of the loop, and the pass after which each value between passes is made.
Method: even passes traverse the stages forwards, odd ones backwards. A reader of a sum over all microbatches runs in a
        later pass than the sum; gradients and values computed from them belong to backward passes. A value read only by
        later rounds is computed there, so that no round keeps for another what that one can compute itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import ancestors, descendants, inputs_of, makers, read_by, readers_of
from autopar.ir.gradient import is_ahead, is_backward, is_recomputed
from autopar.ir.split.microbatches.microbatch import Microbatches
from autopar.ir.work import num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PassOrder:
    """The passes of a loop.

    Attributes:
        passes: Per equation of the loop, in order, the number of its pass.
        after_pass: Value made between passes -> the pass after which it is made.
        beside: Value made after a backward pass and read by the loop (the loop's variable) -> the value of the loop that
            it is computed beside: a parameter, or a microbatch's contribution to a result. Values made after a forward
            pass have no fixed place.
    """

    passes: tuple[int, ...]
    after_pass: Mapping[Var, int] = field(default_factory=dict)
    beside: Mapping[Var, Var] = field(default_factory=dict)


def pass_order(split: Microbatches) -> PassOrder:
    """Assign the equations of a step in phases to passes."""
    part_of = {r.var: part for r, part in zip(split.results, split.loop.outvars, strict=True)}
    inner_of = {outer: inner for inner, outer in split.invariant_of.items()}
    gradients = descendants(split.between, is_backward)
    after_pass: dict[Var, int] = {}
    while True:  # fixed point: each iteration learns what is made after one more pass
        # Value -> (pass after which it is made, whether its readers run backwards: it depends on gradients).
        late = {inner_of[v]: (k, k % 2 == 0 and v in gradients) for v, k in after_pass.items() if v in inner_of}
        passes = _earliest_passes(split.loop, late)
        made_in = {var: k for eqn, k in zip(split.loop.eqns, passes, strict=True) for var in eqn.outvars}
        before = after_pass
        after_pass = _pass_before(split.between, {v: made_in.get(part, 0) for v, part in part_of.items()})
        if after_pass == before:
            break
    if max(passes, default=0) > 1:
        read = read_by(split.between)
        passes = _in_later_rounds(split.loop, passes, [part for v, part in part_of.items() if v in read])
    beside: dict[Var, Var] = {v: part for v, part in part_of.items() if part in made_in} | inner_of
    for eqn in split.between:
        known = [a for a in inputs_of(eqn) if a in beside]
        if known:
            beside.update((var, beside[max(known, key=num_bytes)]) for var in eqn.outvars)
    led_to = [v for v, k in after_pass.items() if k % 2 and v in inner_of and v in beside]
    return PassOrder(tuple(passes), after_pass, {inner_of[v]: beside[v] for v in led_to})


def _earliest_passes(loop: Jaxpr, late: Mapping[Var, tuple[int, bool]]) -> list[int]:
    """The earliest pass of each equation.

    `late`: value made between passes -> the pass after which it is made, and whether its readers run backwards.
    """
    made_in: dict[Var, int] = {}
    passes = []
    for eqn in loop.eqns:
        operands = inputs_of(eqn)
        of_gradient = is_backward(eqn) or is_recomputed(eqn) or any(late[a][1] for a in operands if a in late)
        first = max((late[a][0] + 1 for a in operands if a in late), default=0)
        number = max([first, *(made_in[a] for a in operands if a in made_in)])
        goes_back = number % 2 == 1 and any(made_in.get(a) == number for a in operands)
        if number % 2 == 0 and of_gradient:
            number += 1
        elif number % 2 == 1 and not of_gradient and (is_ahead(eqn) or not goes_back):
            number += 1  # forwards again: from updated parameters, or from a sum over all forward passes
        made_in.update(dict.fromkeys(eqn.outvars, number))
        passes.append(number)
    return passes


def _pass_before(between: Sequence[JaxprEqn], made_in: Mapping[Var, int]) -> dict[Var, int]:
    """The pass after which each value between passes is made; `made_in`: the pass that makes each result of the loop."""
    found: dict[Var, int] = {}
    for eqn in between:
        numbers = [found.get(a, made_in.get(a, -1)) for a in inputs_of(eqn)]
        found.update(dict.fromkeys(eqn.outvars, max(numbers, default=-1)))
    needed_by: dict[Var, int] = {}
    for eqn in reversed(between):  # values of state alone are made with their first reader
        number = max(found[var] for var in eqn.outvars)
        if number < 0:
            number = min((needed_by[var] for var in eqn.outvars if var in needed_by), default=0)
            found.update(dict.fromkeys(eqn.outvars, number))
        for a in inputs_of(eqn):
            needed_by[a] = min(needed_by.get(a, number), number)
    return found


def _in_later_rounds(loop: Jaxpr, passes: Sequence[int], waited: Collection[Var]) -> list[int]:
    """Move equations to a later round if they are connected to its equations and no earlier pass needs them.

    `waited`: results of the loop that are read between its passes.
    """
    found = dict(zip(loop.eqns, passes, strict=True))
    maker, readers = makers(loop.eqns), readers_of(loop.eqns)
    for number in range(max(passes) // 2):
        now = [var for var in waited if var in maker and found[maker[var]] // 2 <= number]
        for eqn in loop.eqns:  # this round's gradients that later rounds read belong to it, too
            now += [a for a in inputs_of(eqn) if a in maker and found[maker[a]] == 2 * number + 1 < found[eqn]]
        early = ancestors(now, lambda var: inputs_of(maker[var]) if var in maker else ())
        free = {eqn for eqn in loop.eqns if not eqn.effects and not any(var in early for var in eqn.outvars)}
        waiting = [eqn for eqn in free if found[eqn] // 2 > number]
        seen = set(waiting)
        while waiting:
            eqn = waiting.pop()
            beside = [maker[var] for var in inputs_of(eqn) if var in maker]
            beside += [reader for var in eqn.outvars for reader in readers.get(var, ())]
            waiting += [other for other in beside if other in free and other not in seen]
            seen.update(beside)
        found |= {eqn: found[eqn] + 2 for eqn in seen & free if found[eqn] // 2 == number}
    return list(found.values())

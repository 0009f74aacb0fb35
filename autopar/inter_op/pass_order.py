"""In which pass of a microbatch each equation of the loop runs: forward, backward, and both again in later rounds.

In:     a step in phases (`ir/split/microbatches/microbatch.py`).
Out:    `PassOrder`: the number of the pass of every equation of the loop, and behind which pass what stands between runs.
Method: even passes go through the stages forwards, odd ones backwards. What reads a sum that a pass makes over all
        microbatches runs in a later one; gradients, and what is made of them, run backwards. What nothing but later rounds
        read is made there, so that no round keeps for another what that can make itself.
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
        passes: Of each equation of the loop, in order, the number of its pass.
        behind: Of each value that is made between passes, the pass behind which it is made.
        beside: What is made behind a backward pass and the loop reads, as the loop calls it: what of the loop its makers have
            at hand, a parameter or a microbatch's part of a result. What joins samples behind a forward pass is anywhere.
    """

    passes: tuple[int, ...]
    behind: Mapping[Var, int] = field(default_factory=dict)
    beside: Mapping[Var, Var] = field(default_factory=dict)


def pass_order(split: Microbatches) -> PassOrder:
    """Number the passes of a step in phases."""
    part_of = {r.var: part for r, part in zip(split.results, split.loop.outvars, strict=True)}
    inner_of = {outer: inner for inner, outer in split.invariant_of.items()}
    gradients = descendants(split.between, is_backward)
    behind: dict[Var, int] = {}
    while True:  # each turn knows of one more pass what is made behind it
        # Of a forward pass, what gradients make goes backwards; of a backward pass it is what it has led to.
        late = {inner_of[v]: (k, k % 2 == 0 and v in gradients) for v, k in behind.items() if v in inner_of}
        passes = _followed(split.loop, late)
        made_in = {var: k for eqn, k in zip(split.loop.eqns, passes, strict=True) for var in eqn.outvars}
        before, behind = behind, _behind(split.between, {v: made_in.get(part, 0) for v, part in part_of.items()})
        if behind == before:
            break
    if max(passes, default=0) > 1:
        read = read_by(split.between)
        passes = _made_late(split.loop, passes, [part for v, part in part_of.items() if v in read])
    beside: dict[Var, Var] = {v: part for v, part in part_of.items() if part in made_in} | inner_of
    for eqn in split.between:
        known = [a for a in inputs_of(eqn) if a in beside]
        if known:
            beside.update((var, beside[max(known, key=num_bytes)]) for var in eqn.outvars)
    led_to = [v for v, k in behind.items() if k % 2 and v in inner_of and v in beside]
    return PassOrder(tuple(passes), behind, {inner_of[v]: beside[v] for v in led_to})


def _followed(loop: Jaxpr, late: Mapping[Var, tuple[int, bool]]) -> list[int]:
    """The earliest pass of each equation.

    `late`: of what is made between passes the pass behind which it is, and whether it goes backwards.
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
            number += 1  # forwards again, where a gradient has led, or with what the forward passes of all have made
        made_in.update(dict.fromkeys(eqn.outvars, number))
        passes.append(number)
    return passes


def _behind(between: Sequence[JaxprEqn], made_in: Mapping[Var, int]) -> dict[Var, int]:
    """The pass behind which each value between passes is made; `made_in`: in which pass the loop makes its results."""
    found: dict[Var, int] = {}
    for eqn in between:
        numbers = [found.get(a, made_in.get(a, -1)) for a in inputs_of(eqn)]
        found.update(dict.fromkeys(eqn.outvars, max(numbers, default=-1)))
    needed_by: dict[Var, int] = {}
    for eqn in reversed(between):  # what is made of state alone waits for who reads it
        number = max(found[var] for var in eqn.outvars)
        if number < 0:
            number = min((needed_by[var] for var in eqn.outvars if var in needed_by), default=0)
            found.update(dict.fromkeys(eqn.outvars, number))
        for a in inputs_of(eqn):
            needed_by[a] = min(needed_by.get(a, number), number)
    return found


def _made_late(loop: Jaxpr, passes: Sequence[int], waited: Collection[Var]) -> list[int]:
    """The passes of equations, where what belongs to a later round and no pass before waits for is made in that round.

    `waited`: results of the loop that are read between its passes.
    """
    found = dict(zip(loop.eqns, passes, strict=True))
    maker, readers = makers(loop.eqns), readers_of(loop.eqns)
    for number in range(max(passes) // 2):
        now = [var for var in waited if var in maker and found[maker[var]] // 2 <= number]
        for eqn in loop.eqns:  # what leads a sample forwards again is behind it, too
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

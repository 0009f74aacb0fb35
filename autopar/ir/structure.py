"""Parts of loops by name, for passes that are about one kind of loop.

In:     a `scan` or `while` of the flat program (its bodies are flat too, with fresh variables and no constants).
Out:    its parts, outer value beside inner variable; which carries are sums; which loops end for each sample by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr, scan_counts
from autopar.ir.dataflow import inputs_of, variables


@dataclass(frozen=True, slots=True)
class ScanParts:
    """A scan: (outer operand, body variable) of constants; (outer operand, body variable, body result, outer result)
    of carries; (outer operand, body variable) of scanned inputs; (body result, outer result) of stacked outputs."""

    body: Jaxpr
    consts: tuple[tuple[Atom, Var], ...]
    carries: tuple[tuple[Atom, Var, Atom, Var], ...]
    xs: tuple[tuple[Atom, Var], ...]
    ys: tuple[tuple[Atom, Var], ...]


def scan_parts(eqn: JaxprEqn) -> ScanParts:
    """The parts of a `scan` equation."""
    body = open_jaxpr(eqn.params["jaxpr"])[0]
    num_consts, num_carry = scan_counts(eqn.params)
    first_x = num_consts + num_carry
    return ScanParts(
        body,
        tuple(zip(eqn.invars[:num_consts], body.invars[:num_consts], strict=True)),
        tuple(
            zip(
                eqn.invars[num_consts:first_x],
                body.invars[num_consts:first_x],
                body.outvars[:num_carry],
                eqn.outvars[:num_carry],
                strict=True,
            )
        ),
        tuple(zip(eqn.invars[first_x:], body.invars[first_x:], strict=True)),
        tuple(zip(body.outvars[num_carry:], eqn.outvars[num_carry:], strict=True)),
    )


@dataclass(frozen=True, slots=True)
class WhileParts:
    """A while loop; a carry is (outer operand, condition variable, body variable, body result, outer result)."""

    cond_body: Jaxpr
    body: Jaxpr
    cond_consts: tuple[tuple[Atom, Var], ...]
    body_consts: tuple[tuple[Atom, Var], ...]
    carries: tuple[tuple[Atom, Var, Var, Atom, Var], ...]
    predicate: Atom


def while_parts(eqn: JaxprEqn) -> WhileParts:
    """The parts of a `while` equation."""
    cond, body = open_jaxpr(eqn.params["cond_jaxpr"])[0], open_jaxpr(eqn.params["body_jaxpr"])[0]
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = num_cond + num_body
    return WhileParts(
        cond,
        body,
        tuple(zip(eqn.invars[:num_cond], cond.invars[:num_cond], strict=True)),
        tuple(zip(eqn.invars[num_cond:first], body.invars[:num_body], strict=True)),
        tuple(
            zip(
                eqn.invars[first:],
                cond.invars[num_cond:],
                body.invars[num_body:],
                body.outvars,
                eqn.outvars,
                strict=True,
            )
        ),
        cond.outvars[0],
    )


def sum_carries(parts: ScanParts) -> list[bool | None]:
    """For each carry of a scan whether it is a sum over the trips (True), does not change (False), or neither (None).

    A sum may stand nowhere else: what reads it waits for the trips before.
    """
    entered: dict[Any, Var] = {inside: inside for _, inside, _, _ in parts.carries}
    for eqn in parts.body.eqns:
        entered.update((var, entered[a]) for a, var in _passed_on(eqn) if not isinstance(a, Literal) and a in entered)
    stays = [
        not isinstance(result, Literal) and entered.get(result) is inside for _, inside, result, _ in parts.carries
    ]
    sum_of: dict[Any, int | None] = {inside: k for k, (_, inside, _, _) in enumerate(parts.carries) if not stays[k]}
    for eqn in parts.body.eqns:
        read = [a for a in inputs_of(eqn) if a in sum_of]
        passed = _passed_on(eqn)
        if passed:
            sum_of.update((var, sum_of[a]) for a, var in passed if not isinstance(a, Literal) and a in sum_of)
        elif read:
            adds = eqn.primitive.name in ("add", "add_any") and len(read) == 1 and read[0].aval == eqn.outvars[0].aval
            sum_of.update(dict.fromkeys(eqn.outvars, sum_of[read[0]] if adds else None))
    broken = any(sum_of.get(a, -1) is None for a in variables(parts.body.outvars))
    broken = broken or any(a in sum_of for a in variables(result for result, _ in parts.ys))
    kinds: list[bool | None] = []
    for k, (_, _, result, _) in enumerate(parts.carries):
        is_sum = not broken and not isinstance(result, Literal) and sum_of.get(result) == k
        kinds.append(False if stays[k] else True if is_sum else None)
    return kinds


def _passed_on(eqn: JaxprEqn) -> list[tuple[Atom, Var]]:
    """Operands that come out as they went in: through a barrier, or less weakly typed (a sum that begins as `0.0`)."""
    pairs = list(zip(eqn.invars, eqn.outvars, strict=False))
    if eqn.primitive.name == "optimization_barrier":
        return pairs
    if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
        return pairs
    return []


def is_done_apart(loop: WhileParts) -> bool:
    """Whether each sample of a loop ends in its own time: it goes on while any does, and keeps what does not go on.

    Then the loop may end earlier for some of the samples: the rounds that are left change nothing of them.
    """
    made_by = {var: eqn for eqn in (*loop.cond_body.eqns, *loop.body.eqns) for var in eqn.outvars}
    test = made_by.get(loop.predicate)
    if test is None or test.primitive.name != "reduce_or":
        return False
    going = next((inside for _, var, inside, _, _ in loop.carries if var is test.invars[0]), None)

    def stays(old: Var, result: Atom) -> bool:
        """Whether what does not go on is as before."""
        eqn = made_by.get(result)
        if eqn is None or result is old:
            return result is old
        if old is going:
            return eqn.primitive.name == "and" and going in eqn.invars
        if eqn.primitive.name != "select_n" or eqn.invars[1] is not old:
            return False
        choice = eqn.invars[0]
        wide = made_by.get(choice)
        if wide is not None and wide.primitive.name == "broadcast_in_dim":
            leading = list(wide.params["broadcast_dimensions"]) == list(range(wide.invars[0].aval.ndim))
            choice = wide.invars[0] if leading else choice
        return choice is going

    return going is not None and all(stays(old, result) for _, _, old, result, _ in loop.carries)

"""Loops and branches over something else than layers, in which each part of a stack is worked on by itself.

In:     a `scan`, `while` or `cond` that reads stacks in parts: an iteration on all layers' matrices at once (Newton-Schulz of
        an optimizer), a branch around an update that is too heavy for a selection.
Out:    whether all that it does is done for each part apart, and then its copy for one part.
Method: the shares of its operands are followed through its bodies, of carries to a fixed point. What adds up layers, or picks
        some of them, is not done apart; then all of the equation stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    close_jaxpr,
    make_jaxpr,
    new_var,
    replace_eqn,
    scan_params,
    shaped,
)
from autopar.ir.split.borders import border_shares, operand_shares
from autopar.ir.split.pieces import WHOLE, Cut, Share, Way, piece_aval
from autopar.ir.structure import body_jaxprs, inputs_of, is_structured, scan_parts, while_parts
from autopar.ir.trace.flatten import inline, inline_from, inline_function


class Parts(Protocol):
    """Which values are in parts, and how equations are done on them."""

    count: int
    made: dict[Var, Share]
    way_of: dict[int, Way]

    def of(self, atom: Any) -> Share:
        """The share of a value."""
        ...

    def best_way(self, eqn: JaxprEqn, apart: bool = False) -> Way | None:
        """How to do an equation on parts; `apart`: so that each part has its own results."""
        ...

    def program_of(self, eqn: JaxprEqn) -> Jaxpr:
        """What it does on one."""
        ...


class _NotApartError(Exception):
    """Parts meet in a body."""


def follow_loop(eqn: JaxprEqn, parts: Parts) -> bool:
    """Whether an equation with bodies works on each part by itself; if so, `parts` says how."""
    if eqn.effects or not body_jaxprs(eqn) or not any(isinstance(parts.of(a), Cut) for a in eqn.invars):
        return False
    try:
        _enter(eqn, parts)
        apart = any(isinstance(parts.of(var), Cut) for var in eqn.outvars)
    except _NotApartError:
        apart = False
    if not apart:
        _forget(eqn, parts)
    return apart


def _forget(eqn: JaxprEqn, parts: Parts) -> None:
    parts.way_of.pop(id(eqn), None)
    for body in body_jaxprs(eqn):
        for var in body.invars:
            parts.made.pop(var, None)
        for inner in body.eqns:
            _forget(inner, parts)
    for var in eqn.outvars:
        parts.made.pop(var, None)


def _set(parts: Parts, var: Var, share: Share) -> None:
    if isinstance(share, Cut):
        parts.made[var] = share
    else:
        parts.made.pop(var, None)


def _enter(eqn: JaxprEqn, parts: Parts) -> None:
    """Follow the shares of its operands to its results."""
    match eqn.primitive.name:
        case "scan":
            _scan(eqn, parts)
        case "while":
            _while(eqn, parts)
        case "cond":
            _cond(eqn, parts)
        case _:
            for a, var in zip(eqn.invars, eqn.outvars, strict=True):
                _set(parts, var, parts.of(a))


def _body(body: Jaxpr, parts: Parts) -> list[Share]:
    """The shares of a body's results."""
    for eqn in body.eqns:
        _forget(eqn, parts)
        if not any(isinstance(parts.of(a), Cut) for a in eqn.invars):
            continue
        if eqn.effects:
            raise _NotApartError
        if is_structured(eqn):
            _enter(eqn, parts)
            continue
        way = parts.best_way(eqn, apart=True)
        if way is None:
            raise _NotApartError
        parts.way_of[id(eqn)] = way
        for var, share in zip(eqn.outvars, way.results, strict=True):
            _set(parts, var, share)
    return [parts.of(a) for a in body.outvars]


def _joined(a: Share, b: Share) -> Share:
    if isinstance(a, Cut) and isinstance(b, Cut) and a != b:
        raise _NotApartError
    return a if isinstance(a, Cut) else b


def _scan(eqn: JaxprEqn, parts: Parts) -> None:
    loop = scan_parts(eqn)
    for outer, inside in loop.consts:
        _set(parts, inside, parts.of(outer))
    for outer, inside in loop.xs:
        share = parts.of(outer)
        if isinstance(share, Cut) and share.dim == 0:
            raise _NotApartError
        _set(parts, inside, share.moved(-1) if isinstance(share, Cut) else share)
    carries = [parts.of(outer) for outer, *_ in loop.carries]
    results = _to_a_fixed_point(carries, [(inside,) for _, inside, _, _ in loop.carries], loop.body, parts)
    for (*_, result), share in zip(loop.carries, carries, strict=True):
        _set(parts, result, share)
    for (_, stack), share in zip(loop.ys, results[len(carries) :], strict=True):
        _set(parts, stack, share.moved(1) if isinstance(share, Cut) else share)


def _while(eqn: JaxprEqn, parts: Parts) -> None:
    loop = while_parts(eqn)
    for outer, inside in (*loop.cond_consts, *loop.body_consts):
        _set(parts, inside, parts.of(outer))
    carries = [parts.of(outer) for outer, *_ in loop.carries]
    _to_a_fixed_point(carries, [(test, inside) for _, test, inside, _, _ in loop.carries], loop.body, parts)
    (test,) = _body(loop.cond_body, parts)
    if isinstance(test, Cut):
        raise _NotApartError
    for (*_, result), share in zip(loop.carries, carries, strict=True):
        _set(parts, result, share)


def _to_a_fixed_point(carries: list[Share], inside: Sequence[Sequence[Var]], body: Jaxpr, parts: Parts) -> list[Share]:
    """Carries, changed to what they are in every turn; the shares of the body's results."""
    while True:
        for variables, share in zip(inside, carries, strict=True):
            for var in variables:
                _set(parts, var, share)
        results = _body(body, parts)
        grown = [_joined(a, b) for a, b in zip(carries, results, strict=False)]
        if grown == carries:
            return results
        carries[:] = grown


def _cond(eqn: JaxprEqn, parts: Parts) -> None:
    if isinstance(parts.of(eqn.invars[0]), Cut):
        raise _NotApartError
    found: list[Share] = [WHOLE] * len(eqn.outvars)
    for branch in body_jaxprs(eqn):
        for outer, inside in zip(eqn.invars[1:], branch.invars, strict=True):
            _set(parts, inside, parts.of(outer))
        found = [_joined(a, b) for a, b in zip(found, _body(branch, parts), strict=True)]
    for var, share in zip(eqn.outvars, found, strict=True):
        _set(parts, var, share)


def loop_of_part(eqn: JaxprEqn, number: int, operands: Sequence[Any], parts: Parts) -> JaxprEqn:
    """The copy of an equation for one part.

    Args:
        eqn: One that `follow_loop` has followed.
        number: Of the part.
        operands: Of the copy: each operand's part, or it whole.
        parts: What is in parts.
    """
    bodies = [
        _body_of_part(body, leaving, number, parts)
        for body, leaving in zip(body_jaxprs(eqn), border_shares(eqn, parts.made), strict=True)
    ]
    match eqn.primitive.name:
        case "scan":
            loop = scan_parts(eqn)
            params = scan_params(eqn.params, bodies[0], len(loop.consts), len(loop.carries))
        case "while":
            params = {**eqn.params, "cond_jaxpr": close_jaxpr(bodies[0]), "body_jaxpr": close_jaxpr(bodies[1])}
        case "cond":
            params = {**eqn.params, "branches": tuple(map(close_jaxpr, bodies))}
        case _:
            params = eqn.params
    outvars = [new_var(shaped(piece_aval(var.aval, parts.of(var), parts.count))) for var in eqn.outvars]
    return replace_eqn(eqn, invars=list(operands), outvars=outvars, params=params)


def _body_of_part(body: Jaxpr, leaving: Sequence[Share], number: int, parts: Parts) -> Jaxpr:
    local: dict[Var, Any] = {
        var: new_var(shaped(piece_aval(var.aval, parts.of(var), parts.count))) for var in body.invars
    }
    invars, made = list(local.values()), []

    def read(atom: Any, want: Share, source: Any) -> Any:
        if isinstance(atom, Literal) or not isinstance(want, Cut) or parts.of(atom) == want:
            return atom if isinstance(atom, Literal) else local[atom]
        eqns, (part,) = inline_function(_slice(want.dim, atom.aval.shape, number, parts.count), [local[atom]], source)
        made.extend(eqns)
        return part

    for eqn in body.eqns:
        source = eqn.source_info
        if is_structured(eqn) and any(isinstance(parts.of(var), Cut) for var in (*inputs_of(eqn), *eqn.outvars)):
            operands = [
                read(a, want, source) for a, want in zip(eqn.invars, operand_shares(eqn, parts.made), strict=True)
            ]
            copy = loop_of_part(eqn, number, operands, parts)
            made.append(copy)
            results: Sequence[Any] = copy.outvars
        elif id(eqn) in parts.way_of:
            wants = parts.way_of[id(eqn)].operands
            operands = [part_number(number), *(read(a, w, source) for a, w in zip(eqn.invars, wants, strict=True))]
            eqns, results = inline(parts.program_of(eqn), operands, source)
            made += eqns
        else:
            outer = list(dict.fromkeys(inputs_of(eqn)))
            eqns, results = inline_from(make_jaxpr(outer, list(eqn.outvars), [eqn]), [local[a] for a in outer])
            made += eqns
        local.update(zip(eqn.outvars, results, strict=True))
    outvars = [read(a, want, None) for a, want in zip(body.outvars, leaving, strict=True)]
    return make_jaxpr(invars, outvars, made)


def _slice(dim: int, shape: Sequence[int], number: int, count: int) -> Callable[[jax.Array], jax.Array]:
    size = shape[dim] // count
    return lambda x: lax.slice_in_dim(x, number * size, (number + 1) * size, axis=dim)


def part_number(number: int) -> Literal:
    """The number of a part, as a piece's program takes it."""
    return Literal(np.int32(number), shaped(jax.ShapeDtypeStruct((), jnp.int32)))

"""Computes what is known of sorted rows: the sample that each belongs to, and how many are below a number.

In:     a flat program.
Out:    the same program. Numbers `i // k` that are put in order, as those of samples that come `k` times each, are
        `order // k`; a binary search for known numbers in a sorted key counts the rows below each.
Method: numbers are recognized by the equations that define them; a binary search by comparing the loop with the one that
        JAX writes for `searchsorted`. Both then are operations row by row, whatever the order of the rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import Atom, Aval, DropVar, Jaxpr, JaxprEqn, Literal, make_jaxpr, new_var, replace_eqn
from autopar.ir.build import Equations, flat_function
from autopar.ir.dataflow import reading, variables
from autopar.ir.known_values import KnownValues
from autopar.ir.region import equations_within, in_bodies, region_of
from autopar.ir.rewrite.dead_code import with_equations


def compute_sorted_numbers(jaxpr: Jaxpr) -> Jaxpr:
    """Compute numbers in sorted order, and counts of rows below a number, row by row."""
    if not any(eqn.primitive.name == "sort" for eqn, _ in equations_within(jaxpr)):
        return jaxpr
    return _computed(jaxpr, KnownValues(jaxpr))


def _computed(jaxpr: Jaxpr, known: KnownValues) -> Jaxpr:
    eqns = Equations()
    for eqn in jaxpr.eqns:
        match eqn.primitive.name:
            case "gather":
                _gather(eqns, eqn, known)
            case "sort":
                _sort(eqns, eqn, known)
            case "scan" if (found := _searched(eqn, known)) is not None:
                _count(eqns, eqn, *found)
            case _:
                eqns.append(in_bodies(eqn, lambda body: _computed(body, known)))
    return with_equations(jaxpr, eqns)


def _gather(eqns: Equations, eqn: JaxprEqn, known: KnownValues) -> None:
    """`repeat(arange(n), k)[order]` is `order // k`."""
    (var,), table = eqn.outvars, eqn.invars[0]
    times = _times_each(table, known) if var.aval.ndim == 1 else None
    order = known.order_in(eqn.invars[1], table.aval.size) if times is not None else None
    if times is None or order is None:
        eqns.append(eqn)
    else:
        eqns.define(var, functools.partial(_quotient, times=times, dtype=var.aval.dtype), [order], eqn.source_info)


def _sort(eqns: Equations, eqn: JaxprEqn, known: KnownValues) -> None:
    """The same where a sort carries such numbers along: it carries 0, 1, 2, ... instead."""
    operands, results = [*eqn.invars], [*eqn.outvars]
    after = Equations()
    for k, atom in enumerate(eqn.invars[eqn.params["num_keys"] :], eqn.params["num_keys"]):
        times = _times_each(atom, known) if atom.aval.ndim == 1 else None
        if times is None or times == 1:
            continue
        operands[k] = eqns.call_one(functools.partial(lax.iota, atom.aval.dtype, atom.aval.size), [], eqn.source_info)
        results[k] = new_var(atom.aval)
        divided = functools.partial(_quotient, times=times, dtype=atom.aval.dtype)
        after.define(eqn.outvars[k], divided, [results[k]], eqn.source_info)
    eqns.append(replace_eqn(eqn, invars=operands, outvars=results) if after else eqn)
    eqns += after


def _quotient(order: jax.Array, times: int, dtype: jnp.dtype) -> jax.Array:
    return lax.div(order, jnp.asarray(times, order.dtype)).astype(dtype)


def _times_each(atom: Atom, known: KnownValues) -> int | None:
    """How many times each of 0, 1, 2, ... stands in a vector, one after the other; None: it is no such vector."""
    atom, eqn = known.definition(known.origin(atom))
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or atom.aval.ndim != 2 or known.counts(atom) != 0:
        return 1 if atom.aval.ndim == 1 and known.is_count(atom) else None
    return int(atom.aval.shape[1])


class _Search(NamedTuple):
    """A loop of two carries.

    Attributes:
        text: The loop, in the order in which its body reads constants.
        constants: These constants, but for single numbers.
    """

    text: str
    constants: tuple[Atom, ...]


def _search(scan: JaxprEqn, known: KnownValues) -> _Search:
    region = region_of(scan)
    operands = {b.var: b.operand for b in region.of_role("const") if b.operand is not None}
    numbers = {var: atom for var, atom in operands.items() if isinstance(known.definition(atom)[0], Literal)}
    eqns = [
        reading(eqn, {var: known.definition(atom)[0] for var, atom in numbers.items()}) for eqn in region.bodies[0].eqns
    ]
    read = dict.fromkeys(a for eqn in eqns for a in variables(eqn.invars) if a in operands and a not in numbers)
    carries = [b.var for b in region.of_role("carry")]
    body = make_jaxpr([*read, *carries], region.bodies[0].outvars, eqns)
    begin = [known.uniform_value(b.operand) for b in region.of_role("carry") if b.operand is not None]
    return _Search(f"{body} {begin} {region.trips} {scan.params['reverse']}", tuple(operands[var] for var in read))


def _searched(eqn: JaxprEqn, known: KnownValues) -> tuple[Atom, Atom, str] | None:
    """The key whose sorted values a loop searches for known numbers, these, and the side; None: it is no such search."""
    if len(eqn.outvars) != 2 or not isinstance(eqn.outvars[0], DropVar) or len(eqn.invars) < 4:
        return None
    text, constants = _search(eqn, known)
    if len(constants) != 2 or not all(
        a.aval.ndim == 1 and jnp.issubdtype(a.aval.dtype, jnp.integer) for a in constants
    ):
        return None
    rows, numbers = constants
    rows, made = known.definition(rows)
    key = known.sorted_key(made) if made is not None and made.outvars[0] is rows else None
    if key is None or known.numbers(numbers) is None:
        return None
    side = next((side for side in ("left", "right") if text == _text_of_search(rows.aval, numbers.aval, side)), None)
    return None if side is None else (key, numbers, side)


@functools.lru_cache
def _text_of_search(rows: Aval, numbers: Aval, side: str) -> str | None:
    """The loop that JAX writes for a binary search."""
    written = flat_function(functools.partial(jnp.searchsorted, side=side), rows, numbers)
    known = KnownValues(written)
    return next((_search(eqn, known).text for eqn in written.eqns if eqn.primitive.name == "scan"), None)


def _count(eqns: Equations, eqn: JaxprEqn, key: Atom, numbers: Atom, side: str) -> None:
    """The sum over all rows of whether the key is below a number, or also equal to it."""

    def count(key: jax.Array, numbers: jax.Array) -> jax.Array:
        key = key.reshape(*key.shape, 1)
        is_below = key < numbers if side == "left" else key <= numbers
        return is_below.sum(range(key.ndim - 1), dtype=eqn.outvars[1].aval.dtype)

    made = eqns.call_one(count, [key, numbers], eqn.source_info)
    eqns.name(eqn.outvars[1], made, eqn.source_info)

"""Gradient accumulation: a step in phases as one program whose middle is a `scan` over microbatches.

In:     `Microbatches` (`microbatch.py`) and the step's flat program.
Out:    a flat program with the same inputs and outputs. Sums over the batch are carries of the scan, which may stay
        partial over mesh axes (`intra_op/graph.py`), so gradients are reduced once per step and not once per microbatch;
        per-sample results are stacked and put back in order.
Method: gradients in 16 bits are added up in 32, as one matrix product over the whole batch would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import (
    Jaxpr,
    Var,
    make_jaxpr,
    new_eqn,
    new_scan_params,
    new_var,
    open_jaxpr,
    primitives,
    shaped,
    trace,
)
from autopar.ir.flatten import flatten, inline
from autopar.ir.microbatch import Microbatches
from autopar.ir.pieces import Cut, Extreme, Own, Same, Share, Sum


def accumulate(jaxpr: Jaxpr, split: Microbatches) -> Jaxpr:
    """One program that works through its microbatches in turn.

    Args:
        jaxpr: The step that was split.
        split: Its phases.

    Returns:
        A flat program over new variables, inputs and outputs as the step's.
    """
    return _Composer(jaxpr, split).program()


def accumulator_type(aval: Any, share: Share) -> Any:
    """Type in which the parts of a value are joined: sums of 16-bit floats in 32 bits."""
    wide = isinstance(share, Sum | Own) and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    return jax.ShapeDtypeStruct(aval.shape, jnp.float32 if wide else aval.dtype)


def first_value(aval: Any, share: Share) -> jax.Array:
    """What an accumulator of this type holds before the first microbatch."""
    if isinstance(share, Extreme):
        low = share.kind == "max"
        if aval.dtype == jnp.bool_:
            return jnp.full(aval.shape, not low)
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            return jnp.full(aval.shape, -np.inf if low else np.inf, aval.dtype)
        limits = jnp.iinfo(aval.dtype)
        return jnp.full(aval.shape, limits.min if low else limits.max, aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


def joined(share: Share, so_far: jax.Array, part: jax.Array, count: int) -> jax.Array:
    """The accumulator after one more microbatch.

    Args:
        share: How parts make the whole.
        so_far: The accumulator, of `accumulator_type`.
        part: What this microbatch made.
        count: Number of microbatches.
    """
    match share:
        case Sum():
            return so_far + part.astype(so_far.dtype)
        case Extreme(kind="max"):
            return jnp.maximum(so_far, part)
        case Extreme():
            return jnp.minimum(so_far, part)
        case Own() if jnp.issubdtype(part.dtype, jnp.inexact):
            return so_far + part.astype(so_far.dtype) / count
        case _:
            return part


class _Composer:
    def __init__(self, jaxpr: Jaxpr, split: Microbatches):
        self.jaxpr, self.split, self.count = jaxpr, split, split.count
        self.eqns: list[Any] = []

    def program(self) -> Jaxpr:
        split = self.split
        self.eqns += split.before
        pieces = [self.add(self.in_pieces(var.aval), [var])[0] for var in split.pieces]
        results = dict(zip((r.var for r in split.results), self.loop(pieces), strict=True))
        self.substitute(results)
        jaxpr = make_jaxpr(self.jaxpr.invars, self.jaxpr.outvars, self.eqns)
        flat, consts = flatten(jaxpr)
        assert not consts, "a flat program has no constants"
        return flat

    def substitute(self, results: dict[Var, Any]) -> None:
        """Equations after the loop read what it made under the step's own names."""
        for var, atom in results.items():
            # A copy keeps the step's variable as it is; flattening drops it.
            self.eqns.append(new_eqn(primitives.copy_p, [atom], [var], {}))
        self.eqns += self.split.after

    def add(self, program: Callable[..., Any], operands: Sequence[Any], source: Any = None) -> list[Any]:
        """Append the equations of a small function of ours."""
        flat, consts = flatten(*open_jaxpr(trace(program, *(a.aval for a in operands))))
        assert not consts, "constants in a program of ours"
        eqns, results = inline(flat, operands, source)
        self.eqns += eqns
        return results

    def in_pieces(self, aval: Any) -> Callable[[jax.Array], jax.Array]:
        shape = (self.count, aval.shape[0] // self.count, *aval.shape[1:])
        return lambda whole: jnp.reshape(whole, shape)

    def loop(self, pieces: Sequence[Any]) -> list[Any]:
        """The scan; what each result is after it."""
        split, count = self.split, self.count
        stacked = [isinstance(r.share, Cut) for r in split.results]
        carried = [r for r, is_stacked in zip(split.results, stacked, strict=True) if not is_stacked]
        types = [accumulator_type(r.var.aval, r.share) for r in carried]
        starts = [
            self.add(lambda aval=aval, r=r: first_value(aval, r.share), [])[0]
            for aval, r in zip(types, carried, strict=True)
        ]
        numbers = self.add(lambda: jnp.arange(count, dtype=jnp.int32), [])

        accumulators = [new_var(shaped(aval)) for aval in types]
        eqns = list(split.loop.eqns)
        number, *others = split.loop.invars
        invariants, inside = others[: len(split.invariants)], others[len(split.invariants) :]
        updated, parts, at = [], [], 0
        for result, atom, is_stacked in zip(split.results, split.loop.outvars, stacked, strict=True):
            if is_stacked:
                parts.append(atom)
                continue
            added = _Adder(eqns)
            updated.append(
                added.call(lambda a, b, result=result: joined(result.share, a, b, count), [accumulators[at], atom])
            )
            at += 1
        body = make_jaxpr([*invariants, *accumulators, number, *inside], [*updated, *parts], eqns)
        outvars = [new_var(shaped(aval)) for aval in types]
        stacks = [new_var(shaped(jax.ShapeDtypeStruct((count, *a.aval.shape), a.aval.dtype))) for a in parts]
        params = new_scan_params(count, body, len(invariants), len(accumulators))
        operands = [*split.invariants, *starts, *numbers, *pieces]
        self.eqns.append(new_eqn(primitives.scan_p, operands, [*outvars, *stacks], params))
        totals, whole = iter(outvars), iter(stacks)
        return [
            self.add(self.in_order(r.var.aval, r.share), [next(whole)])[0]
            if is_stacked
            else self.add(lambda total, r=r: total.astype(r.var.aval.dtype), [next(totals)])[0]
            for r, is_stacked in zip(split.results, stacked, strict=True)
        ]

    def in_order(self, aval: Any, share: Any) -> Callable[[jax.Array], jax.Array]:
        dim, shape = share.dim, aval.shape
        return lambda stack: jnp.reshape(jnp.moveaxis(stack, 0, dim), shape)


class _Adder:
    """Appends small functions of ours to a list of equations."""

    def __init__(self, eqns: list[Any]):
        self.eqns = eqns

    def call(self, program: Callable[..., Any], operands: Sequence[Any]) -> Any:
        flat, consts = flatten(*open_jaxpr(trace(program, *(a.aval for a in operands))))
        assert not consts, "constants in a program of ours"
        eqns, results = inline(flat, operands)
        self.eqns += eqns
        return results[0]


__all__ = ["Same", "accumulate", "accumulator_type", "first_value", "joined"]

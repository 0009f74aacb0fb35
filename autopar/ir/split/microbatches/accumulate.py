"""Gradient accumulation: writes a step in phases as one program whose middle is a `scan` over microbatches.

In:     `Microbatches` (`microbatch.py`) and the step's flat program.
Out:    a flat program with the same inputs and outputs. Sums over the batch are carries of the scan, which may stay
        partial over mesh axes (`intra_op/graph.py`), so gradients are reduced once per step and not once per microbatch;
        per-sample results are stacked and put back in order.
Method: gradients in 16 bits are added up in 32, as one matrix product over the whole batch would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import (
    Atom,
    Aval,
    Jaxpr,
    JaxprEqn,
    Literal,
    NameStack,
    SourceInfo,
    Var,
    make_jaxpr,
    new_source_info,
    new_var,
    resized,
    shaped,
)
from autopar.ir.build import Equations, flat_function
from autopar.ir.dataflow import makers
from autopar.ir.dims import apart, in_pieces
from autopar.ir.region import Binding, new_scan, rows_in, rows_out
from autopar.ir.rules.linearity import identity_of
from autopar.ir.split.microbatches.microbatch import Microbatches, Result
from autopar.ir.split.placement import OWN, SUM, Partial, Placement, Split
from autopar.ir.split.strategy import joined
from autopar.ir.trace.flatten import flatten


def accumulate(jaxpr: Jaxpr, split: Microbatches) -> Jaxpr:
    """A flat program, with the step's inputs and outputs, that processes its microbatches in a scan."""
    assert not split.between, "one loop has no place between its forward and its backward passes"
    count = split.count
    eqns = Equations(split.before)
    stacks = {
        var: eqns.call_one(partial(in_pieces, shape=(count, *var.aval.shape)), [whole])
        for var, whole in split.piece_of.items()
    }
    results = list(zip(split.results, split.loop.outvars, strict=True))
    scan = accumulating_scan(count, split.number, split.loop.eqns, split.invariant_of, stacks, results)
    eqns += [*scan.eqns, *scan.after, *split.after]
    flat, arrays = flatten(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))
    assert not arrays, "a flat program has no constants"
    return flat


def accumulator_type(aval: Aval, placement: Placement) -> jax.ShapeDtypeStruct:
    """Type of the accumulator of a value: sums of 16-bit floats are accumulated in 32 bits."""
    wide = placement in (SUM, OWN) and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    return jax.ShapeDtypeStruct(aval.shape, jnp.float32 if wide else aval.dtype)


def first_value(aval: Aval | jax.ShapeDtypeStruct, placement: Placement) -> jax.Array:
    """The initial value of an accumulator."""
    if isinstance(placement, Partial) and placement != SUM:
        return jnp.full(aval.shape, identity_of(placement.kind, aval.dtype), aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A result of the loop as the scan computes it: a carry that accumulates contributions, or a stack of them.

    Attributes:
        result: The result.
        contribution: The atom of the body that holds a microbatch's contribution.
        total: The variable that the scan makes.
        before: The accumulator as it enters the body; None: contributions are stacked.
        eqns: The equations that add a contribution to the accumulator.
        after: The atom that leaves the body: the accumulator with the contribution, or the contribution.
    """

    result: Result
    contribution: Atom
    total: Var
    before: Var | None
    eqns: tuple[JaxprEqn, ...]
    after: Atom


@dataclass(frozen=True, slots=True, eq=False)
class AccumulatingScan:
    """A `scan` over microbatches with the equations before and after it; empty where microbatches compute nothing.

    Attributes:
        eqns: Initial accumulators, numbers of the microbatches, and last the scan. Its operands are constants, accumulators,
            numbers, stacks; its results are accumulators, stacks of rows, `sent`.
        consts: Variables of the body that are the same for all microbatches, with their values outside, in order.
        stacked: Variables of the body of which each microbatch has its own, in order.
        joined: Results, in order: first carries, then stacks.
        sent: Stacks of further values of the body, in order.
        after: Equations that make the step's variables from the scan's results.
    """

    eqns: tuple[JaxprEqn, ...] = ()
    consts: Mapping[Var, Atom] = field(default_factory=dict)
    stacked: tuple[Var, ...] = ()
    joined: tuple[Joined, ...] = ()
    sent: tuple[Var, ...] = ()
    after: tuple[JaxprEqn, ...] = ()

    @property
    def eqn(self) -> JaxprEqn:
        """The scan, if there is one."""
        return self.eqns[-1]


def accumulating_scan(
    count: int,
    number: Var,
    eqns: Sequence[JaxprEqn],
    consts: Mapping[Var, Atom],
    stacks: Mapping[Var, Atom],
    results: Sequence[tuple[Result, Atom]],
    sent: Sequence[Var] = (),
) -> AccumulatingScan:
    """Make a scan of equations on one microbatch.

    Args:
        consts: Variables of the body that are the same for all microbatches -> their values outside.
        stacks: Variables of the body of which each microbatch has its own -> the stacks of them.
        results: The results of the loop, with a microbatch's contribution to each.
        sent: Further values of the body to be stacked.
    """
    before, after, made_by = Equations(), Equations(), makers(eqns)
    sums, starts, rows = list[Joined](), list[Atom](), list[Joined]()
    for result, own in results:
        if isinstance(result.placement, Split):
            rows.append(Joined(result, own, new_var(stack_type(own.aval, count)), None, (), own))
            continue
        kind = accumulator_type(result.var.aval, result.placement)
        so_far, total = new_var(shaped(kind)), new_var(shaped(kind))
        adding = Equations()
        (joint,) = adding.inline(_adding(result.placement, count, so_far.aval, own.aval), [so_far, own])
        starts += before.inline(_beginning(so_far.aval, result.placement), [])
        sums.append(Joined(result, own, total, so_far, tuple(adding), joint))
    numbers = before.call_one(lambda: jnp.arange(count, dtype=jnp.int32), [])
    stack_of = {var: new_var(stack_type(var.aval, count)) for var in sent}
    bindings = [
        *(Binding("const", outer, (var,), (None,)) for var, outer in consts.items()),
        *(Binding("carry", first, (s.before,), (s.after,), s.total) for first, s in zip(starts, sums, strict=True)),
        *(rows_in(stack, var) for var, stack in {number: numbers, **stacks}.items()),
        *(rows_out(row.after, row.total) for row in rows),
        *(rows_out(var, stack) for var, stack in stack_of.items()),
    ]
    scan = new_scan(count, bindings, [*eqns, *(eqn for s in sums for eqn in s.eqns)])
    for each in (*sums, *rows):
        line = _line(each.contribution, made_by)
        (made,) = after.inline(_finish(each), [each.total], line)
        after.name(each.result.var, made, line)
    return AccumulatingScan(
        (*before, scan), dict(consts), tuple(stacks), (*sums, *rows), tuple(stack_of.values()), tuple(after)
    )


def stack_type(aval: Aval, count: int) -> Aval:
    """Type of a stack of as many values as there are microbatches."""
    return resized(aval, (count, *aval.shape))


def _in_order(result: Result) -> Callable[[jax.Array], jax.Array]:
    """A function from stacked rows to the result with its samples in their original order."""
    placement, shape = result.placement, result.var.aval.shape
    assert isinstance(placement, Split)
    dim, blocks = placement.dim, placement.blocks

    def put_back(stack: jax.Array) -> jax.Array:
        """[count, ..., blocks * rows, ...] to [..., blocks * count * rows, ...]."""
        if blocks == 1:
            return jnp.reshape(jnp.moveaxis(stack, 0, dim), shape)
        return jnp.reshape(jnp.moveaxis(apart(stack, dim + 1, blocks), 0, dim + 1), shape)

    return put_back


# Small programs, traced once for each type.


@cache
def _adding(placement: Placement, count: int, so_far: Aval, part: Aval) -> Jaxpr:
    return flat_function(lambda a, b: joined(placement, a, b, count), so_far, part)


@cache
def _beginning(aval: Aval, placement: Placement) -> Jaxpr:
    return flat_function(partial(first_value, aval, placement))


def _finish(joined: Joined) -> Jaxpr:
    """The program from a scan's result to the step's value: cast to its type, or with rows in their original order."""
    if joined.before is None:
        return flat_function(_in_order(joined.result), joined.total.aval)
    return _narrowing(joined.total.aval, joined.result.var.aval.dtype)


@cache
def _narrowing(total: Aval, dtype: np.dtype) -> Jaxpr:
    return flat_function(partial(jax.lax.convert_element_type, new_dtype=dtype), total)


def _line(value: Atom, made_by: Mapping[Var, JaxprEqn]) -> SourceInfo | None:
    """The user's line that makes a value of the loop, without a name stack; None: no equation there makes it."""
    maker = None if isinstance(value, Literal) else made_by.get(value)
    return None if maker is None else new_source_info(maker.source_info.traceback, NameStack())

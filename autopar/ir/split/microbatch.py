"""Microbatches: a training step in three phases, of which the middle one runs once per part of the batch.

In:     a flat program, its batch inputs, the number of microbatches.
Out:    `Microbatches`: equations *before* (on whole values), the *loop*, a program over one microbatch, and equations
        *after* (the update), such that the three together compute what the program does.
Method: `shares.py` says how each equation is done; here its pieces are written out (`pieces.py`). No value is rescaled:
        a mean over the batch is a sum of parts that are each divided by the size of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

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
from autopar.errors import BatchError
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rewrite.views import views_of_arguments
from autopar.ir.rules import rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.split.borders import border_shares, operand_shares
from autopar.ir.split.pieces import (
    OWN,
    SAME,
    WHOLE,
    Cut,
    Extreme,
    Own,
    Same,
    Share,
    Sum,
    Whole,
    mask_program,
    piece_aval,
    piece_program,
    scale_program,
    slice_program,
)
from autopar.ir.split.share_analysis import find_shares
from autopar.ir.split.shares import Shares
from autopar.ir.structure import (
    body_jaxprs,
    inputs_of,
    is_structured,
    needed,
    scan_parts,
    trip_count,
    variables,
    while_parts,
)
from autopar.ir.trace.flatten import inline, inline_from, inline_function


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A value that the loop makes for the rest of the step: `var` of the step, joined from all microbatches by `share`."""

    var: Var
    share: Share


@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """A step in three phases.

    Attributes:
        count: Number of microbatches.
        before: Equations on whole values that the loop needs, in order.
        loop: One microbatch. Invars: its number (int32), then `invariants`, then `pieces`; outvars: `results`.
        invariants: Variables of the step that every microbatch reads whole.
        pieces: Variables of the step of which microbatch k reads the k-th part along dim 0.
        results: What comes of the loop.
        after: Equations that need all microbatches, in order.
    """

    count: int
    before: tuple[JaxprEqn, ...]
    loop: Jaxpr
    invariants: tuple[Var, ...]
    pieces: tuple[Var, ...]
    results: tuple[Result, ...]
    after: tuple[JaxprEqn, ...]

    def read_outside(self, eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
        """Variables of the step that equations of the loop read, whole or in pieces, in order."""
        outer_of = dict(zip(self.loop.invars[1:], (*self.invariants, *self.pieces), strict=True))
        return dict.fromkeys(outer_of[a] for eqn in eqns for a in inputs_of(eqn) if a in outer_of)


def split_microbatches(
    jaxpr: Jaxpr,
    count: int,
    batch: Sequence[int],
    per_microbatch: bool = False,
    name: str = "the batch",
    apart: bool = False,
) -> Microbatches:
    """Split a step into phases.

    Args:
        jaxpr: Flat program.
        count: Number of microbatches, at least 2.
        batch: Inputs whose leading dim runs over samples.
        per_microbatch: Where samples wait for a sum over the batch, each microbatch takes its own.
        name: What messages call the batch.
        apart: Keep the parts of a gradient apart in the loop: stages make one each.

    Raises:
        BatchError: There is no batch, or it does not divide.
        MicrobatchError: The step cannot be split exactly.
    """
    check_divides(jaxpr, count, batch, name)
    shares = find_shares(jaxpr, count, batch, per_microbatch, apart)
    return _Writer(jaxpr, shares).write()


def check_divides(jaxpr: Jaxpr, count: int, batch: Sequence[int], name: str = "the batch") -> None:
    """The batch must divide into microbatches.

    Raises:
        BatchError: It does not, or there is none.
    """
    sizes = sorted({jaxpr.invars[k].aval.shape[0] for k in batch})
    if not sizes:
        raise BatchError(
            "there is no batch to split into microbatches.",
            given=f"num_microbatches={count}",
            wrong="every argument is state, or has no dims.",
            do="pass batch_argnums=...; for a step without one, use num_microbatches=1.",
            candidates={},
        )
    for size in sizes:
        if size % count:
            raise BatchError(
                "the batch does not divide into microbatches.",
                given=f"{name} of {size} samples, num_microbatches={count}",
                wrong=f"{size} is no multiple of {count}.",
                do="choose a number of microbatches that divides the batch size; where the last batch of an epoch is "
                "smaller, drop it, or pad it and leave the padding out of the loss by a mask.",
                size=size,
            )


class _Writer:
    """Writes the loop: `values` holds, for each value of the step and share, the atom that the loop has for it."""

    def __init__(self, jaxpr: Jaxpr, shares: Shares):
        self.jaxpr, self.shares, self.count = jaxpr, shares, shares.count
        self.number = new_var(shaped(jax.ShapeDtypeStruct((), jnp.int32)))
        self.inputs = set(jaxpr.invars)
        self.views = views_of_arguments(jaxpr)
        self.invariants: dict[Var, Var] = {}
        self.pieces: dict[Var, Var] = {}
        self.programs: dict[object, Jaxpr] = {}
        self.rules: dict[object, Any] = {}

    def write(self) -> Microbatches:
        shares, phase = self.shares, self.shares.phase
        before, after = [], []
        top = _Scope(self, {}, self.number, top=True)
        for eqn in self.jaxpr.eqns:
            kind = phase[id(eqn)]
            if kind == "before" or id(eqn) in shares.early:
                before.append(eqn)
            if kind == "loop":
                if eqn.primitive.name == "optimization_barrier":
                    before += self.whole_part(eqn)
                top.equation(eqn)
            elif kind == "after":
                after.append(eqn)
        done_before = {var for eqn in before for var in eqn.outvars}
        read = dict.fromkeys(a for eqn in after for a in eqn.invars if not isinstance(a, Literal))
        read.update(dict.fromkeys(a for a in self.jaxpr.outvars if not isinstance(a, Literal)))
        inputs = set(self.jaxpr.invars)
        made = {var for eqn in after for var in eqn.outvars}
        results = [
            Result(var, _joined(shares, var))
            for var in read
            if var not in done_before and var not in inputs and var not in made
        ]
        outvars = [top.value(r.var, r.share) for r in results]
        loop = make_jaxpr([self.number, *self.invariants.values(), *self.pieces.values()], outvars, top.eqns)
        loop = remove_dead_code(loop)
        used = {a for eqn in loop.eqns for a in eqn.invars if not isinstance(a, Literal)}
        used.update(a for a in loop.outvars if not isinstance(a, Literal))
        invariants = {var: inside for var, inside in self.invariants.items() if inside in used}
        pieces = {var: inside for var, inside in self.pieces.items() if inside in used}
        loop = make_jaxpr([self.number, *invariants.values(), *pieces.values()], loop.outvars, loop.eqns)
        before, after = for_the_loop(self.jaxpr, before, after, [*invariants, *pieces])
        return Microbatches(
            self.count, tuple(before), loop, tuple(invariants), tuple(pieces), tuple(results), tuple(after)
        )

    def whole_part(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The operands of a barrier in the loop that are whole pass one before it."""
        pairs = [
            (a, var)
            for a, var in zip(eqn.invars, eqn.outvars, strict=True)
            if isinstance(self.shares.made.get(var, WHOLE), Whole)
        ]
        if not pairs:
            return []
        return [replace_eqn(eqn, invars=[a for a, _ in pairs], outvars=[var for _, var in pairs])]

    def program_of(self, eqn: JaxprEqn) -> Jaxpr:
        """The program of a piece of an equation under its way; the same for equal equations."""
        way = self.shares.way_of[id(eqn)]
        key = equation_signature(eqn), way
        if key not in self.programs:
            rule = rule_for(eqn)
            avals = {
                k: piece_aval(a.aval, want, self.count)
                for k, (a, want) in enumerate(zip(eqn.invars, way.operands, strict=True))
            }
            self.programs[key] = piece_program(eqn, rule, way, self.count, avals)
        return self.programs[key]


def for_the_loop(
    jaxpr: Jaxpr, before: Sequence[JaxprEqn], after: Sequence[JaxprEqn], wanted: Sequence[Var]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Before the loop only what it needs; what could also come later comes with the update."""
    kept = needed([eqn for eqn in before if eqn.outvars], wanted)
    early = {id(eqn) for eqn in kept}
    late = {id(eqn) for eqn in (*before, *after)} - early
    later = [eqn for eqn in jaxpr.eqns if id(eqn) in late]
    made = {var for eqn in later for var in eqn.outvars}
    # A part of a barrier is an equation of its own, not one of the step's.
    listed = {id(eqn) for eqn in jaxpr.eqns}
    extra = [eqn for eqn in before if id(eqn) not in listed and id(eqn) not in early]
    assert not any(var in made for eqn in extra for var in eqn.outvars), "a part of a barrier is made twice"
    atoms = [*jaxpr.outvars, *(a for eqn in after for a in eqn.invars)]
    return kept, needed([*extra, *later], variables(atoms))


def _joined(shares: Shares, var: Var) -> Share:
    """How a value that the loop makes is put together."""
    made = shares.made[var]
    of_numbers = jnp.issubdtype(var.aval.dtype, jnp.inexact)
    if var in shares.stand_ins and not isinstance(made, Sum) and (of_numbers or not isinstance(made, Extreme)):
        return OWN
    return made


class _Scope:
    """One body being written: the loop itself (`top`), or the body of a loop or branch inside it."""

    def __init__(self, writer: _Writer, values: dict[tuple[Any, Share], Any], number: Any, top: bool):
        self.writer, self.shares, self.count = writer, writer.shares, writer.count
        self.values, self.number, self.top = values, number, top
        self.eqns: list[JaxprEqn] = []

    # Values.

    def value(self, atom: Any, want: Share, source: Any = None) -> Any:
        """The atom that holds the wanted share of a value of the step."""
        if isinstance(atom, Literal):
            return self.converted(atom, atom, WHOLE, want, source)
        plain = isinstance(want, Whole | Same | Own)
        key = (atom, WHOLE if plain else want)
        if key not in self.values:
            self.values[key] = self.make(atom, WHOLE if plain else want, source)
        return self.values[key]

    def make(self, atom: Any, want: Share, source: Any) -> Any:
        made = self.shares.made.get(atom, WHOLE)
        if atom in self.shares.stand_ins and isinstance(want, Whole):
            part = self.values[atom, made]
            if isinstance(made, Extreme):
                return part
            program = scale_program(tuple(atom.aval.shape), atom.aval.dtype, self.count)
            return self.inlined(program, [self.number, part], source)[0]
        if atom in self.shares.stand_ins and isinstance(want, Cut):
            return self.converted(atom, self.value(atom, WHOLE, source), OWN, want, source)
        whole_here = isinstance(made, Whole | Same | Own) and not (self.top and isinstance(made, Whole))
        if whole_here:
            return self.converted(atom, self.values[atom, WHOLE], made, want, source)
        assert self.top, f"{atom} is {made}, and wanted {want}"
        if want == Cut(0) and made == Cut(0) and atom in self.writer.inputs:
            return self.writer.pieces.setdefault(atom, new_var(shaped(piece_aval(atom.aval, want, self.count))))
        whole = self.view(atom) or self.writer.invariants.setdefault(atom, new_var(atom.aval))
        return self.converted(atom, whole, WHOLE, want, source)

    def view(self, atom: Any) -> Any:
        """An argument in another shape, made here; None: it is none."""
        eqn = self.writer.views.get(atom)
        if eqn is None or atom in self.writer.invariants:
            return None
        made = new_var(atom.aval)
        self.eqns.append(replace_eqn(eqn, invars=[self.value(eqn.invars[0], WHOLE)], outvars=[made]))
        return made

    def converted(self, atom: Any, local: Any, have: Share, want: Share, source: Any) -> Any:
        shape, dtype = tuple(atom.aval.shape), atom.aval.dtype
        match want:
            case Cut():
                program = slice_program(shape, dtype, want, self.count)
            case Sum():
                if isinstance(atom, Literal) and atom.val == 0:
                    return local
                program = mask_program(shape, dtype)
            case _:
                return local
        return self.inlined(program, [self.number, local], source)[0]

    def inlined(self, program: Jaxpr, operands: Sequence[Any], source: Any) -> list[Any]:
        eqns, results = inline(program, operands, source)
        self.eqns += eqns
        return results

    def define(self, var: Var, share: Share, atom: Any) -> None:
        plain = isinstance(share, Whole | Same | Own)
        self.values[var, WHOLE if plain else share] = atom

    # Equations.

    def equation(self, eqn: JaxprEqn) -> None:
        if is_structured(eqn):
            self.structured(eqn)
            return
        made = self.shares.made
        way = self.shares.way_of.get(id(eqn))
        wants = way.operands if way is not None else (WHOLE,) * len(eqn.invars)
        operands = [self.value(a, want, eqn.source_info) for a, want in zip(eqn.invars, wants, strict=True)]
        if way is None or way.factor is None:
            outvars = [new_var(var.aval) for var in eqn.outvars]
            self.eqns.append(replace_eqn(eqn, invars=operands, outvars=outvars))
        elif eqn.primitive.name == "sharding_constraint":
            # Nothing to compute, but the planner reads it off the microbatch.
            outvars = [new_var(shaped(piece_aval(eqn.outvars[0].aval, way.results[0], self.count)))]
            self.eqns.append(replace_eqn(eqn, invars=operands, outvars=outvars))
        else:
            outvars = self.inlined(self.writer.program_of(eqn), [self.number, *operands], eqn.source_info)
        results = way.results if way is not None else [made.get(var, WHOLE) for var in eqn.outvars]
        for var, share, atom in zip(eqn.outvars, results, outvars, strict=True):
            self.define(var, share, atom)

    def structured(self, eqn: JaxprEqn) -> None:
        made = self.shares.made
        wants = operand_shares(eqn, made, self.shares.own_trips.get(id(eqn)))
        name = eqn.primitive.name
        if name == "optimization_barrier":
            through = [
                k for k, var in enumerate(eqn.outvars) if not (self.top and isinstance(made.get(var, WHOLE), Whole))
            ]
            operands = [self.value(eqn.invars[k], wants[k], eqn.source_info) for k in through]
            outvars = [new_var(a.aval) for a in operands]
            if through:
                self.eqns.append(replace_eqn(eqn, invars=operands, outvars=outvars))
            for k, atom in zip(through, outvars, strict=True):
                self.define(eqn.outvars[k], made.get(eqn.outvars[k], WHOLE), atom)
            return
        operands = [self.value(a, want, eqn.source_info) for a, want in zip(eqn.invars, wants, strict=True)]
        if id(eqn) in self.shares.own_trips:
            self.own_trips(eqn, operands)
            return
        bodies = [
            self.body(body, leaving) for body, leaving in zip(body_jaxprs(eqn), border_shares(eqn, made), strict=True)
        ]
        number = self.number
        match name:
            case "scan":
                parts = scan_parts(eqn)
                params = scan_params(eqn.params, bodies[0], 1 + len(parts.consts), len(parts.carries))
                operands = [number, *operands]
            case "while":
                loop = while_parts(eqn)
                tests = len(loop.cond_consts)
                params = {
                    **eqn.params,
                    "cond_jaxpr": close_jaxpr(bodies[0]),
                    "body_jaxpr": close_jaxpr(bodies[1]),
                    "cond_nconsts": 1 + tests,
                    "body_nconsts": 1 + len(loop.body_consts),
                }
                operands = [number, *operands[:tests], number, *operands[tests:]]
            case _:
                params = {**eqn.params, "branches": tuple(map(close_jaxpr, bodies))}
                operands = [operands[0], number, *operands[1:]]
        shares = [made.get(var, WHOLE) for var in eqn.outvars]
        outvars = [
            new_var(shaped(piece_aval(var.aval, share, self.count)))
            for var, share in zip(eqn.outvars, shares, strict=True)
        ]
        self.eqns.append(replace_eqn(eqn, invars=operands, outvars=outvars, params=params))
        for var, share, atom in zip(eqn.outvars, shares, outvars, strict=True):
            self.define(var, share, atom)

    def own_trips(self, eqn: JaxprEqn, operands: Sequence[Any]) -> None:
        """A scan over one microbatch's samples; a single trip is no loop, so that a pipeline can cut what is in it."""
        trips = trip_count(eqn) // self.count
        made = self.single_trip(eqn, operands) if trips == 1 else self.shorter_scan(eqn, operands, trips)
        for var, atom in zip(eqn.outvars, made, strict=True):
            self.define(var, self.shares.made.get(var, WHOLE), atom)

    def single_trip(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        parts, source = scan_parts(eqn), eqn.source_info
        first = len(parts.consts) + len(parts.carries)
        entering = list(operands[:first])
        for rows in operands[first:]:
            more, row = inline_function(lambda x: x[0], [rows], source)
            self.eqns += more
            entering += row
        eqns, made = inline_from(parts.body, entering)
        self.eqns += eqns
        for k in range(len(parts.carries), len(made)):
            more, (made[k],) = inline_function(lambda x: x[None], [made[k]], source)
            self.eqns += more
        return made

    def shorter_scan(self, eqn: JaxprEqn, operands: Sequence[Any], trips: int) -> list[Any]:
        parts = scan_parts(eqn)
        eqns, results = inline_from(parts.body, inside := [new_var(var.aval) for var in parts.body.invars])
        body = make_jaxpr(inside, results, eqns)
        params = scan_params(eqn.params, body, len(parts.consts), len(parts.carries))
        params |= {"length": trips, "unroll": min(eqn.params["unroll"], trips)}
        shares = [self.shares.made.get(var, WHOLE) for var in eqn.outvars]
        made = [
            new_var(shaped(piece_aval(var.aval, share, self.count)))
            for var, share in zip(eqn.outvars, shares, strict=True)
        ]
        self.eqns.append(replace_eqn(eqn, invars=operands, outvars=made, params=params))
        return made

    def body(self, jaxpr: Jaxpr, leaving: Sequence[Share]) -> Jaxpr:
        """A body over shares; its first invar is the number of the microbatch."""
        made = self.shares.made
        number = new_var(self.number.aval)
        inner = _Scope(self.writer, {}, number, top=False)
        invars = []
        for var in jaxpr.invars:
            share = made.get(var, WHOLE)
            local = new_var(shaped(piece_aval(var.aval, share, self.count)))
            invars.append(local)
            inner.define(var, share, local)
        for eqn in jaxpr.eqns:
            inner.equation(eqn)
        outvars = [inner.value(a, want) for a, want in zip(jaxpr.outvars, leaving, strict=True)]
        return make_jaxpr([number, *invars], outvars, inner.eqns)


__all__ = ["SAME", "Microbatches", "Result", "check_divides", "split_microbatches"]

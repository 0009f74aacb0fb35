"""Microbatches: a training step in three phases, of which the middle one runs once for each microbatch.

In:     a flat program, its batch inputs, the number of microbatches.
Out:    `Microbatches`: equations *before* (on whole values), the *loop*, a program over one microbatch, and equations
        *after* (the update), such that the three together compute what the program does.
Method: `phases.py` assigns phases and strategies; here the program of one microbatch is written (`writer.py`). No value is
        rescaled: a mean over the batch is a sum of terms that are each divided by the size of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from autopar._jax import Atom, Jaxpr, JaxprEqn, SourceInfo, Var, make_jaxpr, new_var, replace_eqn, shaped
from autopar.errors import BatchError
from autopar.ir.check import check_program
from autopar.ir.dataflow import inputs_of, makers, needed, read_by, variables
from autopar.ir.dims import pieces_dim
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rewrite.views import arrays_of_numbers, views_of_arguments
from autopar.ir.split.placement import OWN, REPLICATED, SUM, Batch, Partial, Placement, Split, sample_dims
from autopar.ir.split.solution import LoopSolution
from autopar.ir.split.writer import Programs, ShardWriter, barrier_apart


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A result of the loop: variable `var` of the step, and the placement in which a microbatch has it."""

    var: Var
    placement: Placement


@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """A step in three phases.

    Attributes:
        count: Number of microbatches.
        before: Equations on whole values that the loop needs, in order.
        loop: One microbatch. Invars: its number (int32), then `invariants`, then `pieces`; outvars: `results`.
        invariants: Variables of the step that every microbatch reads whole.
        pieces: Variables of the step of which microbatch k reads the k-th part along the dim that runs over samples.
        results: The results of the loop.
        between: Equations on joint results of all forward passes, in order. Backward passes read their values among
            `invariants`, so none may begin before (`rounds/joins.py`).
        after: Equations that need all microbatches, in order; they may read values made between.
    """

    count: int
    before: tuple[JaxprEqn, ...]
    loop: Jaxpr
    invariants: tuple[Var, ...]
    pieces: tuple[Var, ...]
    results: tuple[Result, ...]
    after: tuple[JaxprEqn, ...]
    between: tuple[JaxprEqn, ...] = ()

    @property
    def number(self) -> Var:
        """The variable of the loop that holds the number of the microbatch."""
        return self.loop.invars[0]

    @property
    def invariant_of(self) -> dict[Var, Var]:
        """Variable of the loop -> variable of the step, for `invariants`."""
        return dict(zip(self.loop.invars[1:], self.invariants, strict=False))

    @property
    def piece_of(self) -> dict[Var, Var]:
        """Variable of the loop -> variable of the step, for `pieces`."""
        return dict(zip(self.loop.invars[1 + len(self.invariants) :], self.pieces, strict=True))

    def read_outside(self, eqns: Iterable[JaxprEqn]) -> dict[Var, None]:
        """Variables of the step that equations of the loop read, whole or in pieces, in order."""
        outer_of = self.invariant_of | self.piece_of
        return {outer_of[var]: None for var in read_by(eqns) if var in outer_of}


def write_phases(jaxpr: Jaxpr, solution: LoopSolution) -> Microbatches:
    """Write the phases of a program from its solution."""
    return _Loop(jaxpr, solution).write()


def check_phases(jaxpr: Jaxpr) -> Callable[[Microbatches], None]:
    """A checker of a program's phases: each must be a flat program over the values of the phases before it."""

    def check(split: Microbatches) -> None:
        made, joint = [*makers(split.before)], [*makers(split.between)]
        check_program(make_jaxpr(jaxpr.invars, made, split.before))
        check_program(split.loop)
        there = dict.fromkeys([*jaxpr.invars, *made, *joint])
        outside = [*split.invariants, *split.pieces]
        assert all(var in there for var in outside), "the loop reads what is not there before it"
        inner = [var.aval.shape for var in split.loop.invars[1:]]
        assert inner[: len(split.invariants)] == [var.aval.shape for var in split.invariants], (
            "the loop reads other shapes"
        )
        for part, whole in zip(inner[len(split.invariants) :], split.pieces, strict=True):
            dim = pieces_dim(whole.aval.shape, (split.count, *part))
            assert whole.aval.shape == (*part[:dim], part[dim] * split.count, *part[dim + 1 :]), (
                "the loop reads other parts"
            )
        there = dict.fromkeys([*jaxpr.invars, *made, *(result.var for result in split.results)])
        check_program(make_jaxpr([*there], joint, split.between))
        check_program(make_jaxpr([*there, *joint], jaxpr.outvars, split.after))

    return check


def check_divides(jaxpr: Jaxpr, count: int, batch: Batch, name: str = "the batch") -> None:
    """Check that the batch divides into microbatches.

    `name`: of the batch; if there is none, why.

    Raises `BatchError`: it does not, or there is none.
    """
    sizes = sorted({jaxpr.invars[k].aval.shape[dim] for k, dim in sample_dims(batch).items()})
    if not sizes:
        raise BatchError(
            "there is no batch to split into microbatches.",
            given=f"num_microbatches={count}",
            wrong=name,
            do="pass what has no row per sample (a mask, a graph's edges) as an argument of its own, or say batch_argnums=...; "
            "for a step without a batch (it draws its own samples, holds them in its state, or works on one whole graph), use "
            "ShardParallel() or Auto(), with num_microbatches=1.",
            candidates={},
        )
    for size in sizes:
        if size % count:
            raise BatchError(
                "the batch does not divide into microbatches.",
                given=f"{name} of {size} samples, num_microbatches={count}",
                wrong=f"{size} is no multiple of {count}.",
                do=f"choose a number of microbatches that divides the batch size; {how_to_divide(sizes)}.",
                size=size,
            )


def how_to_divide(sizes: Collection[int]) -> str:
    """What to do about a batch that does not divide; `sizes`: the numbers of rows of its arrays."""
    if len(set(sizes)) > 1:
        return (
            "arrays of several sizes are split each by itself. If their rows belong together (the nodes and edges of one "
            "big graph), there are no samples to split: say batch_argnums=() and use ShardParallel() or Auto(), or give "
            "each graph a row of its own, padded to one size, with jax.vmap over the graphs"
        )
    return "where the last batch of an epoch is smaller, drop it, or pad it and leave the padding out of the loss by a mask"


class _Loop(ShardWriter):
    """Writes the program of one microbatch; values from outside of the loop are read whole, or the microbatch's part."""

    def __init__(self, jaxpr: Jaxpr, solution: LoopSolution):
        super().__init__(Programs(solution), number := new_var(shaped(jax.ShapeDtypeStruct((), jnp.int32))))
        self.jaxpr, self.phases, self.first = jaxpr, solution, number
        self.inputs = set(jaxpr.invars)
        numbers = arrays_of_numbers(jaxpr) if solution.count == 1 else {}
        self.views = {**views_of_arguments(jaxpr), **numbers}
        self.invariants: dict[Var, Var] = {}
        self.pieces: dict[Var, Var] = {}

    def outside(self, var: Var, want: Placement, source: SourceInfo | None) -> Atom:
        """Read a value of the step that the loop does not make."""
        made = self.solution.made_as(var)
        is_piece = isinstance(made, Split) and made.blocks == 1 and (want == made or self.solution.count == 1)
        if is_piece and var in self.inputs:
            return self.pieces.setdefault(var, self.local(var.aval, made))
        whole = self.view(var) or self.invariants.setdefault(var, new_var(var.aval))
        return self.converted(var, whole, want, source)

    def view(self, var: Var) -> Var | None:
        """Write a reshaped argument, or an array of consecutive numbers, anew in the loop; None: the value is neither."""
        eqn = self.views.get(var)
        if eqn is None or var in self.invariants:
            return None
        made = new_var(var.aval)
        operands = [self.value(atom, REPLICATED) for atom in eqn.invars]
        self.eqns.append(replace_eqn(eqn, invars=operands, outvars=[made]))
        return made

    def write(self) -> Microbatches:
        before: list[JaxprEqn] = []
        late: list[JaxprEqn] = []
        made_late: set[Var] = set()
        in_order: list[JaxprEqn] = []
        for eqn in self.jaxpr.eqns:
            phase = self.phases.phase[eqn]
            *whole, own = barrier_apart(eqn, self.solution) if phase == "loop" else [eqn]
            in_order += [*whole, own]
            for part in whole:
                (before if made_late.isdisjoint(inputs_of(part)) else late).append(part)
            is_early = phase == "before" or eqn in self.phases.early
            if is_early:
                before.append(own)
            if phase == "loop":
                self.equation(own)
            elif not is_early:
                late.append(own)
            made_late.update(late[-1].outvars if late else ())
        between = needed(late, self.invariants, effects=False)
        there = set(between)
        after = [eqn for eqn in needed(late, variables(self.jaxpr.outvars)) if eqn not in there]
        elsewhere = makers((*before, *late)).keys() | self.inputs
        read = read_by((*between, *after), self.jaxpr.outvars)
        results = [Result(var, self.joined(var)) for var in read if var not in elsewhere]
        outvars = [self.value(r.var, r.placement) for r in results]
        entering = [*self.invariants.values(), *self.pieces.values()]  # an argument may be among both
        loop = remove_dead_code(make_jaxpr([self.first, *entering], outvars, self.eqns), keep_inputs=1)
        used = set(loop.invars)
        invariants = tuple(var for var, inside in self.invariants.items() if inside in used)
        pieces = tuple(var for var, inside in self.pieces.items() if inside in used)
        # Before the loop only what it needs; what could also come later comes with the update.
        kept = needed([eqn for eqn in before if eqn.outvars], [*invariants, *pieces, *read_by(between)])
        later = {*before, *after}.difference(kept, there)
        after = needed([eqn for eqn in in_order if eqn in later], read_by(after, self.jaxpr.outvars))
        return Microbatches(
            self.solution.count, tuple(kept), loop, invariants, pieces, tuple(results), tuple(after), tuple(between)
        )

    def joined(self, var: Var) -> Placement:
        """The placement by which microbatches' values of a result are joined."""
        made = self.solution.made_as(var)
        of_numbers = jnp.issubdtype(var.aval.dtype, jnp.inexact)
        if self.solution.of(var) == OWN and made != SUM and (of_numbers or not isinstance(made, Partial)):
            return OWN
        return made

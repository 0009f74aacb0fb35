"""Offloads residuals to host memory: they are copied there as the forward pass makes them, and back for the backward pass.

In:     a flat program with a gradient; how many of its residuals are offloaded.
Out:    the same program with these copies. Cheap values that the backward pass reads are recomputed from what is copied back.
Method: the residuals are the minimum cut of the forward pass (`residuals.py`). Those made first wait longest, and are offloaded
        first; what a scan over layers stacks is copied row by row, in the trips of both scans, so that no device ever has the
        stack. A copy back begins while the one before is being read. Rhu et al., "vDNN", MICRO 2016.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import jax

from autopar._jax import (
    Jaxpr,
    JaxprEqn,
    Var,
    copies_to_or_from_host,
    in_host_memory,
    is_key,
    make_jaxpr,
    new_var,
    replace_eqn,
)
from autopar.grouping import grouped
from autopar.inter_op.rematerialized_residuals import rematerialize_residuals
from autopar.inter_op.residuals import Kept, can_run_again, choose_residuals
from autopar.ir.build import Equations
from autopar.ir.dataflow import descendants, inputs_of, makers, read_by, readers_of, reading
from autopar.ir.gradient import feeds_backward, made_by_backward
from autopar.ir.region import Binding, kind_of, region_of
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rewrite.host_reads import copy_to, read_from_host, send_rows
from autopar.ir.work import device_bytes
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """What may be offloaded of a program.

    Attributes:
        program: The program, its loops keeping as little as they can.
        kept: Its residuals, and what is recomputed from them.
        values: Those that may be offloaded, in order.
        backward: The equations of the backward pass.
    """

    program: Jaxpr
    kept: Kept
    values: tuple[Var, ...]
    backward: Collection[JaxprEqn]

    def count_of(self, share: float) -> int:
        """How many of the values are at most this share of their bytes; all for 1."""
        most = share * self.num_bytes(len(self.values))
        return sum(total <= most for total in itertools.accumulate(map(device_bytes, self.values)))

    def num_bytes(self, count: int) -> int:
        """Bytes of the first `count` values, unsharded."""
        return sum(map(device_bytes, self.values[:count]))


def find_residuals(jaxpr: Jaxpr) -> Residuals:
    """The residuals of a program that may be offloaded: large ones of floating or other numbers, that no result needs."""
    program = rematerialize_residuals(jaxpr)
    feeds, later = feeds_backward(program), made_by_backward(program)
    forward = [e for e, f in zip(program.eqns, feeds, strict=True) if f and not any(v in later for v in e.outvars)]
    backward = [e for e, f in zip(program.eqns, feeds, strict=True) if f and any(v in later for v in e.outvars)]
    ahead = makers(forward)
    wanted = [var for var in read_by(backward) if var in ahead]
    passes = {*forward, *backward}
    others = read_by((e for e in program.eqns if e not in passes), program.outvars)
    free = {*program.invars, *(var for var in others if var in ahead)}
    kept = choose_residuals(forward, wanted, free, once=_far(forward, free))
    readers = readers_of(program.eqns)
    behind = set(backward)
    movable = [var for var in kept.values if var in ahead and _may_move(var, ahead[var], readers[var], behind)]
    least = TUNING.offloaded_least * max(map(device_bytes, movable), default=0)
    place = {eqn: k for k, eqn in enumerate(forward)}
    large = [var for var in movable if device_bytes(var) >= max(least, 1)]
    order = sorted(large, key=lambda var: (place[ahead[var]], -device_bytes(var)))
    return Residuals(program, kept, tuple(order), backward)


def _far(forward: Sequence[JaxprEqn], free: Collection[Var]) -> set[Var]:
    """Values that cheap equations make from results of heavy ones far before, as the sums of residual networks.

    Recomputed, they would need copies back of early residuals early.
    """
    begins, heavy, far = dict[Var, int](), 0, set[Var]()
    for eqn in forward:
        is_cheap = can_run_again(eqn)
        heavy += not is_cheap
        begin = (
            min((begins.get(a, heavy) for a in inputs_of(eqn) if a not in free), default=heavy) if is_cheap else heavy
        )
        if heavy - begin > TUNING.offloaded_reach:
            begin = heavy
            far.update(eqn.outvars)
        begins.update(dict.fromkeys(eqn.outvars, begin))
    return far


def _may_move(var: Var, maker: JaxprEqn, readers: Sequence[JaxprEqn], backward: Collection[JaxprEqn]) -> bool:
    """Whether a residual can be copied as it is made; a stack: row by row, by both scans."""
    if is_key(var.aval) or copies_to_or_from_host(maker):
        return False
    return not any(b.result is var for b in _rows_made(maker)) or all(
        eqn in backward and _reads_rows(eqn, var) for eqn in readers
    )


def _rows_made(eqn: JaxprEqn) -> list[Binding]:
    return region_of(eqn).ys if kind_of(eqn) == "scan" else []


def _reads_rows(eqn: JaxprEqn, stack: Var) -> bool:
    return kind_of(eqn) == "scan" and all(b.role == "xs" for b in region_of(eqn).bindings if b.operand is stack)


def residuals_on_host(found: Residuals, count: int) -> Jaxpr:
    """The program with the first `count` of its residuals in host memory between the passes."""
    return _Writer(found, found.values[:count]).written()


class _Writer:
    """Writes the program with these residuals offloaded.

    Attributes:
        there: Residual -> its copy in host memory.
        back: Residual -> its copy that the backward pass reads.
        again: What is recomputed from these copies, by value.
    """

    def __init__(self, found: Residuals, moved: Sequence[Var]):
        self.program, self.backward = found.program, set(found.backward)
        made = makers(self.program.eqns)
        self.there = {var: new_var(in_host_memory(var.aval)) for var in moved}
        self.stacks = {v for v in moved if any(b.result is v for b in _rows_made(made[v]))}
        self.back = {var: new_var(var.aval) for var in moved if var not in self.stacks}
        changed = descendants(found.kept.again, given=self.back)
        self.again = {v: e for e in found.kept.again if not changed.keys().isdisjoint(inputs_of(e)) for v in e.outvars}
        self.names = {var: new_var(var.aval) for var in self.again} | self.back
        self.eqns = Equations()

    def written(self) -> Jaxpr:
        fetches = self._fetches()
        for eqn in self.program.eqns:
            if eqn not in self.backward:
                self._forward(eqn)
                continue
            for var in fetches.get(eqn, ()):
                self.eqns.append(copy_to(self.there[var], self.back[var], jax.memory.Space.Device, eqn))
            self._recompute(inputs_of(eqn), eqn)
            rows, _ = read_from_host([eqn], {var: self.there[var] for var in inputs_of(eqn) if var in self.stacks})
            self.eqns += [reading(each, self.names) for each in rows]
        return remove_dead_code(make_jaxpr(self.program.invars, self.program.outvars, self.eqns))

    def _forward(self, eqn: JaxprEqn) -> None:
        """The equation, and copies of what it makes; those of a stack are made in its trips."""
        rows = {b.result: self.there[b.result] for b in _rows_made(eqn) if b.result in self.stacks}
        self.eqns.append(send_rows(eqn, rows) if rows else eqn)
        for var in eqn.outvars:
            if var in self.back:
                self.eqns.append(copy_to(var, self.there[var], jax.memory.Space.Host, eqn))

    def _recompute(self, wanted: Sequence[Var], near: JaxprEqn) -> None:
        """Recompute values, once, from what has been copied back, in the backward pass."""
        for var in wanted:
            made = self.again.pop(var, None)
            if made is not None:
                self._recompute(inputs_of(made), near)
                source = made.source_info.replace(name_stack=near.source_info.name_stack)
                results = [self.names.get(v, v) for v in made.outvars]
                for other in made.outvars:
                    self.again.pop(other, None)
                self.eqns.append(replace_eqn(reading(made, self.names), outvars=results, source_info=source))

    def _fetches(self) -> dict[JaxprEqn, list[Var]]:
        """Where copies back begin: each while the one before it is being read."""
        first: dict[Var, JaxprEqn] = {}
        seen: set[Var] = set()
        for eqn in (e for e in self.program.eqns if e in self.backward):
            first.update(dict.fromkeys(self._from(inputs_of(eqn), seen), eqn))
        order = list(first)
        return grouped((first[before], var) for before, var in zip([*order[:1], *order], order, strict=False))

    def _from(self, wanted: Sequence[Var], seen: set[Var]) -> Iterator[Var]:
        """The residuals that values are recomputed from, as `_recompute` reads them; but for those `seen`, which it adds to."""
        for var in wanted:
            if var in seen:
                continue
            seen.add(var)
            if var in self.back:
                yield var
            elif var in self.again:
                yield from self._from(inputs_of(self.again[var]), seen)

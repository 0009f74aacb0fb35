"""The program over parts of stacks, written out.

In:     a flat program, and which of its values are in parts (`part_shares.py`).
Out:    equations that make every value's parts, or it whole: parts are joined where all are needed, and cut where one is.
Method: each equation once for each part; a scan over layers as one scan after the other, or as layers where a part is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, Literal, Var, make_jaxpr, new_var, replace_eqn, scan_params, shaped
from autopar.ir.split.borders import operand_shares
from autopar.ir.split.loops_in_parts import loop_of_part, part_number
from autopar.ir.split.part_rows import part_of_padded, slice_of_part
from autopar.ir.split.part_shares import PartShares
from autopar.ir.split.pieces import Cut, Extreme, Share, Sum
from autopar.ir.structure import ScanParts, inputs_of, scan_parts
from autopar.ir.trace.flatten import inline, inline_from, inline_function


class PartWriter:
    """Writes the program over parts: for each value, its parts, or it whole, whichever was made first."""

    def __init__(self, of: PartShares):
        self.of, self.count = of, of.count
        self.eqns: list[JaxprEqn] = []
        self.whole: dict[Var, Any] = {}
        self.parts: dict[tuple[Var, Share], list[Any]] = {}
        self.of_stack: dict[Any, Any] = {}  # of stacks of one layer, the layer

    def value(self, atom: Any, source: Any) -> Any:
        """A value whole; parts are joined once."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self.whole:
            (share, parts) = next((s, p) for (var, s), p in self.parts.items() if var is atom)
            dim = share.dim  # type: ignore[union-attr]
            self.whole[atom] = self.add(lambda *xs: lax.concatenate(xs, dim), parts, source)
        return self.whole[atom]

    def in_parts(self, atom: Any, want: Share, source: Any) -> list[Any]:
        """The parts of a value, or the same whole one for all."""
        if not isinstance(want, Cut):
            return [self.value(atom, source)] * self.count
        if (atom, want) not in self.parts:
            whole, size = self.value(atom, source), atom.aval.shape[want.dim] // self.count
            self.parts[atom, want] = [
                self.add(lambda x, k=k: lax.slice_in_dim(x, k * size, (k + 1) * size, axis=want.dim), [whole], source)
                for k in range(self.count)
            ]
        return self.parts[atom, want]

    def add(self, program: Callable[..., Any], operands: Sequence[Any], source: Any) -> Any:
        eqns, results = inline_function(program, operands, source)
        self.eqns += eqns
        return results[0]

    def equation(self, eqn: JaxprEqn) -> None:
        if id(eqn) in self.of.cut_scans:
            self.scan(eqn)
        elif id(eqn) in self.of.way_of:
            self.pieces(eqn)
        elif eqn.primitive.name == "optimization_barrier":
            self.barrier(eqn)
        elif id(eqn) in self.of.loops:
            self.loop(eqn)
        elif id(eqn) in self.of.part_of:
            self.layers(eqn, self.of.part_of[id(eqn)])
        else:
            self.plain(eqn)

    def plain(self, eqn: JaxprEqn) -> None:
        """An equation on whole values; bodies of loops get variables of their own."""
        outer = [a for a in dict.fromkeys(inputs_of(eqn))]
        alone = make_jaxpr(outer, list(eqn.outvars), [eqn])
        eqns, results = inline_from(alone, [self.value(a, eqn.source_info) for a in outer])
        self.eqns += eqns
        self.whole.update(zip(eqn.outvars, results, strict=True))

    def layers(self, eqn: JaxprEqn, part: int) -> None:
        """A slice of one part, or a value that stands in one part."""
        var, source = eqn.outvars[0], eqn.source_info
        if eqn.primitive.name == "slice":
            rows = self.in_parts(eqn.invars[0], Cut(0), source)[part]
            self.whole[var] = self.add(slice_of_part(eqn, part, self.count), [rows], source)
            return
        operands = [self.value(a, source) for a in eqn.invars]
        self.parts[var, Cut(0)] = [
            self.add(part_of_padded(eqn, part, k, self.count), operands, source) for k in range(self.count)
        ]

    def barrier(self, eqn: JaxprEqn) -> None:
        """A barrier on each part: what joined them before must not be shared with what comes after."""
        for k in range(self.count):
            pairs = [
                (self.in_parts(a, self.of.of(var), eqn.source_info)[k], var)
                for a, var in zip(eqn.invars, eqn.outvars, strict=True)
                if isinstance(self.of.of(var), Cut)
            ]
            if pairs:
                made = [new_var(a.aval) for a, _ in pairs]
                self.eqns.append(replace_eqn(eqn, invars=[a for a, _ in pairs], outvars=made))
                for (_, var), new in zip(pairs, made, strict=True):
                    self.parts.setdefault((var, self.of.of(var)), []).append(new)
        rest = [(a, v) for a, v in zip(eqn.invars, eqn.outvars, strict=True) if not isinstance(self.of.of(v), Cut)]
        if rest:
            made = [new_var(v.aval) for _, v in rest]
            operands = [self.value(a, eqn.source_info) for a, _ in rest]
            self.eqns.append(replace_eqn(eqn, invars=operands, outvars=made))
            self.whole.update(zip((v for _, v in rest), made, strict=True))

    def pieces(self, eqn: JaxprEqn) -> None:
        way, program = self.of.way_of[id(eqn)], self.of.program_of(eqn)
        operands = [self.in_parts(a, want, eqn.source_info) for a, want in zip(eqn.invars, way.operands, strict=True)]
        made: list[list[Any]] = [[] for _ in eqn.outvars]
        for k in range(self.count):
            eqns, results = inline(program, [part_number(k), *(parts[k] for parts in operands)], eqn.source_info)
            self.eqns += eqns
            for parts, result in zip(made, results, strict=True):
                parts.append(result)
        for var, share, parts in zip(eqn.outvars, way.results, made, strict=True):
            match share:
                case Cut():
                    self.parts[var, share] = parts
                case Sum() | Extreme():
                    self.whole[var] = self.joined(share, parts, eqn.source_info)
                case _:
                    self.whole[var] = parts[0]

    def loop(self, eqn: JaxprEqn) -> None:
        """A copy for each part; what is whole, all of them make, and the first's is taken: dead code in the others."""
        wants = operand_shares(eqn, self.of.made)
        operands = [self.in_parts(a, want, eqn.source_info) for a, want in zip(eqn.invars, wants, strict=True)]
        copies = [loop_of_part(eqn, k, [parts[k] for parts in operands], self.of) for k in range(self.count)]
        self.eqns += copies
        for at, var in enumerate(eqn.outvars):
            share = self.of.of(var)
            if isinstance(share, Cut):
                self.parts[var, share] = [copy.outvars[at] for copy in copies]
            else:
                self.whole[var] = copies[0].outvars[at]

    def joined(self, share: Share, parts: Sequence[Any], source: Any) -> Any:
        join = jnp.add if isinstance(share, Sum) else jnp.maximum if share == Extreme("max") else jnp.minimum
        so_far = parts[0]
        for part in parts[1:]:
            so_far = self.add(lambda a, b: join(a, b), [so_far, part], source)
        return so_far

    def scan(self, eqn: JaxprEqn) -> None:
        """One scan for each part; the carries go from one to the next, in the order of the trips."""
        parts = scan_parts(eqn)
        source, reverse = eqn.source_info, eqn.params["reverse"]
        consts = [self.value(outer, source) for outer, _ in parts.consts]
        carries = [self.value(outer, source) for outer, *_ in parts.carries]
        xs = [self.in_parts(outer, Cut(0), source) for outer, _ in parts.xs]
        length = self.of.length // self.count
        stacks: list[list[Any]] = [[None] * self.count for _ in parts.ys]
        for k in reversed(range(self.count)) if reverse else range(self.count):
            if length == 1:
                carries, rows = self.layer(parts, [*consts, *carries], [x[k] for x in xs], source)
                for stack, var in zip(stacks, rows, strict=True):
                    stack[k] = var
                continue
            body_invars = [new_var(var.aval) for var in parts.body.invars]
            eqns, outvars = inline_from(parts.body, body_invars)
            body = make_jaxpr(body_invars, outvars, eqns)
            params = {**scan_params(eqn.params, body, len(consts), len(carries)), "length": length}
            made = [new_var(var.aval) for *_, var in parts.carries]
            made_ys = [
                new_var(shaped(jax.ShapeDtypeStruct((length, *a.aval.shape), a.aval.dtype))) for a, _ in parts.ys
            ]
            operands = [*consts, *carries, *(x[k] for x in xs)]
            self.eqns.append(replace_eqn(eqn, invars=operands, outvars=[*made, *made_ys], params=params))
            carries = list(made)
            for stack, var in zip(stacks, made_ys, strict=True):
                stack[k] = var
        self.whole.update(zip((var for *_, var in parts.carries), carries, strict=True))
        for (_, result), stack in zip(parts.ys, stacks, strict=True):
            self.parts[result, Cut(0)] = stack

    def layer(
        self, parts: ScanParts, entering: Sequence[Any], xs: Sequence[Any], source: Any
    ) -> tuple[list[Any], list[Any]]:
        """One trip by itself, no loop: its carries, and its stacks of one layer."""
        layers = [self.of_stack.get(x) or self.add(lambda x: lax.squeeze(x, (0,)), [x], source) for x in xs]
        eqns, results = inline_from(parts.body, [*entering, *layers])
        self.eqns += eqns
        carries, made = results[: len(parts.carries)], results[len(parts.carries) :]
        rows = [self.add(lambda y: lax.expand_dims(y, (0,)), [y], source) for y in made]
        self.of_stack.update(zip(rows, made, strict=True))
        return carries, rows

"""Scans over layers, taken apart: a `scan` of L layers becomes n scans of L / n layers behind each other, or L layers.

In:     a flat program whose scans run over stacked layers, and n.
Out:    `Unstacked`: the same program over the parts of its stacks: weights, residuals, gradients and optimizer state of
        each part are values of their own, so that the program can be cut between any two parts.
Method: the dim of layers is worked through in pieces (`pieces.py`), as the batch is by microbatches, but all pieces stand
        in the program at once. What is only read in parts is made in parts; what needs all parts gets them joined. A
        stacked argument of which only parts are read becomes as many arguments, and so does its new value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    make_jaxpr,
    new_var,
    replace_eqn,
    scan_params,
    shaped,
)
from autopar.ir.borders import operand_shares
from autopar.ir.dead_code import remove_dead_code
from autopar.ir.flatten import inline, inline_from, inline_function
from autopar.ir.loops_in_parts import follow_loop, loop_of_part, part_number
from autopar.ir.part_rows import part_of_padded, part_padded, part_read, slice_of_part
from autopar.ir.pieces import SUM, WHOLE, Cut, Extreme, Share, Sum, Way, Whole, piece_aval, piece_program, ways
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.share_analysis import feeds_backward
from autopar.ir.signature import equation_signature
from autopar.ir.structure import ScanParts, inputs_of, is_structured, scan_parts, trip_count, variables
from autopar.ir.work import Work

WORTH = 0.2
"""Scans of one length are taken apart if they do at least this part of the forward and backward passes' work."""


@dataclass(frozen=True, slots=True, eq=False)
class Unstacked:
    """A program over parts of its stacks.

    Attributes:
        jaxpr: The program.
        count: Number of parts.
        inputs: For each input of the original program its inputs here: one, or one for each part.
        outputs: The same for results.
        input_dims: For each input of the original program the dim of layers, along which its parts lie; 0 if it is whole.
        output_dims: The same for results.
    """

    jaxpr: Jaxpr
    count: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    input_dims: tuple[int, ...]
    output_dims: tuple[int, ...]


def whole_stacks(jaxpr: Jaxpr) -> Unstacked:
    """A program as it is."""
    return Unstacked(
        jaxpr,
        1,
        tuple((k,) for k in range(len(jaxpr.invars))),
        tuple((k,) for k in range(len(jaxpr.outvars))),
        (0,) * len(jaxpr.invars),
        (0,) * len(jaxpr.outvars),
    )


def layer_count(
    jaxpr: Jaxpr, state: Collection[int], aliases: Mapping[int, int], lying: Mapping[int, int] | None = None
) -> int:
    """Length of the scans over layers: of those that do a good part of the work and have stacks of state for themselves.

    Args:
        jaxpr: Flat program.
        state: Inputs that are state: a scan over chunks of samples, or over time, has none that it reads in parts.
        aliases: As of `unstack`.
        lying: As of `unstack`.

    Returns:
        Where there are several, that of the scans that do most; 0: there is none.
    """
    costs, whole = _costs(jaxpr)
    of_length: dict[int, float] = {}
    for eqn, cost in zip(jaxpr.eqns, costs, strict=True):
        if _can_be_cut(eqn):
            of_length[trip_count(eqn)] = of_length.get(trip_count(eqn), 0.0) + cost
    worth = [length for length, cost in of_length.items() if cost >= WORTH * whole]
    if len(worth) < 2:
        return next(iter(worth), 0)
    for length in sorted(worth, key=lambda length: (-of_length[length], -length)):
        if not _Unstacking(jaxpr, length, length, aliases, lying).find_borders()[0].keys().isdisjoint(state):
            return length
    return 0


def _costs(jaxpr: Jaxpr) -> tuple[list[float], float]:
    """The work of each equation, and of all forward and backward passes; where there is no backward pass, of all."""
    costs = Work().of_equations(jaxpr.eqns)
    of_passes = sum(cost for cost, matters in zip(costs, feeds_backward(jaxpr), strict=True) if matters)
    return costs, of_passes or sum(costs)


def _can_be_cut(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and trip_count(eqn) > 1 and bool(scan_parts(eqn).xs)


def unstack(
    jaxpr: Jaxpr, length: int, count: int, aliases: Mapping[int, int], lying: Mapping[int, int] | None = None
) -> Unstacked:
    """Take the scans of `length` layers apart.

    Args:
        jaxpr: Flat program.
        length: Which scans: those with so many trips over stacked values.
        count: Number of parts; divides `length`.
        aliases: Output -> input whose new value it is: both become parts, or neither.
        lying: Inputs that lie in parts, and along which dim: they are such also where they are read whole, and are put
            together for that.
    """
    return _Unstacking(jaxpr, length, count, aliases, lying).run()


class _Unstacking:
    def __init__(
        self, jaxpr: Jaxpr, length: int, count: int, aliases: Mapping[int, int], lying: Mapping[int, int] | None
    ):
        self.jaxpr, self.length, self.count, self.aliases = jaxpr, length, count, aliases
        self.lying = dict(lying or {})
        self.made: dict[Var, Share] = {jaxpr.invars[k]: Cut(dim) for k, dim in self.lying.items()}
        self.way_of: dict[int, Way] = {}
        self.part_of: dict[int, int] = {}
        self.loops: set[int] = set()
        self.rules: dict[object, tuple[ShardingRule, list[Way]]] = {}
        self.programs: dict[object, Jaxpr] = {}
        costs, whole = _costs(jaxpr)
        self.cut_scans = {
            id(eqn)
            for eqn, cost in zip(jaxpr.eqns, costs, strict=True)
            if _can_be_cut(eqn) and trip_count(eqn) == length and cost >= WORTH / 4 * whole
        }

    def run(self) -> Unstacked:
        split_in, split_out = self.find_borders()
        return self.write(split_in, split_out)

    def find_borders(self) -> tuple[dict[int, int], dict[int, int]]:
        """Decide what is in parts; the inputs and outputs that are, and along which dim."""
        for eqn in self.jaxpr.eqns:
            self.share(eqn)
        return self.split_borders(self.cut_late())

    # Which values are in parts.

    def ways(self, eqn: JaxprEqn) -> tuple[ShardingRule, list[Way]]:
        signature = equation_signature(eqn)
        if signature not in self.rules:
            rule = rule_for(eqn)
            self.rules[signature] = rule, ways(rule, self.count)
        return self.rules[signature]

    def of(self, atom: Any) -> Share:
        return WHOLE if isinstance(atom, Literal) else self.made.get(atom, WHOLE)

    def share(self, eqn: JaxprEqn) -> None:
        if eqn.primitive.name == "scan" and trip_count(eqn) == self.length:
            parts = scan_parts(eqn)
            if id(eqn) in self.cut_scans or any(self.of(outer) == Cut(0) for outer, _ in parts.xs):
                self.cut_scans.add(id(eqn))
                self.made.update((result, Cut(0)) for _, result in parts.ys)
                return
        if eqn.primitive.name == "optimization_barrier":
            self.made.update(
                (var, self.of(a)) for a, var in zip(eqn.invars, eqn.outvars, strict=True) if isinstance(self.of(a), Cut)
            )
            return
        if is_structured(eqn):
            if follow_loop(eqn, self):
                self.loops.add(id(eqn))
            return
        if not any(isinstance(self.of(a), Cut) for a in eqn.invars) or eqn.effects:
            return
        way = self.best_way(eqn)
        if way is not None:
            self.way_of[id(eqn)] = way
            self.made.update(
                (var, share) for var, share in zip(eqn.outvars, way.results, strict=True) if isinstance(share, Cut)
            )

    def best_way(self, eqn: JaxprEqn, apart: bool = False) -> Way | None:
        """How to do an equation on parts; `apart`: so that each part has its own results."""
        shares = [self.of(a) for a in eqn.invars]
        best: tuple[int, Way] | None = None
        for way in self.ways(eqn)[1]:
            if way.factor is None or (apart and not (_all_cut(way.results) and SUM not in way.operands)):
                continue
            costs = [_conversion(a, have, want) for a, have, want in zip(eqn.invars, shares, way.operands, strict=True)]
            if all(c is not None for c in costs):
                total = sum(c or 0 for c in costs)
                if best is None or total < best[0]:
                    best = total, way
        return best[1] if best is not None else None

    def program_of(self, eqn: JaxprEqn) -> Jaxpr:
        """What an equation does on one part."""
        way = self.way_of[id(eqn)]
        key = equation_signature(eqn), way
        if key not in self.programs:
            avals = {
                k: piece_aval(a.aval, want, self.count)
                for k, (a, want) in enumerate(zip(eqn.invars, way.operands, strict=True))
            }
            self.programs[key] = piece_program(eqn, self.ways(eqn)[0], way, self.count, avals)
        return self.programs[key]

    def wants(self, eqn: JaxprEqn) -> Sequence[Share]:
        """The share of each operand that an equation reads."""
        if id(eqn) in self.way_of:
            return self.way_of[id(eqn)].operands
        if id(eqn) in self.cut_scans:
            parts = scan_parts(eqn)
            return [WHOLE] * (len(parts.consts) + len(parts.carries)) + [Cut(0)] * len(parts.xs)
        if eqn.primitive.name == "optimization_barrier":
            return [self.of(var) for var in eqn.outvars]
        if id(eqn) in self.loops:
            return operand_shares(eqn, self.made)
        if id(eqn) in self.part_of and eqn.primitive.name == "slice":
            return [Cut(0)]
        return [WHOLE] * len(eqn.invars)

    def cut_late(self) -> dict[Var, dict[Share, None]]:
        """What is whole, and only read in parts, is made in parts: a stack that is converted before it is scanned.

        Returns:
            For each value, the shares in which it is read.
        """
        uses: dict[Var, dict[Share, None]] = {}
        results = set(variables(self.jaxpr.outvars))
        slices: list[tuple[JaxprEqn, int]] = []
        for eqn in reversed(self.jaxpr.eqns):  # all readers of what it makes have been asked by then
            part = part_read(eqn, self.length, self.count)
            if part is not None and id(eqn) not in self.way_of:
                slices.append((eqn, part))  # as the others read it
                continue
            if not is_structured(eqn) and id(eqn) not in self.way_of and not eqn.effects:
                wanted = [uses.get(var, {}) for var in eqn.outvars]
                cut = [next(iter(w)) if len(w) == 1 else None for w in wanted]
                in_parts = any(wanted) and all(isinstance(c, Cut) for c, w in zip(cut, wanted, strict=True) if w)
                if in_parts and not any(var in results for var in eqn.outvars):
                    for way in self.ways(eqn)[1]:
                        fits = all(not w or c == m for c, w, m in zip(cut, wanted, way.results, strict=True))
                        if fits and way.factor is not None and SUM not in way.operands:
                            self.way_of[id(eqn)] = way
                            self.made.update(zip(eqn.outvars, way.results, strict=True))
                            break
                    part = part_padded(eqn, self.length, self.count)
                    if part is not None and id(eqn) not in self.way_of and cut == [Cut(0)]:
                        self.part_of[id(eqn)] = part
                        self.made[eqn.outvars[0]] = Cut(0)
            for atom, want in zip(eqn.invars, self.wants(eqn), strict=True):
                if not isinstance(atom, Literal):
                    uses.setdefault(atom, {})[want] = None
        for eqn, part in slices:
            atom = eqn.invars[0]
            if self.of(atom) == Cut(0) or list(uses.get(atom, ())) == [Cut(0)]:
                self.part_of[id(eqn)] = part
            uses.setdefault(atom, {})[self.wants(eqn)[0]] = None
        return uses

    def split_borders(self, uses: Mapping[Var, Mapping[Share, None]]) -> tuple[dict[int, int], dict[int, int]]:
        """Inputs and outputs that become parts, and along which dim."""
        invars, outvars = self.jaxpr.invars, self.jaxpr.outvars
        position = {var: k for k, var in enumerate(invars)}
        replaced_by = {into: out for out, into in self.aliases.items()}
        split_in: dict[int, int] = {}
        split_out: dict[int, int] = {}
        for k, var in enumerate(invars):
            wants = uses.get(var, {})
            dim = self.lying.get(k, _only_dim(wants))
            if not wants or dim is None:
                continue
            out = replaced_by.get(k)
            if out is None:
                if not any(a is var for a in outvars):
                    split_in[k] = dim
            else:
                atom = outvars[out]
                if not isinstance(atom, Literal) and (self.of(atom) == Cut(dim) or position.get(atom) == k):
                    split_in[k] = split_out[out] = dim
        # An input that also leaves as another output stays whole.
        for k in sorted(split_in):
            if any(a is invars[k] and out not in split_out for out, a in enumerate(outvars)):
                del split_in[k]
                split_out.pop(replaced_by.get(k, -1), None)
        return split_in, split_out

    # Writing.

    def write(self, split_in: Mapping[int, int], split_out: Mapping[int, int]) -> Unstacked:
        writer = _Writer(self)
        invars: list[Var] = []
        inputs = []
        for k, var in enumerate(self.jaxpr.invars):
            if k in split_in:
                share = Cut(split_in[k])
                parts = [new_var(shaped(piece_aval(var.aval, share, self.count))) for _ in range(self.count)]
                writer.parts[var, share] = parts
            else:
                parts = [new_var(var.aval)]
                writer.whole[var] = parts[0]
            inputs.append(tuple(range(len(invars), len(invars) + len(parts))))
            invars += parts
        for eqn in self.jaxpr.eqns:
            writer.equation(eqn)
        outvars: list[Any] = []
        outputs = []
        for k, atom in enumerate(self.jaxpr.outvars):
            made = writer.in_parts(atom, Cut(split_out[k]), None) if k in split_out else [writer.value(atom, None)]
            outputs.append(tuple(range(len(outvars), len(outvars) + len(made))))
            outvars += made
        jaxpr = remove_dead_code(make_jaxpr(invars, outvars, writer.eqns))
        return Unstacked(
            jaxpr,
            self.count,
            tuple(inputs),
            tuple(outputs),
            tuple(split_in.get(k, 0) for k in range(len(inputs))),
            tuple(split_out.get(k, 0) for k in range(len(outputs))),
        )


def _only_dim(wants: Mapping[Share, None]) -> int | None:
    """The dim that all readers read in parts; None: there is no such."""
    match list(wants):
        case [Cut(dim, 1)]:
            return dim
        case _:
            return None


def _all_cut(shares: Sequence[Share]) -> bool:
    return all(isinstance(share, Cut) for share in shares)


def _conversion(atom: Any, have: Share, want: Share) -> int | None:
    if have == want:
        return 0
    if isinstance(have, Whole) and isinstance(want, Cut):
        return 1
    if isinstance(have, Whole) and isinstance(want, Sum):
        return 0 if isinstance(atom, Literal) and atom.val == 0 else None
    return None


class _Writer:
    """Writes the program over parts: for each value, its parts, or it whole, whichever was made first."""

    def __init__(self, of: _Unstacking):
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

"""Results of a Pallas kernel that its steps add up, read off its body.

In:     the body; for each result the grid dims that it does not move with, so that their steps share a block of it.
Out:    `dims_added_up`: grid dims of which fewer steps make a part of the sum; `with_last_steps`: the body over fewer.
Method: at the first step of these dims zeros are stored (`pl.when(pl.program_id(0) == 0)`), and each step adds to what is
        there something that does not depend on it: in the result, or in a scratch buffer that is copied to the result, at
        each step or the last (`pl.when(pl.program_id(0) == pl.num_programs(0) - 1)`). The index of such a dim is asked for
        nothing else, so that a device that has some of its steps cannot tell them from the first ones. What is written in
        another way is no sum here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as Kind

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, all_equations, bodies_in, open_jaxpr, replace_eqn
from autopar.ir.rules.linearity import may_be_partial, sums_survive

Dims = frozenset[int]


def dims_added_up(
    body: Jaxpr, grid: Sequence[int | None], shared: Mapping[int, Dims], scratch: Sequence[int] = ()
) -> Dims:
    """Dims of the grid, as the kernel counts them, over which all results that do not move with them are sums.

    Args:
        grid: Lengths of these dims.
        shared: For each result, by its position among the body's arguments, the dims (longer than 1) that it does not
            move with.
        scratch: Positions of buffers that outlive a step.
    """
    found = _Body(grid, {body.invars[at]: dims for at, dims in shared.items()}, [body.invars[at] for at in scratch])
    for eqn in body.eqns:
        found.visit(eqn)
    if any(not found.is_sum(var, found.zeroed.get(var)) for var in found.scratch):
        return frozenset()
    sums = [var for var, dims in found.shared.items() if found.adds_up(var, dims)]
    others = frozenset().union(*(dims for var, dims in found.shared.items() if var not in sums))
    return frozenset().union(*(found.shared[var] for var in sums)) - others - found.asked


@dataclass(frozen=True, slots=True)
class _Number:
    """Of a dim: which step it is, how many there are, or which is the last."""

    kind: Kind["index", "count", "last"]
    dim: int


@dataclass(frozen=True, slots=True)
class _Flag:
    """Whether it is the first, or the last, step of these dims."""

    kind: Kind["first", "last"]
    dims: Dims


@dataclass(frozen=True, slots=True)
class _Held:
    """What was added up in a buffer: as this step finds it, with its own part, or behind that; spent, it has no use left."""

    kind: Kind["old", "new", "total", "spent"]
    buffer: Var


class _Body:
    """What is known of a body's values, equation by equation.

    Attributes:
        zeroed: Results and scratch, with the dims at whose first step zeros are stored.
        writes: How often each is added to.
        copied: Results that are copies of a scratch buffer, made at the last step of which dims; of none: at every step.
        spoiled: Results and scratch of which something else is done.
        asked: Dims whose index is asked for something else.
        known: What values are. One that depends on what was added up so far has one use.
    """

    def __init__(self, grid: Sequence[int | None], shared: Mapping[Var, Dims], scratch: Sequence[Var]):
        self.grid, self.shared, self.scratch = grid, shared, scratch
        self.zeroed: dict[Var, Dims] = {}
        self.writes = dict.fromkeys((*shared, *scratch), 0)
        self.copied: dict[Var, tuple[Var, Dims]] = {}
        self.spoiled: set[Var] = set()
        self.asked: Dims = frozenset()
        self.known: dict[Atom, _Number | _Flag | _Held] = {}

    def adds_up(self, result: Var, dims: Dims) -> bool:
        """Whether a result is the sum of what the steps of these dims add."""
        if result not in self.copied:
            return self.is_sum(result, dims)
        scratch, last = self.copied[result]
        inner = all(d in dims for d in range(min(dims), len(self.grid)) if self.grid[d] != 1)
        clean = result not in self.spoiled and not self.writes[result] and result not in self.zeroed
        return clean and inner and last in (frozenset(), dims) and self.is_sum(scratch, dims)

    def is_sum(self, buffer: Var, dims: Dims | None) -> bool:
        """Whether zeros are stored in a buffer at the first step of these dims, and it is added to at each of them."""
        return (
            dims is not None
            and self.zeroed.get(buffer) == dims
            and self.writes[buffer] == 1
            and buffer not in self.spoiled
        )

    def visit(self, eqn: JaxprEqn) -> None:
        meaning = self._meaning(eqn)
        if meaning is not None:
            self.known[eqn.outvars[0]] = meaning
        elif not self._is_part_of_sum(eqn):
            for atom in eqn.invars:
                self._used_otherwise(atom)
            inside = (inner for body in bodies_in(eqn) for inner in all_equations(body))
            self.asked |= {e.params["axis"] for e in inside if e.primitive.name in ("program_id", "num_programs")}

    def _operands(self, eqn: JaxprEqn) -> list[_Number | _Flag | _Held | Literal | None]:
        """What is known of the operands; numbers that stand in the program as they are."""
        return [self.known.get(atom) if isinstance(atom, Var) else atom for atom in eqn.invars]

    def _meaning(self, eqn: JaxprEqn) -> _Number | _Flag | _Held | None:
        """What a sum is made by, of what an equation makes; None: it makes nothing of the kind."""
        operands = self._operands(eqn)
        totals = [value.buffer if isinstance(value, _Held) and value.kind == "total" else None for value in operands]
        match eqn.primitive.name, operands:
            case "program_id", _:
                return _Number("index", eqn.params["axis"])
            case "num_programs", _:
                return _Number("count", eqn.params["axis"])
            case "sub", [_Number("count", dim), one] if _is_number(one, 1):
                return _Number("last", dim)
            case "eq", [_Number("index", dim), zero] if _is_number(zero, 0):
                return _Flag("first", self._steps(dim))
            case "eq", [_Number("index", dim), last] if last == _Number("last", dim) or self._is_last(dim, last):
                return _Flag("last", self._steps(dim))
            case "and", [_Flag(kind, one), _Flag(same, other)] if kind == same:
                return _Flag(kind, one | other)
            case "convert_element_type", [_Flag() as flag]:
                return flag
            case "get", [None] if (buffer := eqn.invars[0]) in self.writes and _is_whole(eqn.outvars[0], buffer):
                return _Held("total" if buffer in self.scratch and self.writes[buffer] else "old", buffer)
            case _ if keeps_sums(eqn, [buffer is not None for buffer in totals]):
                (buffer, *others) = dict.fromkeys(buffer for buffer in totals if buffer is not None)
                return _Held("total", buffer) if not others else None
            case "add", ([_Held("old", buffer), _] | [_, _Held("old", buffer)]):
                at = operands.index(_Held("old", buffer))
                added = operands[1 - at]
                if isinstance(added, _Held) and added.kind == "old":
                    return None
                self._used_otherwise(eqn.invars[1 - at])
                self.known[eqn.invars[at]] = _Held("spent", buffer)
                return _Held("new", buffer)
        return None

    def _is_part_of_sum(self, eqn: JaxprEqn) -> bool:
        """Whether it stores what belongs to a sum, and nothing else."""
        buffer = eqn.invars[0] if eqn.invars else None
        match eqn.primitive.name, self._operands(eqn):
            case "cond", [_Flag("first", dims), *_]:
                return self._zeros(eqn, dims)
            case "cond", [_Flag("last", dims), *_]:
                return self._copies_last(eqn, dims)
            case "swap", [None, _Held("total", scratch)] if buffer in self.shared:
                return _is_whole(eqn.invars[1], buffer) and self._is_copied(buffer, scratch, frozenset(), eqn)
            case "swap", [None, _Held("new", added)] if added is buffer and _is_whole(eqn.invars[1], buffer):
                self.known[eqn.invars[1]] = _Held("spent", buffer)
                return self._is_added(buffer, eqn)
            case "addupdate", [None, *_] if buffer in self.writes and _is_whole(eqn.invars[1], buffer):
                self._used_otherwise(eqn.invars[1])
                return self._is_added(buffer, eqn)
        return False

    def _steps(self, dim: int) -> Dims:
        """The dim, if it has more steps than one."""
        return frozenset() if self.grid[dim] == 1 else frozenset({dim})

    def _is_last(self, dim: int, number: object) -> bool:
        length = self.grid[dim]
        return length is not None and _is_number(number, length - 1)

    def _is_copied(self, result: Var, scratch: Var, last: Dims, eqn: JaxprEqn) -> bool:
        if result in self.copied:
            return False
        self.copied[result] = scratch, last
        self.known.update(dict.fromkeys(eqn.outvars, _Held("spent", result)))
        return True

    def _copies_last(self, eqn: JaxprEqn, last: Dims) -> bool:
        """A condition whose one branch does nothing but copy what was added up."""
        nothing, branch = (open_jaxpr(each)[0] for each in eqn.params["branches"])
        outer = dict(zip(branch.invars, eqn.invars[1:], strict=True))
        total: dict[Atom, Var] = {}
        if nothing.eqns or eqn.outvars:
            return False
        for each in branch.eqns:
            first = outer.get(each.invars[0]) if each.invars and isinstance(each.invars[0], Var) else None
            sums = [isinstance(atom, Var) and atom in total for atom in each.invars]
            match each.primitive.name:
                case "get" if first in self.scratch and self.writes[first] and _is_whole(each.outvars[0], first):
                    total[each.outvars[0]] = first
                case "swap" if first in self.shared and sums == [False, True] and _is_whole(each.invars[1], first):
                    if not self._is_copied(first, total[each.invars[1]], last, each):
                        return False
                case _ if keeps_sums(each, sums) and sum(sums) == 1:
                    total[each.outvars[0]] = total[each.invars[sums.index(True)]]
                case _:
                    return False
        return True

    def _is_added(self, result: Var, eqn: JaxprEqn) -> bool:
        self.writes[result] += 1
        self.known.update(dict.fromkeys(eqn.outvars, _Held("spent", result)))  # what was there before
        return True

    def _zeros(self, eqn: JaxprEqn, dims: Dims) -> bool:
        """A condition whose one branch does nothing but store zeros, before anything is added."""
        nothing, branch = (open_jaxpr(each)[0] for each in eqn.params["branches"])
        stored = None if nothing.eqns or eqn.outvars else list(_stores_of_zeros(branch))
        results = [] if stored is None else [eqn.invars[1 + at] for at in stored if at is not None]
        if stored is None or None in stored or any(r not in self.writes or self.writes[r] for r in results):
            return False
        for result in results:
            if result in self.zeroed:
                self.spoiled.add(result)
            self.zeroed[result] = dims
        return True

    def _used_otherwise(self, atom: Atom) -> None:
        if not isinstance(atom, Var):
            return
        if atom in self.writes:
            self.spoiled.add(atom)
        match self.known.get(atom):
            case _Held(buffer=buffer):
                self.spoiled.add(buffer)
            case _Flag(dims=dims):
                self.asked |= dims
            case _Number(dim=dim):
                self.asked |= {dim}


def _stores_of_zeros(branch: Jaxpr) -> Iterator[int | None]:
    """The argument that each equation stores zeros in, all over; None: it does something else."""
    zeros: set[Atom] = set()

    def are_zeros(atom: Atom) -> bool:
        return _is_number(atom, 0) if isinstance(atom, Literal) else atom in zeros

    for eqn in branch.eqns:
        match eqn.primitive.name:
            case "broadcast_in_dim" | "convert_element_type" if are_zeros(eqn.invars[0]):
                zeros.add(eqn.outvars[0])
            case "swap" if are_zeros(eqn.invars[1]):
                result = eqn.invars[0]
                is_whole = result in branch.invars and _is_whole(eqn.invars[1], result)
                yield branch.invars.index(result) if is_whole else None
            case _:
                yield None


def _is_number(atom: object, number: int) -> bool:
    return isinstance(atom, Literal) and bool(atom.val == number)


def _is_whole(value: Atom, ref: Atom) -> bool:
    """Whether a value that is loaded from a buffer or stored in it is all of it."""
    return tuple(value.aval.shape) == tuple(ref.aval.shape)


_LINEAR = "convert_element_type broadcast_in_dim reshape transpose squeeze copy neg add add_any sub mul div".split()


def keeps_sums(eqn: JaxprEqn, sums: Sequence[bool]) -> bool:
    """Whether an equation on these operands, which are sums of parts, makes a sum of what it makes of the parts."""
    if eqn.primitive.name not in _LINEAR or not any(sums) or len(eqn.outvars) != 1:
        return False
    source, target = (eqn.invars[list(sums).index(True)].aval.dtype, eqn.outvars[0].aval.dtype)
    match eqn.primitive.name:
        case "mul" | "div" if sum(sums) == 1:
            factor = eqn.invars[list(sums).index(False)]
            usable = isinstance(factor, Literal) and bool(np.isfinite(factor.val)) and bool(factor.val != 0)
            return usable and jnp.issubdtype(target, jnp.inexact) and (sums[0] or eqn.primitive.name == "mul")
        case "mul" | "div":
            return False
        case "convert_element_type":  # a kernel adds up in more bits than it returns, as products do
            are_floats = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
            return sums_survive(source, target) or (are_floats and may_be_partial(target))
    return all(sums)


def with_last_steps(body: Jaxpr, lengths: Mapping[int, tuple[int, int]]) -> Jaxpr:
    """A body whose steps find the last one of some dims at another number: for each dim its length, and the new one."""
    if all(old == new for old, new in lengths.values()):
        return body
    index_of: dict[Atom, int] = {}
    eqns = []
    for eqn in body.eqns:
        if eqn.primitive.name == "program_id":
            index_of[eqn.outvars[0]] = eqn.params["axis"]
        if eqn.primitive.name == "eq" and isinstance(eqn.invars[1], Literal) and isinstance(eqn.invars[0], Var):
            old, new = lengths.get(index_of.get(eqn.invars[0], -1), (0, 0))
            if old and _is_number(eqn.invars[1], old - 1):
                last = type(eqn.invars[1])(np.asarray(new - 1, eqn.invars[1].aval.dtype)[()], eqn.invars[1].aval)
                eqn = replace_eqn(eqn, invars=[eqn.invars[0], last])
        eqns.append(eqn)
    return body.replace(eqns=eqns)

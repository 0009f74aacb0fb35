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
        body: Of the kernel.
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


class _Body:
    """What is known of a body's values, equation by equation.

    Attributes:
        zeroed: Results and scratch, with the dims at whose first step zeros are stored.
        writes: How often each is added to.
        copied: Results that are copies of a scratch buffer, made at the last step of which dims; of none: at every step.
        spoiled: Results and scratch of which something else is done.
        asked: Dims whose index is asked for something else.

    A number that depends on what was added up so far (loaded, or one step further) has one use, and is spent then.
    """

    def __init__(self, grid: Sequence[int | None], shared: Mapping[Var, Dims], scratch: Sequence[Var]):
        self.grid, self.shared, self.scratch = grid, shared, scratch
        self.zeroed: dict[Var, Dims] = {}
        self.writes = dict.fromkeys((*shared, *scratch), 0)
        self.copied: dict[Var, tuple[Var, Dims]] = {}
        self.spoiled: set[Var] = set()
        self.asked: Dims = frozenset()
        self._index: dict[Var, int] = {}
        self._count: dict[Var, int] = {}
        self._last: dict[Var, int] = {}
        self._is_first: dict[Var, Dims] = {}
        self._is_last: dict[Var, Dims] = {}
        self._loaded: dict[Var, Var] = {}
        self._more: dict[Var, Var] = {}
        self._total: dict[Var, Var] = {}
        self._spent: dict[Var, Var] = {}

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
        if not self._understood(eqn):
            for atom in eqn.invars:
                self._used_otherwise(atom)
            inside = (inner for body in bodies_in(eqn) for inner in all_equations(body))
            self.asked |= {
                e.params["axis"] for e in (eqn, *inside) if e.primitive.name in ("program_id", "num_programs")
            }

    def _understood(self, eqn: JaxprEqn) -> bool:
        """Whether it does one of the things that a sum is made by."""
        inputs = [atom if isinstance(atom, Var) else None for atom in eqn.invars]
        match eqn.primitive.name, inputs:
            case "program_id", _:
                self._index[eqn.outvars[0]] = eqn.params["axis"]
                return True
            case "num_programs", _:
                self._count[eqn.outvars[0]] = eqn.params["axis"]
                return True
            case "sub", [Var() as count, None] if count in self._count and _is_number(eqn.invars[1], 1):
                self._last[eqn.outvars[0]] = self._count[count]
                return True
            case "eq", [Var() as index, None] if index in self._index and _is_zero(eqn.invars[1]):
                self._is_first[eqn.outvars[0]] = self._steps(self._index[index])
                return True
            case "eq", [Var() as index, None] if index in self._index and self._is_last_of(index, eqn.invars[1]):
                self._is_last[eqn.outvars[0]] = self._steps(self._index[index])
                return True
            case "eq", [Var() as index, Var() as last] if index in self._index and last in self._last:
                if self._index[index] != self._last[last]:
                    return False
                self._is_last[eqn.outvars[0]] = self._steps(self._index[index])
                return True
            case "and", [Var() as one, Var() as other] if one in self._is_first and other in self._is_first:
                self._is_first[eqn.outvars[0]] = self._is_first[one] | self._is_first[other]
                return True
            case "and", [Var() as one, Var() as other] if one in self._is_last and other in self._is_last:
                self._is_last[eqn.outvars[0]] = self._is_last[one] | self._is_last[other]
                return True
            case "convert_element_type", [Var() as flag] if flag in self._is_first:
                self._is_first[eqn.outvars[0]] = self._is_first[flag]
                return True
            case "convert_element_type", [Var() as flag] if flag in self._is_last:
                self._is_last[eqn.outvars[0]] = self._is_last[flag]
                return True
            case "cond", [Var() as flag, *_] if flag in self._is_first:
                return self._zeros(eqn, self._is_first[flag])
            case "cond", [Var() as flag, *_] if flag in self._is_last:
                return self._copies_last(eqn, self._is_last[flag])
            case "get", [Var() as buffer] if buffer in self.scratch and self.writes[buffer]:
                self._total[eqn.outvars[0]] = buffer
                return _is_whole(eqn.outvars[0], buffer)
            case _ if keeps_sums(eqn, [atom in self._total for atom in inputs]):
                totals = dict.fromkeys(self._total[atom] for atom in inputs if atom is not None)
                self._total[eqn.outvars[0]] = next(iter(totals))
                return len(totals) == 1
            case "swap", [Var() as result, Var() as new] if new in self._total and result in self.shared:
                return _is_whole(new, result) and self._is_copied(result, self._total[new], frozenset(), eqn)
            case "get", [Var() as result] if result in self.writes and _is_whole(eqn.outvars[0], result):
                self._loaded[eqn.outvars[0]] = result
                return True
            case "add", [one, other] if (one in self._loaded) != (other in self._loaded):
                old, new = (one, eqn.invars[1]) if one in self._loaded else (other, eqn.invars[0])
                assert old is not None
                self._used_otherwise(new)
                self._more[eqn.outvars[0]] = self._spent[old] = self._loaded.pop(old)
                return True
            case "swap", [Var() as result, Var() as new] if self._more.get(new) is result and _is_whole(new, result):
                self._spent[new] = self._more.pop(new)
                return self._is_added(result, eqn)
            case "addupdate", [Var() as result, new, *_] if result in self.writes and _is_whole(eqn.invars[1], result):
                self._used_otherwise(eqn.invars[1])
                return self._is_added(result, eqn)
        return False

    def _steps(self, dim: int) -> Dims:
        """The dim, if it has more steps than one."""
        return frozenset() if self.grid[dim] == 1 else frozenset({dim})

    def _is_last_of(self, index: Var, number: Atom) -> bool:
        length = self.grid[self._index[index]]
        return length is not None and _is_number(number, length - 1)

    def _is_copied(self, result: Var, scratch: Var, last: Dims, eqn: JaxprEqn) -> bool:
        if result in self.copied:
            return False
        self.copied[result] = scratch, last
        self._spent.update((var, result) for var in eqn.outvars)
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
        self._spent.update((var, result) for var in eqn.outvars)  # what was there before
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
        for values in (self._loaded, self._more, self._total, self._spent):
            if atom in values:
                self.spoiled.add(values[atom])
        for flags in (self._is_first, self._is_last):
            self.asked |= flags.get(atom, frozenset())
        for numbers in (self._index, self._count, self._last):
            self.asked |= {numbers[atom]} if atom in numbers else frozenset()


def _stores_of_zeros(branch: Jaxpr) -> Iterator[int | None]:
    """The argument that each equation stores zeros in, all over; None: it does something else."""
    zeros: set[Atom] = set()

    def are_zeros(atom: Atom) -> bool:
        return _is_zero(atom) if isinstance(atom, Literal) else atom in zeros

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


def _is_zero(atom: Atom) -> bool:
    return _is_number(atom, 0)


def _is_number(atom: Atom, number: int) -> bool:
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

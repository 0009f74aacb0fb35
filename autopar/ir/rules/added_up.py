"""Results of a Pallas kernel that its steps add up, read off its body.

In:     the body; for each result the grid dims that it does not move with, so that their steps share a block of it.
Out:    `dims_added_up`: grid dims of which fewer steps make a part of the sum.
Method: at the first step of these dims zeros are stored (`pl.when(pl.program_id(0) == 0)`), and each step adds to what is
        there something that does not depend on it. The index of such a dim is asked for nothing else, so that a device
        that has some of its steps cannot tell them from the first ones. What is written in another way is no sum here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, all_equations, bodies_in, open_jaxpr

Dims = frozenset[int]


def dims_added_up(body: Jaxpr, shared: Mapping[int, Dims]) -> Dims:
    """Dims of the grid, as the kernel counts them, over which all results that do not move with them are sums.

    Args:
        body: Of the kernel.
        shared: For each result, by its position among the body's arguments, the dims (longer than 1) that it does not
            move with.
    """
    found = _Body({body.invars[at]: dims for at, dims in shared.items()})
    for eqn in body.eqns:
        found.visit(eqn)
    sums = [var for var, dims in found.shared.items() if found.zeroed.get(var) == dims and found.writes[var] == 1]
    others = frozenset().union(*(dims for var, dims in found.shared.items() if var not in sums or var in found.spoiled))
    return frozenset().union(*(found.shared[var] for var in sums)) - others - found.asked


class _Body:
    """What is known of a body's values, equation by equation.

    Attributes:
        zeroed: Results, with the dims at whose first step zeros are stored.
        writes: How often each is added to.
        spoiled: Results of which something else is done.
        asked: Dims whose index is asked for something else.

    A number that depends on what was added up so far (loaded, or one step further) has one use, and is spent then.
    """

    def __init__(self, shared: Mapping[Var, Dims]):
        self.shared = shared
        self.zeroed: dict[Var, Dims] = {}
        self.writes = dict.fromkeys(shared, 0)
        self.spoiled: set[Var] = set()
        self.asked: Dims = frozenset()
        self._index: dict[Var, int] = {}
        self._is_first: dict[Var, Dims] = {}
        self._loaded: dict[Var, Var] = {}
        self._more: dict[Var, Var] = {}
        self._spent: dict[Var, Var] = {}

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
            case "eq", [Var() as index, None] if index in self._index and _is_zero(eqn.invars[1]):
                self._is_first[eqn.outvars[0]] = frozenset({self._index[index]})
                return True
            case "and", [Var() as one, Var() as other] if one in self._is_first and other in self._is_first:
                self._is_first[eqn.outvars[0]] = self._is_first[one] | self._is_first[other]
                return True
            case "convert_element_type", [Var() as flag] if flag in self._is_first:
                self._is_first[eqn.outvars[0]] = self._is_first[flag]
                return True
            case "cond", [Var() as flag, *_] if flag in self._is_first:
                return self._zeros(eqn, self._is_first[flag])
            case "get", [Var() as result] if result in self.shared and _is_whole(eqn.outvars[0], result):
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
            case "addupdate", [Var() as result, new, *_] if result in self.shared and _is_whole(eqn.invars[1], result):
                self._used_otherwise(eqn.invars[1])
                return self._is_added(result, eqn)
        return False

    def _is_added(self, result: Var, eqn: JaxprEqn) -> bool:
        self.writes[result] += 1
        self._spent.update((var, result) for var in eqn.outvars)  # what was there before
        return True

    def _zeros(self, eqn: JaxprEqn, dims: Dims) -> bool:
        """A condition whose one branch does nothing but store zeros, before anything is added."""
        nothing, branch = (open_jaxpr(each)[0] for each in eqn.params["branches"])
        stored = None if nothing.eqns or eqn.outvars else list(_stores_of_zeros(branch))
        results = [] if stored is None else [eqn.invars[1 + at] for at in stored if at is not None]
        if stored is None or None in stored or any(r not in self.shared or self.writes[r] for r in results):
            return False
        for result in results:
            if result in self.zeroed:
                self.spoiled.add(result)
            self.zeroed[result] = dims
        return True

    def _used_otherwise(self, atom: Atom) -> None:
        if not isinstance(atom, Var):
            return
        if atom in self.shared:
            self.spoiled.add(atom)
        for values in (self._loaded, self._more, self._spent):
            if atom in values:
                self.spoiled.add(values[atom])
        self.asked |= self._is_first.get(atom, frozenset())
        if atom in self._index:
            self.asked |= {self._index[atom]}


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
    return isinstance(atom, Literal) and bool(atom.val == 0)


def _is_whole(value: Atom, ref: Atom) -> bool:
    """Whether a value that is loaded from a buffer or stored in it is all of it."""
    return tuple(value.aval.shape) == tuple(ref.aval.shape)

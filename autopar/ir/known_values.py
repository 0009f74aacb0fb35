"""Constant propagation: which values are one number everywhere, count 0, 1, 2, ..., or are a known function of others.

In:     a flat program, and the values of its constants.
Out:    `KnownValues`, which answers such questions for any value of the program, in its bodies too.
Method: back along the defining equations, out of the bodies that a value enters as a constant; computed in NumPy. A value of
        which one column counts is followed through what JAX's indexing does (concatenation, broadcast, the
        `where(i < 0, i + n, i)` of negative indices), back to an `iota` or a constant equal to one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, Constant, Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.region import Binding, Region, equations_within, is_region, region_of
from autopar.ir.rules.index_map import OPERATIONS

RESHAPES = "convert_element_type reshape squeeze expand_dims broadcast_in_dim copy stop_gradient".split()
"""Primitives that keep the numbers and change their shape or dtype."""


Position = tuple[int, int]
"""A dim and an index along it: one column of an array."""


class KnownValues:
    """What is known of the values of one program.

    Attributes:
        maker: Each value -> the equation that defines it.
        outside: A constant of a body -> the operand that it is; a result of a barrier -> the operand of the barrier.
        rows: The row that a loop body reads -> its stack; a stack that a loop returns -> the row that the body makes.
        constants: Inputs of the program that are constants -> their values.
    """

    def __init__(self, jaxpr: Jaxpr, constants: Mapping[Var, Constant] | None = None):
        self.constants = constants or {}
        self.maker: dict[Var, JaxprEqn] = {}
        self.outside: dict[Var, Atom] = {}
        self.rows: dict[Var, Atom] = {}
        for eqn, _ in equations_within(jaxpr):
            self.maker.update(dict.fromkeys(eqn.outvars, eqn))
            if is_region(eqn):
                region = region_of(eqn)
                for b in region.of_role("const"):
                    self.outside.update(dict.fromkeys(b.variables, b.operand))
                self.outside.update({b.result: b.operand for b in region.of_role("through") if b.result is not None})
                for b in region.of_role("xs"):
                    self.rows.update(dict.fromkeys(b.variables, b.operand))
                self.rows.update({b.result: b.value for b in region.of_role("ys") if b.result is not None})

    def definition(self, atom: Atom) -> tuple[Atom, JaxprEqn | None]:
        """The same value outside of the bodies that it enters as a constant, and before barriers; and its equation."""
        while isinstance(atom, Var) and atom in self.outside:
            atom = self.outside[atom]
        return atom, self.maker.get(atom) if isinstance(atom, Var) else None

    def origin(self, atom: Atom) -> Atom:
        """The integers that this value is, before reshapes and changes to dtypes that hold all of them, in their order."""
        atom, eqn = self.definition(atom)
        while eqn is not None and eqn.primitive.name in RESHAPES:
            before = eqn.invars[0].aval
            is_kept = np.issubdtype(before.dtype, np.integer) and np.can_cast(before.dtype, atom.aval.dtype)
            if before.size != atom.aval.size or not is_kept:
                break
            atom, eqn = self.definition(eqn.invars[0])
        return atom

    def expression(self, atom: Atom, whole: Collection[Var]) -> Iterator[tuple[Atom, JaxprEqn | None]]:
        """All values of the elementwise expression of `atom`, each with its equation; None: a leaf, as each of `whole` is."""
        atom, eqn = self.definition(self.origin(atom))
        if eqn is None or atom in whole or eqn.primitive.name not in (*OPERATIONS, *RESHAPES):
            yield atom, None
            return
        yield atom, eqn
        for operand in eqn.invars:
            yield from self.expression(operand, whole)

    def evaluate(self, atom: Atom, values: Mapping[Var, np.ndarray]) -> np.ndarray | None:
        """Evaluate the elementwise expression of `atom`, given the values of its leaves; None: it is not known."""
        atom, eqn = self.definition(self.origin(atom))
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom in values:
            return values[atom]
        if atom in self.rows:  # a row of a uniform stack is uniform
            return self.uniform_value(self.rows[atom])
        if eqn is None or eqn.primitive.name not in (*OPERATIONS, *RESHAPES):
            return None
        operands = [self.evaluate(operand, values) for operand in eqn.invars]
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands):
            return None
        if eqn.primitive.name not in OPERATIONS:
            return known[0].astype(atom.aval.dtype)
        with np.errstate(all="ignore"):
            return np.asarray(OPERATIONS[eqn.primitive.name](eqn.params, *known)).astype(atom.aval.dtype)

    def uniform_value(self, atom: Atom) -> np.ndarray | None:
        """The number that all elements of a value equal; None: it is not known, or they differ."""
        made = self.evaluate(atom, {})
        return made if made is not None and made.ndim == 0 else None

    def is_count(self, atom: Atom) -> bool:
        """Whether a value is the vector 0, 1, 2, ..."""
        return len(atom.aval.shape) == 1 and self.counts(atom) == 0

    def is_order(self, var: Var) -> bool:
        """Whether a value is a permutation as `argsort` makes it, or writes as its inverse.

        A `sort` carries a counting operand along; a `scatter` writes such numbers to the places of a permutation.
        """
        _, eqn = self.definition(var)
        if eqn is None or len(var.aval.shape) != 1:
            return False
        if eqn.primitive.name == "scatter":
            return self.is_count(eqn.invars[2]) and self.writes_each(eqn)
        if eqn.primitive.name != "sort":
            return False
        return self.is_count(eqn.invars[[out is var for out in eqn.outvars].index(True)])

    def writes_each(self, scatter: JaxprEqn) -> bool:
        """Whether a scatter writes each row of its operand once: its indices are a permutation of them."""
        table, indices, updates = scatter.invars
        numbers = scatter.params["dimension_numbers"]
        dims = tuple(numbers.scatter_dims_to_operand_dims)
        if len(dims) != 1 or dims != tuple(numbers.inserted_window_dims) or numbers.operand_batching_dims:
            return False
        rows = table.aval.shape[dims[0]]
        if (
            scatter.params["update_jaxpr"] is not None
            or updates.aval.size != table.aval.size
            or indices.aval.size != rows
        ):
            return False
        return self.order_in(indices, rows) is not None

    def order_in(self, indices: Atom, rows: int) -> Var | None:
        """The permutation of so many rows that indices are, as JAX writes `x[order]`; None: they are not known to be one."""
        ends = [atom for atom, eqn in self.expression(indices, ()) if eqn is None and isinstance(atom, Var)]
        leaves = list(dict.fromkeys(ends))
        if len(leaves) != 1 or leaves[0].aval.shape != (rows,) or not self.is_order(leaves[0]):
            return None
        made = self.evaluate(indices, {leaves[0]: np.arange(rows, dtype=leaves[0].aval.dtype)})
        return leaves[0] if made is not None and np.array_equal(made, np.arange(rows)) else None

    def sorted_key(self, eqn: JaxprEqn) -> Var | None:
        """The key whose values an equation takes in sorted order: a sort by it, or `key[argsort(key)]`; None: it takes none."""
        (read, *others), sort = eqn.invars, eqn
        if eqn.primitive.name == "gather" and read.aval.ndim == eqn.outvars[0].aval.ndim == 1:
            order = self.order_in(others[0], read.aval.size)
            _, made = self.definition(order) if order is not None else (None, None)
            sort = made if made is not None else eqn
        if sort.primitive.name != "sort" or len(sort.invars[0].aval.shape) != 1:
            return None
        key = self.origin(read)
        return key if isinstance(key, Var) and self.origin(sort.invars[0]) is key else None

    def is_uniform(self, atom: Atom, dim: int) -> bool:
        """Whether all slices of a value along a dim are equal."""
        atom, eqn = self.definition(atom)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            return dim not in eqn.params["broadcast_dimensions"] or eqn.invars[0].aval.ndim == 0
        return self.uniform_value(atom) is not None

    # Values that count.

    def counts(self, atom: Atom, column: Position | None = None) -> int | None:
        """The dim along which an array, or one column of it, is 0, 1, 2, ...; None: it is not known to count."""
        atom, eqn = self.definition(atom)
        if isinstance(atom, Var) and atom in self.constants:
            return _counts_along(np.asarray(self.constants[atom]), column)
        if eqn is None:
            return None
        match eqn.primitive.name:
            case "iota":
                along = eqn.params["dimension"]
                fits = _holds(atom, atom.aval.shape[along])
                return along if fits and (column is None or column[0] != along) else None
            case "scan" if column is None and atom in self.rows:
                return 0 if self.is_trip(self.rows[atom], region_of(eqn)) else None
            case "convert_element_type":
                fits = _holds(eqn.invars[0], 0) and _holds(atom, max(atom.aval.shape, default=0))
                return self.counts(eqn.invars[0], column) if fits else None
            case "select_n":
                return self.counts(eqn.invars[1], column) if self.is_false(eqn.invars[0], column) else None
            case "copy" | "stop_gradient":
                return self.counts(eqn.invars[0], column)
            case "concatenate":
                return self.counts_in_concatenation(eqn, column)
            case "broadcast_in_dim":
                return self.moved(eqn.invars[0], atom, eqn.params["broadcast_dimensions"], column)
            case "reshape" | "squeeze" | "expand_dims":
                return self.moved(eqn.invars[0], atom, kept_dims(eqn.invars[0].aval.shape, atom.aval.shape), column)
        return None

    def is_trip(self, atom: Atom, scan: Region) -> bool:
        """Whether a value of a scan's body is the index of the row that this trip reads."""
        atom, eqn = self.definition(atom)
        if not isinstance(atom, Var) or not _holds(atom, scan.trips):
            return False
        for b in scan.of_role("xs", "carry"):
            if b.var is atom and b.operand is not None:
                return self.is_count(b.operand) if b.role == "xs" else self.counts_trips(b, scan)
        match (eqn.primitive.name, eqn.invars) if eqn is not None else ("", []):
            case "convert_element_type", [of]:
                return self.is_trip(of, scan)
            case "select_n", [which, of, _]:
                _, test = self.definition(which)
                if test is not None and test.primitive.name == "lt" and _is_number(test.invars[1], 0):
                    return self.is_trip(test.invars[0], scan) and self.is_trip(of, scan)
        return False

    def in_trips(self, atom: Atom, scan: Region) -> np.ndarray | None:
        """The value of an integer of a scan's body in each trip, or in all; None: it is not known.

        It may depend on rows of stacks that are known, and on carries that begin with a number and grow by one.
        """
        values: dict[Var, np.ndarray] = {}
        for b in scan.of_role("xs"):
            if b.operand is not None and b.operand.aval.ndim == 1:
                stack = self.numbers(b.operand)
                values |= {} if stack is None else dict.fromkeys(b.variables, stack)
        for b in () if scan.eqn.params["reverse"] else scan.of_role("carry"):
            _, step = self.definition(b.value)
            if step is None or step.primitive.name != "add" or step.invars[0] is not b.var:
                continue
            if isinstance(b.operand, Literal) and isinstance(step.invars[1], Literal):
                values[b.var] = b.operand.val + step.invars[1].val * np.arange(scan.trips)
        return self.evaluate(atom, values)

    def numbers(self, atom: Atom) -> np.ndarray | None:
        """The elements of a vector made from constants and from vectors that count; None: they are not known."""
        leaves = [leaf for leaf, eqn in self.expression(atom, ()) if eqn is None and isinstance(leaf, Var)]
        known = {leaf: np.asarray(self.constants[leaf]) for leaf in leaves if leaf in self.constants}
        known |= {leaf: np.arange(leaf.aval.shape[0]) for leaf in leaves if leaf not in known and self.is_count(leaf)}
        made = self.evaluate(atom, known)
        return made if made is not None and made.shape == atom.aval.shape else None

    def counts_trips(self, carry: Binding, scan: Region) -> bool:
        """Whether a carry starts at 0 and each trip adds 1."""
        _, step = self.definition(carry.value)
        if scan.eqn.params["reverse"] or not _is_number(carry.operand, 0) or step is None:
            return False
        return step.primitive.name == "add" and step.invars[0] is carry.var and _is_number(step.invars[1], 1)

    def is_false(self, atom: Atom, column: Position | None) -> bool:
        """Whether a predicate is known to be false: a false constant, or `i < 0` of an `i` that counts."""
        atom, eqn = self.definition(atom)
        if isinstance(atom, Literal):
            return not atom.val
        if atom in self.constants:
            return not np.any(np.asarray(self.constants[atom]))
        if eqn is None or eqn.primitive.name != "lt":
            return False
        return _is_number(eqn.invars[1], 0) and self.counts(eqn.invars[0], column) is not None

    def counts_in_concatenation(self, eqn: JaxprEqn, column: Position | None) -> int | None:
        """`counts` of the operand of a concatenation that holds the column."""
        if column is None or column[0] != eqn.params["dimension"]:
            return None
        place = column[1]
        for part in eqn.invars:
            size = part.aval.shape[column[0]]
            if place < size:
                return self.counts(part, (column[0], place))
            place -= size
        return None

    def moved(self, source: Atom, target: Atom, places: Sequence[int | None], column: Position | None) -> int | None:
        """`counts` through an operation that moves dim d of its operand to `places[d]`; None where it drops the dim."""
        inner: Position | None = None
        for d, place in enumerate(places):
            if column is not None and place == column[0]:
                stretched = source.aval.shape[d] != target.aval.shape[place]
                inner = d, 0 if stretched else column[1]
        along = self.counts(source, inner)
        if along is None or places[along] is None:
            return None
        return places[along] if source.aval.shape[along] == target.aval.shape[places[along]] else None


def _is_number(atom: Atom | None, number: int) -> bool:
    return isinstance(atom, Literal) and bool(atom.val == number)


def _holds(atom: Atom, number: int) -> bool:
    """Whether a value's dtype is of integers and can represent this number."""
    return jnp.issubdtype(atom.aval.dtype, jnp.integer) and number <= jnp.iinfo(atom.aval.dtype).max


def _counts_along(value: np.ndarray, column: Position | None) -> int | None:
    """As `KnownValues.counts`, of a constant's value."""
    if column is not None:
        value = np.take(value, [column[1]], axis=column[0])
    for along, size in enumerate(value.shape):
        count = np.arange(size).reshape([size if d == along else 1 for d in range(value.ndim)])
        if size > 1 and np.array_equal(value, np.broadcast_to(count, value.shape)):
            return along
    return None


def kept_dims(source: tuple[int, ...], target: tuple[int, ...]) -> list[int | None]:
    """For each dim, where a reshape that only adds or drops dims of length 1 moves it; None: it is dropped, or not known."""
    kept = [d for d, size in enumerate(target) if size != 1]
    if [target[d] for d in kept] != [size for size in source if size != 1]:
        return [None] * len(source)
    places = iter(kept)
    return [next(places) if size != 1 else None for size in source]

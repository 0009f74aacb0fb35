"""Loops in the body of a kernel that go over a buffer block by block, as Triton's products and norms do.

In:     the body of a Pallas kernel.
Out:    `loops_over_blocks`: the loops of which fewer trips, over shorter buffers, make a part of each result: of its rows, if
        the loop stores them, else of a sum.
Method: trip t reads and writes the t-th block of some dims of some buffers, and these nowhere else. Where, is computed of
        all trips at once, in NumPy; no other number that a trip works with may differ from those of the first. What is
        carried from trip to trip, or kept in scratch, starts at zero, is only added to, and reaches results by operations
        that are linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr, scan_counts
from autopar.ir.rules.added_up import keeps_sums
from autopar.ir.rules.index_map import MAX_STEPS, OPERATIONS
from autopar.ir.rules.kernel_access import Access, access_of, is_buffer
from autopar.ir.rules.linearity import may_be_partial


@dataclass(frozen=True, eq=False, slots=True)
class BlockLoop:
    """A loop over blocks.

    Attributes:
        at: Its number among the equations of the body; None: its trips are the steps of a dim of the grid.
        trips: How many.
        walked: (position among the body's arguments, dim) of what is gone over; a block is the `trips`-th part of it.
        adds_up: Whether some results are sums over the trips.
    """

    at: int | None
    trips: int
    walked: tuple[tuple[int, int], ...]
    adds_up: bool


def loops_over_blocks(body: Jaxpr, results: Sequence[int]) -> list[BlockLoop]:
    """Such loops of a body, whose results are the arguments at these positions."""
    found = []
    for eqn in body.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] > 1 and not eqn.params["reverse"]:
            try:
                found.append(_Body(body, eqn, [body.invars[at] for at in results]).loop())
            except NotUnderstoodError:
                continue
    return found


class NotUnderstoodError(Exception):
    """Fewer trips of the loop may be anything."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """A value that is a sum over trips: of a carry or a buffer, in the loop 0 or 1 times added to by this trip (`so_far`)."""

    carry: int | Var = -1
    so_far: int | None = None


class _Free:
    """A value that does not depend on which trip it is."""


FREE = _Free()
_GONE = _Sum(so_far=2)
"""What stood in a result before: of no use."""
Value = np.ndarray | _Sum | _Free
"""Known numbers have the trip in front: of length 1 where all trips have the same."""


class Values:
    """What is known of the values of one program; of most, that they are free."""

    def __init__(self) -> None:
        self.known: dict[Var, Value] = {}

    def of(self, atom: Atom | int) -> Value:
        if isinstance(atom, Var):
            return self.known.get(atom, FREE)
        return np.asarray(atom.val if isinstance(atom, Literal) else atom)[None]


class Walk:
    """What trips do to the buffers of a kernel.

    Attributes:
        trips: How many there are.
        results: Buffers of results.
        walked: Buffers of which a trip has its own block, and along which dim.
        inside: All that a trip touches.
        zeroed: Scratch in which there are zeros before the first trip.
    """

    def __init__(self, trips: int, results: Sequence[Var]):
        self.trips, self.results = trips, results
        self.walked: dict[tuple[Var, int], None] = {}
        self.inside: dict[Var, None] = {}
        self.zeroed: dict[Var, None] = {}


class _Body(Walk):
    """One loop of a body, and what is around it."""

    def __init__(self, body: Jaxpr, loop: JaxprEqn, results: Sequence[Var]):
        super().__init__(loop.params["length"], results)
        self.body, self.eqn = body, loop
        self.values = Values()
        self.scratch = body.invars[body.invars.index(results[-1]) + 1 :]
        self.outside: dict[Var, None] = {}
        self.sums: dict[Var, None] = {}
        self.added: dict[Var, None] = {}

    def loop(self) -> BlockLoop:
        for eqn in self.body.eqns:
            made = self._trips() if eqn is self.eqn else self._around(eqn)
            self.values.known.update(zip(eqn.outvars, made, strict=True))
        walked = {var for var, _ in self.walked}
        unlike = any((var in walked) == (var in self.sums) for var in self.results)
        unlike |= any(var in self.outside for var in (*walked, *self.sums, *self.added))
        if not walked or unlike or not all(may_be_partial(var.aval.dtype) for var in (*self.sums, *self.added)):
            raise NotUnderstoodError
        places = sorted((self.body.invars.index(var), dim) for var, dim in self.walked)
        return BlockLoop(self.body.eqns.index(self.eqn), self.trips, tuple(places), bool(self.sums))

    # Around the loop.

    def _around(self, eqn: JaxprEqn) -> Sequence[Value]:
        operands = [self.values.of(atom) for atom in eqn.invars]
        access = access_of(eqn)
        if access is not None and access.stored is not None and isinstance(self.values.of(access.stored), _Sum):
            summed = [value for value in operands if isinstance(value, _Sum)]
            if access.buffer not in self.results or access.reads or len(summed) > 1 or summed[0] is _GONE:
                raise NotUnderstoodError
            self.sums[access.buffer] = None
            return [_GONE] * len(eqn.outvars)
        if access is not None and access.is_whole and access.buffer in self.scratch:
            if access.buffer in self.added and access.stored is None:
                return [_Sum()]
            is_new = not access.reads and access.buffer not in self.zeroed and access.buffer not in self.outside
            if is_new and access.stored is not None and _is_zero(self.values.of(access.stored)):
                self.zeroed[access.buffer] = None
                return [_GONE] * len(eqn.outvars)
        self.outside.update((atom, None) for atom in eqn.invars if isinstance(atom, Var) and is_buffer(atom))
        if any(isinstance(value, _Sum) for value in operands):
            if any(value is _GONE for value in operands) or not keeps_sums(
                eqn, [isinstance(value, _Sum) for value in operands]
            ):
                raise NotUnderstoodError
            return [_Sum()]
        return known_numbers(eqn, operands) or [FREE] * len(eqn.outvars)

    # In it.

    def _trips(self) -> Sequence[Value]:
        """Through one trip, which stands for all; what the loop leaves behind."""
        inside, consts = open_jaxpr(self.eqn.params["jaxpr"])
        num_consts, num_carry = scan_counts(self.eqn.params)
        if consts or len(inside.invars) > num_consts + num_carry or len(inside.outvars) > num_carry:
            raise NotUnderstoodError
        outer = dict(zip(inside.invars, self.eqn.invars, strict=True))
        carries = inside.invars[num_consts:]
        trip = Trip(self, {var: atom for var, atom in outer.items() if is_buffer(atom)})
        for var in inside.invars[:num_consts]:
            trip.values.known[var] = self.values.of(outer[var])
        for k, var in enumerate(carries):
            trip.values.known[var] = self._carried(k, self.values.of(outer[var]), var)
        for eqn in inside.eqns:
            trip.visit(eqn)
        self.added = {buffer: None for buffer in trip.stored}
        pairs = zip(carries, inside.outvars, strict=True)
        return [self._left(k, trip.values.of(var), trip.values.of(new)) for k, (var, new) in enumerate(pairs)]

    def _carried(self, k: int, start: Value, var: Var) -> Value:
        if not _is_zero(start):
            raise NotUnderstoodError
        if var.aval.shape == () and jnp.issubdtype(var.aval.dtype, jnp.integer):
            return np.arange(self.trips, dtype=var.aval.dtype)
        return _Sum(k, 0)

    def _left(self, k: int, before: Value, after: Value) -> Value:
        if isinstance(before, np.ndarray) and isinstance(after, np.ndarray) and np.array_equal(after, before + 1):
            return _Sum()  # how often it ran
        if isinstance(before, _Sum) and isinstance(after, _Sum) and after == _Sum(k, 1):
            return _Sum()
        raise NotUnderstoodError


class Trip:
    """The values of one trip."""

    def __init__(self, around: Walk, buffers: Mapping[Var, Atom]):
        self.around, self.buffers = around, dict(buffers)
        self.values = Values()
        self.spent: dict[int | Var, None] = {}
        self.stored: dict[Var, None] = {}

    def visit(self, eqn: JaxprEqn) -> None:
        operands = [self.values.of(atom) for atom in eqn.invars]
        access = access_of(eqn)
        if access is not None and self.buffers.get(access.buffer) in self.around.zeroed:
            made: Sequence[Value] = [self._added_to(access)] * len(eqn.outvars)
        elif access is not None:
            self._touch(access)
            made = [FREE if access.reads else _GONE] * len(eqn.outvars)
        elif any(map(is_buffer, eqn.invars)):
            raise NotUnderstoodError
        elif any(isinstance(value, _Sum) for value in operands):
            made = [self._added(eqn, operands)]
        else:
            known = known_numbers(eqn, operands)
            if known is None and any(map(varies, operands)):
                raise NotUnderstoodError
            made = known or [FREE] * len(eqn.outvars)
        self.values.known.update(zip(eqn.outvars, made, strict=True))

    def _added(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
        """A sum so far, with what a trip adds to it."""
        sums = [value for value in operands if isinstance(value, _Sum)]
        (before,) = sums if len(sums) == 1 else (_Sum(),)
        plain = eqn.primitive.name == "add" and not any(map(varies, operands))
        if before.so_far != 0 or before.carry in self.spent or not plain:
            raise NotUnderstoodError
        self.spent[before.carry] = None
        return _Sum(before.carry, 1)

    def _added_to(self, access: Access) -> Value:
        """A buffer that was zero before the loop is added to, all of it and once."""
        buffer = self.buffers[access.buffer]
        assert isinstance(buffer, Var)
        if not access.is_whole or buffer in self.stored:
            raise NotUnderstoodError
        if access.stored is None:
            return _Sum(buffer, 0)
        value = self.values.of(access.stored)
        adds = access.reads and not isinstance(value, _Sum) and not varies(value) and buffer not in self.spent
        is_more = not access.reads and isinstance(value, _Sum) and value == _Sum(buffer, 1)
        if not (adds or is_more):
            raise NotUnderstoodError
        self.spent[buffer] = self.stored[buffer] = None
        return _GONE

    def _touch(self, access: Access) -> None:
        """A buffer is read or written: in a trip's own block of some dims, and elsewhere where every trip does."""
        buffer = self.buffers.get(access.buffer)
        others = [self.values.of(atom) for atom in access.others]
        if not isinstance(buffer, Var) or any(isinstance(value, _Sum) or varies(value) for value in others):
            raise NotUnderstoodError
        walked = [dim for dim in range(len(access.starts)) if self._walks(access, dim)]
        if len(walked) > 1 or not self.may_touch(access, bool(walked), buffer in self.around.results):
            raise NotUnderstoodError
        keys = {(buffer, dim): None for dim in walked}
        seen = {key: None for key in self.around.walked if key[0] is buffer}
        if buffer in self.around.inside and keys != seen:
            raise NotUnderstoodError
        self.around.inside[buffer] = None
        self.around.walked.update(keys)

    def may_touch(self, access: Access, walks: bool, is_result: bool) -> bool:
        """Whether no trip finds what another has stored, and all that are stored are kept."""
        return (walks or access.reads) and not (access.reads and is_result)

    def _walks(self, access: Access, dim: int) -> bool:
        """Whether a trip has its block of this dim; not if all of it, or what it has, is the same for every trip."""
        start, length, trips = self.values.of(access.starts[dim]), access.shape[dim], self.around.trips
        if isinstance(start, _Sum):
            raise NotUnderstoodError
        if isinstance(start, _Free) or not varies(start):
            return False
        block = length // trips
        first = np.arange(trips).reshape(-1, *(1,) * (start.ndim - 1)) * block
        within = _core(start) - first
        if length % trips or (within != within[:1]).any() or within.min() < 0:
            raise NotUnderstoodError
        if within.max() + access.sizes[dim] > block:
            raise NotUnderstoodError
        return True


def _is_zero(value: Value) -> bool:
    return isinstance(value, np.ndarray) and len(value) == 1 and not value.any()


def varies(value: Value) -> bool:
    return isinstance(value, np.ndarray) and len(value) > 1


def _core(array: np.ndarray) -> np.ndarray:
    """Without what is there several times only by broadcasting."""
    return array[tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)]


def known_numbers(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value] | None:
    """The numbers that an equation makes of known ones; None: it is not known which."""
    arrays = [value for value in operands if isinstance(value, np.ndarray)]
    if len(arrays) < len(operands) or len(eqn.outvars) != 1 or not hasattr(eqn.outvars[0].aval, "dtype"):
        return None
    aval, name = eqn.outvars[0].aval, eqn.primitive.name
    trips = max(map(len, arrays), default=1)
    if name == "iota":
        line = np.arange(aval.shape[eqn.params["dimension"]], dtype=aval.dtype)
        return [_spread(line[None], aval.shape, (eqn.params["dimension"],))]
    if name in ("broadcast_in_dim", "broadcast_to"):
        ndim = arrays[0].ndim - 1
        last = tuple(range(len(aval.shape) - ndim, len(aval.shape)))
        return [_spread(arrays[0], aval.shape, eqn.params.get("broadcast_dimensions", last))]
    if name in ("reshape", "squeeze") and arrays[0].size <= MAX_STEPS:
        return [arrays[0].reshape(len(arrays[0]), *aval.shape)]
    if name not in OPERATIONS or trips * int(np.prod(aval.shape)) > MAX_STEPS:
        return None
    aligned = [a.reshape(len(a), *(1,) * len(aval.shape)) if a.ndim == 1 else a for a in arrays]
    with np.errstate(all="ignore"):
        made = np.asarray(OPERATIONS[name](eqn.params, *aligned)).astype(aval.dtype)
    return [made[:1] if len(made) > 1 and (made == made[:1]).all() else made]


def _spread(array: np.ndarray, shape: Sequence[int], dims: Sequence[int]) -> np.ndarray:
    """Broadcast, its dims behind the trip at those of the result."""
    lengths = [1] * len(shape)
    for d, size in zip(dims, array.shape[1:], strict=True):
        lengths[d] = size
    return np.broadcast_to(array.reshape(len(array), *lengths), (len(array), *shape))

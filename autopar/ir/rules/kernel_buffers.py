"""Analyses how the steps of a Pallas kernel use its buffers, in one interpretation of the body for all steps.

In:     the body of a kernel; the steps of its grid, or the trips of a loop in it.
Out:    `BufferUse`: which buffers each step has its own block of, and which are sums over the steps.
Method: a number that depends on the step may only be the offset of the step's own block, or the condition that the step is
        the first or the last. A buffer, or a carry of a loop, is a sum if it is set to zeros before all steps or at the first
        (`pl.when`), each step adds to all of it once, and its value is used only for results that are linear in it: when it
        is complete, or at each step, where the last one's result stays. Everything else is not understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal as Choice

import jax.numpy as jnp
import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var, all_equations, bodies_in, open_jaxpr, scan_counts
from autopar.ir.rules.index_map import numbers_of
from autopar.ir.rules.kernel_access import Access, access_of, is_buffer
from autopar.ir.rules.kernel_interpreter import ASKS, GONE, Interpreter, NotUnderstoodError, Sum, Value
from autopar.ir.rules.linearity import may_be_partial, sums_survive, survives_infinity
from autopar.ir.rules.registry import has_rule, rule_for

Dims = frozenset[int]
"""Grid dims, in the kernel's numbering."""
TRIPS = -1
"""The dim of steps that are the trips of a loop."""
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


@dataclass(frozen=True, slots=True)
class _When:
    """The steps at which an equation runs: each, the first or the last of some dims, some; or outside, around all steps."""

    at: Choice["each", "first", "last", "some", "around"]
    dims: Dims = frozenset()


_EACH, _SOME, _AROUND = _When("each"), _When("some"), _When("around")


class BufferUse(Interpreter):
    """An interpretation of a body for all steps of one dim.

    Attributes:
        dim: The dim of steps that is to be split.
        results: Buffers that are results of the kernel.
        scratch: Buffers that outlive a step.
        own: Buffers of which each step has its own instance.
        walked: (buffer, dim) where a step has its own block at an offset computed from its index.
        touched: Buffers, sums excepted, that a step reads or writes.
        outside: The same, for equations around a loop.
        zeroed: Sums -> the dims at whose first step they are set to zeros.
        spent: Sums that this step has computed its addition to.
        added: Sums into which that addition has been stored.
        copied: Results computed from sums -> those sums, and the dims at whose last step; no dims: at every step.
    """

    def __init__(
        self,
        body: Jaxpr,
        numbers: Mapping[int, np.ndarray],
        dim: int,
        results: Sequence[Var],
        scratch: Sequence[Var],
        own: Sequence[Var] = (),
    ):
        super().__init__(body, numbers)
        self.dim, self.axis, self.when = dim, self.axes.index(dim), _EACH
        self.results, self.scratch, self.own = results, scratch, own
        self.walked: dict[tuple[Var, int], None] = {}
        self.touched: dict[Var, None] = {}
        self.outside: dict[Var, None] = {}
        self.zeroed: dict[Var, Dims] = {}
        self.spent: dict[Var, None] = {}
        self.added: dict[Var, None] = {}
        self.copied: dict[Var, tuple[frozenset[Var], Dims]] = {}

    def through_loop(self, loop: JaxprEqn) -> list[Var]:
        """Interpret the body with the trips of a loop as steps; the results that are sums over them.

        Raises `NotUnderstoodError`: it is not understood, or some result is neither made block by block nor a sum.
        """
        with self._at_steps(_AROUND):
            for eqn in self.body.eqns:
                if eqn is loop:
                    self._trips(loop)
                else:
                    self.visit(eqn)
        walked = {var for var, _ in self.walked}
        sums = [var for var in self.results if self.is_result_sum(var, frozenset([self.dim]))]
        apart = all((var in walked) != (var in sums) for var in self.results)
        alone = not any(var in self.outside for var in (*walked, *sums, *self.added))
        if not (walked and apart and alone) or not all(may_be_partial(v.aval.dtype) for v in (*sums, *self.added)):
            raise NotUnderstoodError
        return sums

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """`walked`, with buffers as positions among the body's arguments."""
        return tuple(sorted((self.body.invars.index(var), dim) for var, dim in self.walked))

    def is_sum(self, buffer: Var, dims: Dims | None) -> bool:
        """Whether a buffer is set to zeros at the first step of these dims, and added to at each."""
        return dims is not None and self.zeroed.get(buffer) == dims and buffer in self.added

    def is_result_sum(self, result: Var, dims: Dims) -> bool:
        """Whether a result that does not move with these dims is a sum over their steps, or computed from such sums."""
        if result not in self.copied:
            return self.is_sum(result, dims)
        sources, last = self.copied[result]
        innermost = all(d in dims or len(self.numbers[d]) == 1 for d in self.axes if d >= min(dims))
        alone = result not in self.touched and result not in self.zeroed
        return alone and innermost and last in (frozenset(), dims) and all(self.is_sum(v, dims) for v in sources)

    # Equations.

    def interpret(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
        access = access_of(eqn)
        if access is not None:
            return [self._access(access)] * len(eqn.outvars)
        if any(isinstance(value, Sum) for value in operands):
            return [self._summed(eqn, operands)]
        numbers = numbers_of(eqn, operands, len(self.axes))  # type: ignore[arg-type]
        if numbers is not None:
            return [numbers]
        if self._is_the_same(eqn, operands):
            return [None] * len(eqn.outvars)
        match eqn.primitive.name:
            case "scan":
                return self._loop(eqn, list(operands))
            case "cond":
                return self._branches(eqn, operands)
            case name if name in _CALLS:
                closed = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
                return self.inside(closed, eqn.invars, operands)
        raise NotUnderstoodError

    def _varies(self, value: Value) -> bool:
        """Whether a value differs between steps."""
        return isinstance(value, np.ndarray) and value.shape[self.axis] > 1

    def _is_the_same(self, eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
        """Whether an equation does the same at each step, on the step's own buffers; or runs around all steps."""
        buffers = [self.buffers.get(atom) for atom in eqn.invars if isinstance(atom, Var) and is_buffer(atom)]
        named = dict.fromkeys(buffer for buffer in buffers if buffer is not None)
        if self.when is _AROUND:
            self.outside.update(named)
            return True
        inside = (inner for body in bodies_in(eqn) for inner in all_equations(body))
        asks = any(inner.primitive.name in ASKS for inner in inside) or any(map(self._varies, operands))
        walked = {var for var, _ in self.walked}
        own = all(buffer in self.own and buffer not in walked for buffer in buffers)
        if own and not asks and self.dim not in self.when.dims:
            self.touched.update(named)
            return True
        return False

    def _loop(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Interpret a loop inside a step, trip by trip."""
        first = _first_carry(eqn)
        for _ in range(eqn.params["length"]):
            values[first:] = self.inside(eqn.params["jaxpr"], eqn.invars, values)
        return values[first:]

    def _branches(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
        index, *values = operands
        branches = eqn.params["branches"]
        if isinstance(index, np.ndarray) and index.size == 1:
            return self.inside(self.branch(eqn, index), eqn.invars[1:], values)
        when = self._holds(index) if self.when is _EACH else None
        if when is not None and len(branches) == 2 and not eqn.outvars and not open_jaxpr(branches[0])[0].eqns:
            with self._at_steps(when):
                return self.inside(branches[1], eqn.invars[1:], values)
        if self._varies(index):
            raise NotUnderstoodError
        with self._at_steps(_SOME if self.when is _EACH else self.when):
            made = [value for each in branches for value in self.inside(each, eqn.invars[1:], values)]
        if any(self._varies(value) or isinstance(value, Sum) for value in made):
            raise NotUnderstoodError
        return [None] * len(eqn.outvars)

    def _holds(self, index: Value) -> _When | None:
        """The steps at which a condition holds, if it is the first or the last of some dims; else None."""
        if not isinstance(index, np.ndarray) or np.count_nonzero(index) != 1:
            return None
        dims = frozenset(d for d, size in zip(self.axes, index.shape, strict=True) if size > 1)
        return _When("first", dims) if index.flat[0] else _When("last", dims) if index.flat[-1] else None

    @contextmanager
    def _at_steps(self, when: _When) -> Iterator[None]:
        self.when, before = when, self.when
        yield
        self.when = before

    def _trips(self, eqn: JaxprEqn) -> None:
        """Interpret one trip of the loop, for all at once, and note its results."""
        first, (inside, _) = _first_carry(eqn), open_jaxpr(eqn.params["jaxpr"])
        values, carries = [self.of(atom) for atom in eqn.invars], inside.invars[first:]
        values[first:] = [self._carried(var, start) for var, start in zip(carries, values[first:], strict=True)]
        with self._at_steps(_EACH):
            made = self.inside(eqn.params["jaxpr"], eqn.invars, values)
        for result, var, before, after in zip(eqn.outvars, carries, values[first:], made, strict=True):
            self.known[result] = self._left(var, before, after)

    def _carried(self, var: Var, start: Value) -> Value:
        if not _are_zeros(start):
            raise NotUnderstoodError
        if var.aval.shape == () and jnp.issubdtype(var.aval.dtype, jnp.integer):
            return self.numbers[self.dim].astype(var.aval.dtype)
        self.zeroed[var] = frozenset([self.dim])
        return Sum(frozenset([var]), "old")

    def _left(self, var: Var, before: Value, after: Value) -> Value:
        if isinstance(before, np.ndarray) and isinstance(after, np.ndarray) and np.array_equal(after, before + 1):
            return Sum(frozenset(), "total")  # the count of trips
        if after != Sum(frozenset([var]), "new"):
            raise NotUnderstoodError
        self.added[var] = None
        return Sum(frozenset([var]), "total")

    # Sums.

    def _summed(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Sum:
        """Interpret an equation on sums: it adds to one, or is linear in complete ones."""
        sums = [value for value in operands if isinstance(value, Sum)]
        of = frozenset[Var]().union(*(value.of for value in sums))
        others_vary = any(map(self._varies, operands))
        if all(value.state == "total" for value in sums):
            if not others_vary and _keeps_sums(eqn, [isinstance(value, Sum) for value in operands]):
                return Sum(of, "total")
        elif len(sums) == 1 and sums[0].state == "old" and not any(var in self.spent for var in of):
            if not others_vary and eqn.primitive.name == "add" and self._adds_here():
                self.spent.update(dict.fromkeys(of))
                return Sum(of, "new")
        raise NotUnderstoodError

    def _access(self, access: Access) -> Value:
        """Interpret a load or a store; the old value that a store returns must not be used."""
        buffer, value = self.buffers.get(access.buffer), None if access.stored is None else self.of(access.stored)
        if buffer is None:
            raise NotUnderstoodError
        if isinstance(value, Sum) and value.state == "total":
            self._copy(access, buffer, value.of)
        elif self._is_begun(access, buffer, value):
            self.zeroed[buffer] = frozenset([self.dim]) if self.when is _AROUND else self.when.dims
        elif buffer in self.zeroed:
            return self._add(access, buffer, value)
        elif self.when is _AROUND:
            self.outside[buffer] = None
        else:
            self._touch(access, buffer)
        return None if access.reads else GONE

    def _is_begun(self, access: Access, buffer: Var, value: Value) -> bool:
        """Whether an access sets all of a buffer to zeros, before any other access to it."""
        shared = buffer in (*self.results, *self.scratch) and buffer not in self.own
        seen = any(buffer in seen for seen in (self.touched, self.outside, self.zeroed))
        stores = access.is_whole and not access.reads and _are_zeros(value)
        return stores and shared and not seen and self.when.at in ("first", "around")

    def _add(self, access: Access, buffer: Var, value: Value) -> Value:
        """Interpret an access that loads a sum or adds to it."""
        this = frozenset([buffer])
        if not access.is_whole:
            raise NotUnderstoodError
        is_read = access.stored is None and buffer in self.added and buffer not in self.results
        if is_read and self.when.at not in ("first", "some"):
            return Sum(this, "total")
        if not self._adds_here() or buffer in self.added:
            raise NotUnderstoodError
        if access.stored is None:
            return Sum(this, "old")
        adds = access.reads and not isinstance(value, Sum) and not self._varies(value) and buffer not in self.spent
        if not adds and (access.reads or value != Sum(this, "new")):
            raise NotUnderstoodError
        self.spent[buffer] = self.added[buffer] = None
        return GONE

    def _adds_here(self) -> bool:
        """Whether each step may add to sums here: always, or on a condition that is the same for steps of the dim."""
        return self.when.at not in ("around", "first") and self.dim not in self.when.dims

    def _copy(self, access: Access, buffer: Var, sums: frozenset[Var]) -> None:
        """Interpret a store computed from complete sums, at each step or the last; a step's own result, from other sums."""
        places = [self.of(atom) for atom in (*access.starts, *access.others) if atom is not access.stored]
        if (
            access.reads
            or self.when.at in ("first", "some")
            or any(isinstance(v, Sum) or self._varies(v) for v in places)
        ):
            raise NotUnderstoodError
        last = frozenset([self.dim]) if self.when is _AROUND else self.when.dims
        before, when = self.copied.get(buffer, (frozenset[Var](), last))
        if buffer in self.own and not any(self.dim in self.zeroed[var] for var in sums):
            self.touched[buffer] = None
        elif buffer in self.results and buffer not in self.own and when == last:
            self.copied[buffer] = before | sums, last
        else:
            raise NotUnderstoodError

    # Blocks.

    def _touch(self, access: Access, buffer: Var) -> None:
        """Interpret another access: within the step's own block along one dim, and the same at every step along others."""
        others = [self.of(atom) for atom in access.others]
        if self.dim in self.when.dims or any(isinstance(value, Sum) or self._varies(value) for value in others):
            raise NotUnderstoodError
        walked = {(buffer, dim): None for dim in range(len(access.starts)) if self._walks(access, dim)}
        read_only = access.reads and buffer not in self.results
        allowed = (
            buffer not in self.scratch and (read_only or not access.reads)
            if walked
            else buffer in self.own or read_only
        )
        seen = {key for key in self.walked if key[0] is buffer}
        if len(walked) > 1 or not allowed or (buffer in self.touched and walked.keys() != seen):
            raise NotUnderstoodError
        self.touched[buffer] = None
        self.walked.update(walked)

    def _walks(self, access: Access, dim: int) -> bool:
        """Whether a step accesses its own block along this dim; False if the offset is the same for every step."""
        start, length, steps = self.of(access.starts[dim]), access.shape[dim], len(self.numbers[self.dim])
        if isinstance(start, Sum):
            raise NotUnderstoodError
        if start is None or not self._varies(start):
            return False
        block = length // steps
        core = start[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in start.strides)]
        within = core - block * np.arange(steps).reshape([steps if k == self.axis else 1 for k in range(core.ndim)])
        moves = length % steps or (within != within.take([0], self.axis)).any()
        if moves or within.min() < 0 or within.max() + access.sizes[dim] > block:
            raise NotUnderstoodError
        return True


def _first_carry(loop: JaxprEqn) -> int:
    """The number of a loop's first carry among its operands."""
    num_consts, num_carry = scan_counts(loop.params)
    if len(loop.invars) > num_consts + num_carry or len(loop.outvars) > num_carry:
        raise NotUnderstoodError
    return num_consts


def _are_zeros(value: Value) -> bool:
    return isinstance(value, np.ndarray) and not value.any()


def _keeps_sums(eqn: JaxprEqn, sums: Sequence[bool]) -> bool:
    """Whether an equation is linear in the operands that are sums, so that partial sums pass through it."""
    group = tuple(k for k, is_sum in enumerate(sums) if is_sum)
    if eqn.primitive.name == "convert_element_type":  # kernels accumulate in more bits than they return, as products do
        source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        are_floats = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
        return sums_survive(source, target) or (are_floats and may_be_partial(target))
    return has_rule(eqn.primitive) and group in rule_for(eqn).linear and survives_infinity(eqn, group)

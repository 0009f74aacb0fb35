"""Sinks casts of gradients to 16 bits out of loops and branches, so that only complete sums over samples are narrowed.

In:     a flat program in which the gradient of a 16-bit parameter is computed in 32 bits and cast down inside a `scan` or a
        branch, as `jax.grad` writes it; the parameter may itself be cast there from 32 bits, and its gradient back to them.
Out:    the same function, with the cast after the loop; a sum over the trips of a loop is carried in 32 bits until then. Where
        each trip's addend is cast down and back by itself, the addends are stacked, and cast and added up after the loop.
Method: a microbatch computes a partial sum of a gradient, and a partial sum must not be narrowed (`rules/linearity.py`). The
        cast is found behind operations that only move or add values, which then run in 32 bits. Only in backward passes:
        activations that a forward loop stacks in 16 bits stay so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import Atom, Aval, Jaxpr, JaxprEqn, Literal, Var, bind_eqn, new_var, shaped
from autopar.ir.build import Equations
from autopar.ir.dataflow import makers, times_read, variables
from autopar.ir.gradient import is_backward
from autopar.ir.region import Binding, Region, is_region, kind_of, region_of
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rules import rule_for
from autopar.ir.rules.linearity import sums_survive
from autopar.ir.rules.registry import has_rule


def narrow_late(jaxpr: Jaxpr) -> Jaxpr:
    """Sink casts of gradients to 16 bits out of loops and branches; over the same inputs and results."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += _region(region_of(eqn)) if kind_of(eqn) in ("scan", "cond") else [eqn]
    return with_equations(jaxpr, eqns)


def _region(region: Region) -> list[JaxprEqn]:
    """Widen a region's sums over trips, and in a backward pass its stacks and results, to the dtype they are computed in."""
    eqn, bodies = region.eqn, [narrow_late(body) for body in region.bodies]
    inside = [_Wide(body) for body in bodies]
    bindings: list[Binding] = []
    before, after = Equations(), Equations()
    for b in region.bindings:
        is_sum = b.role == "carry" and is_backward(eqn) and _fits(b.var, region)
        addend = inside[0].take_rounded_addend(b) if is_sum else None
        if addend is not None:
            (wide,) = inside
            dtype = wide.dtype_behind(addend)
            assert dtype is not None and b.operand is not None and b.result is not None, "a carry of rounded addends"
            each = wide.widened(addend, dtype, {})
            stack = region.new_stack(each)
            bindings.append(Binding("ys", None, (None,), (each,), stack))
            added = partial(_added_in_order, addend.aval.dtype, bool(eqn.params["reverse"]))
            after.define(b.result, added, [b.operand, stack], eqn.source_info)
            continue
        rounded = _rounded(b, inside)
        outputs = rounded or b.outputs
        found = [wide.dtype_behind(atom) for wide, atom in zip(inside, outputs, strict=True)]
        dtype = max((dtype for dtype in found if dtype is not None), key=lambda d: d.itemsize, default=None)
        moves = inside[0].is_sum_of(b.var, b.value) if b.role == "carry" else is_backward(eqn)
        if dtype is None or b.result is None or not moves:
            bindings.append(b)
            continue
        entering = {var: new_var(_of_dtype(var, dtype)) for var in b.variables}
        leaving = [wide.widened(atom, dtype, entering) for wide, atom in zip(inside, outputs, strict=True)]
        outer, result = b.operand, new_var(_of_dtype(b.result, dtype))
        if outer is not None:
            outer = before.call_one(partial(lax.convert_element_type, new_dtype=dtype), [outer])
        inner = tuple(None if var is None else entering[var] for var in b.inputs)
        bindings.append(Binding(b.role, outer, inner, tuple(leaving), result))
        narrowed = rounded[0].aval.dtype if rounded else b.result.aval.dtype
        after.define(b.result, partial(_through, narrowed, b.result.aval.dtype), [result], eqn.source_info)
    if not after and all(a is b for a, b in zip(bodies, region.bodies, strict=True)):
        return [eqn]
    return [*before, region.rebuild(bindings, [wide.eqns for wide in inside]), *after]


def _rounded(binding: Binding, inside: Sequence[_Wide]) -> list[Var]:
    """The 16-bit values that a region's wider results are cast from, as of parameters that layers cast; []: there are none."""
    if binding.role == "carry" or binding.result is None:
        return []
    found = [wide.cast_from(atom) for wide, atom in zip(inside, binding.outputs, strict=True)]
    known = [var for var in found if var is not None]
    return known if len(known) == len(found) and len({var.aval.dtype for var in known}) == 1 else []


def _fits(carry: Var, loop: Region) -> bool:
    """Whether a stack of a carry's addends is no larger than one that the loop reads anyway."""
    stacks = [b.operand.aval.size for b in loop.of_role("xs") if b.operand is not None]
    return kind_of(loop.eqn) == "scan" and carry.aval.size * loop.trips <= max(stacks, default=0)


def _added_in_order(narrow: np.dtype, reverse: bool, start: jax.Array, addends: jax.Array) -> jax.Array:
    """The sum of rounded addends, one after the other, as the loop adds them up."""

    def add(total: jax.Array, addend: jax.Array) -> tuple[jax.Array, None]:
        return total + _through(narrow, total.dtype, addend), None

    return lax.scan(add, start, addends, reverse=reverse)[0]


def _through(narrow: np.dtype, wide: np.dtype, x: jax.Array) -> jax.Array:
    return lax.convert_element_type(lax.convert_element_type(x, narrow), wide)


def _of_dtype(var: Var, dtype: np.dtype) -> Aval:
    return shaped(jax.ShapeDtypeStruct(var.aval.shape, dtype))


class _Wide:
    """A body to whose equations wider versions of its values are appended."""

    def __init__(self, body: Jaxpr):
        self.eqns = Equations(body.eqns)
        self.made_by = makers(body.eqns)
        self.num_readers = times_read(body.eqns, body.outvars)

    def dtype_behind(self, atom: Atom | None) -> np.dtype | None:
        """The widest dtype that a 16-bit value was cast from, looking through moves and additions; None: there is no cast."""
        if not isinstance(atom, Var) or atom not in self.made_by:
            return None
        eqn = self.made_by[atom]
        if _narrows(eqn):
            return eqn.invars[0].aval.dtype
        found = [self.dtype_behind(a) for a in eqn.invars] if self.passes_on(eqn) else []
        return max((d for d in found if d is not None), key=lambda d: d.itemsize, default=None)

    def cast_from(self, atom: Atom | None) -> Var | None:
        """The 16-bit value that a wider one was cast from; None: it was not."""
        eqn = self.made_by.get(atom) if isinstance(atom, Var) else None
        if eqn is None or eqn.primitive.name != "convert_element_type" or not isinstance(eqn.invars[0], Var):
            return None
        (source,), (target,) = eqn.invars, eqn.outvars
        floats = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in (source, target))
        return source if floats and source.aval.dtype.itemsize == 2 < target.aval.dtype.itemsize else None

    def take_rounded_addend(self, carry: Binding) -> Var | None:
        """The 16-bit value that is widened and added to a carry in each trip, as of parameters that all trips cast.

        None: nothing is, or no wider value was cast to it. The addition is removed.
        """
        eqn = self.made_by.get(carry.value) if isinstance(carry.value, Var) else None
        if eqn is None or eqn.primitive.name not in ("add", "add_any") or carry.var not in variables(eqn.invars):
            return None
        others = [atom for atom in eqn.invars if atom is not carry.var]
        addend = self.cast_from(others[0]) if len(others) == 1 else None
        if addend is None or self.dtype_behind(addend) is None:
            return None
        if self.num_readers[carry.var] > 1 or self.num_readers[eqn.outvars[0]] > 1:
            return None
        self.eqns.remove(eqn)
        return addend

    def passes_on(self, eqn: JaxprEqn) -> bool:
        """Whether an equation only moves or adds its operands, in one dtype, and at most one equation reads its result."""
        var, *others = eqn.outvars
        alike = all(a.aval.dtype == var.aval.dtype for a in eqn.invars)
        if others or not alike or self.num_readers[var] > 1 or is_region(eqn) or "new_dtype" in eqn.params:
            return False
        return has_rule(eqn.primitive) and tuple(range(len(eqn.invars))) in rule_for(eqn).linear

    def is_sum_of(self, var: Var, atom: Atom | None) -> bool:
        """Whether `atom` is `var` plus something, and nothing else reads `var`."""
        if self.num_readers[var] != 1 or isinstance(atom, Literal):
            return False
        while atom in self.made_by:
            eqn = self.made_by[atom]
            if len(eqn.invars) != 2 or not self.passes_on(eqn):
                return False
            if var in variables(eqn.invars):
                return eqn.primitive.name in ("add", "add_any")
            atom = next((a for a in variables(eqn.invars) if self.leads_to(var, a)), None)
        return False

    def leads_to(self, var: Var, atom: Atom) -> bool:
        """Whether `atom` is computed from `var` by moves and additions."""
        eqn = self.made_by.get(atom)
        return atom is var or (
            eqn is not None and self.passes_on(eqn) and any(self.leads_to(var, a) for a in variables(eqn.invars))
        )

    def widened(self, atom: Atom, dtype: np.dtype, wide: Mapping[Var, Var]) -> Atom:
        """`atom` in a wider dtype; `wide`: variables that hold the body's inputs in it."""
        if not isinstance(atom, Literal):
            if atom in wide:
                return wide[atom]
            eqn = self.made_by.get(atom)
            if eqn is not None and _narrows(eqn):
                atom = eqn.invars[0]
                if atom.aval.dtype == dtype:
                    return atom
            elif eqn is not None and self.dtype_behind(atom) is not None:
                operands = [self.widened(a, dtype, wide) for a in eqn.invars]
                return self.eqns.call_one(lambda *xs: bind_eqn(eqn, *xs)[0], operands, eqn.source_info)
        return self.eqns.call_one(partial(lax.convert_element_type, new_dtype=dtype), [atom])


def _narrows(eqn: JaxprEqn) -> bool:
    """Whether an equation casts floats to 16-bit floats in which their partial sums would lose bits."""
    if eqn.primitive.name != "convert_element_type":
        return False
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
    return floats and source.itemsize > target.itemsize == 2 and not sums_survive(source, target)

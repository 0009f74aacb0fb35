"""Moves casts to 16 bits out of loops and branches, so that sums over samples are narrowed when they are complete.

In:     a flat program in which the gradient of a 16-bit parameter is computed in 32 bits and cast down inside a `scan` or a
        branch, as `jax.grad` writes it.
Out:    the same function, with the cast behind the loop; a sum over the trips of a loop is kept in 32 bits until then.
Method: a microbatch makes a part of a gradient, and a part must not be narrowed (`rules/linearity.py`). The cast is looked
        for behind what merely moves and adds up values, which is done in 32 bits instead. Only in what is differentiated:
        activations that are stacked in 16 bits stay so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar._jax import Atom, Aval, Jaxpr, JaxprEqn, Literal, Var, bind_eqn, new_var, shaped
from autopar.ir.build import Equations
from autopar.ir.dataflow import makers, variables
from autopar.ir.gradient import is_backward
from autopar.ir.region import Binding, Region, is_region, kind_of, region_of
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rules import rule_for
from autopar.ir.rules.linearity import sums_survive
from autopar.ir.rules.registry import has_rule


def narrow_late(jaxpr: Jaxpr) -> Jaxpr:
    """The program with casts of gradients to 16 bits behind its loops and branches; over the same inputs and results."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += _region(region_of(eqn)) if kind_of(eqn) in ("scan", "cond") else [eqn]
    return with_equations(jaxpr, eqns)


def _region(region: Region) -> list[JaxprEqn]:
    """Its sums over trips, and if it is part of a backward pass its stacks and results, in the dtype they are computed in."""
    eqn, bodies = region.eqn, [narrow_late(body) for body in region.bodies]
    inside = [_Wide(body) for body in bodies]
    bindings: list[Binding] = []
    before, after = Equations(), Equations()
    for b in region.bindings:
        found = [wide.dtype_behind(atom) for wide, atom in zip(inside, b.inside, strict=True)]
        dtype = max((dtype for dtype in found if dtype is not None), key=lambda d: d.itemsize, default=None)
        moves = inside[0].is_sum_of(b.var, b.value) if b.role == "carry" else is_backward(eqn)
        if dtype is None or b.result is None or not moves:
            bindings.append(b)
            continue
        entering = {var: new_var(_of_dtype(var, dtype)) for var in b.variables}
        leaving = [wide.widened(atom, dtype, entering) for wide, atom in zip(inside, b.inside, strict=True)]
        outer, result = b.outer, new_var(_of_dtype(b.result, dtype))
        if outer is not None:
            outer = before.call_one(partial(lax.convert_element_type, new_dtype=dtype), [outer])
        inner = tuple(None if var is None else entering[var] for var in b.inner)
        bindings.append(Binding(b.role, outer, inner, tuple(leaving), result))
        narrow = partial(lax.convert_element_type, new_dtype=b.result.aval.dtype)
        after.define(b.result, narrow, [result], eqn.source_info)
    if not after and all(a is b for a, b in zip(bodies, region.bodies, strict=True)):
        return [eqn]
    return [*before, region.rebuild(bindings, [wide.eqns for wide in inside]), *after]


def _of_dtype(var: Var, dtype: np.dtype) -> Aval:
    return shaped(jax.ShapeDtypeStruct(var.aval.shape, dtype))


class _Wide:
    """A body in which values are made again in a wider dtype, behind the equations that are there."""

    def __init__(self, body: Jaxpr):
        self.eqns = Equations(body.eqns)
        self.made_by = makers(body.eqns)
        self.num_readers = Counter([*variables(body.outvars), *(a for eqn in body.eqns for a in variables(eqn.invars))])

    def dtype_behind(self, atom: Atom | None) -> np.dtype | None:
        """The widest dtype of which a 16-bit float is a cast, behind moves and additions; None: it is none."""
        if not isinstance(atom, Var) or atom not in self.made_by:
            return None
        eqn = self.made_by[atom]
        if _narrows(eqn):
            return eqn.invars[0].aval.dtype
        found = [self.dtype_behind(a) for a in eqn.invars] if self.passes_on(eqn) else []
        return max((d for d in found if d is not None), key=lambda d: d.itemsize, default=None)

    def passes_on(self, eqn: JaxprEqn) -> bool:
        """Whether it only moves or adds up its operands, for one reader."""
        var, *others = eqn.outvars
        alike = all(a.aval.dtype == var.aval.dtype for a in eqn.invars)
        if others or not alike or self.num_readers[var] > 1 or is_region(eqn) or "new_dtype" in eqn.params:
            return False
        return has_rule(eqn.primitive) and tuple(range(len(eqn.invars))) in rule_for(eqn).linear

    def is_sum_of(self, var: Var, atom: Atom | None) -> bool:
        """Whether `atom` is `var` with something added, and `var` stands nowhere else."""
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
        eqn = self.made_by.get(atom)
        return atom is var or (
            eqn is not None and self.passes_on(eqn) and any(self.leads_to(var, a) for a in variables(eqn.invars))
        )

    def widened(self, atom: Atom, dtype: np.dtype, wide: Mapping[Var, Var]) -> Atom:
        """`atom` in a wider dtype, where `wide` are some values in it."""
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
    """Whether it casts floats to 16-bit floats in which their sums do not survive."""
    if eqn.primitive.name != "convert_element_type":
        return False
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    floats = jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating)
    return floats and source.itemsize > target.itemsize == 2 and not sums_survive(source, target)

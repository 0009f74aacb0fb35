"""Stacks decompositions of equal matrices that do not depend on each other, so that devices can share them.

In:     a flat program, the number of devices. Optimizers that decompose a matrix of each layer's statistics (Shampoo, SOAP,
        K-FAC) do so layer by layer; no device can split one `eigh`.
Out:    the same function. Equal decompositions are one of a stack of matrices, which is as long as devices share it evenly:
        the last matrix is repeated.
Method: decompositions form a group if they are equal but for their operands and have as many decompositions on the longest
        way to them: then none depends on another. A group is computed where its last matrix is known; equations that
        read its results are moved behind it, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from autopar._jax import DropVar, Jaxpr, JaxprEqn, Literal, Var, bind_eqn
from autopar.ir.build import Equations
from autopar.ir.dataflow import inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.region import in_bodies
from autopar.ir.rewrite.dead_code import with_equations
from autopar.ir.rules.linear_algebra import decomposes_one_matrix
from autopar.ir.signature import equation_signature


def stack_decompositions(jaxpr: Jaxpr, num_devices: int) -> Jaxpr:
    """Stack equal decompositions, in bodies of loops and branches too, for so many devices."""
    eqns: Sequence[JaxprEqn] = [
        in_bodies(e, partial(stack_decompositions, num_devices=num_devices)) for e in jaxpr.eqns
    ]
    group_of = {} if num_devices == 1 or any(eqn.effects for eqn in eqns) else _groups(eqns)
    if group_of:
        walk = _Walk(group_of, num_devices)
        for eqn in eqns:
            walk.visit(eqn)
        eqns = walk.made
    return with_equations(jaxpr, eqns)


def _groups(eqns: Sequence[JaxprEqn]) -> dict[JaxprEqn, list[JaxprEqn]]:
    """The group of each decomposition, where it is not alone in it."""
    depth: dict[Var, int] = {}
    groups: dict[object, list[JaxprEqn]] = {}
    for eqn in eqns:
        number = max((depth[a] for a in inputs_of(eqn) if a in depth), default=0)
        if decomposes_one_matrix(eqn) and not any(isinstance(a, Literal) for a in eqn.invars):
            groups.setdefault((number, is_backward(eqn), equation_signature(eqn)), []).append(eqn)
            number += 1
        depth.update(dict.fromkeys(eqn.outvars, number))
    return {eqn: group for group in groups.values() if len(group) > 1 for eqn in group}


class _Walk:
    """Walks through a program in order.

    Attributes:
        made: The equations of the result.
        ready: Decompositions whose operands are known.
        delayed: Equations that read results of groups which are not complete, in order.
        missing: Results of both.
    """

    def __init__(self, group_of: Mapping[JaxprEqn, Sequence[JaxprEqn]], num_devices: int):
        self.group_of, self.num_devices = group_of, num_devices
        self.made, self.ready, self.missing = Equations(), set[JaxprEqn](), set[Var]()
        self.delayed: list[JaxprEqn] = []

    def visit(self, eqn: JaxprEqn) -> None:
        if not self.missing.isdisjoint(inputs_of(eqn)):
            self.delayed.append(eqn)
        elif eqn in self.group_of:
            self.ready.add(eqn)
        else:
            self.made.append(eqn)
            return
        self.missing.update(eqn.outvars)
        group = self.group_of.get(eqn, ())
        if eqn in self.ready and self.ready.issuperset(group):
            self.stack(group)
            delayed, self.delayed = self.delayed, []
            self.missing.difference_update(var for each in (*group, *delayed) for var in each.outvars)
            for each in delayed:
                self.visit(each)

    def stack(self, group: Sequence[JaxprEqn]) -> None:
        """Append the decompositions of a group as one."""
        first, size = group[0], len(group)
        num_operands, repeated = len(first.invars), -size % self.num_devices

        def program(*operands: jax.Array) -> list[jax.Array]:
            columns = [operands[k::num_operands] for k in range(num_operands)]
            stacks = [jnp.stack((*column, *column[-1:] * repeated)) for column in columns]
            results = bind_eqn(first, *stacks)
            return [result[k] for k in range(size) for result in results]

        results = self.made.call(program, [a for eqn in group for a in eqn.invars], first.source_info)
        for var, atom in zip((var for eqn in group for var in eqn.outvars), results, strict=True):
            if not isinstance(var, DropVar):
                self.made.name(var, atom, first.source_info)

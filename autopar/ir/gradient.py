"""Which pass of a gradient an equation belongs to, and what waits for which pass.

In:     equations of a step, whose name stacks say where `jax.grad` and `remat` made them.
Out:    whether one is of the forward pass, of the backward pass, or computed again for it; which of a step's equations the
        backward pass waits for, and which wait for it.
Method: of the scopes in a name stack, the outermost `jvp(...)` or `transpose(...)`; then readers and makers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

from autopar._jax import Jaxpr, JaxprEqn, NameStack, Var, all_equations
from autopar.ir.dataflow import descendants, inputs_of
from autopar.ir.source import source_line

_RECOMPUTED = "rematted_computation"
"""Scope that JAX itself puts on the equations that `remat` computes again in the backward pass."""


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the second run of a `remat` body."""
    return any(getattr(scope, "name", None) == _RECOMPUTED for scope in eqn.source_info.name_stack.stack)


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the backward pass: `jax.grad` marks such equations in their name stack.

    A gradient that the loss itself asks for (forces, a gradient penalty, an inner step of MAML) is part of the forward
    pass: "jvp(transpose(jvp()))", and backward is "transpose(jvp(...))" of it.
    """
    return _outermost(eqn.source_info.name_stack) == "transpose"


def is_ahead(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the forward pass of a gradient."""
    return _outermost(eqn.source_info.name_stack) == "jvp"


def is_of_inner_gradient(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the backward pass of a gradient that the loss itself asks for."""
    return is_ahead(eqn) and "transpose(" in str(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=1 << 16)
def _outermost(name_stack: NameStack) -> str:
    found = re.search(r"\b(transpose|jvp)\(", str(name_stack))
    return "" if found is None else found[1]


def gradient_line(jaxpr: Jaxpr) -> str:
    """The user's line that a program, as it was traced, takes the gradient of; "" if it takes none."""
    return next((source_line(eqn) for eqn in all_equations(jaxpr) if is_backward(eqn)), "")


# What waits for which pass.


def feeds_backward(jaxpr: Jaxpr) -> list[bool]:
    """For each equation, whether it is of the backward pass or something of that waits for it."""
    waited: dict[Var, None] = {}
    found = []
    for eqn in reversed(jaxpr.eqns):
        matters = is_backward(eqn) or any(var in waited for var in eqn.outvars)
        if matters:
            waited.update(dict.fromkeys(inputs_of(eqn)))
        found.append(matters)
    return found[::-1]


def behind_gradients(jaxpr: Jaxpr) -> list[bool]:
    """For each equation, whether it needs what the backward pass makes, and nothing of that pass waits for it."""
    made: set[Var] = set()
    found = []
    for eqn, matters in zip(jaxpr.eqns, feeds_backward(jaxpr), strict=True):
        found.append(not matters and not made.isdisjoint(inputs_of(eqn)))
        made.update(eqn.outvars if found[-1] or is_backward(eqn) else ())
    return found


def made_behind(jaxpr: Jaxpr) -> dict[Var, None]:
    """What the backward passes make, and whatever is made of that."""
    return descendants(jaxpr.eqns, is_behind)


def is_behind(eqn: JaxprEqn, behind: Collection[Var] = ()) -> bool:
    """Whether an equation is of the backward passes, or reads what is made behind."""
    return is_backward(eqn) or is_recomputed(eqn) or any(a in behind for a in inputs_of(eqn))

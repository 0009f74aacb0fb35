"""Tells which pass of a gradient an equation belongs to, and which equations feed or follow the backward pass.

In:     equations of a step, whose name stacks JAX marks in `jax.grad` and `remat`.
Out:    whether an equation is of the forward pass, of the backward pass, or recomputed for it; which equations of a step the
        backward pass depends on, and which depend on it.
Method: the outermost `jvp(...)` or `transpose(...)` scope of the name stack; then dataflow.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection

from autopar._jax import Jaxpr, JaxprEqn, NameStack, Var, all_equations
from autopar.ir.dataflow import descendants, inputs_of
from autopar.ir.region import bodies_of, equations_within
from autopar.ir.source import source_line

_RECOMPUTED = "rematted_computation"
"""The scope that JAX puts on equations that `remat` recomputes in the backward pass."""


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether `eqn` recomputes part of a `remat` body in the backward pass."""
    return any(getattr(scope, "name", None) == _RECOMPUTED for scope in eqn.source_info.name_stack.stack)


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the backward pass, by the `transpose(...)` that `jax.grad` leaves in its name stack.

    A gradient that the loss itself takes (forces, a gradient penalty, an inner step of MAML) is part of the forward
    pass, "jvp(transpose(jvp()))"; its backward pass is "transpose(jvp(...))".
    """
    return _outermost(eqn.source_info.name_stack) == "transpose"


def holds_backward(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the backward pass, or is a loop or branch that takes gradients in a body."""
    return is_backward(eqn) or any(map(takes_gradients, bodies_of(eqn)))


def takes_gradients(body: Jaxpr) -> bool:
    """Whether a body has equations of a backward pass."""
    return any(is_backward(inner) for inner, _ in equations_within(body))


def is_ahead(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the forward pass of a gradient."""
    return _outermost(eqn.source_info.name_stack) == "jvp"


def is_of_inner_gradient(eqn: JaxprEqn) -> bool:
    """Whether `eqn` belongs to the backward pass of a gradient that the loss itself takes."""
    return is_ahead(eqn) and "transpose(" in str(eqn.source_info.name_stack)


@functools.lru_cache(maxsize=1 << 16)
def _outermost(name_stack: NameStack) -> str:
    found = re.search(r"\b(transpose|jvp)\(", str(name_stack))
    return "" if found is None else found[1]


def gradient_line(jaxpr: Jaxpr) -> str:
    """The user's line that a traced program takes the gradient of; "" if it takes none."""
    return next((source_line(eqn) for eqn in all_equations(jaxpr) if is_backward(eqn)), "")


# Dependences on the backward pass.


def feeds_backward(jaxpr: Jaxpr, is_of_pass: Callable[[JaxprEqn], bool] = is_backward) -> list[bool]:
    """For each equation, whether it is of the backward pass or the backward pass depends on it.

    `is_of_pass`: which equations are of the backward pass.
    """
    needed: dict[Var, None] = {}
    found = []
    for eqn in reversed(jaxpr.eqns):
        feeds = is_of_pass(eqn) or any(var in needed for var in eqn.outvars)
        if feeds:
            needed.update(dict.fromkeys(inputs_of(eqn)))
        found.append(feeds)
    return found[::-1]


def after_gradients(jaxpr: Jaxpr, is_of_pass: Callable[[JaxprEqn], bool] = is_backward) -> list[bool]:
    """For each equation, whether it depends on the backward pass, and the backward pass does not depend on it.

    `is_of_pass`: as in `feeds_backward`.
    """
    made: set[Var] = set()
    found = []
    for eqn, feeds in zip(jaxpr.eqns, feeds_backward(jaxpr, is_of_pass), strict=True):
        found.append(not feeds and not made.isdisjoint(inputs_of(eqn)))
        made.update(eqn.outvars if found[-1] or is_of_pass(eqn) else ())
    return found


def made_by_backward(jaxpr: Jaxpr) -> dict[Var, None]:
    """The results of the backward passes, and everything computed from them."""
    return descendants(jaxpr.eqns, is_of_backward)


def is_of_backward(eqn: JaxprEqn, later: Collection[Var] = ()) -> bool:
    """Whether an equation is of a backward pass (or recomputed for one), or reads one of the `later` values."""
    return is_backward(eqn) or is_recomputed(eqn) or any(a in later for a in inputs_of(eqn))

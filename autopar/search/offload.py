"""Offloads the optimizer's state to host memory, if a step does not fit otherwise.

In:     a step and its roles.
Out:    the arguments that are state which only the update reads; the step with these in host memory.
Method: a rewrite of the program (`ir/rewrite/state_on_host.py`), which is planned like any other: values in host memory take
        no device memory, and copies have a price.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TypeVar

import jax.numpy as jnp

from autopar._jax import on_host
from autopar.debug import check_after
from autopar.errors import InfeasibleError
from autopar.ir.check import check_program
from autopar.ir.program import Program
from autopar.ir.rewrite.state_on_host import only_for_update, state_on_host
from autopar.ir.trace.state import Roles
from autopar.ir.work import num_bytes
from autopar.mesh import Device
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text
from autopar.search.methods import Follow, FollowMesh
from autopar.search.request import Request
from autopar.tuning import TUNING

_T = TypeVar("_T")


def within_memory(plan: Callable[[Request], _T], request: Request) -> tuple[_T, tuple[str, ...]]:
    """Plan a step with `plan`; if nothing fits, with its optimizer's state in host memory.

    Returns:
        The plan, and the paths of the arguments in host memory.

    Raises:
        InfeasibleError: Nothing fits either way.
    """
    method, program, roles = request.method, request.program, request.roles
    followed = method.on_host if isinstance(method, Follow | FollowMesh) else ()
    if followed:
        return plan(request.of(offloaded_program(program, roles, followed))), tuple(followed)
    try:
        return plan(request), ()
    except InfeasibleError as error:
        paths = optimizer_state(program, roles) if hasattr(error, "budget_bytes") else ()
        if not paths:
            raise
        if method.offload == "never":
            also = 'offload="auto" has the optimizer\'s state wait in the memory of the hosts.'
            raise _again(error, error.given, f"{error.do} Or {also}") from error
        failure = error
    try:
        return plan(request.of(offloaded_program(program, roles, paths))), paths
    except InfeasibleError as error:
        raise _again(error, f"{error.given}, the optimizer's state in the memory of the hosts", error.do) from failure


def _again(error: InfeasibleError, given: str, do: str) -> InfeasibleError:
    return type(error)(error.summary, given=given, wrong=error.wrong, do=do, **error.facts)


def check_hosts(plan: Decision, device: Device) -> None:
    """Check that values in host memory fit there.

    Raises:
        InfeasibleError: They do not.
    """
    needed, available = plan.cost.host_bytes, device.host_memory_bytes
    if needed <= available:
        return
    what = "the optimizer's state" if plan.offloaded else "what the step copies there"
    raise InfeasibleError(
        "the hosts' memory is too small.",
        given=f"`{plan.name}`, whose plan has {bytes_text(needed)} of each {device} in the memory of its host",
        wrong=f"{what} is more than a device's share of it, {bytes_text(available)}.",
        do="take more devices or microbatches, offload less, or state how much there is: Device(host_memory_bytes=...).",
        budget_bytes=available,
        needed_bytes=needed,
    )


def optimizer_state(program: Program, roles: Roles) -> tuple[str, ...]:
    """Paths of state that only the update reads: moments, but no parameters.

    State that is small beside the largest stays: the latency of its copies would outweigh the bytes saved.
    """
    late, of_state = only_for_update(program.jaxpr), set(roles.aliases.values())
    sizes = {
        k: num_bytes(var)
        for k, var in enumerate(program.jaxpr.invars)
        if k in of_state and late[k] and jnp.issubdtype(var.aval.dtype, jnp.inexact) and not on_host(var.aval)
    }
    least = TUNING.offloaded_least * max(sizes.values(), default=0)
    return tuple(program.in_paths[k] for k, size in sizes.items() if size >= least and size)


def offloaded_program(program: Program, roles: Roles, paths: Collection[str]) -> Program:
    """The step with these arguments, and their new values, in host memory."""
    if not paths:
        return program
    inputs = [k for k, path in enumerate(program.in_paths) if path in paths]
    jaxpr = state_on_host(program.jaxpr, inputs, roles.aliases)
    check_after("offload", check_program, jaxpr)
    return dataclasses.replace(program, jaxpr=jaxpr)

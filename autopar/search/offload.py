"""Offloads activations and state to host memory, where memory demands it and the step is faster.

In:     a step and its roles; a function that plans steps.
Out:    the fastest plan, and what it has in host memory; the step with that in host memory.
Method: rewrites of the program (`inter_op/offloaded_residuals.py`, `ir/rewrite/state_on_host.py`), which is planned like any
        other: values in host memory take no device memory, and copies have a price. Where memory binds, the plan with
        activations offloaded is compared with what else fits: recomputation, microbatches, other shardings. The optimizer's
        state is offloaded only where nothing else fits, and parameters only where that does not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from autopar._jax import on_host
from autopar.debug import check_after
from autopar.errors import InfeasibleError
from autopar.inter_op.offloaded_residuals import Residuals, find_residuals, residuals_on_host
from autopar.intra_op.problem import planning_seconds
from autopar.ir.check import check_program
from autopar.ir.program import Program
from autopar.ir.rewrite.state_on_host import read_for, state_on_host
from autopar.ir.split.layers.update import update_by_layer
from autopar.ir.trace.state import Roles
from autopar.ir.work import num_bytes
from autopar.mesh import Device
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, offloaded_text, seconds_text
from autopar.search.methods import Auto, Follow, FollowMesh
from autopar.search.padding import Lengths
from autopar.search.request import Narrowed, Request
from autopar.streams.assemble import PipelinePlan, StepPlan
from autopar.tuning import TUNING


class Planned(NamedTuple):
    """A plan of a step, what else was tried, its padding, and what is worth searching again if the step is rewritten."""

    step: StepPlan
    tried: list[tuple[str, str]]
    padded: Lengths
    shown: Narrowed


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What is in host memory.

    Attributes:
        arguments: Paths of arguments, between steps.
        activations: Number of residuals, from the forward to the backward pass (`inter_op/offloaded_residuals.py`).
    """

    arguments: tuple[str, ...] = ()
    activations: int = 0

    def __str__(self) -> str:
        return f"{offloaded_text(len(self.arguments), self.activations) or 'nothing'} on the hosts"


NOTHING = Offloaded()


def within_memory(plan: Callable[[Request], Planned], request: Request) -> tuple[Planned, Offloaded]:
    """Plan a step with `plan`; where memory binds, also with activations in host memory, and if nothing else fits, with its
    state there: the fastest plan wins.

    Raises:
        InfeasibleError: Nothing fits either way.
    """
    method, program, roles = request.method, request.program, request.roles
    followed = method.on_host if isinstance(method, Follow | FollowMesh) else ()
    if followed:
        return plan(request.of(offloaded_program(program, roles, Offloaded(followed)))), Offloaded(followed)
    ways = _Ways(plan, request)
    ways.attempt(NOTHING)
    if ways.best is None:
        ways.where_nothing_fits()
    elif method.offload == "auto" and not request.options.is_over and _memory_binds(ways.best.step, request):
        ways.activations()
    return ways.found()


class _Ways:
    """Plans a step with this or that offloaded.

    Attributes:
        best: The fastest plan so far; None: nothing has fitted yet.
        offloaded: What it offloads.
        failures: Why the others do not fit.
    """

    def __init__(self, plan: Callable[[Request], Planned], request: Request):
        self.plan, self.request = plan, request
        self.best: Planned | None = None
        self.offloaded = NOTHING
        self.failures: list[InfeasibleError] = []
        self.tried: list[tuple[Offloaded, str]] = []

    @functools.cached_property
    def residuals(self) -> Residuals:
        """What may be offloaded between the passes."""
        return find_residuals(self.request.program.jaxpr)

    def attempt(self, what: Offloaded) -> bool:
        """Plan the step with `what` offloaded; whether it is the fastest so far."""
        request, goal = self.request, self.request.options.goal
        try:
            program = offloaded_program(request.program, request.roles, what, lambda: self.residuals)
            known = math.inf if self.best is None else self.best.step.seconds
            narrowed = None if self.best is None else self.best.shown
            found = self.plan(dataclasses.replace(request, program=program, beat=known, narrowed=narrowed))
        except InfeasibleError as error:
            self.failures.append(error.kept())
            self.tried.append((what, error.summary))
            return False
        self.tried.append((what, seconds_text(found.step.seconds)))
        least = math.inf if self.best is None else self.best.step.seconds_for(goal)
        if self.offloaded == NOTHING:
            least *= 1 - TUNING.offload_gains
        if wins := found.step.seconds_for(goal) < least:
            self.best, self.offloaded = found, what
        return wins

    def activations(self, arguments: tuple[str, ...] = ()) -> None:
        """Offload activations, about half as many bytes of them each time, until the step is no faster."""
        device, residuals = self.request.cluster.device, self.residuals
        share, rate = 1.0, self.request.cluster.num_devices * device.host_bytes_per_second
        while count := residuals.count_of(share):
            copying = 2 * residuals.num_bytes(count) / rate
            share /= 2
            if self.best is not None and copying >= self.best.step.seconds:
                continue
            if self.request.options.is_over or not self.attempt(Offloaded(arguments, count)):
                return

    def where_nothing_fits(self) -> None:
        """Offload activations, or the optimizer's state, or both; then all state, and parameters are part of it."""
        failure, method = self.failures[0], self.request.method
        program, roles = self.request.program, self.request.roles
        optimizer, state = (offloadable_state(program, roles, parameters=too) for too in (False, True))
        if not hasattr(failure, "budget_bytes") or self.request.options.is_over:
            raise failure
        if method.offload == "never":
            if not state and not self.residuals.values:
                raise failure
            also = 'offload="auto" has activations and state wait in the memory of the hosts.'
            raise _again(failure, failure.given, f"{failure.do} Or {also}") from failure
        self.activations()
        if optimizer:
            self.attempt(Offloaded(optimizer))
            if self.best is None:
                self.activations(optimizer)
        if self.best is None and state != optimizer and not self.attempt(Offloaded(state)):
            self.activations(state)

    def found(self) -> tuple[Planned, Offloaded]:
        """The fastest plan, with what else was tried, and what it offloads.

        Raises:
            InfeasibleError: There is none.
        """
        if self.best is None:
            failure, last = self.failures[0], self.tried[-1][0]
            if last == NOTHING:
                raise failure
            raise _again(self.failures[-1], f"{self.failures[-1].given}, {last}", self.failures[-1].do) from failure
        others = [(str(what), outcome) for what, outcome in self.tried if what != self.offloaded]
        return self.best._replace(tried=[*self.best.tried, *others]), self.offloaded


def _memory_binds(planned: StepPlan, request: Request) -> bool:
    """Whether a plan was chosen to fit, and might be enough faster with less in the devices' memory to repay planning."""
    method = request.method
    if isinstance(planned, PipelinePlan):
        is_fixed = getattr(method, "recompute", "auto") != "auto"
        return any(s.sharded.problem.rows for s in planned.stages) if is_fixed else planned.memory_binds
    best = planned.stages[0].sharded
    won = planned.seconds - best.shared_seconds
    is_chosen = bool(best.problem.rows) or (isinstance(method, Auto) and planned.num_microbatches > 1)
    repaid = request.options.repays(TUNING.hoped * won, planning_seconds(best.problem))
    return is_chosen and repaid and won > TUNING.offload_gains * planned.seconds


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
    own = [*["state"] * bool(plan.offloaded), *["activations"] * bool(plan.offloaded_activations)]
    what = " with ".join(own) or "what the step copies there"
    raise InfeasibleError(
        "the hosts' memory is too small.",
        given=f"`{plan.name}`, whose plan has {bytes_text(needed)} of each {device} in the memory of its host",
        wrong=f"{what} is more than a device's share of it, {bytes_text(available)}.",
        do="take more devices or microbatches, offload less, or state how much there is: Device(host_memory_bytes=...).",
        budget_bytes=available,
        needed_bytes=needed,
    )


def offloadable_state(program: Program, roles: Roles, parameters: bool) -> tuple[str, ...]:
    """Paths of state that only the update of a step with gradients reads, such as moments; with `parameters` of all its state.

    State that is small beside the largest stays: the latency of its copies would outweigh the bytes saved.
    """
    read, of_state = read_for(program.jaxpr), set(roles.aliases.values())
    sizes = {
        k: num_bytes(var)
        for k, var in enumerate(program.jaxpr.invars)
        if k in of_state and (read[k] == "update" or (parameters and read[k] == "gradients"))
        if jnp.issubdtype(var.aval.dtype, jnp.inexact) and not on_host(var.aval)
    }
    least = TUNING.offloaded_least * max(sizes.values(), default=0)
    return tuple(program.in_paths[k] for k, size in sizes.items() if size >= least and size)


def offloaded_program(
    program: Program, roles: Roles, what: Offloaded, residuals: Callable[[], Residuals] | None = None
) -> Program:
    """The step with residuals, and these arguments and their new values, in host memory.

    `residuals`: finds those of the program, if they are known.
    """
    if what == NOTHING:
        return program
    inputs = [k for k, path in enumerate(program.in_paths) if path in what.arguments]
    jaxpr = program.jaxpr
    if what.activations:
        jaxpr = residuals_on_host(find_residuals(jaxpr) if residuals is None else residuals(), what.activations)
    if inputs:
        jaxpr = update_by_layer(jaxpr, [result for result, k in roles.aliases.items() if k in inputs])
        jaxpr = state_on_host(jaxpr, inputs, roles.aliases)
    check_after("offload", check_program, jaxpr)
    return dataclasses.replace(program, jaxpr=jaxpr)

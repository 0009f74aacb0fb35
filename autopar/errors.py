"""The exceptions that autopar raises for mistakes that the user can mend; and its warnings.

In:     what was given, what is wrong with it, what to do: one sentence each, with names, numbers and source lines.
Out:    an exception whose message shows the three in that order and whose fields carry the facts.
Method: one class per kind of mistake, all derived from `AutoparError`. An exception from the user's own code passes through
        unchanged while the step is traced; in a running step it is the `__cause__` of a `StepError`, which says where it was
        raised. Our own bugs are `assert`s. A warning tells of a step that works, but perhaps not as the user expects.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Self


class AutoparError(Exception):
    """A mistake that the user can mend.

    Facts are keyword arguments and become fields: `raise InfeasibleError("...", given=..., needed_bytes=10)` has
    `error.needed_bytes == 10`.

    Args:
        summary: What failed, in one line; or a whole message, without the three parts.
        given: What was passed in.
        wrong: Why it cannot be used.
        do: What to change.
        facts: Fields of the exception, for programs that catch it.
    """

    _UNKNOWN: Mapping[str, Any] = {}
    """Defaults of the facts that all errors of a class have."""

    def __init__(self, summary: str, *, given: str = "", wrong: str = "", do: str = "", **facts: Any) -> None:
        self.summary, self.given, self.wrong, self.do = summary, given, wrong, do
        self.facts = facts = {**self._UNKNOWN, **facts}
        for name, value in facts.items():
            assert not hasattr(type(self), name), f"fact {name!r} would hide an attribute of {type(self).__name__}"
            setattr(self, name, value)
        parts = (("given", given), ("wrong", wrong), ("do", do))
        told = ((label, text.strip().replace("\n", "\n" + " " * 10)) for label, text in parts if text)
        lines = [f"  {label + ':':7} {text}" for label, text in told]
        super().__init__("\n".join([summary, *lines]))

    def kept(self) -> Self:
        """This error without the frames that it, its cause and its context came through; whoever keeps it keeps no more."""
        chain: list[BaseException] = [self]
        for error in chain:
            error.__traceback__ = None
            chain += [e for e in (error.__cause__, error.__context__) if e is not None and e not in chain]
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not pickle by themselves, and workers send theirs to the driver.
        return _rebuild, (type(self), self.summary, self.given, self.wrong, self.do, self.facts)


def _rebuild(kind: type[AutoparError], summary: str, given: str, wrong: str, do: str, facts: dict) -> AutoparError:
    return kind(summary, given=given, wrong=wrong, do=do, **facts)


class TraceError(AutoparError):
    """The step cannot be traced to one program: a leaf is not an array, or the function closes over tracers."""


class UnsupportedPrimitiveError(AutoparError):
    """The program contains an operation that cannot be sharded or replicated. Facts: `primitive`, `source`."""


class RuleError(AutoparError):
    """A sharding rule given by the user does not fit the operation. Facts: `rule`, `shapes`."""


class BatchError(AutoparError):
    """The batch is ambiguous among the arguments, or does not divide. Facts: `candidates` or `size`."""

    _UNKNOWN = {"candidates": None, "size": None}


class StateError(AutoparError):
    """A step takes a gradient and returns no new value of any argument. Facts: `paths`, of the lost state."""


class MicrobatchError(AutoparError):
    """The step would compute something else in microbatches. Facts: `operation`, `source`."""


class PipelineError(AutoparError):
    """The step cannot be cut into the requested stages. Facts: `num_stages`."""


class ClusterError(AutoparError):
    """The description of the machine is invalid: no such device, a count below one, unreadable text."""


class NodeLostError(ClusterError):
    """A node of a Ray cluster has died. Facts: `node`, its address."""


class MeshError(ClusterError):
    """A logical mesh that these devices cannot form. Facts: `shape`, `num_devices`."""


class DeviceCountError(ClusterError):
    """The plan or mesh wants another number of devices than there are. Facts: `wanted`, `available`."""


class ConstraintError(AutoparError):
    """A sharding constraint names no tensor, or one that cannot be split so. Facts: `path`, `spec`."""


class InfeasibleError(AutoparError):
    """It is proved that no plan satisfies what was asked. Facts: `budget_bytes` and `needed_bytes`, or `constraint`."""


class NoPlanFoundError(InfeasibleError):
    """No plan within the memory budget was found, though none is proved impossible. Facts: `budget_bytes`, and `needed_bytes`
    of the smallest plan found."""


def needed_bytes(error: AutoparError | None) -> float:
    """The bytes that a plan needs, if the error tells; else inf."""
    return float(getattr(error, "needed_bytes", math.inf))


class SolverError(AutoparError):
    """The solver is not installed, or ended without an answer. Facts: `solver`, `status`."""


class PlanFileError(AutoparError):
    """The file is not a plan that this version can read. Facts: `path`."""

    _UNKNOWN = {"path": ""}


class ProfileError(AutoparError):
    """The file is not a machine's profile that this version can read, or it is of other devices. Facts: `path`."""


class StalePlanError(AutoparError):
    """The plan was made for another program or cluster. Facts: `changed`, what differs, one line each."""


class CheckpointError(AutoparError):
    """A checkpoint is damaged, missing, or of another state. Facts: `path`, of the leaf or on disk."""

    _UNKNOWN = {"path": ""}


class WorkerError(AutoparError):
    """A part of the machine failed during a step. Facts, None where unknown: `worker`, `stage`, `instruction`, `microbatch`,
    `waited_for`."""

    _UNKNOWN = dict.fromkeys(("worker", "stage", "instruction", "microbatch", "waited_for"))


class StructureChangedError(AutoparError):
    """A later call passes arguments of another structure, shape or dtype than the plan's. Facts: `path`."""

    _UNKNOWN = {"path": ""}


class StepError(AutoparError):
    """A step failed while it ran: a callback raised, memory ran out, a NaN where `jax_debug_nans` forbids it.

    Its `__cause__` is the original exception. Facts: `stage` and `microbatch` (None: of none), `task` in words, `source`,
    `state_lost`: whether arguments were overwritten before the failure; `results`: the step's results, if all were computed
    nevertheless (a callback without results raised), else None.
    """

    results: Any


class DonatedError(AutoparError, RuntimeError):
    """An array is gone: it was donated to a step, or the workers that held it have ended.

    Facts: `paths`, of a step's arguments; or the `shape` and `dtype` of a handle that is read.
    """


class NotBuiltYetError(AutoparError, NotImplementedError):
    """A public name that this version does not implement. Facts: `feature`."""


def check_number(
    owner: str,
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float = math.inf,
    is_whole: bool = False,
    kind: type[AutoparError] = AutoparError,
    do: str = "pass such a number, or leave it out.",
    **facts: Any,
) -> None:
    """Check that a parameter is a number within its bounds; without `least` it must be more than 0.

    `owner`: the function or class that has the parameter `name`, as the user writes it (`fit`); "": none. `kind`, `facts`:
    the class and facts of the error.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_of_kind = is_number and (isinstance(value, Integral) or not is_whole)
    if is_of_kind and (value > 0 if least is None else value >= least) and value <= most:
        return
    bounds = "more than 0" if least is None else f"{least:g} or more"
    bounds += f", at most {most:g}" if most < math.inf else ""
    raise kind(
        f"`{name}` must be a {'whole ' * is_whole}number, {bounds}.",
        given=f"{owner}({name}={value!r})" if owner else f"{name}={value!r}",
        wrong="it is not." if is_number else f"it is of type {type(value).__name__}.",
        do=do,
        **facts,
    )


def check_choice(
    owner: str,
    name: str,
    value: Any,
    known: Collection[str],
    *,
    kind: type[AutoparError] = AutoparError,
    do: str = "name one of them, or leave it out.",
    **facts: Any,
) -> None:
    """Check that a parameter is one of the `known` words; other arguments as in `check_number`."""
    if value not in tuple(known):
        near = difflib.get_close_matches(str(value).lower(), known, n=1)
        raise kind(
            f"there is no such `{name}`.",
            given=f"{owner}({name}={value!r})" if owner else f"{name}={value!r}",
            wrong=f"autopar knows {', '.join(map(repr, known))}.",
            do=(f"did you mean {near[0]!r}? " if near else "") + do,
            **facts,
        )


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` names, or lines, and how many more there are."""
    gap = "\n" if between == "\n" else " "
    return between.join(names[:most]) + (f"{gap}and {len(names) - most} more" if len(names) > most else "")


def warn(text: str) -> None:
    """Issue a warning, located at the line of the user's program that called autopar."""
    package, level, outermost, frame = os.path.dirname(__file__) + os.sep, 0, 0, sys._getframe(0).f_back
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(package):
            outermost = level
        frame = frame.f_back
    warnings.warn(text, stacklevel=outermost + 2)

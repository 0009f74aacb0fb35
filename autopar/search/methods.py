"""What the user may ask for: plan everything, or fix a known method.

In:     `@autopar.parallelize(method=...)`.
Out:    one frozen dataclass per method; `Method` is their closed union.
Method: a hand method only forbids choices (`intra_op/restrict.py`), so all methods share one planner and one cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError
from autopar.mesh import LogicalMesh
from autopar.options import Goal, Options, Recompute, Settings
from autopar.plan.decision import Decision
from autopar.streams.schedules import AUTOMATIC, find_schedule
from autopar.tuning import TUNING


@dataclass(frozen=True, kw_only=True)
class _Settings(Settings):
    def __post_init__(self) -> None:
        self.options()  # a mistake in it is told at once

    def options(self) -> Options:
        """The planner's options."""
        names = [setting.name for setting in dataclasses.fields(Options) if hasattr(self, setting.name)]
        return Options(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class _StageSettings(_Settings):
    """What every method takes that may cut the step into pipeline stages.

    Attributes:
        recompute: What the backward pass of a stage recomputes: `"auto"`, as much as memory demands; `"cheap"`, `"all"`,
            operations per byte saved, or a tuple of these for the stages.
    """

    recompute: Recompute = "auto"


@dataclass(frozen=True)
class ShardParallel(_Settings):
    """Shard every operation as the ILP finds best, on one mesh of all devices.

    Attributes:
        mesh_shape: A tuple, a `LogicalMesh` whose links then hold, or `"auto"`: every shape is tried.
        num_microbatches: The batch is worked through in so many parts, which takes less memory; gradients are added up
            and communicated once per step.
    """

    mesh_shape: Any = "auto"
    num_microbatches: int = 1

    def options(self) -> Options:
        """The planner's options; one mesh is taken all pains with."""
        steps = TUNING.repaying_steps if isinstance(self.mesh_shape, str) else math.inf
        return dataclasses.replace(super().options(), repaying_steps=steps)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("ShardParallel", "num_microbatches", self.num_microbatches)
        shape = self.mesh_shape
        if not (
            (isinstance(shape, str) and shape == "auto")
            or isinstance(shape, LogicalMesh)
            or (isinstance(shape, tuple) and all(isinstance(n, int) and n > 0 for n in shape))
        ):
            raise AutoparError(
                "unknown mesh shape.",
                given=f"mesh_shape={shape!r}",
                wrong="it is no shape of a mesh.",
                do='pass "auto", a tuple such as (2, 4), or a LogicalMesh.',
            )


@dataclass(frozen=True)
class DataParallel(_Settings):
    """Split the batch over all devices; ZeRO stage `zero` (0 to 3) says what of the state is stored split.

    Stages 1 and 2 are the same plan: gradients are reduce-scattered in both. With microbatches they are so once per
    step, after all of them.
    """

    zero: int = 0
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("DataParallel", "num_microbatches", self.num_microbatches)
        _check_zero("DataParallel", self.zero)


@dataclass(frozen=True)
class Auto(_StageSettings):
    """Decide everything: the mesh and every sharding; where memory binds, in how many microbatches gradients are
    accumulated; and on several hosts, or where nothing else fits, whether to cut the step into pipeline stages, which, on
    which submeshes, in how many microbatches and by which schedule.

    Attributes:
        steps: How many steps are to be trained, about. What takes longer to plan than it may win in so many is left out;
            `math.inf`: nothing is left out for that.
    """

    steps: float = TUNING.repaying_steps

    def options(self) -> Options:
        """The planner's options."""
        return dataclasses.replace(super().options(), repaying_steps=self.steps)

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int | float) or not self.steps > 0:
            raise AutoparError(
                "unknown number of steps.",
                given=f"steps={self.steps!r}",
                wrong="it is no positive number.",
                do="pass about how many steps are to be trained, such as 100_000, or math.inf.",
            )
        super().__post_init__()
        if isinstance(self.recompute, tuple):
            raise AutoparError(
                "how much each stage runs again cannot be said before the stages are known.",
                given=f"Auto(recompute={self.recompute!r})",
                wrong="Auto decides how many stages there are.",
                do="pass one level for all stages, or fix the stages: PipelineParallel(num_stages=...).",
            )


@dataclass(frozen=True)
class Inference(_Settings):
    """Decide everything, for a step that trains nothing: a model's answer, a prefill, one token of a decoder.

    What goes in and comes back (a cache of keys and values) is state, donated as in training; parameters keep their sharding.

    Attributes:
        latency: True: the least seconds from a call to its result. False: the most calls per second, where they follow
            each other without waiting for results: of a pipeline the slowest stage counts, since the next call fills it
            while the last one drains.
    """

    latency: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.latency, bool):
            raise AutoparError(
                "`latency` is yes or no.",
                given=f"Inference(latency={self.latency!r})",
                wrong=f"it is of type {type(self.latency).__name__}.",
                do="pass True for the fastest answer to one call, False for the most calls per second.",
            )

    def options(self) -> Options:
        """The planner's options."""
        goal: Goal = "step" if self.latency else "calls"
        return dataclasses.replace(super().options(), goal=goal, repaying_steps=TUNING.repaying_steps)


@dataclass(frozen=True)
class PipelineParallel(_StageSettings):
    """Cut the step into pipeline stages on equal submeshes; how each stage is sharded on its own is found.

    Attributes:
        num_stages: How many; None: one more than the `mark_stage`s in the step. With `"interleaved"`, how many meshes:
            each of them holds two stages; with `"interleaved-4"`, four.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"interleaved-4"`, `"zb-h1"`, `"zb-h1-whole"`, `"inference"`, or an
            object with `name` and `order(num_stages, num_microbatches)`. `"auto"`: the fastest of those that train.
        num_microbatches: None: four for each stage, or what divides the batch below that; one, with a warning, where several
            would compute something else.
        submeshes: Devices of each stage, such as (1, 1, 2, 4); None: equally many.
    """

    num_stages: int | None = None
    schedule: Any = "1f1b"
    num_microbatches: int | None = None
    submeshes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_stages", "num_microbatches"):
            if getattr(self, name) is not None:
                _check_count("PipelineParallel", name, getattr(self, name))
        _check_schedule(self.schedule)
        if self.submeshes is not None:
            if not isinstance(self.submeshes, tuple | list) or not self.submeshes:
                raise AutoparError(
                    "submeshes are counts of devices.",
                    given=f"PipelineParallel(submeshes={self.submeshes!r})",
                    wrong="it is no tuple with one for each stage.",
                    do="pass a tuple such as (1, 1, 2), or leave it out for equal ones.",
                )
            for count in self.submeshes:
                _check_count("PipelineParallel", "submeshes", count)
            if self.num_stages not in (None, len(self.submeshes)):
                raise AutoparError(
                    "stages and submeshes differ in number.",
                    given=f"PipelineParallel(num_stages={self.num_stages}, submeshes={self.submeshes})",
                    wrong=f"there are {len(self.submeshes)} submeshes.",
                    do="leave num_stages out, or give one submesh for each stage.",
                )


@dataclass(frozen=True)
class ThreeD(_StageSettings):
    """Data x tensor x pipeline degrees, as in Megatron-LM.

    Attributes:
        data: Each stage's samples are split over so many devices.
        tensor: Each stage's weights are split over so many devices, by columns and rows, heads and vocabulary; none is
            gathered.
        pipeline: Number of stages; with `"interleaved"`, of meshes, which hold two stages each (`"interleaved-4"`: four).
        num_microbatches: None: four for each stage, or what divides the batch below that; one, with a warning, where several
            would compute something else.
        schedule: As of `PipelineParallel`.
        zero: What of the state is split over the data axis too, as of `DataParallel`.
        sequence: Between products activations are split over the tensor axis (sequence parallelism): sums are scattered
            and gathered where they would be added up for all.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    num_microbatches: int | None = None
    schedule: Any = "1f1b"
    zero: int = 0
    sequence: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data", "tensor", "pipeline"):
            _check_count("ThreeD", name, getattr(self, name))
        if self.num_microbatches is not None:
            _check_count("ThreeD", "num_microbatches", self.num_microbatches)
        _check_schedule(self.schedule)
        _check_zero("ThreeD", self.zero)


@dataclass(frozen=True)
class Follow(_Settings):
    """Run on the stages of another step's pipeline, its state where it is; `autopar.follow` makes it.

    Attributes:
        plan: The other step's.
        paths: Arguments that are state of the other step: path here -> path there.
    """

    plan: Decision = field(repr=False, hash=False)
    paths: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def on_host(self) -> tuple[str, ...]:
        """Arguments that the other step keeps in the memory of the hosts."""
        return tuple(path for path, there in self.paths.items() if there in self.plan.offloaded)


@dataclass(frozen=True)
class FollowMesh(ShardParallel):
    """Run on the mesh of another step, of whose state some is in the memory of the hosts; `autopar.follow` makes it.

    Attributes:
        on_host: Paths of the arguments that are there.
    """

    on_host: tuple[str, ...] = ()


def _check_schedule(schedule: Any) -> None:
    if schedule != AUTOMATIC:
        find_schedule(schedule)


def _check_zero(method: str, zero: object) -> None:
    if zero not in (0, 1, 2, 3):
        raise AutoparError(
            "unknown ZeRO stage.",
            given=f"{method}(zero={zero!r})",
            wrong="there is no such stage.",
            do="pass 0, 1, 2 or 3.",
        )


def _check_count(method: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AutoparError(
            f"`{name}` must be a whole number, at least 1.",
            given=f"{method}({name}={value!r})",
            wrong="there is no such number of parts.",
            do="pass 1 for the whole batch at once, or a number that divides the batch size."
            if name == "num_microbatches"
            else "pass an int that is more than 0.",
        )


Method = Auto | Inference | ShardParallel | DataParallel | PipelineParallel | ThreeD | Follow


def method_text(method: Method) -> str:
    """The method as one writes it: what is left at its default is left out."""
    if isinstance(method, Follow):
        return f"follow `{method.plan.name}`, {method.plan.method}"
    stated = []
    for setting in dataclasses.fields(method):
        value = getattr(method, setting.name)
        default = {} if setting.default is dataclasses.MISSING else setting.default
        if value != default:
            stated.append(f"{setting.name}={_setting_text(value)}")
    return f"{type(method).__name__}({', '.join(stated)})"


def _setting_text(value: object) -> str:
    if isinstance(value, LogicalMesh):
        return f"LogicalMesh({value.shape}, {value.axis_names})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in value.items()) + "}"
    return repr(value)

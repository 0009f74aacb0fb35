"""The methods that a user may ask for: plan everything, or fix a known scheme.

In:     `@autopar.parallelize(method=...)`.
Out:    one frozen dataclass per method; `Method` is their closed union.
Method: a fixed scheme only forbids choices (`intra_op/restrict.py`), so that all methods share one planner and one cost
        model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError, check_number
from autopar.mesh import LogicalMesh
from autopar.options import Goal, Options, Recompute, Settings
from autopar.plan.decision import Decision
from autopar.streams.schedules import AUTOMATIC, find_schedule
from autopar.tuning import TUNING


@dataclass(frozen=True, kw_only=True)
class _Settings(Settings):
    def __post_init__(self) -> None:
        self.options()  # reports mistakes at once

    def options(self) -> Options:
        """The planner's options."""
        names = [setting.name for setting in dataclasses.fields(Options) if hasattr(self, setting.name)]
        return Options(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class _StageSettings(_Settings):
    """Settings of methods that may cut the step into pipeline stages.

    Attributes:
        recompute: What the backward pass of a stage recomputes: `"auto"`, as much as memory demands; `"cheap"`, `"all"`,
            operations per byte saved, or a tuple with one of these per stage.
    """

    recompute: Recompute = "auto"


@dataclass(frozen=True)
class ShardParallel(_Settings):
    """Shard every operation as the ILP finds best, on one mesh of all devices.

    Attributes:
        mesh_shape: A tuple; a `LogicalMesh`, whose links are used; or `"auto"`: every shape is tried.
        num_microbatches: Number of microbatches that the batch is split into, which saves memory; gradients are accumulated
            and communicated once per step.
    """

    mesh_shape: Any = "auto"
    num_microbatches: int = 1

    def options(self) -> Options:
        """The planner's options; a given mesh is planned as thoroughly as possible."""
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
    """Split the batch over all devices; the ZeRO stage `zero` (0 to 3) says which state is stored split.

    Stages 1 and 2 are the same plan: gradients are reduce-scattered in both; with microbatches once per step, after the
    last one.
    """

    zero: int = 0
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("DataParallel", "num_microbatches", self.num_microbatches)
        _check_zero("DataParallel", self.zero)


@dataclass(frozen=True)
class Auto(_StageSettings):
    """Decide everything: the mesh and every sharding; where memory binds, the number of microbatches for gradient
    accumulation; and on several hosts, or where nothing else fits, whether to cut the step into pipeline stages, which, on
    which submeshes, with how many microbatches and by which schedule.

    Attributes:
        steps: About how many steps are to be trained. Planning that takes longer than it may save in so many steps is
            skipped; `math.inf`: nothing is skipped for that reason.
    """

    steps: float = TUNING.repaying_steps

    def options(self) -> Options:
        """The planner's options."""
        return dataclasses.replace(super().options(), repaying_steps=self.steps)

    def __post_init__(self) -> None:
        told = "pass about how many steps are to be trained, such as 100_000, or math.inf."
        check_number("Auto", "steps", self.steps, do=told)
        super().__post_init__()
        if isinstance(self.recompute, tuple):
            raise AutoparError(
                "recomputation cannot be given per stage before the stages are known.",
                given=f"Auto(recompute={self.recompute!r})",
                wrong="Auto decides how many stages there are.",
                do="pass one level for all stages, or fix the stages: PipelineParallel(num_stages=...).",
            )


@dataclass(frozen=True)
class Inference(_Settings):
    """Decide everything, for a step without training: a model's answer, a prefill, one token of a decoder.

    Arguments that are returned updated (a cache of keys and values) are state, donated as in training; parameters keep their
    sharding.

    Attributes:
        latency: True: minimize the seconds from a call to its result. False: maximize calls per second, if calls do not
            wait for each other's results: of a pipeline the slowest stage counts, since the next call fills it while the
            last one drains.
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
    """Cut the step into pipeline stages; each stage is sharded as the ILP finds best on its submesh.

    Attributes:
        num_stages: Number of stages; None: one more than the `mark_stage`s in the step. With `"interleaved"`, number of
            meshes, each of which holds two stages; with `"interleaved-4"`, four.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"interleaved-4"`, `"zb-h1"`, `"zb-h1-whole"`, `"inference"`, or an
            object with `name` and `order(num_stages, num_microbatches)`. `"auto"`: the fastest of "1f1b", "zb-h1" and the
            interleaved ones; the later ones are tried only while devices wait.
        num_microbatches: None: four per stage, or the most below that which divide the batch; one, with a warning, if
            several would change what the step computes.
        submeshes: Number of devices of each stage, such as (1, 1, 2, 4); None: equal numbers.
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
    """Data, tensor and pipeline parallelism of given degrees, as in Megatron-LM.

    Attributes:
        data: Number of devices that each stage's samples are split over.
        tensor: Number of devices that each stage's weights are split over, by columns and rows, heads and vocabulary;
            none is gathered.
        pipeline: Number of stages; with `"interleaved"`, of meshes, which hold two stages each (`"interleaved-4"`: four).
        num_microbatches: None: four per stage, or the most below that which divide the batch; one, with a warning, if
            several would change what the step computes.
        schedule: As in `PipelineParallel`.
        zero: ZeRO stage over the data axis, as in `DataParallel`.
        sequence: Whether activations between products are split over the tensor axis (sequence parallelism): sums are
            reduce-scattered and later gathered, instead of all-reduced.
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
    """Run on the stages of another step's pipeline, its state in place; made by `autopar.follow`.

    Attributes:
        plan: The other step's plan.
        paths: Path of an argument that is state of the other step -> its path in that step.
    """

    plan: Decision = field(repr=False, hash=False)
    paths: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def on_host(self) -> tuple[str, ...]:
        """Paths of the arguments that the other step keeps in host memory."""
        return tuple(path for path, there in self.paths.items() if there in self.plan.offloaded)


@dataclass(frozen=True)
class FollowMesh(ShardParallel):
    """Run on the mesh of another step that keeps some of its state in host memory; made by `autopar.follow`.

    Attributes:
        on_host: Paths of the arguments in host memory.
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
    parts = "pass 1 for the whole batch at once, or a number that divides the batch size."
    do = parts if name == "num_microbatches" else "pass an int that is more than 0."
    check_number(method, name, value, least=1, is_whole=True, do=do)


Method = Auto | Inference | ShardParallel | DataParallel | PipelineParallel | ThreeD | Follow


def count_of(method: Method) -> int:
    """The number of microbatches that a method asks for; 1 if it leaves that open."""
    return getattr(method, "num_microbatches", None) or 1


def method_text(method: Method) -> str:
    """The method as written in Python, without settings at their defaults."""
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

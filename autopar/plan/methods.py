"""What the user may ask for: plan everything, or fix a known method.

In:     `@autopar.parallelize(method=...)`.
Out:    one frozen dataclass per method; `Method` is their closed union.
Method: a hand method only forbids choices (`intra_op/restrict.py`), so all methods share one planner and one cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError, NotBuiltYetError
from autopar.mesh import LogicalMesh
from autopar.options import Options, Solver


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What every method takes.

    Attributes:
        memory_budget_bytes: Bytes one device may use; None: the device's own memory.
        constraints: Pins `{path glob: PartitionSpec}` over argument paths such as `"state/params/*/kernel"`.
        solver: `"highs"` or `"cbc"`.
        solver_seconds: Time limit of one solve.
    """

    memory_budget_bytes: int | None = None
    constraints: Mapping[str, Any] = field(default_factory=dict, hash=False)
    solver: Solver = "highs"
    solver_seconds: float = 60.0

    def options(self) -> Options:
        """The planner's options."""
        return Options(
            memory_budget_bytes=self.memory_budget_bytes,
            constraints=dict(self.constraints),
            solver=self.solver,
            solver_seconds=self.solver_seconds,
        )


@dataclass(frozen=True)
class ShardParallel(_Settings):
    """Shard every operation as the ILP finds best, on one mesh of all devices.

    Attributes:
        mesh_shape: A tuple, a `LogicalMesh` whose links then hold, or `"auto"`: every shape is tried.
        num_microbatches: 1; more is not built yet.
    """

    mesh_shape: Any = "auto"
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        if self.num_microbatches != 1:
            raise NotBuiltYetError(
                "microbatches are not built yet.",
                given=f"ShardParallel(num_microbatches={self.num_microbatches})",
                wrong="this version runs the whole batch at once.",
                do="leave num_microbatches out.",
                feature="microbatches",
            )
        shape = self.mesh_shape
        if not (
            shape == "auto"
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

    Stages 1 and 2 are the same plan while there are no microbatches: gradients are reduce-scattered in both.
    """

    zero: int = 0

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise AutoparError(
                "unknown ZeRO stage.",
                given=f"DataParallel(zero={self.zero!r})",
                wrong="there is no such stage.",
                do="pass 0, 1, 2 or 3.",
            )


@dataclass(frozen=True)
class Auto(_Settings):
    """Decide everything. This version does not cut pipelines: it is `ShardParallel(mesh_shape="auto")`."""


@dataclass(frozen=True)
class PipelineParallel(_Settings):
    """Pipeline stages; not built yet."""

    num_stages: int | None = None
    schedule: str = "1f1b"
    num_microbatches: int | None = None

    def __post_init__(self) -> None:
        _not_yet("PipelineParallel")


@dataclass(frozen=True)
class ThreeD(_Settings):
    """Data x tensor x pipeline degrees; not built yet."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    num_microbatches: int | None = None
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        _not_yet("ThreeD")


def _not_yet(name: str) -> None:
    raise NotBuiltYetError(
        f"{name} is not built yet.",
        given=f"method={name}(...)",
        wrong="this version cuts no pipeline stages.",
        do="use Auto(), ShardParallel() or DataParallel().",
        feature=name,
    )


Method = Auto | ShardParallel | DataParallel | PipelineParallel | ThreeD

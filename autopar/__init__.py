"""autopar: automatic parallel training in JAX. One line, `@autopar.parallelize`, runs a training step on many devices."""

from autopar import adapters, checkpoint, errors, loggers  # noqa: F401  (importing the adapters registers them)
from autopar.api import parallelize
from autopar.calibrate import calibrate
from autopar.compare import Comparison, compare
from autopar.compiled import CompiledStep
from autopar.fit import fit
from autopar.fit.hosts import batches
from autopar.follow import follow
from autopar.ir.rules.mark import mark_stage
from autopar.ir.rules.opaque import sharding_rule
from autopar.mesh import Achieved, Cluster, Device, Link, LogicalMesh, MachineProfile
from autopar.report.plan import Plan
from autopar.report.show import show
from autopar.search.methods import Auto, DataParallel, Inference, PipelineParallel, ShardParallel, ThreeD
from autopar.step import ParallelStep

__version__ = "0.1.0"
__all__ = [
    "Achieved",
    "Auto",
    "Cluster",
    "Comparison",
    "CompiledStep",
    "DataParallel",
    "Device",
    "Inference",
    "Link",
    "LogicalMesh",
    "MachineProfile",
    "ParallelStep",
    "PipelineParallel",
    "Plan",
    "ShardParallel",
    "ThreeD",
    "batches",
    "calibrate",
    "checkpoint",
    "compare",
    "errors",
    "fit",
    "follow",
    "loggers",
    "mark_stage",
    "parallelize",
    "sharding_rule",
    "show",
]

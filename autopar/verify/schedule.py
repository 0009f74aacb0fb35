"""Simulates a compiled program in the order in which it runs: its collectives, and the kernels that overlap with them.

In:     `Module`, the mesh, the device.
Out:    `Followed`: every collective with its executions, and seconds of kernels, collectives and waiting.
Method: two clocks, of kernels and of the network. A kernel advances the first, a collective the second; waiting for a
        collective advances the first to its end, and one that runs beside kernels slows them down as in the plan, which
        counts as waiting, too (`intra_op/lanes.py`). A loop is simulated once, and counts by its trips. Kernels take the longer
        of their products at the device's rate and their bytes at its memory's: of an array of which they only read or replace
        a part, those of the part. What XLA for TPUs runs in another form counts as what the program asked for
        (`rewritten.py`), and takes as long as what runs. XLA compiles here without tuning kernels, so this shows what
        overlaps with a collective, and not how long a step takes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.cost import collective_seconds
from autopar.cost.steps import COLLECTIVE_KINDS, CollectiveKind
from autopar.mesh import Device, LogicalMesh
from autopar.plan.words import type_text
from autopar.verify.hlo import Hlo, Module, dims_of, dtype_of, groups_of, parts_of, type_bytes
from autopar.verify.rewritten import Asked, find_rewritten

_FREE = frozenset("parameter constant tuple get-tuple-element bitcast after-all iota partition-id replica-id".split())
_PARTS = ("slice", "dynamic-slice", "gather")
"""These read as much of their first operand as they return."""
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""These replace a part of their first operand in place; which operand holds the new part."""
_BEGINS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""Custom calls around an asynchronous collective of XLA for TPUs; the fusions between the two carry out parts of it."""
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8"}


@dataclass(frozen=True, slots=True)
class Emitted:
    """A collective of a compiled program.

    Attributes:
        kind: Kind of collective.
        axes: Mesh axes that it runs over.
        bytes: Operand bytes on one device; for an all-gather, result bytes.
        times: Executions in one run of the program.
        is_async: Whether it is asynchronous.
        seconds: Seconds of one execution, by the cost model.
        hidden_seconds: Seconds of kernels between its begin and its end, in one execution.
        sent_as: The kind that is sent, if XLA runs it in another form.
        is_added: Whether the program did not ask for it.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    times: int
    is_async: bool
    seconds: float
    hidden_seconds: float
    sent_as: CollectiveKind | None = None
    is_added: bool = False


@dataclass(slots=True)
class Followed:
    """The record of a simulated program.

    Attributes:
        collectives: Its collectives, in order.
        kernels: Executions of custom calls, by target and first result, whose shape is local:
            `__cudnn$fmhaSoftmax bf16[4,256,8,64]`.
        compute_seconds: Seconds of all kernels.
        exposed_seconds: Seconds in which kernels wait for collectives or are slowed down by them.
    """

    collectives: list[Emitted] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def bytes_of(self) -> dict[str, int]:
        """Kind of collective -> executed bytes, without what XLA added."""
        found: dict[str, int] = {}
        for c in (c for c in self.collectives if not c.is_added):
            found[c.kind] = found.get(c.kind, 0) + c.times * c.bytes
        return found


def follow_program(module: Module, mesh: LogicalMesh, device: Device, on_tpus: bool = False) -> Followed:
    """Simulate a compiled program."""
    follower = _Follower(module, mesh, device)
    follower.rewritten = find_rewritten(module, mesh.num_devices) if on_tpus else {}
    follower.run(module.entry, 1)
    return follower.seen


class _Follower:
    """The state of a simulation; `run` returns the seconds of one execution of a computation."""

    def __init__(self, module: Module, mesh: LogicalMesh, device: Device):
        self.module, self.mesh, self.device = module, mesh, device
        self.seen = Followed()
        self.type_of = {hlo.name: hlo.type for lines in module.computations.values() for hlo in lines}
        self.axes_of = dict(_groups_of_axes(mesh))
        self.rewritten: Mapping[str, tuple[Asked, ...]] = {}

    def run(self, computation: str, times: int) -> float:
        now = network = 0.0
        begun: dict[str, tuple[float, float, Hlo, Hlo]] = {}
        for hlo in self.module.computations[computation]:
            inner = self._collective_in(hlo)
            if inner is not None:
                seconds = self._seconds(inner)
                network = max(now, network) + seconds
                if (_begins(hlo) or inner.chain is not None) and not hlo.is_synchronous:
                    slowed = (1 - self.device.achieved.overlap) * seconds
                    self.seen.exposed_seconds += times * slowed
                    now += slowed
                    begun[hlo.name] = (now, network, hlo, inner)
                else:
                    self._note(inner, times, False, 0.0)
                    self.seen.exposed_seconds += times * (network - now)
                    now = network
            elif (ended := self._ended(hlo, begun)) is not None:
                start, end, _, inner = begun.pop(ended)
                self._note(inner, times, True, now - start)
                self.seen.exposed_seconds += times * max(0.0, end - now)
                now = max(now, end)
            else:
                now += self._kernels(hlo, times)
        return now

    def _kernels(self, hlo: Hlo, times: int) -> float:
        """Seconds of an instruction that is no collective."""
        if hlo.opcode == "while":
            trips = self.module.trips(hlo)
            return trips * sum(self.run(name, times * trips) for name in hlo.called)
        if hlo.opcode in ("call", "conditional"):
            return max((self.run(name, times) for name in hlo.called), default=0.0)
        if hlo.opcode in _FREE or hlo.opcode.endswith("-done"):
            return 0.0
        if hlo.opcode == "custom-call":
            self.seen.kernels[f"{hlo.target} {_array_text(hlo.type)}".rstrip()] += times
        operands = [self.type_of.get(name, "") for name in hlo.operands]
        seconds = kernel_seconds(hlo, operands, self._moved_bytes(hlo), self.device)
        self.seen.compute_seconds += times * seconds
        return seconds

    def _moved_bytes(self, hlo: Hlo) -> int:
        """Bytes that a kernel reads and writes."""
        lines: tuple[Hlo, ...] = (hlo,)
        given = hlo.operands
        if hlo.opcode == "fusion" and hlo.called:
            lines = self.module.computations[hlo.called[0]]
            parameters = {int(line.operands[0]): line.name for line in lines if line.opcode == "parameter"}
            given = tuple(parameters[k] for k in range(len(parameters)))
        made = {line.name: line for line in lines}
        read = {name: 0 for line in lines for name in (line.name, *line.operands)}  # bytes of each value that are read
        for line in reversed(lines):
            for position, name in enumerate(line.operands):
                part = read[line.name] if line.opcode == "bitcast" else _part_bytes(line, position)
                read[name] += self._bytes_of(name) if part is None else part

        def written(line: Hlo) -> int:
            if line.opcode in ("tuple", "bitcast"):
                return sum(written(made[name]) for name in line.operands if name in made)
            return self._bytes_of(line.operands[_UPDATES[line.opcode]]) if line.opcode in _UPDATES else line.num_bytes

        return written(lines[-1]) + sum(min(read[name], self._bytes_of(name)) for name in given)

    def _bytes_of(self, name: str) -> int:
        return type_bytes(self.type_of.get(name, ""))

    def _collective_in(self, hlo: Hlo) -> Hlo | None:
        """The collective that an instruction is or contains; asynchronous ones are wrapped, or fused with a slice."""
        if kind_of(hlo.opcode) is not None:
            return hlo
        if hlo.opcode in ("async-start", "fusion"):
            lines = [line for name in hlo.called for line in self.module.computations[name]]
            found = next((found for line in lines if (found := self._collective_in(line)) is not None), None)
            is_begun = found is None or found.chain is None or any(line.target == _BEGINS for line in lines)
            return found if is_begun else None
        return None

    def _ended(self, hlo: Hlo, begun: Mapping[str, tuple[float, float, Hlo, Hlo]]) -> str | None:
        """Return the name of the collective that ends with an instruction; None: none does."""
        if hlo.opcode.endswith("-done") and hlo.operands:
            return hlo.operands[0] if hlo.operands[0] in begun else None
        lines = (
            [line for name in hlo.called for line in self.module.computations[name]] if hlo.opcode == "fusion" else []
        )
        if not any(line.target == _ENDS for line in lines):
            return None
        chains = {line.chain for line in lines} - {None}
        return next((name for name, (*_, inner) in begun.items() if inner.chain in chains), None)

    def _note(self, hlo: Hlo, times: int, is_async: bool, hidden: float) -> None:
        runs = kind_of(hlo.opcode)
        assert runs is not None
        all_asked = self.rewritten.get(hlo.name) or (Asked(runs, self._bytes(hlo), runs),)
        total = sum(asked.bytes for asked in all_asked)
        for asked in all_asked:
            is_added, kind = asked.kind is None, asked.kind or runs
            num_bytes = self._bytes(hlo) if is_added else asked.bytes
            sent_as = asked.sent_as if asked.sent_as != kind else None
            seconds = self._seconds(hlo) * (asked.bytes / total if total else 1.0)
            self.seen.collectives.append(
                Emitted(kind, self._axes(hlo), num_bytes, times, is_async, seconds, hidden, sent_as, is_added)
            )

    def _bytes(self, hlo: Hlo) -> int:
        if hlo.opcode == "all-gather":
            return hlo.num_bytes
        if hlo.opcode == "all-gather-start":
            *_, result = parts_of(hlo.type)
            return type_bytes(result)
        if kind_of(hlo.opcode) == "ragged-all-to-all":  # the larger side is a buffer for the worst case
            result = [*parts_of(hlo.type)][-1] if _begins(hlo) else hlo.type
            return min(type_bytes(self.type_of[hlo.operands[0]]), type_bytes(result))
        return sum(type_bytes(self.type_of[name]) for name in hlo.operands)

    def _axes(self, hlo: Hlo) -> tuple[str, ...]:
        groups = groups_of(hlo.attributes, self.mesh.num_devices)
        return self.axes_of.get(frozenset(map(frozenset, groups)), tuple(self.mesh.axis_sizes))

    def _seconds(self, hlo: Hlo) -> float:
        asked = self.rewritten.get(hlo.name)
        kind = kind_of(hlo.opcode) if asked is None else asked[0].sent_as
        assert kind is not None
        return collective_seconds(kind, self._bytes(hlo), self._axes(hlo), self.mesh)


def _part_bytes(reader: Hlo, position: int) -> int | None:
    """What an instruction reads of its operand at a position, if it is only a part."""
    if position == 0 and reader.opcode in _UPDATES:
        return 0
    return reader.num_bytes if position == 0 and reader.opcode in _PARTS else None


def _array_text(kind: str) -> str:
    """The first array of a type; "" if it has none."""
    name = dtype_of(kind)
    return type_text(dims_of(kind), name) if name else ""


def _begins(hlo: Hlo) -> bool:
    return hlo.opcode.endswith("-start")


def kind_of(opcode: str) -> CollectiveKind | None:
    """The kind of collective of an opcode; None: it is no collective."""
    kind = opcode.removesuffix("-start")
    return next((known for known in COLLECTIVE_KINDS if known == kind), None)


def _groups_of_axes(mesh: LogicalMesh) -> Iterator[tuple[frozenset[frozenset[int]], tuple[str, ...]]]:
    """Groups of devices -> axes of a collective over them; choices with fewer axes come later, and replace equal ones."""
    numbers, names = np.arange(mesh.num_devices).reshape(mesh.shape), tuple(mesh.axis_sizes)
    choices = [c for count in range(len(names), 0, -1) for c in itertools.combinations(range(len(names)), count)]
    for choice in choices:
        kept = [k for k in range(len(names)) if k not in choice]
        size = math.prod(mesh.shape[k] for k in choice)
        rows = numbers.transpose(*kept, *choice).reshape(-1, size)
        yield frozenset(frozenset(map(int, row)) for row in rows), tuple(names[k] for k in choice)


def kernel_seconds(hlo: Hlo, operands: list[str], num_bytes: int, device: Device) -> float:
    """Seconds of one kernel: launch, and the longer of its products and its bytes at the rates that the device reaches."""
    reached = device.achieved
    moving = num_bytes / (device.memory_bytes_per_second * reached.memory)
    flops = product_flops(hlo, operands)
    name = _DTYPES.get(dtype_of(operands[0]), "float32") if operands else "float32"
    computing = flops / (device.product_flops_per_second([name]) * reached.product) if flops else 0.0
    return reached.launch_seconds + max(moving, computing)


def product_flops(hlo: Hlo, operands: list[str]) -> float:
    """FLOPs of a matrix product or a convolution; 0 for other kernels."""
    if hlo.opcode == "dot" or "gemm_backend_config" in hlo.attributes:
        lhs = dims_of(operands[0])
        depth = math.prod(lhs[k] for k in hlo.number_list("lhs_contracting_dim(?:ension)?s"))
        return 2.0 * math.prod(dims_of(hlo.type)) * depth
    labels = hlo.attributes.split("dim_labels=")
    if len(labels) < 2:
        return 0.0
    _, kernel, _ = labels[1].split(",")[0].replace("->", "_").split("_")
    sizes = [dims_of(text) for text in (*operands[:2], hlo.type)]
    shapes = {"Forward": (1, 2), "BackwardInput": (1, 0), "BackwardFilter": (2, 1)}
    weights, out = next((at for name, at in shapes.items() if f"conv{name}" in hlo.target), (1, 2))
    return 2.0 * math.prod(sizes[out]) * math.prod(sizes[weights]) / sizes[weights][kernel.index("o")]


def program_kernels(kernels: Mapping[str, int]) -> dict[str, int]:
    """Custom kernels that are neither XLA's, whose names begin as classes do, nor of libraries for products."""
    libraries = ("__cublas", "__cudnn$conv")
    return {name: n for name, n in kernels.items() if not name.startswith(libraries) and not name[0].isupper()}

"""The accelerators that people use: rates, memory, what kernels reach of them, and how they are usually connected.

In:     (data only; `find_device.py` finds a device by its name.)
Out:    `MODELS`: of each device a `Model`: its rates, the devices of a usual host, the link within it and that between hosts.
Method: peak rates are dense, without sparsity, as the vendors' datasheets state them; beside them stands what is reached.
        Products: what the best of many shapes reaches for seconds (Bekman, "Machine Learning Engineering", table of
        maximum achievable matmul FLOPS), times `SUSTAINED`, the part of it that a device holds all through a step.
        A link's rate is what one device sends in one direction (half of the datasheet's figure), times what large
        collectives reach of it. The rate between hosts is one network card per device where such hosts have one.
        The link to the host is PCIe x16 in one direction: 3.0 of V100 and TPUs (16 GB/s), 4.0 of A100, L4 and L40S (32), 5.0
        since H100 (64); or NVLink-C2C of Grace (450: half of its datasheet's 900).
        The host's memory is that of the usual host, shared among its devices: 512 GB of DGX-1, 1 and 2 TB of DGX A100, 2 TB
        of DGX H100, H200, B200 and B300, 480 GB of a Grace for two, 384 GB for eight L4 and 1536 GB for eight L40S where
        they are rented, and what Google Cloud's documentation has of hosts of TPUs (407, 384, 448 and 1440 GB).
        Watts are what a device is rated for, as its datasheet has it.
        Latencies are those of a hop with which NCCL chooses its algorithms. `Cluster(...)` takes measured figures instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.mesh.device import Achieved, Device
from autopar.mesh.link import Link
from autopar.mesh.torus import torus_parts

SUSTAINED = 0.915
"""Part of the best product's rate that training holds: fitted to published steps on A100, H100 and V100, one number for all."""
_MEMORY = 0.88
"""Part of the memory's rate that long streams reach; BabelStream's triad: 0.87 on V100 and A100, 0.90 on H100."""
_LAUNCH, _TILE = 4e-6, 1.9e-6
"""Seconds of a launch, and to fill and empty a tile's pipeline: fitted, with the balance of Hopper's tiles, to the products
that OpenXLA's cost model lists as measured on an H100 (`matmul_interpolator_data.h`, 70 shapes, mean error 4 %)."""
_NVLINK, _NETWORK = 0.8, 0.92
"""Parts of their rates that NCCL's rings reach: 235 of 300 GB/s between A100s and 360 of 450 between H100s, 23 of 25 GB/s
over InfiniBand HDR (nccl-tests)."""
_HOST = 0.8
"""Part of the link to the host that copies of pinned memory reach: 12.8 of 16 GB/s on V100, 26 of 32 on A100 (CUDA's
bandwidthTest)."""
_OVERLAP = 0.85
"""Part of a collective that leaves the kernels beside it alone: NCCL's own kernels hold 16 to 24 of 132 multiprocessors."""
_HOPS = 3.4e-6, 9.6e-6
"""Latency of a hop over NVLink and over a network, NCCL's protocol for long messages (`src/graph/tuning.cc`)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A device as it is sold.

    Attributes:
        device: Rates and memory, and what is reached.
        devices_per_host: In a usual host.
        intra: Link between devices of a host, as reached.
        inter: Link between hosts, per device, as reached.
        intra_peak: Bytes per second of the former as the datasheet has it, one device in one direction.
        inter_peak: The same of the latter.
        source: Where the figures are from.
        torus: Axes of the torus that its links form, and a multiple of which length closes such an axis; None: no torus.
    """

    device: Device
    devices_per_host: int
    intra: Link
    inter: Link
    intra_peak: float
    inter_peak: float
    source: str
    torus: tuple[int, int] | None = None

    def links_of(self, num_devices: int) -> tuple[Link, Link]:
        """Links inside a host and between hosts, of a machine with so many devices."""
        if self.torus is None:
            return self.intra, self.inter
        parts = torus_parts(num_devices, *self.torus)
        return dataclasses.replace(self.intra, torus=parts), dataclasses.replace(self.inter, torus=parts)


def _gpu(
    name: str,
    tflops: Mapping[str, float],
    gigabytes: float,
    memory_gb_per_second: float,
    intra_gb_per_second: float,
    inter_gb_per_second: float,
    achieved: Achieved,
    source: str,
    per_host: int = 8,
    hops: tuple[float, float] = _HOPS,
    switch_gb_per_second: float = 0.0,
    groups: tuple[tuple[int, float], ...] = (),
    watts: float | None = None,
    host_gb_per_second: float = 64.0,
    host_gigabytes: float = 256.0,
) -> Model:
    rates = {k: v * 1e12 for k, v in tflops.items()}
    host = host_gb_per_second * 1e9 * _HOST, host_gigabytes * 1e9
    device = Device(name, rates, gigabytes * 1e9, memory_gb_per_second * 1e9, achieved, watts, *host)
    intra, inter = intra_gb_per_second * 1e9, inter_gb_per_second * 1e9
    return Model(
        device,
        per_host,
        Link(hops[0], intra * _NVLINK, switch_gb_per_second * 1e9, True, groups),
        Link(hops[1], inter * _NETWORK, 0.0, True),
        intra,
        inter,
        source,
    )


def _tpu(
    name: str,
    tflops: Mapping[str, float],
    gigabytes: float,
    memory_gb_per_second: float,
    per_host: int,
    torus_gb_per_second: float,
    source: str,
    torus: tuple[int, int],
    host_gigabytes: float,
) -> Model:
    """A chip of a torus: the links between hosts are those inside one, and a ring along an axis has a link each way."""
    rates = {k: v * 1e12 for k, v in tflops.items()}
    # Programs are compiled whole, so nothing is launched; the units take tiles of 128 or 256 one after the other.
    achieved = Achieved(product=0.85, memory=_MEMORY, fused=0.5, overlap=0.95)
    host = host_gigabytes / per_host * 1e9
    device = Device(name, rates, gigabytes * 1e9, memory_gb_per_second * 1e9, achieved, host_memory_bytes=host)
    rate = torus_gb_per_second * 1e9
    return Model(device, per_host, Link(1e-6, rate * 0.9), Link(1e-6, rate * 0.9), rate, rate, source, torus)


def _reached(best: float, cores: int, fused: float = 0.45, balance: float = 137.0) -> Achieved:
    """What a GPU reaches: the best product as a part of the peak, its multiprocessors, the part fused attention reaches."""
    return Achieved(
        product=SUSTAINED * best,
        memory=_MEMORY,
        fused=fused,
        launch_seconds=_LAUNCH,
        cores=cores,
        tile_seconds=_TILE,
        balance=balance,
        overlap=_OVERLAP,
    )


def _rates(
    eight: float, sixteen: float, tfloat32: float, single: float, double: float | None = None
) -> dict[str, float]:
    """Peak TFLOP/s of products by the bits of what is multiplied."""
    rates = {"float8": eight, "int8": eight, "bfloat16": sixteen, "float16": sixteen}
    rates |= {"tfloat32": tfloat32, "float32": single}
    return rates if double is None else {**rates, "float64": double}


_OLD_TILES = 80.0
"""Balance of tiles before Hopper: a core multiplies 0.6 times as fast and loads as fast."""
_VOLTA = {"float16": 125, "float32": 15.7, "float64": 7.8}
_AMPERE = {"bfloat16": 312, "float16": 312, "tfloat32": 156, "float32": 19.5, "float64": 19.5, "int8": 624}
_HOPPER = _rates(1979, 989.5, 494.5, 67, 67)
_HOPPER_PCIE = _rates(1513, 756.5, 378, 51, 51)
_BLACKWELL = _rates(4500, 2250, 1125, 75, 37)
_GRACE_BLACKWELL = _rates(5000, 2500, 1250, 80, 40)
_V100 = _reached(0.755, 80, 0.35, _OLD_TILES)
_A100 = _reached(0.869, 108, 0.5, _OLD_TILES)
_H100 = _reached(0.803, 132)
_B200 = _reached(0.776, 148)
_CUBE = ((2, 1 / 6), (4, 2 / 3))
"""A hybrid cube of V100s, as DGX-1 and p3.16xlarge have it: of the six links of each, one joins the first two of a host, and
rings through a group of four find four."""
_CUBES, _SQUARES = (3, 4), (2, 16)
"""Tori of TPUs: slices of whole cubes of 4 x 4 x 4 chips close on all axes, those on 2 axes on sides of 16."""
_PCIE3, _PCIE4, _PCIE5, _C2C = 16.0, 32.0, 64.0, 450.0
_PCIE_HOPS = 5.7e-6, 9.6e-6

# fmt: off
MODELS: dict[str, Model] = {
    # name, peak rates, GB of memory, its GB/s, GB/s within a host, GB/s between hosts, what is reached; source
    "v100-16": _gpu("V100-16GB", _VOLTA, 16, 900, 150, 3.125, _V100,
        "NVIDIA V100 datasheet (SXM2); DGX-1: 4 x 100 Gb/s / 8, halved", groups=_CUBE, watts=300, host_gb_per_second=_PCIE3,
        host_gigabytes=64),
    "v100-32": _gpu("V100-32GB", _VOLTA, 32, 900, 150, 6.25, _V100,
        "NVIDIA V100 datasheet (SXM2); DGX-1: 4 x 100 Gb/s / 8", groups=_CUBE, watts=300, host_gb_per_second=_PCIE3,
        host_gigabytes=64),
    "a100-40": _gpu("A100-40GB", _AMPERE, 40, 1555, 300, 25, _A100,
        "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gb/s", watts=400, host_gb_per_second=_PCIE4, host_gigabytes=128),
    "a100-80": _gpu("A100-80GB", _AMPERE, 80, 2039, 300, 25, _A100,
        "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gb/s", watts=400, host_gb_per_second=_PCIE4),
    "h100": _gpu("H100", _HOPPER, 80, 3350, 450, 50, _H100,
        "NVIDIA H100 datasheet (SXM5); DGX H100: 8 x 400 Gb/s; NVLink SHARP: 480 GB/s of bus bandwidth (nccl-tests)",
        switch_gb_per_second=274, watts=700),
    "h100-500w": _gpu("H100-500W", _HOPPER, 96, 2400, 450, 50, _reached(0.62, 132, 0.35),
        "H100 with HBM2e and a limit of 500 W, as torchtitan's reports describe theirs", watts=500),
    "h100-pcie": _gpu("H100-PCIe", _HOPPER_PCIE, 80, 2000, _PCIE5, 25, _reached(0.7, 114),
        "NVIDIA H100 datasheet (PCIe, 350 W); PCIe 5.0 x16", hops=_PCIE_HOPS, watts=350),
    "h200": _gpu("H200", _HOPPER, 141, 4800, 450, 50, _H100,
        "NVIDIA H200 datasheet (SXM); DGX H200: 8 x 400 Gb/s", switch_gb_per_second=274, watts=700),
    "b200": _gpu("B200", _BLACKWELL, 180, 8000, 900, 50, _B200,
        "NVIDIA DGX B200 datasheet, one of eight", switch_gb_per_second=480, watts=1000),
    "b300": _gpu("B300", _BLACKWELL, 288, 8000, 900, 100, _reached(0.786, 148),
        "NVIDIA DGX B300 datasheet, one of eight; 8 x 800 Gb/s", switch_gb_per_second=480, watts=1400),
    "gb200": _gpu("GB200", _GRACE_BLACKWELL, 186, 8000, 900, 50, _reached(0.729, 148),
        "NVIDIA GB200 NVL72 datasheet, one of 72; 400 Gb/s each", per_host=72, switch_gb_per_second=480,
        watts=1200, host_gb_per_second=_C2C, host_gigabytes=240),
    "gb300": _gpu("GB300", _GRACE_BLACKWELL, 288, 8000, 900, 100, _reached(0.74, 148),
        "NVIDIA GB300 NVL72 datasheet, one of 72; 800 Gb/s each", per_host=72, switch_gb_per_second=480,
        watts=1400, host_gb_per_second=_C2C, host_gigabytes=240),
    "l4": _gpu("L4", _rates(242, 121, 60, 30.3), 24, 300, _PCIE4, 12.5, _reached(0.7, 58, 0.4, _OLD_TILES),
        "NVIDIA L4 datasheet; PCIe 4.0 x16", hops=_PCIE_HOPS, watts=72, host_gb_per_second=_PCIE4, host_gigabytes=48),
    "l40s": _gpu("L40S", _rates(733, 362, 183, 91.6), 48, 864, _PCIE4, 25, _reached(0.7, 142, 0.4, _OLD_TILES),
        "NVIDIA L40S datasheet; PCIe 4.0 x16", hops=_PCIE_HOPS, watts=350, host_gb_per_second=_PCIE4, host_gigabytes=192),
    "mi300x": _gpu("MI300X", _rates(2615, 1307, 654, 163.4, 81.7), 192, 5300, 448, 50, _reached(0.514, 304, 0.3),
        "AMD Instinct MI300X datasheet; 7 Infinity Fabric links of 128 GB/s", watts=750),
    # name, peak rates, GB of memory, its GB/s, chips in a host, GB/s along an axis of the torus; source
    "tpu-v4": _tpu("TPU v4", {"bfloat16": 275, "int8": 275}, 32, 1200, 4, 100,
        "Google Cloud TPU v4 documentation; 6 links of 50 GB/s on 3 axes, two each", _CUBES, 407),
    "tpu-v5e": _tpu("TPU v5e", {"bfloat16": 197, "int8": 394}, 16, 819, 8, 100,
        "Google Cloud TPU v5e documentation; 1600 Gb/s on 2 axes", _SQUARES, 384),
    "tpu-v5p": _tpu("TPU v5p", {"bfloat16": 459, "int8": 918}, 95, 2765, 4, 200,
        "Google Cloud TPU v5p documentation; 4800 Gb/s on 3 axes", _CUBES, 448),
    "tpu-v6e": _tpu("TPU v6e", {"bfloat16": 918, "int8": 1836}, 32, 1640, 8, 224,
        "Google Cloud TPU v6e documentation; 3584 Gb/s on 2 axes", _SQUARES, 1440),
}
# fmt: on

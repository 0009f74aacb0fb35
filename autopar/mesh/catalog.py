"""The catalog of accelerators: rates, memory, what kernels reach of them, and their usual hosts and links.

In:     (data only; `find_device.py` finds a device by its name.)
Out:    `MODELS`: a `Model` per device: its rates, the devices of a usual host, the links within and between hosts.
Method: peak rates are dense, without sparsity, from the vendors' datasheets; beside each is the fraction that is reached.
        Products: what the best of many shapes reaches for seconds (Bekman, "Machine Learning Engineering", tables of
        maximum achievable matmul FLOPS; for devices not in them 0.7, or the figure of a sister model), times `SUSTAINED`, the
        fraction of it that a device holds through a whole step. H100 reaches 0.709 of its 8-bit peak there, 0.803 of 16 bits.
        Fused attention: 0.6 of the peak while it multiplies (Dao, "FlashAttention-2", 2023, on A100; Shah et al.,
        "FlashAttention-3", 2024, on H100; long causal sequences, both passes, heads of 128). H100 spends 0.24 of its time on
        exponentials, 16 per clock and multiprocessor. Blackwell multiplies twice as fast and computes no more of them, which
        leaves 0.46 to 0.48 of its peak; Blackwell Ultra twice as many (NVIDIA, "Inside NVIDIA Blackwell Ultra", 2025).
        A link's rate is what one device sends in one direction (half of the datasheet's figure), times the fraction that
        large collectives reach. The rate between hosts is one network card per device where such hosts have one.
        The link to the host is PCIe x16 in one direction: 3.0 for V100, T4 and TPUs (16 GB/s), 4.0 for Ampere and Ada (32),
        5.0 since H100 (64); or Grace's NVLink-C2C (450: half of its datasheet's 900).
        Host memory is that of the usual host, shared among its devices: 512 GB for DGX-1, 1 and 2 TB for DGX A100, 2 TB
        for DGX H100, H200, B200 and B300, 480 GB for a Grace with one or two; for rented cards 48 GB per card of 24 GB (G5,
        G6), 96 and 192 GB per larger one; for TPUs as in Google Cloud's documentation.
        Watts are the rated power of the datasheet.
        Latencies are those per hop with which NCCL chooses its algorithms. `Cluster(...)` takes measured figures instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.mesh.device import Achieved, Device
from autopar.mesh.link import Link, torus_parts

SUSTAINED = 0.915
"""Fraction of the best product's rate that training holds: fitted to published steps on A100, H100, V100; one for all."""
_MEMORY = 0.88
"""Fraction of the memory's rate that long streams reach; BabelStream's triad: 0.87 on V100 and A100, 0.90 on H100."""
_LAUNCH, _TILE = 4e-6, 1.9e-6
"""Seconds of a launch, and to fill and empty a tile's pipeline: fitted, with the balance of Hopper's tiles, to the products
that OpenXLA's cost model lists as measured on an H100 (`matmul_interpolator_data.h`, 70 shapes, mean error 4 %)."""
_NVLINK, _NETWORK = 0.8, 0.92
"""Fractions of their rates that NCCL's rings reach: 235 of 300 GB/s between A100s and 360 of 450 between H100s, 23 of 25 GB/s
over InfiniBand HDR (nccl-tests)."""
_HOST = 0.8
"""Fraction of the link to the host that copies of pinned memory reach: 12.8 of 16 GB/s on V100, 26 of 32 on A100 (CUDA's
bandwidthTest)."""
_NARROW = 0.709 / 0.803
_OVERLAP = 0.85
"""Fraction of a collective that does not slow kernels beside it: NCCL's kernels occupy 16 to 24 of 132 multiprocessors."""
_HOPS, _PCIE_HOPS = (3.4e-6, 9.6e-6), (5.7e-6, 9.6e-6)
"""Latency of a hop within a host (NVLink, PCIe) and over a network, in NCCL's protocol for long messages
(`src/graph/tuning.cc`)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A device as it is sold.

    Attributes:
        device: Rates and memory, and what is reached.
        devices_per_host: Devices in a usual host.
        intra: Link between devices of a host, with the rate that is reached.
        inter: Link between hosts, per device, with the rate that is reached.
        inter_peak: Datasheet's bytes per second between hosts, of one device in one direction.
        source: Where the figures are from.
        torus: (axes of the torus that its links form, multiple of the length at which an axis closes); None: no torus.
        capability: Compute capability of an NVIDIA GPU; None for other devices.
        per_chip: How many JAX devices one sold unit is: a TPU chip, a module of two dies.
    """

    device: Device
    devices_per_host: int
    intra: Link
    inter: Link
    inter_peak: float
    source: str
    torus: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None
    per_chip: int = 1

    def links_of(self, num_devices: int) -> tuple[Link, Link]:
        """Links within a host and between hosts, in a machine of `num_devices`."""
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
    capability: tuple[int, int] | None = None,
    per_host: int = 8,
    hops: tuple[float, float] = _HOPS,
    switch_gb_per_second: float = 0.0,
    groups: tuple[tuple[int, float], ...] = (),
    watts: float | None = None,
    host_gb_per_second: float = 64.0,
    host_gigabytes: float = 256.0,
    per_chip: int = 1,
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
        inter,
        source,
        capability=capability,
        per_chip=per_chip,
    )


def _card(
    name: str,
    tflops: Mapping[str, float],
    gigabytes: float,
    memory_gb_per_second: float,
    achieved: Achieved,
    source: str,
    capability: tuple[int, int] | None,
    watts: float,
    host_gb_per_second: float = 32.0,
    inter_gb_per_second: float = 12.5,
    host_gigabytes: float | None = None,
) -> Model:
    """A GPU on a card, whose link to the others of its host is PCIe x16 too."""
    return _gpu(
        name,
        tflops,
        gigabytes,
        memory_gb_per_second,
        host_gb_per_second,
        inter_gb_per_second,
        achieved,
        f"{source}; PCIe x16",
        capability,
        hops=_PCIE_HOPS,
        watts=watts,
        host_gb_per_second=host_gb_per_second,
        host_gigabytes=host_gigabytes or 2 * gigabytes,
    )


_AWAITED_ON_TPUS = "all-reduce", "reduce-scatter"
"""XLA for TPUs runs them one by one, unless its flags say otherwise, as its compiled programs show (`autopar verify`)."""


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
    per_chip: int = 1,
    fused: float = 0.5,
    product: float = 0.85,
) -> Model:
    """A TPU chip: hosts are connected by the same links as the chips of one, and a ring along an axis has a link each way."""
    rates = {k: v * 1e12 for k, v in tflops.items()}
    # A program is compiled as a whole, so there are no launches; the matrix units process tiles of 128 or 256 in sequence.
    achieved = Achieved(product=product, memory=_MEMORY, fused=fused, overlap=0.95, awaited=_AWAITED_ON_TPUS)
    host = host_gigabytes / per_host * 1e9
    device = Device(name, rates, gigabytes * 1e9, memory_gb_per_second * 1e9, achieved, host_memory_bytes=host)
    rate = torus_gb_per_second * 1e9
    link = Link(1e-6, rate * 0.9)
    return Model(device, per_host, link, link, rate, source, torus, None, per_chip)


def _reached(best: float, cores: int, fused: float = 0.6, balance: float = 137.0, narrow: float = _NARROW) -> Achieved:
    """What a GPU reaches. `best`: the best product's fraction of the peak; `cores`: multiprocessors; `fused`: attention's."""
    return Achieved(
        product=SUSTAINED * best,
        memory=_MEMORY,
        fused=fused,
        launch_seconds=_LAUNCH,
        cores=cores,
        tile_seconds=_TILE,
        balance=balance,
        overlap=_OVERLAP,
        narrow=narrow,
    )


def _rates(
    eight: float, sixteen: float, tfloat32: float, single: float, double: float | None = None
) -> dict[str, float]:
    """Peak TFLOP/s of products by the operands' dtype."""
    rates = {"float8": eight, "int8": eight, "bfloat16": sixteen, "float16": sixteen}
    rates |= {"tfloat32": tfloat32, "float32": single}
    return rates if double is None else {**rates, "float64": double}


def _ampere(sixteen: float, single: float, double: float | None = None) -> dict[str, float]:
    """As `_rates`, for a generation without products of 8-bit floats."""
    rates = _rates(2 * sixteen, sixteen, sixteen / 2, single, double)
    return {dtype: rate for dtype, rate in rates.items() if dtype != "float8"}


_OLD_TILES = 80.0
"""Balance of tiles before Hopper: a core multiplies 0.6 times as fast, and loads as fast."""
_VOLTA = {"float16": 125, "float32": 15.7, "float64": 7.8}
_TURING = {"float16": 65, "float32": 8.1, "int8": 130}
_HOPPER = _rates(1979, 989.5, 494.5, 67, 67)
_HOPPER_PCIE = _rates(1513, 756.5, 378, 51, 51)
_BLACKWELL = _rates(4500, 2250, 1125, 75, 37)
_GRACE_BLACKWELL = _rates(5000, 2500, 1250, 80, 40)
_AMPERE = _ampere(312, 19.5, 19.5)
_V100 = _reached(0.755, 80, 0.35, _OLD_TILES)
_A100 = _reached(0.869, 108, 0.6, _OLD_TILES)
_H100 = _reached(0.803, 132)
_B200 = _reached(0.776, 148, 0.48)
_CUBE = ((2, 1 / 6), (4, 2 / 3))
"""The hybrid cube of V100s in DGX-1 and p3.16xlarge: of each one's six links, one joins the first two devices of a host, and
rings through a group of four use four."""
_HALF_FILLED = 0.74 / 2
"""Fused attention on matrix units of 256 by 256, which heads of 128 fill to a half in both products, and 0.74 of that: Llama
3.1 70B with samples of 131,072 tokens takes 34.0 s on TPU7x where the same tokens in samples of 8,192 take 12.3 (tpu-recipes,
Ironwood)."""
_TRILLIUM = SUSTAINED * 728 / 918
"""Products on TPU v6e: XLA's reach 728 TFLOP/s in bfloat16, bound by the matrix units and not by memory; times of the device's
own clock (yangwhale/gpu-tpu-pedia, `tpu/v7_perf`, 2026)."""
_CUBES, _SQUARES = (3, 4), (2, 16)
"""TPU tori, (axes, closing length): 3D slices of whole cubes of 4 x 4 x 4 chips close on all axes, 2D ones on sides of 16."""
_PCIE3, _PCIE4, _PCIE5, _C2C = 16.0, 32.0, 64.0, 450.0

# fmt: off
MODELS: dict[str, Model] = {
    # name, peak rates, GB of memory, its GB/s, GB/s within a host, GB/s between hosts, what is reached; source
    "v100-16": _gpu("V100-16GB", _VOLTA, 16, 900, 150, 3.125, _V100,
        "NVIDIA V100 datasheet (SXM2); DGX-1: 4 x 100 Gb/s / 8, halved", (7, 0), groups=_CUBE, watts=300,
        host_gb_per_second=_PCIE3, host_gigabytes=64),
    "v100-32": _gpu("V100-32GB", _VOLTA, 32, 900, 150, 6.25, _V100,
        "NVIDIA V100 datasheet (SXM2); DGX-1: 4 x 100 Gb/s / 8", (7, 0), groups=_CUBE, watts=300,
        host_gb_per_second=_PCIE3, host_gigabytes=64),
    "t4": _card("T4", _TURING, 16, 320, _reached(0.7, 40, 0.35, _OLD_TILES), "NVIDIA T4 datasheet", (7, 5), 70, _PCIE3),
    "a100-40": _gpu("A100-40GB", _AMPERE, 40, 1555, 300, 25, _A100,
        "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gb/s", (8, 0), watts=400, host_gb_per_second=_PCIE4,
        host_gigabytes=128),
    "a100-80": _gpu("A100-80GB", _AMPERE, 80, 2039, 300, 25, _A100,
        "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gb/s", (8, 0), watts=400, host_gb_per_second=_PCIE4),
    "a800": _gpu("A800", _AMPERE, 80, 2039, 200, 25, _A100,
        "NVIDIA A800 datasheet (SXM4): an A100 with 8 of its 12 links", (8, 0), watts=400, host_gb_per_second=_PCIE4),
    "a30": _card("A30", _ampere(165, 10.3, 10.3), 24, 933, _reached(0.811, 56, 0.5, _OLD_TILES), "NVIDIA A30 datasheet",
        (8, 0), 165),
    "a10": _card("A10", _ampere(125, 31.2), 24, 600, _reached(0.7, 72, 0.4, _OLD_TILES), "NVIDIA A10 datasheet", (8, 6), 150),
    "a10g": _card("A10G", _ampere(70, 35), 24, 600, _reached(0.7, 80, 0.4, _OLD_TILES),
        "NVIDIA A10G datasheet, as in g5 instances", (8, 6), 300),
    "a40": _card("A40", _ampere(149.7, 37.4), 48, 696, _reached(0.7, 84, 0.4, _OLD_TILES), "NVIDIA A40 datasheet", (8, 6),
        300),
    "rtx-a6000": _card("RTX-A6000", _ampere(154.8, 38.7), 48, 768, _reached(0.7, 84, 0.4, _OLD_TILES),
        "NVIDIA RTX A6000 datasheet", (8, 6), 300),
    "rtx-3090": _card("RTX-3090", _ampere(71, 35.6), 24, 936, _reached(0.7, 82, 0.4, _OLD_TILES),
        "NVIDIA GA102 whitepaper, sums in 32 bits", (8, 6), 350),
    "l4": _card("L4", _rates(242, 121, 60, 30.3), 24, 300, _reached(0.7, 58, 0.4, _OLD_TILES), "NVIDIA L4 datasheet", (8, 9),
        72),
    "l40s": _card("L40S", _rates(733, 362, 183, 91.6), 48, 864, _reached(0.7, 142, 0.4, _OLD_TILES),
        "NVIDIA L40S datasheet", (8, 9), 350, inter_gb_per_second=25, host_gigabytes=192),
    "l40": _card("L40", _rates(362, 181, 90.5, 90.5), 48, 864, _reached(0.7, 142, 0.4, _OLD_TILES), "NVIDIA L40 datasheet",
        (8, 9), 300),
    "rtx-6000-ada": _card("RTX-6000-Ada", _rates(729, 364, 182, 91.1), 48, 960, _reached(0.7, 142, 0.4, _OLD_TILES),
        "NVIDIA RTX 6000 Ada datasheet", (8, 9), 300),
    "rtx-4090": _card("RTX-4090", _rates(330, 165, 82.6, 82.6), 24, 1008, _reached(0.7, 128, 0.4, _OLD_TILES),
        "NVIDIA Ada whitepaper, sums in 32 bits", (8, 9), 450),
    "h100": _gpu("H100", _HOPPER, 80, 3350, 450, 50, _H100,
        "NVIDIA H100 datasheet (SXM5); DGX H100: 8 x 400 Gb/s; NVLink SHARP: 480 GB/s of bus bandwidth (nccl-tests)", (9, 0),
        switch_gb_per_second=274, watts=700),
    "h100-500w": _gpu("H100-500W", _HOPPER, 96, 2400, 450, 50, _reached(0.62, 132, 0.6 * 0.62 / 0.803),
        "H100 with HBM2e and a limit of 500 W, as torchtitan's reports describe theirs: it slows attention as it does products",
        (9, 0), watts=500),
    "h100-pcie": _gpu("H100-PCIe", _HOPPER_PCIE, 80, 2000, _PCIE5, 25, _reached(0.7, 114),
        "NVIDIA H100 datasheet (PCIe, 350 W); PCIe 5.0 x16", (9, 0), hops=_PCIE_HOPS, watts=350),
    "h100-nvl": _card("H100-NVL", _rates(1671, 835, 418, 60, 60), 94, 3900, _reached(0.7, 132), "NVIDIA H100 NVL datasheet",
        (9, 0), 400, _PCIE5, 25),
    "h800": _gpu("H800", _rates(1979, 989.5, 494.5, 67, 1), 80, 3350, 200, 50, _H100,
        "NVIDIA H800 datasheet (SXM5): an H100 with 8 of its 18 links", (9, 0), watts=700),
    "h20": _gpu("H20", _rates(296, 148, 74, 44, 1), 96, 4000, 450, 50, _reached(0.803, 78),
        "NVIDIA H20 datasheet (SXM5)", (9, 0), switch_gb_per_second=274, watts=400),
    "h200": _gpu("H200", _HOPPER, 141, 4800, 450, 50, _H100,
        "NVIDIA H200 datasheet (SXM); DGX H200: 8 x 400 Gb/s", (9, 0), switch_gb_per_second=274, watts=700),
    "gh200": _gpu("GH200", _HOPPER, 96, 4000, 450, 50, _reached(0.838, 132, narrow=0.776 / 0.836),
        "NVIDIA GH200 datasheet, one a host; 400 Gb/s", (9, 0), per_host=1, watts=900, host_gb_per_second=_C2C,
        host_gigabytes=480),
    "b200": _gpu("B200", {**_BLACKWELL, "float4": 9000}, 180, 8000, 900, 50, _B200,
        "NVIDIA DGX B200 datasheet, one of eight", (10, 0), switch_gb_per_second=480, watts=1000),
    "b300": _gpu("B300", {**_BLACKWELL, "float4": 13500}, 288, 8000, 900, 100, _reached(0.786, 148, 0.6),
        "NVIDIA DGX B300 datasheet, one of eight; 8 x 800 Gb/s", (10, 3), switch_gb_per_second=480, watts=1400),
    "gb200": _gpu("GB200", {**_GRACE_BLACKWELL, "float4": 10000}, 186, 8000, 900, 50, _reached(0.729, 148, 0.46),
        "NVIDIA GB200 NVL72 datasheet, one of 72; 400 Gb/s each", (10, 0), per_host=72, switch_gb_per_second=480,
        watts=1200, host_gb_per_second=_C2C, host_gigabytes=240),
    "gb300": _gpu("GB300", {**_GRACE_BLACKWELL, "float4": 15000}, 288, 8000, 900, 100, _reached(0.74, 148, 0.58),
        "NVIDIA GB300 NVL72 datasheet, one of 72; 800 Gb/s each", (10, 3), per_host=72, switch_gb_per_second=480,
        watts=1400, host_gb_per_second=_C2C, host_gigabytes=240),
    "rtx-5090": _card("RTX-5090", _rates(419, 209.5, 104.8, 104.8), 32, 1792, _reached(0.7, 170, 0.4, _OLD_TILES),
        "NVIDIA RTX Blackwell whitepaper, sums in 32 bits", (12, 0), 575, _PCIE5),
    "mi250x": _gpu("MI250X", {"bfloat16": 191.5, "float16": 191.5, "float32": 47.9, "float64": 47.9, "int8": 191.5},
        64, 1638, 50, 12.5, _reached(0.767, 110, 0.3, _OLD_TILES),
        "AMD Instinct MI250X datasheet, one of its two dies, which JAX calls a device; 4 x 200 Gb/s for eight", watts=280,
        host_gb_per_second=36, host_gigabytes=64, per_chip=2),
    "mi250": _gpu("MI250", {"bfloat16": 181, "float16": 181, "float32": 45.3, "float64": 45.3, "int8": 181},
        64, 1638, 50, 12.5, _reached(0.767, 104, 0.3, _OLD_TILES),
        "AMD Instinct MI250 datasheet, one of its two dies, which JAX calls a device; 4 x 200 Gb/s for eight", watts=280,
        host_gb_per_second=_PCIE4, host_gigabytes=64, per_chip=2),
    "mi210": _card("MI210", {"bfloat16": 181, "float16": 181, "float32": 45.3, "float64": 45.3, "int8": 181}, 64, 1638,
        _reached(0.767, 104, 0.3, _OLD_TILES), "AMD Instinct MI210 datasheet", None, 300),
    "mi300x": _gpu("MI300X", _rates(2615, 1307, 654, 163.4, 81.7), 192, 5300, 448, 50, _reached(0.514, 304, 0.3),
        "AMD Instinct MI300X datasheet; 7 Infinity Fabric links of 128 GB/s", watts=750),
    "mi325x": _gpu("MI325X", _rates(2615, 1307, 654, 163.4, 81.7), 256, 6000, 448, 50, _reached(0.604, 304, 0.3),
        "AMD Instinct MI325X datasheet; 7 Infinity Fabric links of 128 GB/s", watts=1000),
    "mi355x": _gpu("MI355X", {**_rates(5033, 2517, 1258, 157.3, 78.6), "float4": 10066}, 288, 8000, 537, 50,
        _reached(0.604, 256, 0.3), "AMD Instinct MI355X datasheet; 7 Infinity Fabric links of 153.6 GB/s", watts=1400),
    "gaudi2": _gpu("Gaudi2", {"float8": 865, "bfloat16": 432, "float16": 432, "float32": 54}, 96, 2460, 262.5, 37.5,
        _reached(0.7, 0), "Intel Gaudi 2 whitepaper; 24 x 100 Gb/s, 21 of which stay in the host", watts=600),
    "trainium2": _gpu("Trainium2", _rates(1299, 667, 667, 181), 96, 2900, 640, 25, _reached(0.7, 0),
        "AWS Neuron documentation, Trainium2 (a chip); 1.28 TB/s of NeuronLink, 3.2 Tb/s for sixteen", per_host=16, watts=500),
    # name, peak rates, GB of memory, its GB/s, chips in a host, GB/s along an axis of the torus; source
    "tpu-v3": _tpu("TPU v3", {"bfloat16": 61.5}, 16, 450, 8, 82,
        "Google Cloud TPU v3 documentation, half a chip; 4 links of 82 GB/s on 2 axes", (2, 32), 340, 2),
    "tpu-v4": _tpu("TPU v4", {"bfloat16": 275, "int8": 275}, 32, 1200, 4, 100,
        "Google Cloud TPU v4 documentation; 6 links of 50 GB/s on 3 axes, two each", _CUBES, 407),
    "tpu-v5e": _tpu("TPU v5e", {"bfloat16": 197, "int8": 394}, 16, 819, 8, 100,
        "Google Cloud TPU v5e documentation; 1600 Gb/s on 2 axes", _SQUARES, 384),
    "tpu-v5p": _tpu("TPU v5p", {"bfloat16": 459, "int8": 918}, 95, 2765, 4, 200,
        "Google Cloud TPU v5p documentation; 4800 Gb/s on 3 axes", _CUBES, 448),
    "tpu-v6e": _tpu("TPU v6e", {"bfloat16": 918, "int8": 1836}, 32, 1640, 8, 224,
        "Google Cloud TPU v6e documentation; 3584 Gb/s on 2 axes; arrays of 256 x 256", _SQUARES, 1440, 1, _HALF_FILLED,
        _TRILLIUM),
    "tpu-v7x": _tpu("TPU7x", {"bfloat16": 1153.5, "float8": 2307, "int8": 2307}, 96, 3690, 8, 100,
        "Google Cloud TPU7x documentation, half a chip; 1200 GB/s on 3 axes in both directions; arrays of 256 x 256", _CUBES,
        960, 2, _HALF_FILLED),
}
# fmt: on

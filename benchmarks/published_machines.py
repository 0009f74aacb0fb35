"""The machine of a published run.

In:     `Run`: its device and the description of its network.
Out:    `Machine`: the catalog's device, its link inside a host and that between hosts.
Method: the catalog has what devices and links reach; the row may state another network, other links, or a power limit.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace

from published_frameworks import (
    BY_ROWS,
    EFA_SECONDS,
    FIRST_FLASH,
    OMNI_PATH,
    OMNI_PATH_RING,
    SECOND_FLASH,
    generation_of,
)
from published_runs import Run

from autopar.errors import AutoparError
from autopar.mesh import Cluster, Device, Link, find_device, linked_mesh
from autopar.mesh.catalog import Model
from autopar.mesh.find_device import known_device, slice_chips

EXPONENTIALS = 16 * 1.7e9
"""Per second on one multiprocessor: 16 in a clock (NVIDIA, "CUDA programming guide", throughput of special functions)."""
_TWICE_THE_EXPONENTIALS = (10, 3)
"""Blackwell Ultra (NVIDIA, "Inside NVIDIA Blackwell Ultra", 2025)."""
_STATED_FOR = 128
_ASYNCHRONOUS = (9, 0)
"""Compute capability from which on kernels must be written anew to reach what products do."""


@dataclass(frozen=True)
class Machine:
    """A device and its links: inside a host, and between hosts.

    Attributes:
        ring: Bytes per second that one ring has between hosts at most.
        together: Those of one device at most, where all hosts communicate at once.
    """

    device: Device
    per_host: int
    intra: Link
    inter: Link
    ring: float = math.inf
    together: float = math.inf

    def link_of(self, size: int) -> Link:
        """That of a group of so many neighbours."""
        if size <= self.per_host:
            return self.intra.within(size)
        hosts = math.ceil(size / self.per_host)
        return linked_mesh(Cluster(hosts, self.per_host, self.device, self.intra, self.inter), (size,)).links[0]


def machine_of(run: Run) -> Machine:
    """The machine of a run: the catalog's device, the network that the table states.

    Raises:
        AutoparError: The catalog does not have the device.
    """
    model = model_of(run)
    intra, inter = model.intra, model.inter
    if re.search("pcie", run.device, re.IGNORECASE) and "NVLink" not in run.network:
        intra = min(
            intra,
            replace(intra, bytes_per_second=model.device.host_bytes_per_second, switch_bytes_per_second=0.0),
            key=lambda link: link.bytes_per_second,
        )
    per_host = model.devices_per_host if "NVL72" in run.network else run.per_host or model.devices_per_host
    # A job has equal parts of its hosts, or of their domains: 64 devices of each rack of 72, where those make 256.
    per_host = max(part for part in range(1, per_host + 1) if run.devices % part == 0)
    rate = None if model.torus else _network_rate(run.network, per_host, model.inter_peak)
    is_omni_path = "Omni-Path" in run.network
    if rate is not None:
        reached = OMNI_PATH if is_omni_path else inter.bytes_per_second / model.inter_peak
        inter = replace(inter, bytes_per_second=rate * reached)
    if re.search(r"\bEFA\b|Elastic Fabric", run.network):
        inter = replace(inter, latency_seconds=EFA_SECONDS)
    device = model.device
    if run.by_rows and run.dtype == "float8":
        device = replace(device, achieved=replace(device.achieved, narrow=device.achieved.narrow * BY_ROWS))
    if run.kernel:
        fused = device.achieved.fused * _part_for_heads(model, run.head_size)
        if run.kernel == 1:
            fused *= FIRST_FLASH[generation_of(device)]
        elif run.kernel == 2 and model.capability and model.capability >= _ASYNCHRONOUS:
            fused *= SECOND_FLASH
        device = replace(device, achieved=replace(device.achieved, fused=fused))
    together = run.reached / per_host if run.reached and run.devices > per_host else math.inf
    return Machine(device, per_host, intra, inter, OMNI_PATH_RING if is_omni_path else math.inf, together)


def _part_for_heads(model: Model, size: int) -> float:
    """What fused attention reaches with heads of this size, over what it does with 128, for which the catalog states it.

    Of each score a GPU takes one exponential forward and one backward, whatever the heads' size, besides 14 FLOPs for each of
    their numbers: Shah et al., "FlashAttention-3", 2024, sec. 3.1 (and figures 5, 6: 497 TFLOP/s with 64, 648 with 128).
    """
    cores = model.device.achieved.cores
    if not cores or size >= _STATED_FOR:
        return 1.0
    exponentials = cores * EXPONENTIALS * (2 if model.capability == _TWICE_THE_EXPONENTIALS else 1)
    part = 2 / (14 * _STATED_FOR) * model.device.product_flops_per_second(["bfloat16"]) / exponentials
    return (1 + part) / (1 + part * _STATED_FOR / size)


def by_devices(run: Run) -> Run:
    """A run whose row counts chips of which JAX makes several devices each: as many more replicas, or halves of tensors.

    It says so, or its hosts have as many fewer.
    """
    model = model_of(run)
    is_chip = "chip" in run.device.lower() or 0 < run.per_host * model.per_chip == model.devices_per_host
    several = model.per_chip if is_chip else 1
    if several == 1:
        return run
    run = replace(run, devices=run.devices * several, per_host=run.per_host * several, device=run.device.split(",")[0])
    if run.microbatch % several:
        return replace(run, tensor=run.tensor * several)
    shards = run.shards * several if run.shards > 1 else 1
    return replace(run, data=run.data * several, microbatch=run.microbatch // several, shards=shards)


def model_of(run: Run) -> Model:
    """The catalog's entry of the device that the row names, on its own or among other words.

    Raises:
        AutoparError: It has none.
    """
    if sold := slice_chips(run.device.partition(",")[0]):
        return sold[1]
    power = re.search(r"(\d+) ?W\b", run.device)
    limited = f"-{power[1]}w" if power else ""
    name = re.sub(r",.*|\bchips?\b|\(.*?\)|^(?:\d+ ?[x×X] ?)+|\b(?:DGX|HGX|SXM\d?|NVL\d+)\b", "", run.device).strip(
        " -"
    )
    if limited:
        try:
            return find_device(re.sub(r"-\d+GB$", "", name) + limited)
        except AutoparError:
            pass  # the catalog's own limit
    rented = next((device for names, device in _RENTED if re.search(names, run.device, re.IGNORECASE)), None)
    words = re.sub(r"(?<=\d)s\b", "", name).split()
    spans = [words[a:b] for a, b in itertools.combinations(range(len(words) + 1), 2)]
    several = sorted(spans, key=len, reverse=True) if len(words) < _MOST_WORDS else []
    return known_device(name) or find_device(
        rented or next((text for text in map(" ".join, several) if known_device(text)), name)
    )


_RENTED = (
    (r"\bv5[\s_-]?lite(pod)?\b", "tpu-v5e"),
    (r"\bdgx-?1\b", "v100-16"),
    (r"\bdgx-?2h?\b", "v100-32"),
    (r"\bp3dn|\bndv2", "v100-32"),
    (r"\bp3\b", "v100-16"),
    (r"\bp4de|\ba2-ultra", "a100-80"),
    (r"\bp4d|\ba2-(high|mega)", "a100-40"),
    (r"\bp5en?\b|\ba3-ultra", "h200"),
    (r"\bp5\b|\ba3-(high|mega|edge)", "h100"),
    (r"\bp6\b|\bp6-b200|\ba4-high", "b200"),
    (r"\bg5\b", "a10g"),
    (r"\bg6\b", "l4"),
)
"""Servers, and instances of clouds, by the devices in them (NVIDIA DGX; Amazon EC2 and Google Compute Engine)."""
_MOST_WORDS = 12
_PORTS = {"XDR": 800, "NDR": 400, "HDR": 200, "HDR100": 100, "EDR": 100, "FDR": 56}
"""Gb/s of a port of InfiniBand by its generation."""


_CARDS = (
    r"(?:(?:Mellanox|NVIDIA|ConnectX|CX|Slingshot|Omni-Path|InfiniBand|IB|RoCE|[EFHNX]DR|NIC|HCA|card|port|rail)s?"
    r"(?:-?\d+)?\s*(?:of )?)"
)
"""What people call them between how many there are and their rate."""


def _network_rate(text: str, per_host: int, usual: float = 0.0) -> float | None:
    """Bytes per second of one device, out of words like "8x400 Gb/s IB", "3.2 Tb/s EFA" or "25 Gb/s Ethernet per host".

    Where it is not said how many cards a host has, a rate that is `usual` for the card of one device is that of each.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    count = rf"(?:(\d+)\s*(?:{_CARDS}*[x×*]\s*{_CARDS}*|{_CARDS}+))?\(?"
    bits = re.search(count + r"(\d+(?:\.\d+)?) ?(Gb/s|Gbps|Gbit|GbE|Gb\b|G\b|Gigabit|Tb/s|Tbps|Tbit)(.*)", text)
    of_bytes = re.search(
        count
        + r"(\d+(?:\.\d+)?) ?(GB/s)(?=\)| (?:each|IB|Infini|EFA|RoCE|Ethernet|per (?:NIC|node|host|GPU|device)))(.*)",
        text,
    )
    bare = re.search(rf"(\d+)(?:\s*[x×]\s*|\s+)({'|'.join(sorted(_PORTS, reverse=True))}|[124]00(?!\d|\s*G))", text)
    if found := bits or of_bytes:
        scale = {"G": 1e9 / 8, "T": 1e12 / 8, "B": 1e9}
        total = int(found[1] or 1) * float(found[2]) * scale[found[3][0] if bits else "B"]
        is_each = re.search(r"(per|each|a) (GPU|chip|device|accelerator)", found[4])
        is_usual = (
            total == usual and not found[1] and not re.search(r"Ethernet|GbE|(per|each|a) (node|host|machine)", text)
        )
        return total if is_each or is_usual else total / per_host
    return int(bare[1]) * float(_PORTS.get(bare[2], bare[2])) / 8 * 1e9 / per_host if bare else None

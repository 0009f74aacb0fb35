"""The accelerators that people use: rates, memory, and how they are usually connected.

In:     a name, such as `"h100"`.
Out:    `Model`: the device, the devices of a usual host, the link within it and that between hosts.
Method: peak rates are dense, without sparsity, as the vendors' datasheets state them. A link's rate is what one device
        sends in one direction: half of the bidirectional figure on the datasheet. The rate between hosts is one network
        card per device where such hosts have one. Latencies are of the order that vendors' collective libraries reach
        per hop. `Cluster(...)` takes measured figures instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ClusterError
from autopar.mesh.device import Device
from autopar.mesh.link import Link


@dataclass(frozen=True, slots=True)
class Model:
    """A device as it is sold.

    Attributes:
        device: Rates and memory.
        devices_per_host: In a usual host.
        intra: Link between devices of a host.
        inter: Link between hosts, per device.
        source: Where the figures are from.
    """

    device: Device
    devices_per_host: int
    intra: Link
    inter: Link
    source: str


def _model(
    name: str,
    tflops: Mapping[str, float],
    gigabytes: float,
    memory_gb_per_second: float,
    per_host: int,
    intra_gb_per_second: float,
    inter_gb_per_second: float,
    source: str,
    intra_latency: float = 3e-6,
    inter_latency: float = 1e-5,
) -> Model:
    device = Device(name, {k: v * 1e12 for k, v in tflops.items()}, gigabytes * 1e9, memory_gb_per_second * 1e9)
    return Model(
        device,
        per_host,
        Link(intra_latency, intra_gb_per_second * 1e9),
        Link(inter_latency, inter_gb_per_second * 1e9),
        source,
    )


_VOLTA = {"float16": 125, "float32": 15.7, "float64": 7.8}
_AMPERE = {"bfloat16": 312, "float16": 312, "tfloat32": 156, "float32": 19.5, "float64": 19.5, "int8": 624}
_HOPPER = {
    "float8": 1979,
    "int8": 1979,
    "bfloat16": 989.5,
    "float16": 989.5,
    "tfloat32": 494.5,
    "float32": 67,
    "float64": 67,
}
_BLACKWELL = {
    "float8": 4500,
    "int8": 4500,
    "bfloat16": 2250,
    "float16": 2250,
    "tfloat32": 1125,
    "float32": 75,
    "float64": 37,
}
_PCIE4, _ICI = 32.0, 1e-6

MODELS: dict[str, Model] = {
    "v100-16": _model(
        "V100-16GB", _VOLTA, 16, 900, 8, 150, 3.125, "NVIDIA V100 datasheet (SXM2); DGX-1: 4 x 100 Gb/s / 8, halved"
    ),
    "v100-32": _model(
        "V100-32GB", _VOLTA, 32, 900, 8, 150, 6.25, "NVIDIA V100 datasheet (SXM2); DGX-1: 4 x 100 Gb/s / 8"
    ),
    "a100-40": _model(
        "A100-40GB", _AMPERE, 40, 1555, 8, 300, 25, "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gb/s"
    ),
    "a100-80": _model(
        "A100-80GB", _AMPERE, 80, 2039, 8, 300, 25, "NVIDIA A100 datasheet (SXM4); DGX A100: 8 x 200 Gb/s"
    ),
    "h100": _model("H100", _HOPPER, 80, 3350, 8, 450, 50, "NVIDIA H100 datasheet (SXM5); DGX H100: 8 x 400 Gb/s"),
    "h200": _model("H200", _HOPPER, 141, 4800, 8, 450, 50, "NVIDIA H200 datasheet (SXM); DGX H200: 8 x 400 Gb/s"),
    "b200": _model("B200", _BLACKWELL, 180, 8000, 8, 900, 50, "NVIDIA DGX B200 datasheet, one of eight"),
    "l4": _model(
        "L4",
        {"float8": 242, "int8": 242, "bfloat16": 121, "float16": 121, "tfloat32": 60, "float32": 30.3},
        24,
        300,
        8,
        _PCIE4,
        12.5,
        "NVIDIA L4 datasheet; PCIe 4.0 x16",
        5e-6,
    ),
    "l40s": _model(
        "L40S",
        {"float8": 733, "int8": 733, "bfloat16": 362, "float16": 362, "tfloat32": 183, "float32": 91.6},
        48,
        864,
        8,
        _PCIE4,
        25,
        "NVIDIA L40S datasheet; PCIe 4.0 x16",
        5e-6,
    ),
    "mi300x": _model(
        "MI300X",
        {
            "float8": 2615,
            "int8": 2615,
            "bfloat16": 1307,
            "float16": 1307,
            "tfloat32": 654,
            "float32": 163.4,
            "float64": 81.7,
        },
        192,
        5300,
        8,
        448,
        50,
        "AMD Instinct MI300X datasheet; 7 Infinity Fabric links of 128 GB/s",
    ),
    "tpu-v4": _model(
        "TPU v4",
        {"bfloat16": 275, "int8": 275},
        32,
        1200,
        4,
        100,
        100,
        "Google Cloud TPU v4 documentation; 6 links of 50 GB/s on 3 axes, two each",
        _ICI,
        _ICI,
    ),
    "tpu-v5e": _model(
        "TPU v5e",
        {"bfloat16": 197, "int8": 394},
        16,
        819,
        8,
        100,
        100,
        "Google Cloud TPU v5e documentation; 1600 Gb/s on 2 axes",
        _ICI,
        _ICI,
    ),
    "tpu-v5p": _model(
        "TPU v5p",
        {"bfloat16": 459, "int8": 918},
        95,
        2765,
        4,
        200,
        200,
        "Google Cloud TPU v5p documentation; 4800 Gb/s on 3 axes",
        _ICI,
        _ICI,
    ),
    "tpu-v6e": _model(
        "TPU v6e",
        {"bfloat16": 918, "int8": 1836},
        32,
        1640,
        8,
        224,
        224,
        "Google Cloud TPU v6e documentation; 3584 Gb/s on 2 axes",
        _ICI,
        _ICI,
    ),
}
_ALIASES = {
    "v100": "v100-16",
    "a100": "a100-80",
    "v4": "tpu-v4",
    "v5e": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v6e": "tpu-v6e",
    "v5lite": "tpu-v5e",
    "v6lite": "tpu-v6e",
}


_CORES_PER_CHIP = {"v2": 2, "v3": 2, "v4": 2, "v5p": 2}
"""Of TPUs that are sold by cores; the others are by chips."""


def slice_chips(text: str) -> tuple[int, Model] | None:
    """The chips of a slice of TPUs under the name that it is sold by, such as `v5p-64` or `v5litepod-16`; None: it is none.

    Raises:
        ClusterError: There is no such slice, or no such TPU in the catalog.
    """
    found = re.fullmatch(r"\s*(?:tpu[\s_-]*)?(v\d+[a-z]*?)(?:lite)?(?:pod)?[\s_-]+(\d+)\s*", text, re.IGNORECASE)
    if found is None or (found[1].lower() == "v100"):
        return None
    kind, number = found[1].lower(), int(found[2])
    kind = {"v5": "v5e", "v5l": "v5e"}.get(kind, kind)
    model = find_device(kind)
    chips, rest = divmod(number, _CORES_PER_CHIP.get(kind, 1))
    if rest or chips < 1 or (chips > model.devices_per_host and chips % model.devices_per_host):
        what = f"{number / _CORES_PER_CHIP.get(kind, 1):g} chips"
        raise ClusterError(
            "no such slice.",
            given=repr(text.strip()),
            wrong=f"that would be {what}, and hosts have {model.devices_per_host} each.",
            do=f'write a slice that there is, or hosts and chips: "2x{model.devices_per_host} {kind}".',
        )
    return chips, model


def find_device(name: str) -> Model:
    """The model of this name; case, spaces, vendor, form factor and "GB" do not matter.

    Raises:
        ClusterError: There is none; lists those there are.
    """
    plain = re.sub(r"[\s_\-]+", "", name.lower())
    plain = re.sub(r"^(nvidia|amd|google|instinct|tesla|cloud)+", "", plain)
    plain = re.sub(r"(sxm\d?|pcie|hbm3e?|hbm2e?|gb|g)", "", plain)
    known = {re.sub(r"-", "", key): model for key, model in MODELS.items()}
    known.update({alias: MODELS[key] for alias, key in _ALIASES.items()})
    for text in (plain, re.sub(r"(80|141|180|192|24|48)$", "", plain), plain.replace("tpu", "")):
        if text in known:
            return known[text]
    near = difflib.get_close_matches(plain, list(known), n=3)
    raise ClusterError(
        "no such device.",
        given=repr(name),
        wrong=f"the catalog has {', '.join(MODELS)}." + (f" Did you mean {near[0]}?" if near else ""),
        do="use one of these, or describe yours: Cluster(hosts=, devices_per_host=, device=Device(...), intra=Link(...), "
        "inter=Link(...)).",
    )

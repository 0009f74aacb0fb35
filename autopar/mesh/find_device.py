"""Finds a device of the catalog by its name, as people, clouds and drivers write it.

In:     a name, such as `"h100"`, `"NVIDIA H100 80GB HBM3"` or `"v5p-64"`.
Out:    its `Model`; for a slice of TPUs the number of its chips; for a GPU its compute capability.
"""

from __future__ import annotations

import difflib
import functools
import re

from autopar.errors import ClusterError
from autopar.mesh.catalog import MODELS, Model
from autopar.mesh.device import Device

_ALIASES = {
    "v100": "v100-16",
    "a100": "a100-80",
    "v5": "tpu-v5p",
    "7x": "tpu-v7x",
    "gracehopper": "gh200",
    "mi300": "mi300x",
    "trn2": "trainium2",
    "trillium": "tpu-v6e",
    "ironwood": "tpu-v7x",
    "v5lite": "tpu-v5e",
    "v6lite": "tpu-v6e",
}
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
"""For TPUs that are sold by cores, the cores that JAX presents as one device."""


def slice_chips(text: str) -> tuple[int, Model] | None:
    """The chips and model of a TPU slice by its product name, such as `v5p-64` or `v5litepod-16`; None: it is no slice.

    Raises `ClusterError`: no such slice exists, or the catalog has no such TPU.
    """
    found = re.fullmatch(r"\s*(?:tpu[\s_-]*)?(v\d+[a-z]*?)(?:lite)?(?:pod)?[\s_-]+(\d+)\s*", text, re.IGNORECASE)
    if found is None or (found[1].lower() == "v100"):
        return None
    kind, number = found[1].lower(), int(found[2])
    kind = {"v5": "v5e", "v5l": "v5e"}.get(kind, kind)
    model = find_device(kind)
    chips, rest = divmod(number, _CORES_PER_DEVICE.get(kind, 1))
    if rest or chips < 1 or (chips > model.devices_per_host and chips % model.devices_per_host):
        what = f"{number / _CORES_PER_DEVICE.get(kind, 1):g} chips"
        raise ClusterError(
            "no such slice.",
            given=repr(text.strip()),
            wrong=f"that would be {what}, and hosts have {model.devices_per_host} each.",
            do=f'write a slice that there is, or hosts and chips: "2x{model.devices_per_host} {kind}".',
        )
    return chips, model


def find_device(name: str) -> Model:
    """The model of this name; case, spaces, vendor, form factor and "GB" do not matter.

    Raises `ClusterError`: there is none; lists those there are.
    """
    model = known_device(name)
    if model is None:
        near = difflib.get_close_matches(_plain(name), list(_models()), n=3)
        raise ClusterError(
            "no such device.",
            given=repr(name),
            wrong=f"the catalog has {', '.join(MODELS)}." + (f" Did you mean {near[0]}?" if near else ""),
            do="use one of these, or describe yours: Cluster(hosts=, devices_per_host=, device=Device(...), "
            "intra=Link(...), inter=Link(...)).",
        )
    return model


def known_device(name: str) -> Model | None:
    """As `find_device`; None: there is none of this name."""
    plain, known = _plain(name), _models()
    without_form = re.sub(r"(sxm\d?|oam|gcd|hbm3e?|hbm2e?|(?<=\d)gb|(?<=\d)g$)", "", plain)
    on_card = re.sub(r"(\d*)pcie(\d*)$", r"\1\2", without_form)
    texts = plain, without_form, _without_memory(without_form), on_card, _without_memory(on_card)
    return next((known[text] for text in texts if text in known), None)


@functools.cache
def _models() -> dict[str, Model]:
    return {_plain(key): model for key, model in MODELS.items()} | {a: MODELS[key] for a, key in _ALIASES.items()}


def _plain(name: str) -> str:
    """A name without vendor and family."""
    text = re.sub(r"[\s_\-]+", "", name.lower().partition("/")[0])
    return re.sub(r"^(nvidia|amd|aws|intel|habana|google|instinct|tesla|cloud|geforce|rtx|tpu)+|generation$", "", text)


def _without_memory(text: str) -> str:
    """A name without the gigabytes at its end, or before `pcie`."""
    sizes = "16|24|32|40|48|64|80|94|96|141|144|180|192|256|288|480"
    return re.sub(rf"(?<=\w\w)({sizes})(pcie)?$", r"\2", text)


def compute_capability(device: Device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU of the catalog; None for other devices."""
    model = known_device(device.name)
    return None if model is None else model.capability

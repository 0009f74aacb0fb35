"""Formats quantities, types and machines as text, for all pages and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, get_args

from autopar.mesh import Cluster, LogicalMesh

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
ArgumentRole = Literal["state", "batch", "argument", "constant"]
"""Roles of a program's inputs."""
ARGUMENT_ROLES: tuple[ArgumentRole, ...] = get_args(ArgumentRole)
ValueRole = ArgumentRole | Literal["result", "activation"]
"""Roles of a program's values."""
VALUE_ROLES: tuple[ValueRole, ...] = (*ARGUMENT_ROLES, "result", "activation")


def machine_text(cluster: Cluster) -> str:
    """The cluster as text."""
    hosts = " + ".join(
        f"{count_text(g.hosts, 'host')} with {g.devices_per_host} {g.device.name}"
        + (f" of {bytes_text(g.device.memory_bytes)}" if math.isfinite(g.device.memory_bytes) else "")
        + g.calibrated_text
        for g in cluster.groups or (cluster,)
    )
    return f"{count_text(cluster.num_devices, 'device')}: {hosts}"


def mesh_text(mesh: LogicalMesh) -> str:
    """The axes of a mesh with their sizes and links."""
    return ", ".join(
        f"{axis}={size} ({seconds_text(link.latency_seconds)}, {rate_text(link.bytes_per_second)})"
        for axis, size, link in zip(mesh.axis_names, mesh.shape, mesh.links, strict=True)
    )


def count_text(number: int, what: str) -> str:
    """Such as "3 stages"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def offloaded_text(num_arguments: int, num_activations: int) -> str:
    """Such as "4 arrays of state and 1 activation"; "" if there are none."""
    state = [count_text(num_arguments, "array") + " of state"] if num_arguments else []
    return " and ".join([*state, *([count_text(num_activations, "activation")] if num_activations else [])])


def differences(
    was: Mapping[_Key, _Value], now: Mapping[_Key, _Value]
) -> list[tuple[_Key, _Value | None, _Value | None]]:
    """The entries in which two maps differ: (key, old value, new value); None: the map lacks the key."""
    return [(key, was.get(key), now.get(key)) for key in dict.fromkeys((*was, *now)) if was.get(key) != now.get(key)]


def type_text(shape: Sequence[int], dtype: str) -> str:
    """Such as "float32[32,8]"."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def padding_text(lengths: Mapping[int, int]) -> str:
    """The padded lengths as text: "dims of 50257 as 50264"."""
    return "dims of " + ", ".join(f"{length} as {longer}" for length, longer in lengths.items())


def bytes_text(num_bytes: float) -> str:
    """Such as "4.1 kB", decimal prefixes."""
    if num_bytes == math.inf:
        return "unlimited"
    return f"{num_bytes:.0f} B" if num_bytes < 999.5 else _with_prefix(num_bytes / 1000, ("kB", "MB", "GB", "TB", "PB"))


def rate_text(bytes_per_second: float) -> str:
    """Such as "450 GB/s"."""
    return "unlimited" if bytes_per_second == math.inf else f"{bytes_text(bytes_per_second)}/s"


def share_text(share: float) -> str:
    """A fraction in per cent, below 10 % with one decimal."""
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def seconds_text(seconds: float) -> str:
    """Such as "1.25 ms"."""
    return (
        "0 s" if seconds == 0 else _with_prefix(abs(seconds) * 1e9, ("ns", "us", "ms", "s"), "-" if seconds < 0 else "")
    )


def _with_prefix(number: float, names: Sequence[str], sign: str = "") -> str:
    for name in names[:-1]:
        if number < 999.5:
            return f"{sign}{_three_digits(number)} {name}"
        number /= 1000
    return f"{sign}{_three_digits(number)} {names[-1]}"


def _three_digits(number: float) -> str:
    number = float(f"{number:.3g}")
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}" if 1e-3 < number < 1e4 else f"{number:.3g}"

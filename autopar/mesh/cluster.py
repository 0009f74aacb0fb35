"""Clusters: hosts, their devices, and the links between them.

In:     numbers, a line of text (`"8x8 h100"`), the devices of this process, or a Ray cluster.
Out:    `Cluster`; it may describe a machine that one does not own, since planning touches no device.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from autopar.errors import ClusterError, check_number
from autopar.markup import facts
from autopar.mesh.device import Device
from autopar.mesh.find_device import find_device, known_device, slice_chips
from autopar.mesh.link import Link
from autopar.mesh.machine_profile import MachineProfile, read_profile
from autopar.mesh.ray_nodes import RayMachine, find_hosts

CPU = Device("cpu", 5e10, memory_bytes_per_second=1e10)
"""One virtual CPU device, about one core. Its memory is the host's, and has no limit here."""
CPU_LINK = Link(2e-5, 2e9)


@dataclass(frozen=True, repr=False)
class Cluster:
    """Equal hosts with equal devices; a cluster of several kinds of devices has one such group for each.

    Attributes:
        hosts: Number of hosts.
        devices_per_host: Devices in each.
        device: Rates and memory of one device.
        intra: Link between devices of one host.
        inter: Link between hosts; its rate is per device, while all devices of a host use it.
        devices: The real devices, host by host; None where the cluster is only described.
        groups: One cluster per kind of device; () for a uniform cluster.
        machine: The Ray cluster; None: this process, or only described.
        price_per_hour: Price of one device, in any currency; None: not stated. It has no influence on plans.
        profile: Measurements of it (`autopar calibrate`); None: its figures are the catalog's, or the user's.
        hosts_per_pod: Hosts that `inter` connects, such as those on one rail or under one switch; 0: all.
        across: Link between pods; its rate is per device, as that of `inter`. None: there is one pod.

    Raises:
        ClusterError: A count below one, a field of a wrong type, or pods of unequal size.
    """

    hosts: int = 1
    devices_per_host: int = 1
    device: Device = Device()
    intra: Link = Link(1e-6, 1e10)
    inter: Link = Link(1e-5, 1e9)
    devices: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)
    groups: tuple[Cluster, ...] = ()
    machine: RayMachine | None = field(default=None, compare=False, repr=False)
    price_per_hour: float | None = field(default=None, compare=False, repr=False)
    profile: MachineProfile | None = field(default=None, compare=False, repr=False)
    hosts_per_pod: int = 0
    across: Link | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            do = "count hosts, and devices in each."
            check_number("Cluster", name, getattr(self, name), least=1, is_whole=True, kind=ClusterError, do=do)
        for name, kind in (("device", Device), ("intra", Link), ("inter", Link)):
            if not isinstance(getattr(self, name), kind):
                raise ClusterError(
                    "this is no part of a cluster.",
                    given=f"Cluster({name}={getattr(self, name)!r})",
                    wrong=f"it is of type {type(getattr(self, name)).__name__}.",
                    do=f'pass a {kind.__name__}(...); Cluster.of("8x8 h100") takes those that it knows by name.',
                )
        if (self.across is None) != (self.hosts_per_pod == 0) or self.hosts % (self.hosts_per_pod or 1):
            raise ClusterError(
                "this is no cluster of pods.",
                given=f"Cluster(hosts={self.hosts}, hosts_per_pod={self.hosts_per_pod!r}, across={self.across!r})",
                wrong="pods have equally many hosts, and a link between them.",
                do="pass both, such as Cluster(hosts=8, hosts_per_pod=4, across=Link(2e-5, 1e10)), or neither.",
            )

    @property
    def num_devices(self) -> int:
        """Number of all devices."""
        return sum(g.num_devices for g in self.groups) if self.groups else self.hosts * self.devices_per_host

    @property
    def devices_per_pod(self) -> int:
        """Devices of one pod."""
        return (self.hosts_per_pod or self.hosts) * self.devices_per_host

    def level_over(self, reach: int) -> int:
        """The level that connects groups of `reach` neighbouring devices: 0 within hosts, 1 within pods, 2 between pods."""
        if self.devices_per_host % reach == 0:
            return 0
        return 1 if self.across is None or self.devices_per_pod % reach == 0 else 2

    def level_between(self, first: int, last: int) -> int:
        """The level that connects the devices from `first` to `last`."""
        if first // self.devices_per_host == last // self.devices_per_host:
            return 0
        return 1 if self.across is None or first // self.devices_per_pod == last // self.devices_per_pod else 2

    def link_at(self, level: int) -> Link:
        """The link of a level."""
        return (self.intra, self.inter, self.across or self.inter)[level]

    @classmethod
    def local(
        cls,
        devices: Sequence[Any] | None = None,
        device: Device | None = None,
        intra: Link | None = None,
        inter: Link | None = None,
        profile: MachineProfile | str | Path | None = None,
    ) -> Cluster:
        """A cluster of the devices of this process, or some of them.

        Args:
            devices: The devices; by default `jax.devices()`.
            device: Rates to plan with; by default the catalog's for this kind of device.
            intra: Link within a host; by default the catalog's.
            inter: Link between hosts; by default the catalog's.
            profile: What `autopar calibrate` measured here, or the path of its file; overrides the catalog.

        Raises:
            ProfileError: The profile cannot be read, or is of other devices.
            ClusterError: No devices, or hosts with different numbers of them.
        """
        given = jax.devices() if devices is None else devices
        devices = tuple(given) if isinstance(given, Iterable) else ()
        if not devices or any(isinstance(each, str | int) for each in devices):
            raise ClusterError(
                "these are no devices.",
                given=f"Cluster.local(devices={given!r})",
                wrong="it is no list of one or more of JAX's devices.",
                do="pass some of them, such as jax.devices()[:4], or leave it out for all.",
            )
        per_host = Counter(getattr(each, "process_index", 0) for each in devices)
        if len(set(per_host.values())) > 1:
            raise ClusterError(
                "the hosts have different numbers of devices.",
                given=f"devices per host: {dict(per_host)}",
                wrong="a mesh needs equally many on each.",
                do="pass equally many devices of each host.",
            )
        kind, platform = (getattr(devices[0], name, "cpu") for name in ("device_kind", "platform"))
        count, stated = len(devices) // len(per_host), (device, intra, inter)
        return _rated("local", len(per_host), count, kind, platform, stated, profile, devices=devices)

    @classmethod
    def of(cls, text: str, *, profile: MachineProfile | str | Path | None = None) -> Cluster:
        """A cluster described in a line: `"8x8 h100"` is 8 hosts with 8 H100 each, `"4 a100"` one host with 4.

        Several kinds are joined with `+`: `"2x8 h100 + 4x8 a100-40"`. `"8xh100"` is `"8 h100"`. Slices of TPUs have their
        product names: `"v5p-64"` is 32 chips, since its number counts cores.

        Args:
            text: The line.
            profile: What `autopar calibrate` measured on a host with such devices, or the path of its file; overrides the
                catalog.

        Raises:
            ProfileError: The profile cannot be read, or is of other devices.
            ClusterError: The text cannot be parsed, or names no known device.
        """
        groups = tuple(_parse_group(part, text) for part in str(text).split("+"))
        if profile is not None:
            groups = tuple(_calibrated(group, profile, f"Cluster.of({text!r})") for group in groups)
        if len(groups) == 1:
            return groups[0]
        slowest = min(groups, key=lambda g: g.inter.bytes_per_second)
        return cls(
            sum(g.hosts for g in groups),
            max(g.devices_per_host for g in groups),
            groups[0].device,
            groups[0].intra,
            slowest.inter,
            groups=groups,
        )

    @classmethod
    def ray(
        cls,
        address: str | None = None,
        *,
        hosts: int | None = None,
        devices_per_host: int | None = None,
        device: Device | None = None,
        intra: Link | None = None,
        inter: Link | None = None,
        profile: MachineProfile | str | Path | None = None,
        wait_seconds: float = 300.0,
        silence_seconds: float = 10.0,
        start_seconds: float = 120.0,
    ) -> Cluster:
        """A cluster of the nodes of a Ray cluster.

        Args:
            address: As of `ray.init`: `"auto"`, or host and port; None: the cluster this process is connected to, one that
                runs on this machine, or else a new one there.
            hosts: How many of its nodes; None: all with enough devices. Without GPUs one node may serve as several hosts.
            devices_per_host: How many devices of each; None: all GPUs, or one virtual CPU device.
            device: Rates to plan with; by default the catalog's for this kind of device.
            intra: Link within a host; by default the catalog's.
            inter: Link between hosts; by default the catalog's.
            profile: What `autopar calibrate` measured on one of its hosts, or the path of its file; overrides the catalog.
            wait_seconds: How long a worker may wait at one instruction of a step, for a message or a program, before the
                step fails.
            silence_seconds: How long a worker may not answer before it counts as hung.
            start_seconds: How long the workers may take to start.

        Raises:
            ProfileError: The profile cannot be read, or is of other devices.
            ClusterError: Ray is not installed or not reachable, or its nodes do not form such a cluster.
        """
        found, count, accelerator = find_hosts(address, hosts, devices_per_host)
        machine = RayMachine(found, count, accelerator, wait_seconds, silence_seconds, start_seconds)
        kind, platform = ("cpu", "cpu") if accelerator is None else (_catalog_name(accelerator), "gpu")
        stated = device, intra, inter
        return _rated("ray", len(found), count, kind, platform, stated, profile, machine=machine)

    def __repr__(self) -> str:
        where = "a Ray cluster: " if self.machine else "this process: " if self.devices else ""
        return f"Cluster({where}{self})"

    def _repr_html_(self) -> str:
        pairs = [("devices", f"{self.num_devices}: {self}")]
        for group in self.groups or (self,):
            name = f" of {group.device}" if self.groups else ""
            pairs += [("within a host" + name, str(group.intra)), ("between hosts" + name, str(group.inter))]
            if group.across is not None:
                pairs.append((f"between pods of {group.hosts_per_pod} hosts" + name, str(group.across)))
            memory = (
                "" if math.isinf(group.device.memory_bytes) else f"{group.device.memory_bytes / 1e9:g} GB of memory, "
            )
            rate = group.device.memory_bytes_per_second
            pairs.append(("each device" + name, memory + f"{rate / 1e9:g} GB/s to it"))
        return facts("Cluster", pairs)

    def __str__(self) -> str:
        if self.groups:
            return " + ".join(map(str, self.groups))
        hosts = f"{self.hosts} x " if self.hosts > 1 else ""
        return f"{hosts}{self.devices_per_host} {self.device}" + self.calibrated_text

    @property
    def calibrated_text(self) -> str:
        """A note with the day of measurement, if the figures were measured; else ""."""
        return "" if self.profile is None else f" (calibrated {self.profile.day})"


def more_devices_text(cluster: Cluster, wanted: int) -> str:
    """The command for more virtual devices, if the cluster is this process's CPU and has too few; else ""."""
    first = cluster.devices[0] if cluster.devices else None
    if getattr(first, "platform", "") != "cpu" or wanted <= cluster.num_devices:
        return ""
    flags = f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} PJRT_NPROC={max(32, wanted)}"
    return f" For {wanted} virtual CPU devices start Python so: {flags} python ..."


def _parse_group(part: str, text: str) -> Cluster:
    chips = slice_chips(part)
    if chips is not None:
        total, model = chips
        hosts = max(1, total // model.devices_per_host)
        count = total // hosts
    else:
        found = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?(\d+)\s*[x*]?\s*([a-wyz].*?|x[a-z].*?)\s*", part, re.IGNORECASE)
        if not found:
            raise ClusterError(
                "unreadable cluster.",
                given=repr(text),
                wrong=f"{part.strip()!r} is not hosts x devices and a name.",
                do=_meant(part) + 'write "8x8 h100", "4 a100-40", or "2x8 h100 + 4x8 a100".',
            )
        hosts, count, model = int(found[1] or 1), int(found[2]), find_device(found[3])
    return Cluster(hosts, count, model.device, *model.links_of(hosts * count))


def _calibrated(group: Cluster, profile: MachineProfile | str | Path, given: str) -> Cluster:
    platform = "tpu" if group.device.name.startswith("TPU") else "gpu"
    found = read_profile(profile, platform, group.device.name, given)
    device, intra, inter = found.for_devices(group.devices_per_host)
    return Cluster(
        group.hosts, group.devices_per_host, device, intra or group.intra, inter or group.inter, profile=found
    )


def _rated(
    maker: str,
    hosts: int,
    count: int,
    kind: str,
    platform: str,
    stated: tuple[Device | None, Link | None, Link | None],
    profile: MachineProfile | str | Path | None,
    **others: Any,
) -> Cluster:
    """A cluster of devices of one kind; each rate is the user's `stated` one, else the profile's, else the catalog's."""
    device, intra, inter = stated
    if profile is not None:
        profile = read_profile(profile, platform, kind, f"Cluster.{maker}()")
        own = profile.for_devices(count)
        device, intra, inter = device or own[0], intra or own[1], inter or own[2]
    if not (device and intra and inter):
        known = (CPU, CPU_LINK, CPU_LINK) if platform == "cpu" else _of_catalog(maker, kind, platform, hosts * count)
        device, intra, inter = device or known[0], intra or known[1], inter or known[2]
    return Cluster(hosts, count, device, intra, inter, profile=profile, **others)


def _of_catalog(maker: str, kind: str, platform: str, num_devices: int) -> tuple[Device, Link, Link]:
    model = known_device(kind)
    if model is None:
        raise ClusterError(
            "the catalog does not know this device.",
            given=f"a {kind!r} of platform {platform}",
            wrong="without its rates and links nothing can be compared.",
            do=f"pass Cluster.{maker}(device=Device(name, peak_flops, memory_bytes, memory_bytes_per_second), "
            "intra=Link(...), inter=Link(...)).",
        )
    return model.device, *model.links_of(num_devices)


def _catalog_name(name: str) -> str:
    """The catalog's name of a device; the name itself if the catalog does not have it."""
    model = known_device(name)
    return name if model is None else model.device.name


def _meant(part: str) -> str:
    """A suggestion for text with the count after the name, `h100 x 8` or `h100:8`, or with none; else ""."""
    found = re.fullmatch(r"\s*([a-z].*?)\s*(?:[x*:,]\s*(\d+))?\s*", part, re.IGNORECASE)
    return "" if found is None or known_device(found[1]) is None else f'did you mean "{found[2] or 8} {found[1]}"? Or '

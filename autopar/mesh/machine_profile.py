"""Machine profiles: parameters fitted to measurements of a machine, which `autopar calibrate` writes.

In:     a JSON file.
Out:    `MachineProfile`: the same parameters as in the catalog (`Device`, `Link`), and the error of each measurement.
Method: every entry is checked when it is read. What the file does not state (links that were not measured) is the catalog's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.entry import DamageError, Entry, plain, read_versioned, reader_of, write_whole
from autopar.errors import AutoparError, ProfileError
from autopar.markup import facts
from autopar.mesh.device import Achieved, Device
from autopar.mesh.find_device import known_device
from autopar.mesh.link import Link

FORMAT = "autopar machine profile"
VERSION = 1
"""Incremented with every change that an older reader cannot read, or that changes the meaning of a number."""
_OF_HOST = "host_bytes_per_second", "host_memory_bytes"


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement.

    Attributes:
        kind: `"product"`, `"pass"`, `"all-reduce"`, ...
        case: Shapes and dtypes, or bytes and devices.
        seconds: The least of several runs.
        fitted_seconds: The prediction of the fitted parameters.
    """

    kind: str
    case: str
    seconds: float
    fitted_seconds: float

    @property
    def error(self) -> float:
        """Relative error of the fitted time."""
        return abs(self.fitted_seconds / self.seconds - 1)


@dataclass(frozen=True, repr=False)
class MachineProfile:
    """A machine as it was measured, by `autopar calibrate` or `autopar.calibrate(...)`.

    Attributes:
        platform: JAX's name of it: `"cpu"`, `"gpu"`, `"tpu"`.
        kind: JAX's name of the devices.
        num_devices: Devices that were busy, all of one host.
        machine: The host, its processor and software versions; for people.
        date: When, in ISO 8601.
        device: Rates of one device, and what is reached of them.
        intra: Link between the devices; None: not measured.
        inter: Link between hosts; None: not measured.
        measured: All measurements, with the fitted parameters' predictions.
    """

    platform: str
    kind: str
    num_devices: int
    machine: Mapping[str, str]
    date: str
    device: Device
    intra: Link | None = None
    inter: Link | None = None
    measured: tuple[Measured, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON. Raises `ProfileError`: the file cannot be written."""
        write_whole(path, json.dumps(_record(self), indent=1) + "\n", "profile", ProfileError)

    @staticmethod
    def load(path: str | Path) -> MachineProfile:
        """Read a profile that `save` wrote.

        Raises `ProfileError`: the file is missing, damaged, no profile, or of another version.
        """
        try:
            return _profile(read_versioned(path, FORMAT, VERSION))
        except DamageError as error:
            raise _unreadable(path, str(error)) from error
        except AutoparError as error:
            raise _unreadable(path, f"{error.given}: {error.wrong}") from error

    @property
    def errors(self) -> dict[str, float]:
        """For each kind of measurement, the median error of the fitted parameters."""
        kinds = dict.fromkeys(m.kind for m in self.measured)
        return {kind: statistics.median(m.error for m in self.measured if m.kind == kind) for kind in kinds}

    def for_devices(self, num_devices: int) -> tuple[Device, Link | None, Link | None]:
        """Device and links of a host with `num_devices`; devices that share its cores are rescaled to that number."""
        if not self.device.achieved.host_cores or num_devices == self.num_devices:
            return self.device, self.intra, self.inter
        slower = num_devices / self.num_devices
        achieved = self.device.achieved
        fixed = "launch_seconds", "tile_seconds", "dispatch_seconds", "array_seconds", "copy_seconds"
        own = {name: getattr(achieved, name) * slower for name in fixed}
        own["fresh_bytes_per_second"] = achieved.fresh_bytes_per_second / slower
        assert isinstance(self.device.peak_flops, Mapping), "a measured device has a rate for each dtype"
        device = dataclasses.replace(
            self.device,
            peak_flops={name: rate / slower for name, rate in self.device.peak_flops.items()},
            memory_bytes_per_second=self.device.memory_bytes_per_second / slower,
            achieved=dataclasses.replace(achieved, **own),
        )
        return device, _slowed(self.intra, slower), _slowed(self.inter, slower)

    def __repr__(self) -> str:
        return f"MachineProfile({self.num_devices} {self.kind}, measured {self.day})"

    def _repr_html_(self) -> str:
        pairs = [*self.machine.items(), ("within a host", str(self.intra)), ("between hosts", str(self.inter))]
        pairs += [(f"median error, {kind}", f"{error:.0%}") for kind, error in self.errors.items()]
        return facts(f"{self.num_devices} {self.kind}, measured {self.day}", pairs)

    @property
    def day(self) -> str:
        """The day on which it was measured."""
        return self.date[:10]


def read_profile(profile: MachineProfile | str | Path, platform: str, kind: str, given: str) -> MachineProfile:
    """A profile, or the one in a file, checked to be of devices of this kind (JAX's name or the catalog's).

    `given`: what the user passed, for errors.

    Raises `ProfileError`: it is no profile, cannot be read, or is of other devices.
    """
    if isinstance(profile, str | os.PathLike):
        path, profile = str(profile), MachineProfile.load(profile)
    else:
        path = repr(profile)
    if not isinstance(profile, MachineProfile):
        raise ProfileError(
            "this is no profile of a machine.",
            given=f"profile={profile!r}",
            wrong=f"it is of type {type(profile).__name__}.",
            do="pass what autopar.calibrate() returns, or the path of a file that `autopar calibrate --save FILE` wrote.",
            path=path,
        )
    if platform != profile.platform or kind not in (profile.kind, profile.device.name):
        raise ProfileError(
            "the profile is of another machine.",
            given=f"{given} with {path}",
            wrong=f"it was measured on {profile.num_devices} {profile.kind!r} of platform {profile.platform}, "
            f"and these devices are {kind!r} of platform {platform}.",
            do="run `autopar calibrate --save FILE` on a machine with these devices, or leave the profile out.",
            path=path,
        )
    return profile


def _slowed(link: Link | None, slower: float) -> Link | None:
    if link is None:
        return None
    latency, rate = link.latency_seconds * slower, link.bytes_per_second / slower
    return dataclasses.replace(link, latency_seconds=latency, bytes_per_second=rate)


def _unreadable(path: str | Path, wrong: str) -> ProfileError:
    return ProfileError(
        "the profile cannot be read.",
        given=str(path),
        wrong=wrong,
        do="measure the machine again: autopar calibrate --save FILE.",
        path=str(path),
    )


def _record(profile: MachineProfile) -> dict[str, Any]:
    errors = {kind: round(error, 4) for kind, error in profile.errors.items()}
    return {"format": FORMAT, "version": VERSION, **plain(profile), "median_errors": errors}


def _parts(entry: Entry) -> tuple[tuple[int, float], ...]:
    return entry.items(lambda part: part.pair(lambda size: size.count(1), Entry.number))


def _link(entry: Entry) -> Link | None:
    return None if entry.value is None else _link_of(entry)


def _device(entry: Entry) -> Device:
    """The device; host memory and link that the file does not state are the catalog's, or else the defaults of `Device`."""
    device = _device_of(entry)
    known = known_device(device.name)
    if known is None:
        return device
    return dataclasses.replace(device, **{n: getattr(known.device, n) for n in _OF_HOST if n not in entry.value})


def _measured(entry: Entry) -> Measured:
    if not entry["seconds"].number():
        raise entry["seconds"].wrong("more than 0")
    return reader_of(Measured)(entry)


_link_of = reader_of(
    Link,
    later=("torus", "in_host"),
    infinite=("bytes_per_second",),
    groups=_parts,
    torus=_parts,
    in_host=lambda entry: entry.pair(lambda count: count.count(1), lambda rate: rate.number(or_infinite=True)),
)
_achieved = reader_of(
    Achieved,
    later=(
        *("narrow", "array_seconds", "copy_seconds", "kept_bytes"),
        *("passes", "update_passes", "turned", "turning", "awaited"),
    ),
    infinite=("fresh_bytes_per_second",),
    tile=lambda entry: entry.pair(lambda side: side.count(1), lambda side: side.count(1)),
    awaited=lambda entry: entry.items(Entry.text),
)
_device_of = reader_of(
    Device,
    later=_OF_HOST,
    infinite=("memory_bytes", "memory_bytes_per_second", *_OF_HOST),
    peak_flops=lambda entry: entry.mapping(Entry.number),
    achieved=_achieved,
)
_profile = reader_of(
    MachineProfile,
    num_devices=lambda entry: entry.count(1),
    device=_device,
    intra=_link,
    inter=_link,
    measured=lambda entry: entry.items(_measured),
)

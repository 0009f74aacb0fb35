"""Measure the machine at hand within a time, and make a profile of it.

In:     devices of this process, seconds to spend.
Out:    `MachineProfile`.
Method: cases are measured one after the other in a fixed order, of every kind the most telling first; when the time is up,
        the rest is left out, and the profile says what it was made from.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.calibrate.blocks import blocks
from autopar.calibrate.cases import all_cases
from autopar.calibrate.fit import Sample, as_measured, fit
from autopar.calibrate.timing import dispatch_seconds, fresh_memory, shared_cores, turn_times, undisturbed
from autopar.errors import ClusterError, ProfileError, check_number
from autopar.mesh import Achieved, Device, Link, MachineProfile
from autopar.mesh.find_device import known_device

SECONDS = 120.0
"""To spend, by default."""
LONG_SECONDS = 10.0
"""With less time than this, memory is taken to be kept: to see that it is not takes seconds."""
FRESH_BYTES = 4 * 2**20, 12 * 2**20, 24 * 2**20, 40 * 2**20, 64 * 2**20
"""On a device, to see how fast memory is got, and which pieces the C library keeps: glibc none over 32 MiB."""
_CPU = Device("cpu", 1e10, achieved=Achieved(cores=1, tile=(256, 256), tile_seconds=1e-6, balance=20.0))
"""A product is cut for the caches of one core; its rates are fitted whole."""
_CPU_LINK = Link(1e-5, 1e9, shared_memory=True)
_GPU_LINK = Link(3.4e-6, 1e11, has_short_messages=True)

Tell = Callable[[str, float], None]
"""Called with what is measured now, and which part of all is done."""


def calibrate(
    devices: Sequence[Any] | None = None,
    *,
    seconds: float = SECONDS,
    save: str | Path | None = None,
    show_progress: bool = False,
) -> MachineProfile:
    """Measure devices of this process, and fit the cost model's parameters to them.

    Products by shape and dtype, passes over memory, convolutions, attention where there is a kernel for it, rows picked and
    placed, every collective by size and group, and what starting a program takes: on all devices at once. Nothing else
    should run on the machine meanwhile.

    Args:
        devices: All of one host, of one kind; `jax.devices()` by default.
        seconds: About how long it may take; what does not fit is left out.
        save: Where to write the profile, too.
        show_progress: Whether to draw a bar on stderr.

    Returns:
        The profile: pass it, or its file, as `Cluster.local(profile=...)`.

    Raises:
        ClusterError: The devices are on several hosts.
        ProfileError: No time, or nothing can be measured; or the file cannot be written.
    """
    devices = tuple(jax.devices() if devices is None else devices)
    hosts = {getattr(device, "process_index", 0) for device in devices}
    if not devices or len(hosts) > 1:
        raise ClusterError(
            "one host is calibrated at a time.",
            given=f"{len(devices)} devices of {len(hosts)} hosts",
            wrong="the profile states what the devices of one host reach; hosts are joined by the catalog's link.",
            do="pass devices=jax.local_devices().",
        )
    do = "allow about 2 seconds for each kind of measurement, 60 for all."
    check_number("calibrate", "seconds", seconds, kind=ProfileError, do=do, path="")
    started = time.monotonic()
    if not show_progress:
        samples, own = _measure(devices, started + seconds, lambda text, done: None)
    else:
        columns = BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=Console(file=sys.stderr, force_jupyter=False), transient=True) as bar:
            task = bar.add_task("calibrating", total=1.0)
            tell: Tell = lambda text, done: bar.update(task, description=text, completed=done)  # noqa: E731
            samples, own = _measure(devices, started + seconds, tell)
    profile = _profile(devices, samples, own, time.monotonic() - started)
    if save is not None:
        profile.save(save)
    return profile


def _measure(devices: Sequence[Any], deadline: float, tell: Tell) -> tuple[list[Sample], dict[str, Any]]:
    """Seconds of cases; and what programs as such take."""
    tell("starting programs", 0.0)
    is_cpu = devices[0].platform == "cpu"
    cases = all_cases(len(devices), is_cpu, blocks(is_cpu))
    own: dict[str, Any] = {"dispatch_seconds": dispatch_seconds(devices)}
    if is_cpu:  # others keep the memory of a program that has ended
        own["host_cores"] = shared_cores(devices)
        if deadline - time.monotonic() > LONG_SECONDS:
            own |= fresh_memory(devices, FRESH_BYTES)
    samples: list[Sample] = []
    stretched: list[float] = []
    for number, case in enumerate(cases):
        if samples and time.monotonic() > deadline:
            break
        tell(f"{case.kind}: {case.text}", number / len(cases))
        try:
            found = turn_times(case, devices, deadline)
        except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError, ValueError):
            continue  # no kernel of this kind here, or no memory for it: the profile lists what there is
        if found is not None:
            samples.append(Sample(case, undisturbed(case, *found, stretched)))
    if not samples:
        raise ProfileError(
            "nothing was measured.",
            given=f"{len(devices)} devices of kind {devices[0].device_kind!r}",
            wrong="every program that was tried has failed there.",
            do="run `autopar doctor`, which tries the devices one thing after the other.",
            path="",
        )
    return samples, own


def _profile(devices: Sequence[Any], samples: Sequence[Sample], own: dict[str, Any], seconds: float) -> MachineProfile:
    first = devices[0]
    start, link = _known(first)
    if first.platform != "cpu":
        start = dataclasses.replace(start, host_memory_bytes=host_memory_bytes(len(devices)))
    fitted = fit(samples, dataclasses.replace(start, achieved=dataclasses.replace(start.achieved, **own)), link)
    machine = {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "seconds": f"{seconds:.0f}",
    }
    return MachineProfile(
        first.platform,
        first.device_kind,
        len(devices),
        machine,
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        _by_dtype(fitted.device),
        fitted.link,
        None,
        as_measured(samples, fitted),
    )


def _by_dtype(device: Device) -> Device:
    """With a rate by dtype, also where no product was measured."""
    peak = device.peak_flops
    return device if isinstance(peak, Mapping) else dataclasses.replace(device, peak_flops={"float32": peak})


def _known(device: Any) -> tuple[Device, Link]:
    """What to begin with: the catalog's, or for a GPU that it does not have what it says of itself."""
    if device.platform == "cpu":
        return _CPU, _CPU_LINK
    model = known_device(device.device_kind)
    if model is not None:
        return model.device, model.intra
    cores = int(getattr(device, "core_count", 0) or 0)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    sizes = {"memory_bytes": float(limit)} if limit else {}
    return Device(device.device_kind, achieved=Achieved(cores=cores), **sizes), _GPU_LINK


def host_memory_bytes(num_devices: int) -> float:
    """A device's share of this host's memory; inf where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_devices
    except (AttributeError, ValueError, OSError):
        return math.inf


def _processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

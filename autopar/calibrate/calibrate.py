"""Measures the present machine within a time budget, and makes a profile of it.

In:     devices of this process, seconds to spend.
Out:    `MachineProfile`.
Method: cases are measured in a fixed order, the most informative of every kind first, until the time is up; the profile
        lists what was measured.
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
from autopar.calibrate.cases import Case, all_cases
from autopar.calibrate.fit import Sample, as_measured, fit
from autopar.calibrate.timing import copied, dispatch, fresh_memory, shared_cores, turn_times, undisturbed
from autopar.errors import ClusterError, ProfileError, check_number, warn
from autopar.mesh import Achieved, Device, Link, MachineProfile
from autopar.mesh.find_device import known_device

SECONDS = 120.0
"""Default time budget."""
LONG_SECONDS = 10.0
"""With less time left than this, the costs of fresh memory and of programs in a row are not measured, which takes seconds."""
FRESH_BYTES = 8 * 2**20, 24 * 2**20, 40 * 2**20
"""Sizes per device for measuring how fast the system gives memory, and which blocks the C library keeps: glibc keeps none
over 32 MiB."""
_CPU = Device("cpu", 1e10, achieved=Achieved(cores=1, tile=(256, 256), tile_seconds=1e-6, balance=20.0))
"""Starting point for CPUs: tiles for the caches of one core, without peak rates."""
_CPU_LINK = Link(1e-5, 1e9, shared_memory=True)
_GPU_LINK = Link(3.4e-6, 1e11, has_short_messages=True)

Tell = Callable[[str, float], None]
"""Called with what is measured now, and the fraction done."""


def calibrate(
    devices: Sequence[Any] | None = None,
    *,
    seconds: float = SECONDS,
    save: str | Path | None = None,
    show_progress: bool = False,
) -> MachineProfile:
    """Measure devices of this process, and fit the cost model's parameters to them.

    Measured are products by shape and dtype, passes over memory, convolutions, attention if there is a kernel for it,
    gathers and scatters, every collective by size and group, and program dispatch, on all devices at once. Nothing else
    should run on the machine meanwhile.

    Args:
        devices: Devices of one host, of one kind; `jax.devices()` by default.
        seconds: Approximate time budget; cases that do not fit are left out, with a warning if nothing of a kind fits.
        save: File to write the profile to.
        show_progress: Whether to draw a progress bar on stderr.

    Returns:
        The profile: pass it, or its file, as `Cluster.local(profile=...)`.

    Raises:
        ClusterError: The devices are on several hosts.
        ProfileError: There is no time, or nothing can be measured; or the file cannot be written.
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
        samples, own, left = _measure(devices, started + seconds, lambda text, done: None)
    else:
        columns = BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=Console(file=sys.stderr, force_jupyter=False), transient=True) as bar:
            task = bar.add_task("calibrating", total=1.0)
            tell: Tell = lambda text, done: bar.update(task, description=text, completed=done)  # noqa: E731
            samples, own, left = _measure(devices, started + seconds, tell)
    _warn_of_unknown(samples, left, seconds)
    profile = _profile(devices, samples, own, time.monotonic() - started)
    if save is not None:
        profile.save(save)
    return profile


def _measure(
    devices: Sequence[Any], deadline: float, tell: Tell
) -> tuple[list[Sample], dict[str, Any], Sequence[Case]]:
    """Measure the cases, and the overhead of programs: fields of `Achieved`. Also returns the cases left for want of time."""
    tell("starting programs", 0.0)
    is_cpu = devices[0].platform == "cpu"
    cases = all_cases(len(devices), is_cpu, blocks(is_cpu))
    is_long = deadline - time.monotonic() > LONG_SECONDS
    own: dict[str, Any] = dict(dispatch(devices, among_others=is_cpu and is_long))
    if is_cpu:  # other backends pool memory
        own |= {"host_cores": shared_cores(devices), **copied(devices)}
        if is_long:
            own |= fresh_memory(devices, FRESH_BYTES)
    samples: list[Sample] = []
    stretched: list[float] = []
    left: Sequence[Case] = ()
    for number, case in enumerate(cases):
        if samples and time.monotonic() > deadline:
            left = cases[number:]
            break
        tell(f"{case.kind}: {case.text}", number / len(cases))
        try:
            found = turn_times(case, devices, deadline)
        except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError, ValueError):
            continue  # there is no such kernel, or not enough memory
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
    return samples, own, left


def _warn_of_unknown(samples: Sequence[Sample], left: Sequence[Case], seconds: float) -> None:
    """Warn if nothing of a kind was measured for want of time: what is fitted to it keeps its starting value."""
    unknown = sorted({case.kind for case in left if case.is_fitted} - {sample.case.kind for sample in samples})
    if unknown:
        warn(
            f"calibrate: {seconds:g} seconds were enough for {len(samples)} measurements, and {len(left)} were left out. "
            f"Not measured at all, and so as in the catalog or guessed: {', '.join(unknown)}. "
            "Allow more seconds, and run nothing else on the machine meanwhile."
        )


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
    """The device with its peak rate by dtype, also if no product was measured."""
    peak = device.peak_flops
    return device if isinstance(peak, Mapping) else dataclasses.replace(device, peak_flops={"float32": peak})


def _known(device: Any) -> tuple[Device, Link]:
    """Starting values: the catalog's, or for a GPU that is not in it, those that it reports."""
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
    """A device's share of this host's memory; inf if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / num_devices
    except (AttributeError, ValueError, OSError):
        return math.inf


def _processor() -> str:
    """The processor's name, by /proc/cpuinfo if there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()

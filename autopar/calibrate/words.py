"""Shows a machine's profile as text.

In:     `MachineProfile`.
Out:    one page: the fitted parameters, and how well they agree with the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.mesh import Link, MachineProfile
from autopar.plan.words import rate_text, seconds_text
from autopar.report.page import Page, Table
from autopar.report.text import page_text


def profile_text(profile: MachineProfile) -> str:
    """The page of a profile."""
    rows = tuple(
        (m.kind, m.case, seconds_text(m.seconds), seconds_text(m.fitted_seconds), f"{m.fitted_seconds / m.seconds:.2f}")
        for m in sorted(profile.measured, key=lambda m: m.kind)
    )
    errors = tuple((kind, f"{error:.0%}") for kind, error in profile.errors.items())
    tables = (
        Table(
            "Measured, one turn on all devices at once",
            ("", "", "measured", "fitted", "fitted / measured"),
            rows,
            (2, 3, 4),
        ),
        Table("Median error of what was fitted", ("", ""), errors, (1,)),
    )
    title = f"{profile.num_devices} {profile.kind}, measured {profile.day} in {profile.machine.get('seconds', '?')} s"
    return page_text(Page(title, tuple(_facts(profile)), tables))


def _facts(profile: MachineProfile) -> Iterator[tuple[str, str]]:
    device, achieved = profile.device, profile.device.achieved
    yield "machine", ", ".join(profile.machine.get(name, "") for name in ("host", "processor"))
    peak: Mapping[str, float] = device.peak_flops if isinstance(device.peak_flops, Mapping) else {}
    yield "products", ", ".join(f"{rate * achieved.product / 1e12:.3g} TFLOP/s {name}" for name, rate in peak.items())
    yield "memory", rate_text(device.memory_bytes_per_second * achieved.memory)
    if math.isfinite(achieved.fresh_bytes_per_second):
        kept = f", which needs over {achieved.kept_bytes / 2**20:.0f} MiB" if achieved.kept_bytes else ""
        yield "", f"{rate_text(achieved.fresh_bytes_per_second)} where a program gets it anew{kept}"
    if achieved.copy_seconds:
        yield "copy", f"{seconds_text(achieved.copy_seconds)} an array to other devices"
    yield "passes", f"{achieved.passes:.1f} where one would do, {achieved.update_passes:.1f} in updates"
    yield "", f"{achieved.turning:.1f} times as long over arrays in another order of dims"
    yield (
        "launch",
        f"{seconds_text(achieved.launch_seconds)} a kernel, {seconds_text(achieved.dispatch_seconds)} a program, "
        f"{seconds_text(achieved.array_seconds)} each of its arrays",
    )
    if achieved.host_cores:
        yield "shared", f"{achieved.host_cores} cores by {profile.num_devices} devices; rates are of one while all work"
    yield "within a host", _link_text(profile.intra)
    yield "between hosts", _link_text(profile.inter)


def _link_text(link: Link | None) -> str:
    return "not measured: the catalog's" if link is None else str(link)

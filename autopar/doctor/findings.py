"""Interprets the answers of the probes: a finding per part, and what to do about a missing one.

In:     `Answer`s.
Out:    `Finding`s, in reading order; as a table or as JSON.
Method: all probes run at the same time. Devices that compute, reduce and transfer, and the default solver are necessary; the
        other parts are optional.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.doctor.child import Answer, ask, ask_probe
from autopar.errors import check_number
from autopar.plan.words import count_text

Status = Literal["ok", "absent", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One part of the machine.

    Attributes:
        part: The name of the part.
        status: `"ok"`; `"absent"`: missing, but optional; `"failed"`.
        found: What was found, or what is wrong.
        fix: What to do; "": nothing.
        necessary: Whether autopar needs it.
    """

    part: str
    status: Status
    found: str
    fix: str = ""
    necessary: bool = False


def examine(silence_seconds: float = 60.0, ray_address: str | None = None) -> list[Finding]:
    """Test every part of the machine that autopar may need.

    Args:
        silence_seconds: A probe that is silent for so long is killed.
        ray_address: The address of a Ray cluster, host:port; None: as `ray status` finds it.

    Raises:
        AutoparError: `silence_seconds` is invalid.
    """
    check_number("examine", "silence_seconds", silence_seconds, most=threading.TIMEOUT_MAX, do="leave it out for 60 s.")
    names = ("devices", "solver_highs", "solver_cbc", "orbax", "cupy")
    with ThreadPoolExecutor(8) as threads:
        cuda = threads.submit(_cuda_driver)
        ray = threads.submit(lambda: list(_ray(silence_seconds, ray_address)))
        asked = {name: threads.submit(ask_probe, name, silence_seconds) for name in names if _is_wanted(name)}
        answers = {name: future.result() for name, future in asked.items()}
        return [
            *_devices(answers["devices"], cuda.result()),
            _solver("HiGHS", answers["solver_highs"], "pip install highspy", necessary=True),
            _solver("CBC", answers["solver_cbc"], "pip install cbcbox", necessary=False),
            _orbax(answers.get("orbax")),
            *ray.result(),
            *_cupy(answers.get("cupy"), answers["devices"], cuda.result()),
        ]


_MARKS = {"ok": "[green]ok[/]", "absent": "[yellow]absent[/]", "failed": "[bold red]failed[/]"}


def print_report(findings: Sequence[Finding], as_json: bool) -> int:
    """Print findings; returns 0 if everything necessary works, else 1."""
    broken = [f.part for f in findings if f.status == "failed" and f.necessary]
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
        return 1 if broken else 0
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("part", "", "found", "do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.part, _MARKS[finding.status], escape(finding.found), escape(finding.fix))
    console = Console(force_jupyter=False)
    console.print(table)
    console.print(f"\nautopar cannot work here: {', '.join(broken)}" if broken else "\neverything necessary works")
    return 1 if broken else 0


def _is_wanted(name: str) -> bool:
    packages = {"orbax": _version("orbax-checkpoint"), "cupy": _cupy_package()}
    return packages.get(name, "always") is not None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda_driver() -> int | None:
    """The newest major CUDA version that the NVIDIA driver supports; None: there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return 12 if Path("/dev/nvidia0").exists() else None
    found = re.search(r"CUDA Version:\s*(\d+)", ask(["nvidia-smi"], 20.0).output)
    return int(found[1]) if found else None


def _devices(answer: Answer, cuda: int | None) -> Iterator[Finding]:
    """Findings about JAX, its devices, an all-reduce over them, and transfers between them."""
    reports = answer.reports
    versions = f"jax {_version('jax')}, jaxlib {_version('jaxlib')}, Python {sys.version.split()[0]}"
    yield Finding("JAX", "ok", versions, necessary=True)
    if "devices" not in reports:
        fix = (
            "see that `python -c 'import jax; print(jax.devices())'` works; JAX_PLATFORMS=cpu does without accelerators"
        )
        yield Finding("devices", "failed", answer.error or "JAX found none", fix, necessary=True)
        return
    backend, found = reports["backend"], reports["devices"]
    memory = {d["memory_bytes"] for d in found if d["memory_bytes"]}
    text = f"{len(found)} x {', '.join(sorted({d['kind'] for d in found}))} ({backend})"
    text += f", {min(memory) / 2**30:.1f} GiB each" if memory else ""
    text += f", {reports['processes']} processes" if reports["processes"] > 1 else ""
    if backend == "cpu" and cuda is not None:
        fix = f"pip install 'autopar[cuda{13 if cuda >= 13 else 12}]'"
        yield Finding("GPUs", "absent", "there is an NVIDIA driver, and JAX runs on the CPU", fix)
    if "computed" not in reports:
        fix = "see nvidia-smi for a device that is in use, out of memory or in error"
        yield Finding("devices", "failed", f"{text}; {answer.error}", fix, necessary=True)
        return
    yield Finding("devices", "ok", text, necessary=True)
    if "reduced" not in reports:
        fix = "run with NCCL_DEBUG=WARN, or NCCL_P2P_DISABLE=1"
        fix = "set PJRT_NPROC=32 before JAX starts" if backend == "cpu" else fix
        yield Finding("all-reduce", "failed", answer.error or "", fix, necessary=True)
        return
    yield Finding("all-reduce", "ok", f"over {count_text(len(found), 'device')}", necessary=True)
    yield _transfers(answer, backend)


def _transfers(answer: Answer, backend: str) -> Finding:
    rates = answer.reports.get("bytes_per_second")
    if rates is None:
        pair = answer.reports.get("transferring")
        where = f"from device {pair[0]} to {pair[1]}: " if pair else ""
        fix = "run with NCCL_P2P_DISABLE=1, and have the IOMMU or ACS of the host turned off"
        fix = "report it" if backend == "cpu" else fix
        return Finding("transfers", "failed", where + (answer.error or ""), fix, necessary=True)
    if not rates:
        return Finding("transfers", "ok", "one device: none are needed", necessary=True)
    slowest, fastest = min(rates, key=lambda r: r[2]), max(rates, key=lambda r: r[2])
    text = f"{count_text(len(rates), 'pair')}, {slowest[2] / 1e9:.2f} to {fastest[2] / 1e9:.2f} GB/s"
    return Finding("transfers", "ok", f"{text}, the slowest {slowest[0]} to {slowest[1]}", necessary=True)


def _solver(name: str, answer: Answer, fix: str, *, necessary: bool) -> Finding:
    if "solver" in answer.reports:
        return Finding(name, "ok", f"solved ({answer.reports['solver']})", necessary=necessary)
    return Finding(name, "failed" if necessary else "absent", answer.error or "no answer", fix, necessary)


def _orbax(answer: Answer | None) -> Finding:
    install = "pip install 'autopar[checkpoint]'"
    if answer is None:
        return Finding("orbax", "absent", "not installed: no checkpoints", install)
    if "restored" not in answer.reports:
        return Finding("orbax", "failed", answer.error or "no answer", install + " --upgrade")
    return Finding("orbax", "ok", f"orbax-checkpoint {_version('orbax-checkpoint')}, written and read back")


def _ray(silence_seconds: float, address: str | None) -> Iterator[Finding]:
    version = _version("ray")
    if version is None:
        yield Finding("Ray", "absent", "not installed: one process only", "pip install 'autopar[ray]'")
        return
    yield Finding("Ray", "ok", f"ray {version}")
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    answer = ask([*command, *(["--address", address] if address else [])], min(silence_seconds, 30.0))
    if answer.error is not None:
        fix = "ray start --head, or name a cluster: --ray-address or RAY_ADDRESS, host:port"
        yield Finding("Ray cluster", "absent", f"none answers: {answer.error}", fix)
        return
    nodes = re.findall(r"node_\w+", answer.output)
    used = re.findall(r"/([\d.]+) (CPU|GPU)\b", answer.output)
    text = ", ".join([count_text(len(set(nodes)), "node"), *(f"{float(n):g} {kind}s" for n, kind in used)])
    yield Finding("Ray cluster", "ok", text)


def _cupy_package() -> str | None:
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
    return next((f"{name} {_version(name)}" for name in names if _version(name)), None)


def _cupy(answer: Answer | None, devices: Answer, cuda: int | None) -> Iterator[Finding]:
    """Findings about CuPy, and whether JAX and CuPy load the same NCCL."""
    if devices.reports.get("backend") != "gpu":
        yield Finding("CuPy, NCCL", "ok", "not needed: JAX uses no NVIDIA GPU")
        return
    install = f"pip install cupy-cuda{13 if (cuda or 12) >= 13 else 12}x"
    mine = devices.reports.get("nccl") or {}
    if not mine.get("path"):
        yield Finding("NCCL of JAX", "failed", mine.get("error", "not loaded"), "pip install 'jax[cuda12]'")
    else:
        yield Finding("NCCL of JAX", "ok", f"{mine['version']}, {mine['path']}")
    if answer is None:
        yield Finding("CuPy", "absent", "not installed: no NCCL between stages on Ray", install)
        return
    if "version" not in answer.reports:
        yield Finding("CuPy", "failed", answer.error or "no answer", install + " --upgrade")
        return
    yield Finding("CuPy", "ok", f"{_cupy_package()}, {count_text(answer.reports['devices'], 'device')}")
    theirs = answer.reports.get("nccl")
    if theirs is None:
        yield Finding("NCCL of CuPy", "failed", answer.error or "not loaded", "pip install nvidia-nccl-cu12")
        return
    text = f"{theirs['version']}, {theirs['path']}"
    if _real(theirs["path"]) == _real(mine.get("path")):
        yield Finding("NCCL of CuPy", "ok", text)
    else:
        there = Path(mine["path"]).parent if mine.get("path") else "..."
        fix = f"put JAX's before it: LD_LIBRARY_PATH={there}"
        yield Finding("NCCL of CuPy", "failed", f"{text}: not the one of JAX", fix)


def _real(path: Any) -> str | None:
    return str(Path(path).resolve()) if path else None

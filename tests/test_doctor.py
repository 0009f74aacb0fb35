"""`autopar doctor`: it finds what is there, names a fix for what is not, and nothing makes it hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from autopar.cli import main
from autopar.doctor import child, findings
from autopar.doctor.child import MARK, Answer, ask
from tests.patience import PATIENCE_SECONDS, several_times, wait_until

DEVICES = [{"id": k, "kind": "H100", "memory_bytes": 80 * 2**30} for k in range(2)]
COMPUTED = {"backend": "gpu", "processes": 1, "devices": DEVICES, "computed": True}
NCCL = {"path": "/jax/lib/libnccl.so.2", "version": 22703}
WHOLE = COMPUTED | {"reduced": True, "nccl": NCCL, "bytes_per_second": [[0, 1, 2e11], [1, 0, 1e11]]}
SOLVED = Answer({"solver": "x"})


@pytest.fixture
def doctor(monkeypatch, capsys):
    """`doctor(cuda=..., versions=..., devices=Answer, ...)` -> status and findings by part, of a machine that is made up."""

    def run(cuda=12, versions=(), **answers):
        known = {"solver_highs": SOLVED, "solver_cbc": SOLVED, "orbax": Answer({"restored": True})} | answers
        packages = {"jax": "0.10.2", "jaxlib": "0.10.2", "orbax-checkpoint": "0.12"} | dict(versions)
        monkeypatch.setattr(findings, "ask_probe", lambda name, _: known[name])
        monkeypatch.setattr(findings, "ask", lambda *_: known["ray"])
        monkeypatch.setattr(findings, "_version", packages.get)
        monkeypatch.setattr(findings, "_cuda_driver", lambda: cuda)
        status = main(["doctor", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] is (status == 0)
        main(["doctor"])
        table = capsys.readouterr().out
        assert all(line["part"].split(",")[0] in table for line in found["findings"])
        return status, {line["part"]: line for line in found["findings"]}

    return run


def test_this_machine(capsys):
    status = main(["doctor", "--json", "--timeout", str(PATIENCE_SECONDS)])
    found = {f["part"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert status == 0, found
    for part in ("JAX", "devices", "all-reduce", "transfers", "HiGHS", "CBC", "orbax"):
        assert found[part]["status"] == "ok", found[part]
    assert "8 x cpu" in found["devices"]["found"] and "56 pairs" in found["transfers"]["found"]
    assert all(f["fix"] for f in found.values() if f["status"] != "ok")


def test_it_is_a_module():
    done = subprocess.run([sys.executable, "-m", "autopar", "doctor", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--json" in done.stdout


def test_a_whole_gpu_machine(doctor):
    versions = {"cupy-cuda12x": "13", "ray": "2.60"}
    ray = Answer(output="node_a1\nnode_b2\n 1.0/16.0 CPU\n 0.0/2.0 GPU\n")
    cupy = Answer({"version": "13", "devices": 2, "nccl": NCCL})
    status, found = doctor(devices=Answer(WHOLE), cupy=cupy, ray=ray, versions=versions)
    assert status == 0 and {f["status"] for f in found.values()} == {"ok"}
    assert found["devices"]["found"] == "2 x H100 (gpu), 80.0 GiB each"
    assert found["transfers"]["found"] == "2 pairs, 100.00 to 200.00 GB/s, the slowest 1 to 0"
    assert found["Ray cluster"]["found"] == "2 nodes, 16 CPUs, 2 GPUs"


@pytest.mark.parametrize(
    "devices, part, words",
    [
        (Answer({}, "no answer within 60 s", True), "devices", "no answer"),
        (Answer({k: v for k, v in COMPUTED.items() if k != "computed"}, "CUDA_ERROR"), "devices", "CUDA_ERROR"),
        (Answer(COMPUTED, "no answer within 60 s", True), "all-reduce", "no answer"),
        (
            Answer(COMPUTED | {"reduced": True, "transferring": [0, 1]}, "no answer"),
            "transfers",
            "from device 0 to 1: no",
        ),
    ],
)
def test_devices_that_fail(doctor, devices, part, words):
    status, found = doctor(devices=devices)
    assert status == 1 and found[part]["status"] == "failed"
    assert words in found[part]["found"] and found[part]["fix"]


def test_what_one_can_do_without(doctor):
    """Fixes are the lines to type; nothing of it is necessary."""
    missing = {"orbax-checkpoint": None}
    cpu = Answer(WHOLE | {"backend": "cpu"})
    status, found = doctor(cuda=13, devices=cpu, solver_cbc=Answer({}, "not there"), versions=missing)
    assert status == 0
    assert found["GPUs"]["fix"] == "pip install 'autopar[cuda13]'"
    assert found["orbax"]["fix"] == "pip install 'autopar[checkpoint]'"
    assert found["Ray"]["fix"] == "pip install 'autopar[ray]'"
    assert found["CBC"]["status"] == "absent" and found["CBC"]["fix"] == "pip install cbcbox"
    status, found = doctor(devices=Answer(WHOLE))
    assert status == 0 and found["CuPy"]["fix"] == "pip install cupy-cuda12x"


def test_no_solver(doctor):
    status, found = doctor(devices=Answer(WHOLE), solver_highs=Answer({}, "No module named 'highspy'"))
    assert status == 1 and found["HiGHS"]["fix"] == "pip install highspy"


def test_two_nccl_libraries(doctor):
    cupy = Answer({"version": "13", "devices": 2, "nccl": {"path": "/usr/lib/libnccl.so.2", "version": 21903}})
    status, found = doctor(devices=Answer(WHOLE), cupy=cupy, versions={"cupy-cuda12x": "13"})
    assert status == 0 and found["NCCL of CuPy"]["status"] == "failed"
    assert found["NCCL of CuPy"]["fix"] == "put JAX's before it: LD_LIBRARY_PATH=/jax/lib"


def test_ray_without_a_cluster(doctor):
    status, found = doctor(devices=Answer(WHOLE), versions={"ray": "2.60"}, ray=Answer(error="no address"))
    assert status == 0 and "ray start --head" in found["Ray cluster"]["fix"]


def test_a_probe_that_hangs_is_ended_with_all_it_started(tmp_path):
    script = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(6000)'])\n"
        f"print({MARK!r} + '{{\"pid\": %d}}' % other.pid, flush=True)\n"
    )
    limit = several_times(lambda: ask([sys.executable, "-c", script + "other.kill()"], PATIENCE_SECONDS), 1.0)
    answer = ask([sys.executable, "-c", script + "time.sleep(6000)"], limit)
    assert answer.error == f"no answer within {limit:g} s"
    wait_until(lambda: not _runs(answer.reports["pid"]), "the end of the probe's own process")


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split()[2] != "Z"


def test_a_probe_that_breaks():
    answer = ask([sys.executable, "-c", "print('noise'); raise SystemExit('it is broken')"], PATIENCE_SECONDS)
    assert answer.error == "it is broken"
    assert "No such file" in ask(["/not/there"], PATIENCE_SECONDS).error
    assert child.ask_probe("not a probe", PATIENCE_SECONDS).error == "KeyError: 'not a probe'"

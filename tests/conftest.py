"""Settings of every test: 8 virtual CPU devices, golden files, and which marks this machine can run.

XLA reads its flags when JAX makes its first backend, so they are set here, before any test module imports jax.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

NUM_DEVICES = 8
SOME_BYTES, MUCH_BYTES = 150 * 2**20, 700 * 2**20
GOLDEN = Path(__file__).parent / "golden"
FIRST = tuple(Path(__file__).parent / room for room in ("ray", "verify"))
_OF_0_10 = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_experimental_ynn_fusion_type=")
XLA_FLAGS = (
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    # Most tests compile longer than they run: LLVM without its optimizer, in one piece, from XLA's plainer loops.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Flags of this version. The last one: XLA's library for reductions of many numbers loses NaN.
    *(_OF_0_10 if version("jaxlib").startswith("0.10.") else ()),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt; then read the diff")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS)).strip()
    os.environ.setdefault("PJRT_NPROC", "32")  # collectives of 8 devices starve in the 2 threads of a small machine
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15: its tests, one chain, would wait for all others
    os.environ.setdefault("AUTOPAR_CHECK", "1")  # what a pass makes wrong is told with its name
    if "gpu" not in config.getoption("-m").replace("not gpu", ""):
        os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine or this command does not run; what waits for other processes comes first.

    Of several workers that steal from each other (`--dist worksteal`) one then begins with Ray's tests, and one with the
    compilers', and starts what they share once: a worker is given one piece of the list, and what is stolen is its end.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    others = [item for item in items if not any(room in item.path.parents for room in FIRST)]
    total = len(items)
    rooms = [[item for item in items if room in item.path.parents] for room in FIRST]
    items[:] = others
    for k, waiting in enumerate(rooms):
        start = k % workers * total // workers
        items[start:start] = waiting
    asked = config.getoption("-m")
    missing = {}
    if "gpu" not in asked:
        missing["gpu"] = "runs on a GPU: pytest -m gpu"
    if "slow" not in asked:
        missing["slow"] = "takes more than a minute: pytest -m slow"
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:  # tests/ray/ alone would do for a package of this name
        missing["ray"] = "Ray is not installed: pip install 'autopar[ray]'"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Nothing is frozen: whatever traces or plans would count it, object by object (`autopar/ir/passes.py`)."""
    gc.collect()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def size_after() -> list[int]:
    """How large this process was when programs were dropped last."""
    return [resident_bytes()]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_kept(request: pytest.FixtureRequest, size_after: list[int]) -> Iterator[None]:
    """Between modules, programs and whatever else a module has cached are dropped: else a process grows to gigabytes."""
    yield
    for made in list(vars(request.module).values()):
        if hasattr(made, "cache_clear") and getattr(made, "__module__", "") == request.module.__name__:
            made.cache_clear()
    if resident_bytes() > size_after[0] + SOME_BYTES:
        drop_programs()
        size_after[0] = resident_bytes()
    elif "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(autouse=True)
def little_is_kept(size_after: list[int]) -> Iterator[None]:
    """Within a module of many programs they are dropped, too, when they have become much."""
    yield
    if resident_bytes() > size_after[0] + MUCH_BYTES:
        drop_programs()
        size_after[0] = resident_bytes()


def drop_programs() -> None:
    """What JAX has compiled, but for what something still holds; the memory goes back to the system."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
    gc.collect()  # walks all that is imported: a third of a second
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where that cannot be seen."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` equals tests/golden/<name>.txt, which `--update-golden` rewrites."""

    def check(name: str, text: object) -> None:
        path = GOLDEN / f"{name}.txt"
        actual = str(text).rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(actual)
            return
        assert path.exists(), f"no golden file {path.name}: write it with `pytest --update-golden` and read it"
        assert actual == path.read_text(), f"differs from {path.name}; if that is wanted: `pytest --update-golden`"

    return check

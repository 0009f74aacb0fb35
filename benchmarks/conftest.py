"""The benchmark suite: `pytest benchmarks/ [--cluster local|ray|"8x8 h100"] [--size small|full]`.

In:     a cluster: this machine's devices (8 virtual ones where it has no GPU), Ray, or one that is only described.
Out:    pytest-benchmark's statistics (`--benchmark-json FILE`, `--benchmark-compare`), and a table: the seconds of each model
        by each way to run it (`ways.py`), over those of the best expert sharding.
Method: with devices, steps are measured; without, their predicted seconds are reported as the benchmark's time. A test fails
        if autopar is slower than the best expert sharding by more than `--most-over-expert`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

MOST_OVER_EXPERT = {"predicted": 1.02, "gpu": 1.10, "tpu": 1.10}
"""Predicted seconds are those of the clock, which knows what collectives hide behind; the integer program does not, so that a
plan by hand may be a little quicker on it. Times of virtual CPU devices, which share a few cores, say little: nothing is
asked for there unless you do."""


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    model: str
    way: str
    seconds: float
    predicted: float | None
    peak_bytes: int | None
    plan: str


class Clock:
    """Shows predicted seconds to pytest-benchmark, where nothing is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let it be later."""
        self.now += seconds


CLOCK = Clock()
RESULTS = pytest.StashKey[list[Result]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("autopar")
    group.addoption("--cluster", default="local", help='local, ray, or one that is described: "8x8 h100"')
    group.addoption("--size", choices=("small", "full"), help="of the models; small, but full on a described cluster")
    group.addoption(
        "--most-over-expert", type=float, help="fail where the best plan takes more than this over the best by hand"
    )


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise pytest.UsageError("the suite needs pytest-benchmark: pip install pytest-benchmark")
    config.stash[RESULTS] = []
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
        os.environ.setdefault("PJRT_NPROC", "32")


def is_described(config: pytest.Config) -> bool:
    """Whether nothing can be measured."""
    return config.getoption("--cluster") not in ("local", "ray")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a described cluster only what can be predicted, on the clock that shows it."""
    for item in items:
        predicted = item.get_closest_marker("predicted") is not None
        if is_described(config) and predicted:
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))
        elif is_described(config):
            item.add_marker(pytest.mark.skip(reason="measures this machine"))
        elif config.getoption("--cluster") == "ray" and not predicted:
            item.add_marker(pytest.mark.skip(reason="measures one process"))


@pytest.fixture(scope="session")
def size(pytestconfig: pytest.Config) -> str:
    """Of the models."""
    return pytestconfig.getoption("--size") or ("full" if is_described(pytestconfig) else "small")


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Any]:
    """The machine."""
    import autopar

    text = pytestconfig.getoption("--cluster")
    if text == "local":
        yield autopar.Cluster.local()
    elif text == "ray":
        import ray

        ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        found = autopar.Cluster.ray() if has_gpus else autopar.Cluster.ray(hosts=2, devices_per_host=4)
        yield found
        found.machine.close()
        ray.shutdown()
    else:
        yield autopar.Cluster.of(text)


@pytest.fixture
def clocked(benchmark: Any, pytestconfig: pytest.Config, size: str) -> Callable[..., None]:
    """`clocked(model, way, run)`: measure a `ways.Run`, or show what is predicted of it; keep it for the table."""

    def keep(model: str, way: str, run: Any) -> None:
        benchmark.group = model
        if run.once is None:
            benchmark.pedantic(CLOCK.advance, args=(run.seconds,), rounds=1)
        else:
            benchmark.pedantic(run.once, rounds=5 if size == "small" else 10, warmup_rounds=1)
        found = Result(model, way, benchmark.stats.stats.median, run.seconds, run.peak_bytes, run.plan)
        benchmark.extra_info.update(vars(found))
        pytestconfig.stash[RESULTS].append(found)

    return keep


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a plan is too slow."""
    if session.exitstatus == pytest.ExitCode.OK and any(over_limit(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def over_limit(config: pytest.Config) -> Iterator[str]:
    """What is slower than it may be, in words."""
    results = config.stash[RESULTS]
    if not results:
        return
    import jax

    where = "predicted" if is_described(config) else jax.default_backend()
    limit = config.getoption("--most-over-expert") or MOST_OVER_EXPERT.get(where)
    for model in dict.fromkeys(result.model for result in results):
        ours, theirs = best_of(results, model, "autopar"), best_of(results, model, "by hand")
        if limit and ours and theirs and ours.seconds > limit * theirs.seconds:
            ratio = ours.seconds / theirs.seconds
            yield f"{model}: `{ours.way}` takes {ratio:.3f} of `{theirs.way}`; at most {limit} is asked for"


def best_of(results: list[Result], model: str, prefix: str) -> Result | None:
    """The quickest of some ways."""
    found = [result for result in results if result.model == model and result.way.startswith(prefix)]
    return min(found, key=lambda result: result.seconds, default=None)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table."""
    results = config.stash[RESULTS]
    if not results:
        return
    from rich.console import Console
    from rich.table import Table

    measured = "predicted" if is_described(config) else "measured"
    table = Table(title=f"one step, {measured} on {config.getoption('--cluster')}", title_justify="left", box=None)
    for heading in ("model", "way", "plan", "step", "over the best by hand", "predicted", "a device holds"):
        table.add_column(heading, justify="left" if heading in ("model", "way", "plan") else "right")
    for model in dict.fromkeys(result.model for result in results):
        theirs = best_of(results, model, "by hand")
        for result in sorted((r for r in results if r.model == model), key=lambda r: r.seconds):
            ratio = f"{result.seconds / theirs.seconds:.2f}" if theirs else ""
            predicted = f"{result.predicted * 1e3:.3g} ms" if result.predicted else ""
            size = f"{result.peak_bytes / 1e9:.3g} GB" if result.peak_bytes else ""
            table.add_row(model, result.way, result.plan, f"{result.seconds * 1e3:.3g} ms", ratio, predicted, size)
    console = Console(width=120, highlight=False)
    with console.capture() as captured:
        console.print(table)
    terminalreporter.write("\n" + captured.get())
    for line in over_limit(config):
        terminalreporter.write_line(f"too slow: {line}", red=True)

"""Predicted against measured step times: calibrates this machine, then predicts and runs six plans of each of three models.

    python benchmarks/measured.py [--profile machine.json] [--seconds 90] [--rounds 9] [--models mlp gpt conv]

Runs on 8 virtual CPU devices, which share this machine's cores. The plans of a model take turns, one step each per round, so
that other load on the machine affects all of them. Prints both times of each plan, their ratio, and for each model Kendall's
tau of the order: 1 if all pairs of plans are in the predicted order, -1 if none is. The median step of each plan counts.
Beside the wall time, the table has the CPU time of the step over the number of cores: since the devices share the cores,
this is what the step would take on an idle machine, and other programs hardly change it.

Two plans are told apart if one of them is faster in so many rounds that a fair coin would be as uneven in fewer than one of
twenty cases (the sign test of Dixon & Mood, 1946; of 9 rounds in 8). Other pairs may be in either order. A second tau is of
the pairs that are told apart; their number is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NUM_DEVICES = 8
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES} " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from gpt import Config  # noqa: E402
from gpt import make_step as make_gpt  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from parts import make_train_step, state_types  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import autopar  # noqa: E402

METHODS: dict[str, Any] = {
    "data parallel": autopar.DataParallel(),
    "ZeRO-3": autopar.DataParallel(zero=3),
    "2 data x 4 tensor": autopar.ThreeD(data=2, tensor=4),
    "8 tensor": autopar.ThreeD(tensor=8),
    "2 stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "2 data x 2 tensor x 2 stages": autopar.ThreeD(data=2, tensor=2, pipeline=2, num_microbatches=4),
}
FOR_IMAGES: dict[str, Any] = {
    "data parallel": autopar.DataParallel(),
    "ZeRO-3": autopar.DataParallel(zero=3),
    "any, on 2 x 4": autopar.ShardParallel(mesh_shape=(2, 4)),
    "any, the batch whole": autopar.ShardParallel(mesh_shape=(8,), constraints={"batch/*": PartitionSpec()}),
    "2 stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "4 stages": autopar.PipelineParallel(num_stages=4, num_microbatches=8),
}


def mlp() -> tuple[Callable[..., Any], Any, Any]:
    """Four layers, more parameters than activations: what is copied everywhere is dear."""
    width, rows = 1024, 512
    optimizer = optax.adamw(1e-4)

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = [{"up": shape(width, width), "down": shape(width, width)} for _ in range(3)]
    batch = {"x": shape(rows, width), "y": shape(rows, width)}
    return make_train_step(loss_fn, optimizer), state_types(params, optimizer), batch


def gpt() -> tuple[Callable[..., Any], Any, Any]:
    """A small GPT, its layers in a scan."""
    config = Config(layers=4, width=256, heads=8, vocabulary=2048, tokens=128, batch=16, scanned=True)
    return make_gpt(config)


def conv() -> tuple[Callable[..., Any], Any, Any]:
    """A residual net of convolutions, few parameters and many activations."""
    optimizer = optax.sgd(1e-3, momentum=0.9)

    def convolve(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss_fn(params, batch):
        x = convolve(batch["image"], params["stem"])
        for number, block in enumerate(params["blocks"]):
            y = convolve(jax.nn.relu(x), block["first"], 2 if number == 2 else 1)
            x = convolve(x, block["skip"], 2 if number == 2 else 1) + convolve(jax.nn.relu(y), block["second"])
        logits = jax.nn.relu(x).mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def kernel(size, fan_in, out):
        return jax.ShapeDtypeStruct((size, size, fan_in, out), jnp.float32)

    widths = [(32, 32), (32, 32), (32, 64), (64, 64)]
    params = {
        "stem": kernel(3, 3, 32),
        "blocks": [{"first": kernel(3, a, b), "second": kernel(3, b, b), "skip": kernel(1, a, b)} for a, b in widths],
        "head": jax.ShapeDtypeStruct((64, 1000), jnp.float32),
    }
    image, label = jax.ShapeDtypeStruct((64, 16, 16, 3), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    return make_train_step(loss_fn, optimizer), state_types(params, optimizer), {"image": image, "label": label}


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "mlp": (mlp, METHODS),
    "gpt": (gpt, METHODS),
    "conv": (conv, FOR_IMAGES),
}


def filled(types: Any) -> Any:
    """Arrays of these types, small numbers."""
    random = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return random.integers(0, 2, leaf.shape).astype(leaf.dtype)
        return abs(random.normal(size=leaf.shape)).astype(leaf.dtype) * 0.02

    return jax.tree.map(fill, types)


def compiled_plans(model: str, cluster: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each plan of a model, compiled, and its arguments: the state, which steps take over, and the batch."""
    make, methods = MODELS[model]
    step, state, batch = make()
    for name, method in methods.items():
        train = autopar.parallelize(step, cluster=cluster, method=method)
        yield name, train.compile(state, batch), [filled(state), filled(batch)]


def step_seconds(compiled: Any, args: list[Any]) -> tuple[float, float]:
    """One step, from its call until its results are there; and what it keeps all cores busy."""
    started, busy = time.perf_counter(), time.process_time()
    args[0], loss = compiled(*args)
    jax.block_until_ready((args[0], loss))
    return time.perf_counter() - started, (time.process_time() - busy) / min(os.cpu_count() or 1, NUM_DEVICES)


class Figures(NamedTuple):
    """Of a plan, seconds: predicted; of each of its steps by the clock, and for which it keeps the cores busy."""

    predicted: float
    clock: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float, float]:
        """One number of each."""
        return self.predicted, statistics.median(self.clock), statistics.median(self.busy)


def are_told_apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether of two plans that were run in turns one is faster, as far as these rounds tell: a sign test at 5 %."""
    rounds = len(one)
    fewer = min(
        sum(a < b for a, b in zip(one, other, strict=True)), sum(a > b for a, b in zip(one, other, strict=True))
    )
    return 2 * sum(math.comb(rounds, k) for k in range(fewer + 1)) / 2**rounds < 0.05


def kendall_tau(plans: Iterable[Figures], which: int, apart: bool = False) -> tuple[float, int]:
    """Pairs in the predicted order less those in the other, as a part of all; and how many. Kendall, Biometrika 1938.

    Args:
        plans: Two at least, run in turns if they are to be told apart.
        which: 1: by the clock; 2: by what the cores did.
        apart: Whether to leave out pairs that are not told apart.
    """
    order = [
        np.sign(a.predicted - b.predicted) * np.sign(a.medians[which] - b.medians[which])
        for a, b in itertools.combinations(plans, 2)
        if not apart or are_told_apart(a[which], b[which])
    ]
    return float(sum(order)) / max(1, len(order)), len(order)


def in_words(groups: list[list[Figures]]) -> str:
    """Kendall's tau of each group of plans, on average."""

    def average(which: int, apart: bool) -> tuple[float, int]:
        found = [kendall_tau(plans, which, apart) for plans in groups]
        return statistics.mean(tau for tau, _ in found), sum(count for _, count in found)

    (clock, pairs), (busy, _) = average(1, False), average(2, False)
    (clock_apart, num_clock), (busy_apart, num_busy) = average(1, True), average(2, True)
    return (
        f"{clock:.2f} of steps, {busy:.2f} of work; of pairs that are told apart {clock_apart:.2f} ({num_clock} of {pairs}), "
        f"{busy_apart:.2f} ({num_busy} of {pairs})"
    )


def main() -> None:
    """Calibrate, predict, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="of this machine; by default it is measured first")
    parser.add_argument("--seconds", type=float, default=90.0, help="to calibrate (90)")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each plan that are timed (9)")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--json", metavar="FILE", help="write the figures, too")
    options = parser.parse_args()
    console = Console(width=110)
    profile = autopar.MachineProfile.load(options.profile) if options.profile else None
    if profile is None:
        profile = autopar.calibrate(seconds=options.seconds, show_progress=True)
        errors = ", ".join(f"{kind} {error:.0%}" for kind, error in profile.errors.items())
        console.print(f"calibrated in {profile.machine['seconds']} s; median errors: {errors}")
    cluster = autopar.Cluster.local(profile=profile)
    found: dict[str, dict[str, Figures]] = {}
    for model in options.models:
        plans = list(compiled_plans(model, cluster))
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in plans}
        for number in range(options.rounds + 1):
            for name, compiled, args in plans:
                seconds = step_seconds(compiled, args)
                if number:  # the first places its arguments
                    taken[name].append(seconds)
        found[model] = {
            name: Figures(compiled.plan.cost.step_seconds, *zip(*taken[name], strict=True))
            for name, compiled, _ in plans
        }
        table = Table("plan", "predicted", "measured", "ratio", "cores busy", "ratio", title=model, show_edge=False)
        for name, plan in sorted(found[model].items(), key=lambda item: item[1].medians[1:]):
            predicted, clock, busy = plan.medians
            times = (f"{seconds * 1e3:.1f} ms" for seconds in (predicted, clock))
            table.add_row(name, *times, f"{predicted / clock:.2f}", f"{busy * 1e3:.1f} ms", f"{predicted / busy:.2f}")
        console.print(table, f"Kendall's tau: {in_words([list(found[model].values())])}\n", sep="\n")
    console.print(
        f"on average over {len(found)} models: {in_words([list(plans.values()) for plans in found.values()])}"
    )
    together = [plan for plans in found.values() for plan in plans.values()]
    clock, busy = (kendall_tau(together, which)[0] for which in (1, 2))
    console.print(f"over all {len(together)} plans: {clock:.2f} of steps, {busy:.2f} of work")
    if options.json:
        plain = {model: {name: plan.medians for name, plan in plans.items()} for model, plans in found.items()}
        Path(options.json).write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()

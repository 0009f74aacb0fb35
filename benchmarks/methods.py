"""`Auto()` against every named method with all its settings, by predicted seconds.

    python benchmarks/methods.py [--models gpt,vit] [--clusters "1x8 h100,8x8 v100"] [--found FILE] [--plans 24]
        [--methods DataParallel,ShardParallel,ThreeD,PipelineParallel]

Prints for each model on each described machine: the seconds of `Auto()`, its gap, the best other method with its settings, the
number of plans compared, and the first time over the second; above 1.000, the automatic plan was beaten. The settings of
`DataParallel` (ZeRO stage, microbatches), `ShardParallel` (every mesh of up to three axes, microbatches), `ThreeD` (three
degrees, microbatches, schedule, ZeRO, sequence parallelism) and `PipelineParallel` (stages, schedule, microbatches,
recomputation) are searched one at a time from several starts, the first as near as can be to what `Auto()` chose, until no
single change is faster, or `--plans` plans from a start were made. Each plan is written to `--found`, one per line, and not
made again, so you can repeat the command as often as you like. `--seconds` limits one run: no plan is begun later than that,
and the exit status is 3 while some are left. With `--methods`, only those are planned, and the table omits the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gpt
import jax.numpy as jnp
import llama
import t5
import vit
import wide_resnet
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.search.methods import Method, method_text
from autopar.search.planner import make_plan

CLUSTERS = "1x8 h100,8x8 h100,1x4 v100,8x8 v100,16x8 a100,4x4 tpu v5e"
GPT_1B = gpt.Config(layers=24, width=2048, heads=32, batch=1024, scanned=True, remat=True, dtype=jnp.bfloat16)
MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: gpt.make_step(
        gpt.Config(8, 1024, 16, vocabulary=8192, tokens=512, batch=256, scanned=True, dtype=jnp.bfloat16)
    ),
    "llama": lambda: llama.make_step(llama.Llama(8, 2048, 5632, heads=16, vocabulary=16384, tokens=1024, batch=256)),
    "experts": lambda: gpt.make_step(
        gpt.Config(2, 1024, 16, vocabulary=8192, tokens=512, batch=256, experts=16, dtype=jnp.bfloat16)
    ),
    "wide_resnet": lambda: wide_resnet.make_step(wide_resnet.Config((1, 1, 1, 1), pixels=64, batch=512)),
    "t5": lambda: t5.make_step(t5.Config(layers=4, vocabulary=8192, batch=256)),
    "vit": lambda: vit.make_step(vit.Config(layers=6, batch=512)),
    "gpt-1.3b": lambda: gpt.make_step(GPT_1B),
    "llama-8b": lambda: llama.make_step(llama.Llama(32, 4096, 14336, heads=32, batch=512)),
}
"""Few layers of real widths, and some of real size, which take longer: ask for those by name."""
SMALL = "gpt,llama,experts,wide_resnet,t5,vit"
SEMANTICS = {"wide_resnet": "per_microbatch"}
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FAR, FEW = 1.5, 4
"""Settings that take so many times as long as the best method known are changed a few times only."""
METHODS = "DataParallel,ShardParallel,ThreeD,PipelineParallel"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


@dataclass(frozen=True)
class Family:
    """One method.

    Attributes:
        name: Of the method.
        method: Makes one of some settings.
        settings: Of each setting the values in order; an ordered one is changed to the next or the one before.
        starts: Settings to start from.
    """

    name: str
    method: Callable[..., Method]
    settings: dict[str, Sequence[Any]]
    starts: Sequence[dict[str, Any]]

    def neighbours(self, at: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What differs in one setting; the settings take turns, so that few plans have tried each of them."""

        def of(name: str) -> Iterator[dict[str, Any]]:
            values = self.settings[name]
            place = values.index(at[name])
            near = (place + 1, place - 1) if name == "num_microbatches" else range(len(values))
            for k in near:
                if 0 <= k < len(values) and k != place and not (name == "degrees" and apart(at[name], values[k]) > 2):
                    yield at | {name: values[k]}

        turns = itertools.zip_longest(*(of(name) for name in self.settings))
        return (each for turn in turns for each in turn if each is not None)

    def beginning_at(self, settings: dict[str, Any]) -> Family:
        """The same, begun at further settings, if its first setting is among them and they are its own."""
        if not self.starts or next(iter(self.settings)) not in settings:
            return self
        start = {name: settings.get(name, of_first) for name, of_first in self.starts[0].items()}
        known = all(value in self.settings[name] for name, value in start.items())
        return dataclasses.replace(self, starts=[start, *self.starts]) if known else self


def families(cluster: autopar.Cluster, most_axes: int) -> Iterator[Family]:
    """Every method with all its settings there; meshes of so many axes at most."""
    count, inside = cluster.num_devices, cluster.devices_per_host
    yield Family(
        "DataParallel",
        autopar.DataParallel,
        {"zero": (0, 1, 3), "num_microbatches": MICROBATCHES},
        [{"zero": zero, "num_microbatches": number} for zero, number in ((1, 1), (3, 1), (3, 4))],
    )
    shapes = [shape for axes in range(1, most_axes + 1) for shape in ordered_factors(count, axes)]
    own = (cluster.hosts, inside) if cluster.hosts > 1 else (count,)
    yield Family(
        "ShardParallel",
        autopar.ShardParallel,
        {"mesh_shape": shapes, "num_microbatches": MICROBATCHES},
        [{"mesh_shape": own, "num_microbatches": 1}],
    )
    degrees = [each for each in ordered_factors(count, 3, least=1) if each[1] <= inside]
    for tensor, pipeline in dict.fromkeys([(1, 1), (min(8, inside), 1), (1, 2), (2, 2)]):
        if count % (tensor * pipeline) == 0:
            yield Family(
                "ThreeD",
                _three_d,
                {
                    "degrees": degrees,
                    "num_microbatches": MICROBATCHES,
                    "zero": (0, 1, 3),
                    "sequence": (False, True),
                    "schedule": ("1f1b", "zb-h1", "interleaved"),
                },
                [
                    {
                        "degrees": (count // tensor // pipeline, tensor, pipeline),
                        "num_microbatches": 4 * pipeline if pipeline > 1 else 1,
                        "zero": 1,
                        "sequence": tensor > 1,
                        "schedule": "1f1b",
                    }
                ],
            )
    yield Family(
        "PipelineParallel",
        autopar.PipelineParallel,
        {
            "num_stages": [n for n in range(2, 17) if count % n == 0],
            "num_microbatches": MICROBATCHES,
            "schedule": SCHEDULES,
            "recompute": ("auto", "all"),
        },
        [
            {"num_stages": n, "num_microbatches": 4 * n, "schedule": "1f1b", "recompute": "auto"}
            for n in (2, 4, 8)
            if count % n == 0
        ],
    )


def _three_d(degrees: tuple[int, int, int], **settings: Any) -> Method:
    data, tensor, pipeline = degrees
    idle = {"zero": 0 if data == 1 else None, "sequence": False if tensor == 1 else None}
    idle["schedule"] = "1f1b" if pipeline == 1 else None
    settings |= {name: value for name, value in idle.items() if value is not None}
    return autopar.ThreeD(data=data, tensor=tensor, pipeline=pipeline, **settings)


def settings_of(chosen: dict[str, Any]) -> dict[str, Any]:
    """The settings at which a method comes nearest to what `Auto()` chose."""
    if not chosen:
        return {}
    mesh, stages = tuple(chosen["mesh"]), chosen["stages"]
    degrees = (*mesh[:2], stages) if len(mesh) == 2 else (mesh[0], 1, stages)
    settings = {"num_microbatches": chosen["num_microbatches"], "mesh_shape": mesh, "degrees": degrees}
    return settings | ({"num_stages": stages, "schedule": chosen["schedule"]} if stages > 1 else {"schedule": "1f1b"})


def apart(one: Sequence[int], other: Sequence[int]) -> int:
    """In how many factors two lists of degrees differ: 2 where one factor went from one degree to another."""
    return sum(len(factors(Fraction(a, b))) for a, b in zip(one, other, strict=True))


def factors(ratio: Fraction) -> list[int]:
    """Prime factors of a ratio, above and below."""
    found, prime = [], 2
    for left in (ratio.numerator, ratio.denominator):
        prime = 2
        while left > 1:
            if left % prime:
                prime += 1
            else:
                found.append(prime)
                left //= prime
    return found


def ordered_factors(number: int, axes: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Ways to write a number as a product of so many factors, in order."""
    divisors = [n for n in range(least, number + 1) if number % n == 0]
    for factors in itertools.product(divisors, repeat=axes):
        if math.prod(factors) == number:
            yield factors


class TimeIsUp(Exception):
    """No further plan is to be begun."""


class Cell:
    """A model on a machine: what was planned of it, and what is planned now.

    Attributes:
        ends: When the last plan may begin, by `time.monotonic()`.
    """

    def __init__(self, model: str, cluster: str, found: Path, ends: float = math.inf):
        self.model, self.cluster, self._file = model, autopar.Cluster.of(cluster), found
        self._name, self.ends = cluster, ends
        self.seconds: dict[str, float] = {}
        self.gaps: dict[str, float] = {}
        self.chosen: dict[str, dict[str, Any]] = {}
        self._program: Any = None
        for line in found.read_text().splitlines() if found.exists() else ():
            row = json.loads(line)
            if (row["model"], row["cluster"]) == (model, cluster):
                self.seconds[row["method"]] = row["seconds"]
                self.gaps[row["method"]] = row.get("gap", math.nan)
                self.chosen[row["method"]] = row.get("chosen", {})

    def plan(self, method: Method) -> float:
        """Seconds of the method's plan; inf: there is none.

        Raises:
            TimeIsUp: It was not planned before, and it is too late to begin.
        """
        text = method_text(method)
        if text not in self.seconds:
            if time.monotonic() > self.ends:
                raise TimeIsUp
            if self._program is None:
                step, *arguments = MODELS[self.model]()
                self._program = trace_step(step, tuple(arguments))
            started, why, words, gap, chosen = time.process_time(), "", "", math.nan, dict[str, Any]()
            try:
                plan = make_plan(self._program, find_roles(self._program, (1,)), self.cluster, method)
            except AutoparError as error:
                seconds, why = math.inf, error.summary
            else:
                seconds, gap = plan.cost.step_seconds, plan.cost.optimality_gap
                words = f"{len(plan.stages)} stages {plan.mesh}, {plan.num_microbatches} microbatches, {plan.schedule}"
                chosen = {"stages": len(plan.stages), "mesh": list(plan.stages[0].logical_mesh.shape)}
                chosen |= {"num_microbatches": plan.num_microbatches, "schedule": plan.schedule}
            taken = time.process_time() - started
            self.seconds[text], self.gaps[text], self.chosen[text] = seconds, gap, chosen
            row = {"model": self.model, "cluster": self._name, "method": text, "seconds": seconds}
            row |= {"gap": gap, "cpu": taken, "chosen": chosen}
            with self._file.open("a") as file:
                file.write(json.dumps(row | {"plan": words, "why": why}) + "\n")
        return self.seconds[text]

    def climb(self, family: Family, most: int) -> None:
        """Settings of a method, one changed at a time."""
        extra = {"microbatch_semantics": SEMANTICS[self.model]} if self.model in SEMANTICS else {}
        known, made = min(self.seconds.values(), default=math.inf), dict[str, float]()

        def seconds(settings: dict[str, Any]) -> float:
            try:
                method = family.method(**settings, **extra)
            except AutoparError:
                return math.inf
            return made.setdefault(method_text(method), self.plan(method))

        for start in family.starts:
            before, at, least, better = len(made), start, seconds(start), True
            while better:
                better = False
                for other in family.neighbours(at):
                    if len(made) - before >= (most if least < FAR * known else min(most, FEW)):
                        break
                    taken = seconds(other)
                    if taken < least * (1 - 1e-9):
                        at, least, better = other, taken, True


def main() -> None:
    """Plan what is missing, print the table; fail where a method is faster than `Auto()`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=SMALL)
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--found", type=Path, default=Path("methods.jsonl"))
    parser.add_argument("--plans", type=int, default=24, help="of each method and start, at most; 0: what was found")
    parser.add_argument("--axes", type=int, default=3, help="of a mesh, at most: those of three take long to plan")
    parser.add_argument("--methods", default=METHODS, help="those that are held against Auto()")
    parser.add_argument("--auto-again", action="store_true", help="plan Auto() again, after a change of the search")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no plan is begun later than that")
    chosen = parser.parse_args()
    ends = time.monotonic() + chosen.seconds
    table = Table(title="Auto() against every method, predicted")
    for heading in ("model", "machine", "Auto()", "gap", "plans", "best other method", "its step", "Auto() over it"):
        table.add_column(heading, justify="left" if heading in ("model", "machine", "best other method") else "right")
    beaten, left, methods = 0, False, tuple(chosen.methods.split(","))
    for model, cluster in itertools.product(chosen.models.split(","), chosen.clusters.split(",")):
        cell = Cell(model, cluster, chosen.found, ends)
        auto = autopar.Auto(microbatch_semantics=SEMANTICS.get(model, "exact"))
        name = method_text(auto)
        if chosen.auto_again:
            cell.seconds.pop(name, None)
        if chosen.plans:
            try:
                cell.plan(auto)
                for family in families(cell.cluster, chosen.axes):
                    if family.name in methods:
                        cell.climb(family.beginning_at(settings_of(cell.chosen[name])), chosen.plans)
            except TimeIsUp:
                left = True
        others = {text: seconds for text, seconds in cell.seconds.items() if text.startswith(methods)}
        if not others or name not in cell.seconds:
            continue
        best = min(others, key=lambda text: others[text])
        ratio = cell.seconds[name] / others[best]
        beaten += ratio > 1.0005
        auto_cell = f"{cell.seconds[name] * 1e3:.3f} ms", f"{cell.gaps[name]:.2%}", str(len(others))
        table.add_row(model, cluster, *auto_cell, best, f"{others[best] * 1e3:.3f} ms", f"{ratio:.4f}")
        print(f"{model} on {cluster}: {ratio:.4f} of {best}", file=sys.stderr, flush=True)
    Console(width=180).print(table)
    if beaten:
        print(f"{beaten} times a method was faster than Auto()", file=sys.stderr)
    sys.exit(1 if beaten else 3 if left else 0)


if __name__ == "__main__":
    main()

"""CPU time of `Auto()`, by pass, and its memory: large models on many devices, nets without equal layers, tiny models.

    python benchmarks/scale.py [--cases gpt-1x8,llama-405b-256x8]

Plans for described machines; no device is touched. Each case is planned in a process of its own. Prints CPU seconds from the
step function to the plan, tracing by JAX included; those of each planning pass; those of following the clock, in all passes
together: simulating what hides behind what, and solving again with what that shows; the peak memory of the process beyond
what importing JAX takes; and the decisions. `timetable` is not a plan, but a simulation: a pipeline of 64 stages and 512
microbatches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX: it reads these once

import gpt
import jax
import jax.numpy as jnp
import llama
import optax
import unet
import wide_resnet
from rich.console import Console
from rich.table import Table

import autopar
from autopar.inter_op import stage_plan
from autopar.intra_op import read_off, shard
from autopar.search import meshes
from autopar.streams import assemble
from autopar.streams.instructions import Instruction, Recv, Run, Send
from autopar.streams.schedules import find_schedule
from autopar.streams.simulate import simulate


def _llama(config: llama.Llama, **changes: Any) -> Callable[[], Any]:
    return lambda: llama.make_step(dataclasses.replace(config, **changes))


CASES: dict[str, tuple[str, Callable[[], Any], float]] = {
    "gpt-1x8": ("1x8 h100", lambda: gpt.make_step(gpt.Config(layers=24, width=1024, heads=16)), 5),
    "llama-8b-8x8": ("8x8 h100", _llama(llama.LLAMA_8B, batch=512), 20),
    "llama-70b-64x8": ("64x8 h100", _llama(llama.LLAMA_70B, batch=1024), 40),
    "llama-405b-256x8": ("256x8 h100", _llama(llama.LLAMA_405B, batch=2048, tokens=8192), 60),
    "llama-405b-2048x8": ("2048x8 h100", _llama(llama.LLAMA_405B, batch=2048, tokens=8192), 60),
    "resnet-50-1x8": ("1x8 h100", lambda: wide_resnet.make_step(wide_resnet.Config(width=64)), 15),
    "wide-resnet-1x8": ("1x8 h100", lambda: wide_resnet.make_step(wide_resnet.Config()), 15),
    "unet-1x8": ("1x8 h100", lambda: unet.make_step(unet.Config(multiples=(1, 2, 2, 4), blocks=3)), 15),
    "demo-gpt": (
        "",
        lambda: gpt.make_step(gpt.Config(layers=3, width=96, heads=4, vocabulary=256, tokens=64, batch=16)),
        3,
    ),
    "digits-cnn": ("", lambda: digits_cnn(), 3),
}
"""Cluster ("": eight virtual devices of this processor), model, and the CPU seconds that it should take at most."""
TIMETABLE = "timetable"
STAGES, MICROBATCHES, MOST_SECONDS = 64, 512, 10
COLUMNS = ("case", "CPU s", "at most", "meshes", "microbatches", "stages", "clock", "GiB", "step", "decided")
CLOCK: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (read_off, ("run_lanes",)),
    (stage_plan, ("run_lanes",)),
    (assemble, ("simulate_streams",)),
    (shard, ("follow_clock", "explore_unseen", "solve_as_begun", "solve_around", "solve_in_less", "exposure_after")),
    (meshes, ("settle",)),
)
"""The functions, where they are called, that simulate steps, and that solve again with the exposure that a step showed."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join([*CASES, TIMETABLE]))
    parser.add_argument("--alone", default="", help="measure this one here, as JSON")
    chosen = parser.parse_args()
    unknown = {chosen.alone or TIMETABLE, *chosen.cases.split(",")} - {*CASES, TIMETABLE}
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join([*CASES, TIMETABLE])}")
    if chosen.alone:
        print(json.dumps(simulate_timetable() if chosen.alone == TIMETABLE else measure(chosen.alone)))
        return
    table = Table(title="planning everything: CPU seconds")
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("case", "decided") else "right")
    for name in chosen.cases.split(","):
        command = [sys.executable, __file__, "--alone", name]
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        table.add_row(*json.loads(answer.stdout.splitlines()[-1]))
    Console(width=160).print(table)


def digits_cnn() -> tuple[Callable[..., Any], Any, Any]:
    """Two convolutions and two dense layers on images of 8 x 8 pixels."""
    optimizer = optax.adamw(1e-3)

    def init() -> Any:
        shapes = (3, 3, 1, 32), (3, 3, 32, 64), (256, 128), (128, 10)
        params = [{"kernel": jnp.ones(shape), "bias": jnp.ones(shape[-1])} for shape in shapes]
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["image"]
        for layer in params[:2]:
            x = jax.lax.conv_general_dilated(
                x, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + layer["bias"]).reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))
        x = jax.nn.relu(x.reshape(len(x), -1) @ params[2]["kernel"] + params[2]["bias"])
        logits = x @ params[3]["kernel"] + params[3]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    image, label = jax.ShapeDtypeStruct((128, 8, 8, 1), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    return train_step, jax.eval_shape(init), {"image": image, "label": label}


def simulate_timetable() -> list[str]:
    """The row of a pipeline's streams, which are there, on the clock."""
    streams: dict[int, list[Instruction]] = {}
    number = {(kind, k, s): n for n, (kind, k, s) in enumerate(product("FB", range(MICROBATCHES), range(STAGES)))}
    for stage, steps in enumerate(find_schedule("1f1b").order(STAGES, MICROBATCHES)):
        own = streams.setdefault(stage, [])
        for step in steps:
            before, after = (stage - 1, stage + 1) if step.kind == "F" else (stage + 1, stage - 1)
            made = number[step.kind, step.microbatch, stage]
            if 0 <= before < STAGES:
                given = number[step.kind, step.microbatch, before]
                own.append(Recv((given,), before, given))
            own.append(Run(step.kind, stage, step.microbatch, (), (made,)))
            if 0 <= after < STAGES:
                own.append(Send((made,), after, made))
    started = time.process_time()
    simulation = simulate(streams, lambda run: 1e-3, lambda mesh, send: 1e-4, [1] * len(number), lambda run: 0)
    seconds = time.process_time() - started
    what = f"{STAGES} stages, {MICROBATCHES} microbatches, 1f1b"
    return [TIMETABLE, f"{seconds:.1f}", f"{MOST_SECONDS}", "", "", "", "", "", f"{simulation.seconds:.4g} s", what]


class Stopwatch:
    """CPU seconds in some functions; those that they call among them count once."""

    def __init__(self) -> None:
        self.seconds, self._is_running = 0.0, False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if self._is_running:
                return function(*args, **options)
            self._is_running, started = True, time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.process_time() - started
                self._is_running = False

        return timed


def measure(name: str) -> list[str]:
    """One row."""
    cluster, make, most = CASES[name]
    step, state, batch = make()
    machine = autopar.Cluster.of(cluster) if cluster else autopar.Cluster.local()
    parallel = autopar.parallelize(step, cluster=machine, batch_argnums=(1,))
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = Stopwatch()
    for module, names in CLOCK:
        for function in names:
            setattr(module, function, clock.around(getattr(module, function)))
    started = time.process_time()
    plan = parallel.plan(state, batch)
    seconds = time.process_time() - started
    passes = dict(plan.cost.search.pass_seconds)
    stages = f"{len(plan.stages)} stages, {plan.schedule}, " if len(plan.stages) > 1 else ""
    return [
        name,
        f"{seconds:.1f}",
        f"{most:g}",
        *(f"{passes.get(each, 0.0):.1f}" for each in ("meshes", "microbatches", "stages")),
        f"{clock.seconds:.1f}",
        f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - imported) / 2**20:.2f}",
        f"{plan.cost.step_seconds:.4g} s",
        f"{stages}{plan.mesh}, {plan.num_microbatches} microbatches",
    ]


if __name__ == "__main__":
    main()

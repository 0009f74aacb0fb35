"""Memory of a planned ZeRO-3 step against FSDP written by hand: bytes on one device, both as XLA's GPU compiler counts them.

    pip install 'autopar[verify]'
    python benchmarks/fsdp.py

In:     the Llama of the benchmarks, small, 16 layers, scanned and unrolled, each layer in `jax.checkpoint`.
Out:    for both programs, the bytes of XLA's buffer assignment on one of 8 H100 that need not be there, and the ratio.
Method: in the hand-written program every parameter is split along its first dim; a layer gathers its weights at its beginning,
        inside the checkpoint, so that the backward pass gathers them again, and JAX turns the gradient of each gather into a
        reduce-scatter; Zhao et al., "PyTorch FSDP", VLDB 2023. The plan's memory budget is the bytes of that program, or, if
        the planner predicts that it needs more, those; nothing waits in the memory of the hosts. Both are compiled for the
        machine that is planned for: a compiler for CPUs sends each gradient at once, so that none is on its way beside the
        next.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from llama import Llama, loss_of, make_step
from parts import make_train_step
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError, InfeasibleError, needed_bytes
from autopar.verify.targets import find_target

SMALL = Llama(layers=16, width=2048, hidden=8192, heads=16, vocabulary=8192, tokens=1024, batch=8, dtype=jnp.float32)


def by_hand(config: Llama, mesh: jax.sharding.Mesh, options: Mapping[str, Any] | None = None) -> Any:
    """The FSDP step, compiled with these options."""
    optimizer = optax.adamw(3e-4, weight_decay=0.1)
    num_devices = mesh.size

    def gathered(tree: Any) -> Any:
        return jax.tree.map(lambda w: lax.all_gather(w, "d", axis=0, tiled=True), tree)

    def part_of_loss(params, tokens):
        return loss_of(params, tokens, config, gathered) / num_devices

    local_step = make_train_step(part_of_loss, optimizer)

    def whole_step(state, tokens):
        state, loss = local_step(state, tokens)
        return state, lax.psum(loss, "d")

    _, state, batch = make_step(config)

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        stacked = config.scanned and any(getattr(key, "key", None) == "layers" for key in path)
        return PartitionSpec(*[None] * stacked, "d") if leaf.ndim else PartitionSpec()

    specs = jax.tree_util.tree_map_with_path(spec, state)
    in_specs, out_specs = (specs, PartitionSpec("d")), (specs, PartitionSpec())
    step = jax.shard_map(whole_step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    types = jax.tree.map(
        lambda t, s: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, s)), (state, batch), in_specs
    )
    return jax.jit(step, donate_argnums=0).lower(*types).compile(compiler_options=dict(options or {}))


def peak_bytes(compiled: Any) -> int:
    """Of one device: arguments, results that do not take their memory, and temporaries."""
    found = compiled.memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def compare(config: Llama, devices: Sequence[Any], options: Mapping[str, Any] | None = None) -> tuple[int, int, int]:
    """Bytes of the program by hand, of the planned one, and what the plan predicted; on these devices."""
    written = peak_bytes(by_hand(config, jax.sharding.Mesh(np.array(devices), ("d",)), options))
    step, state, batch = make_step(config)
    method = autopar.DataParallel(zero=3, memory_budget_bytes=written, offload="never")
    cluster = autopar.Cluster.local(list(devices), device=autopar.Device("h100", 989e12, 80e9, 3.35e12))

    def planned(method: autopar.DataParallel) -> Any:
        return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).compile(state, batch)

    try:
        compiled = planned(method)
    except InfeasibleError as error:  # by the planner's count, which may be above XLA's
        compiled = planned(replace(method, memory_budget_bytes=needed_bytes(error)))
    return written, peak_bytes(next(iter(compiled.programs.values()))), compiled.plan.cost.peak_bytes[0]


def main() -> None:
    """Print the table."""
    try:
        target = find_target("h100", autopar.Cluster.of("8 h100"))
    except AutoparError as error:  # `make bench` runs everything, also where the compiler is not installed
        print(error)
        return
    table = Table(title="ZeRO-3 of 16 layers on 8 H100, bytes on each")
    for heading in ("layers", "by hand", "planned", "predicted", "planned / by hand"):
        table.add_column(heading, justify="right")
    for scanned in (True, False):
        written, planned, predicted = compare(replace(SMALL, scanned=scanned), target.devices, target.options)
        figures = (f"{n / 2**20:.2f} MiB" for n in (written, planned, predicted))
        table.add_row("scanned" if scanned else "unrolled", *figures, f"{planned / written:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

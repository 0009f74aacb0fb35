"""Hand plans against the automatic one, under one cost function: a GPT block, an MoE block, a Wide-ResNet on 8 devices.

    python benchmarks/hand_plans.py [--cluster "1x8 h100"]

The hand plans are those of the literature: data parallelism, ZeRO 1 to 3, Megatron's tensor parallelism with and without
sequence parallelism, expert parallelism, and every mix of data with these in every factorization of the mesh. Each is
given by pins on parameters and batch; what the pins leave open is planned, which can only make it faster. Prints predicted
step times; the last column is the hand plan's over the automatic plan's: below 1, the hand plan is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from gpt import Config
from gpt import make_step as make_gpt
from jax import lax
from jax.sharding import PartitionSpec as P
from parts import make_train_step, state_types
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError

TYPES = jax.ShapeDtypeStruct


def moe_block() -> tuple[Any, Any, Any]:
    """Top-2 experts with a capacity, as in GShard: 8 groups of 512 tokens, 8 experts."""
    groups, tokens, width, hidden, experts = 8, 512, 512, 2048, 8
    capacity = 2 * tokens // experts
    optimizer = optax.adamw(1e-3)

    def loss_fn(params, batch):
        x = batch["x"]
        gates = jax.nn.softmax(x @ params["gate"])
        weights, chosen = lax.top_k(gates, 2)
        mask = jax.nn.one_hot(chosen, experts).sum(2)
        place = (jnp.cumsum(mask, 1) - mask) * mask
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity) * (mask * (place < capacity))[..., None]
        sent = jnp.einsum("gsec,gsm->egcm", slot, x)
        hidden_values = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, params["up"]))
        back = jnp.einsum("egch,ehm->egcm", hidden_values, params["down"])
        mixed = jnp.einsum("gsec,egcm->gsm", slot * gates[..., None], back)
        return jnp.mean((x + mixed - batch["y"]) ** 2) + 0.0 * weights.sum()

    params = {
        "gate": TYPES((width, experts), jnp.float32),
        "up": TYPES((experts, width, hidden), jnp.float32),
        "down": TYPES((experts, hidden, width), jnp.float32),
    }
    array = TYPES((groups * 8, tokens, width), jnp.float32)
    return make_train_step(loss_fn, optimizer), state_types(params, optimizer), {"x": array, "y": array}


def wide_resnet() -> tuple[Any, Any, Any]:
    """Two stages of wide blocks on 32 x 32 images."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def convolve(x, kernel, stride=1):
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def normalize(x):
        return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)

    def loss_fn(params, batch):
        x = convolve(batch["image"], params["stem"])
        for number, block in enumerate(params["blocks"]):
            h = jax.nn.relu(normalize(x))
            stride = 2 if number else 1
            y = convolve(h, block["first"], stride)
            x = convolve(h, block["skip"], stride) + convolve(jax.nn.relu(normalize(y)), block["second"])
        logits = jax.nn.relu(x).mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def kernel(size, fan_in, out):
        return TYPES((size, size, fan_in, out), jnp.float32)

    widths = [(64, 320), (320, 640)]
    params = {
        "stem": kernel(3, 3, 64),
        "blocks": [{"first": kernel(3, a, b), "second": kernel(3, b, b), "skip": kernel(1, a, b)} for a, b in widths],
        "head": TYPES((640, 1000), jnp.float32),
    }
    batch = {"image": TYPES((256, 32, 32, 3), jnp.float32), "label": TYPES((256,), jnp.int32)}
    return make_train_step(loss_fn, optimizer), state_types(params, optimizer), batch


def mixes(num_devices: int) -> Iterator[tuple[int, int]]:
    """Data x other, in every factorization with something of the other."""
    for other in range(2, num_devices + 1):
        if num_devices % other == 0:
            yield num_devices // other, other


def hand_plans(model: str, num_devices: int = 8) -> Iterator[tuple[str, Any]]:
    """Names and methods."""
    for zero in range(4):
        yield ("data parallel" if zero == 0 else f"ZeRO-{zero}"), autopar.DataParallel(zero=zero)
    for data, other in mixes(num_devices):
        shape = (other,) if data == 1 else (data, other)
        axis, batch = ("x", None) if data == 1 else ("y", "x")
        name = f"{data} data x {other} " if data > 1 else f"{other} "
        if model == "GPT block":
            megatron = {
                "*params/*/qkv/kernel": P(None, axis),
                "*params/*/qkv/bias": P(axis),
                "*params/*/out/kernel": P(axis, None),
                "*params/*/up/kernel": P(None, axis),
                "*params/*/up/bias": P(axis),
                "*params/*/down/kernel": P(axis, None),
            }
            yield name + "tensor", _pinned(shape, {**megatron, "batch": P(batch, None)})
            yield (
                name + "tensor + vocabulary",
                _pinned(
                    shape,
                    {
                        **megatron,
                        "*params/head": P(None, axis),
                        "*params/embed": P(axis, None),
                        "batch": P(batch, None),
                    },
                ),
            )
        if model == "MoE block":
            experts = {"*params/up": P(axis, None, None), "*params/down": P(axis, None, None)}
            both = P((batch, axis), None, None) if batch else P(axis, None, None)
            yield name + "expert", _pinned(shape, {**experts, "batch/*": both})
            yield (
                name + "tensor",
                _pinned(
                    shape, {"*params/up": P(None, None, axis), "*params/down": P(None, axis, None), "batch/*": P(batch)}
                ),
            )
        if model == "Wide-ResNet":
            yield (
                name + "output channels",
                _pinned(shape, {"*params/blocks/*": P(None, None, None, axis), "batch/*": P(batch)}),
            )


def _pinned(shape: tuple[int, ...], constraints: dict[str, P]) -> Any:
    return autopar.ShardParallel(mesh_shape=shape, constraints=constraints)


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="1x8 h100")
    parser.add_argument("--models", default="GPT block,MoE block,Wide-ResNet")
    chosen = parser.parse_args()
    cluster = autopar.Cluster.of(chosen.cluster)
    models = {
        "GPT block": lambda: make_gpt(Config(layers=1, width=2048, heads=16, batch=16, vocabulary=8192)),
        "MoE block": moe_block,
        "Wide-ResNet": wide_resnet,
    }
    for model in chosen.models.split(","):
        step, state, batch = models[model]()
        table = Table(title=f"{model} on {chosen.cluster}, predicted")
        for heading in ("plan", "mesh", "step", "communication", "gap", "over automatic"):
            table.add_column(heading, justify="left" if heading in ("plan", "mesh") else "right")
        best = None
        for name, method in [("automatic", autopar.Auto()), *hand_plans(model, cluster.num_devices)]:
            try:
                plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(state, batch)
            except AutoparError as error:
                table.add_row(name, "", error.summary)
                continue
            best = best or plan.cost.step_seconds
            cost = plan.cost
            table.add_row(
                name,
                str(plan.mesh),
                f"{cost.step_seconds * 1e3:.3f} ms",
                f"{cost.communication_seconds * 1e3:.3f} ms",
                f"{cost.optimality_gap:.1%}",
                f"{cost.step_seconds / best:.4f}",
            )
        Console(width=110).print(table)


if __name__ == "__main__":
    main()

"""The models of the benchmark suite, each with the shardings that an expert would write by hand.

In:     "small" (a laptop's virtual devices) or "full" (nodes of GPUs).
Out:    `CASES`: a step and the types of its arguments; for each expert sharding, pins by path on a mesh of data x model.
Method: the shardings of the literature: data parallelism, FSDP (ZeRO-3), Megatron's columns and rows, experts over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import llama
import mlp
import numpy as np
import unet
import wide_resnet
from jax.sharding import PartitionSpec as P

Made = tuple[Callable[..., Any], Any, Any]


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        small: Makes the step and the types of its state and batch, for a few cores.
        full: The same as people train it.
        tensor: What is split over the model axis by hand, by the end of its path; {}: nobody does.
        semantics: Of its microbatches.
    """

    small: Callable[[], Made]
    full: Callable[[], Made]
    tensor: Mapping[str, P] = field(default_factory=dict)
    semantics: Any = "exact"


COLUMNS, ROWS = P(None, "model"), P("model", None)
MEGATRON = {
    "*/qkv/kernel": COLUMNS,
    "*/qkv/bias": P("model"),
    "*/out/kernel": ROWS,
    "*/up/kernel": COLUMNS,
    "*/up/bias": P("model"),
    "*/down/kernel": ROWS,
    "*/embed": ROWS,
    "*/head": COLUMNS,
}
EXPERTS = {"*/up": P("model", None, None), "*/down": P("model", None, None)}
LLAMA = {**{f"*/{name}": P(None, None, "model") for name in ("q", "k", "v", "gate", "up")}}
LLAMA |= {f"*/{name}": P(None, "model", None) for name in ("o", "down")} | {"*/embed": ROWS, "*/head": COLUMNS}


def make_mlp(width: int, layers: int, batch: int) -> Made:
    """The MLP of the benchmarks: types only."""
    step, params, example = mlp.make_step(width, layers, batch)
    return step, *jax.eval_shape(lambda: (params, example))


CASES = {
    "mlp": Case(
        lambda: make_mlp(256, 4, 256),
        lambda: make_mlp(8192, 8, 8192),
        {"[02468]": COLUMNS, "[13579]": ROWS},
    ),
    "gpt": Case(
        lambda: gpt.make_step(gpt.Config(layers=2, width=128, heads=4, vocabulary=512, tokens=32, batch=16)),
        lambda: gpt.make_step(gpt.Config(dtype=jnp.bfloat16)),
        MEGATRON,
    ),
    "llama": Case(
        lambda: llama.make_step(
            llama.Llama(2, 128, 256, heads=8, kv_heads=4, vocabulary=512, tokens=32, batch=16, dtype=jnp.float32)
        ),
        lambda: llama.make_step(llama.LLAMA_8B),
        LLAMA,
    ),
    "experts": Case(
        lambda: gpt.make_step(gpt.Config(2, 128, 4, vocabulary=512, tokens=32, batch=16, experts=8)),
        lambda: gpt.make_step(gpt.Config(experts=16, dtype=jnp.bfloat16)),
        EXPERTS,
    ),
    "wide_resnet": Case(
        lambda: wide_resnet.make_step(wide_resnet.Config((1, 1), width=16, classes=16, pixels=16, batch=16)),
        lambda: wide_resnet.make_step(wide_resnet.Config()),
        semantics="per_microbatch",
    ),
    "unet": Case(
        lambda: unet.make_step(unet.Config(width=32, multiples=(1, 2), blocks=1, groups=8, pixels=16, batch=32)),
        lambda: unet.make_step(unet.Config()),
    ),
}


SMALL = ("mlp", "gpt", "experts", "wide_resnet")
"""Cases of the small set."""


def hand_shardings(case: Case, way: str, arguments: Any, sizes: Mapping[str, int]) -> Any:
    """What an expert writes: a `PartitionSpec` for each leaf of (state, batch).

    Args:
        case: The model.
        way: `"data"`, `"fsdp"` or `"tensor"`.
        arguments: Types of the state and the batch.
        sizes: Of the axes `data` and `model`; FSDP and data parallelism use both as one.
    """
    everything = tuple(sizes)

    def of_state(path: Any, leaf: Any) -> P:
        if way == "data" or not leaf.shape:
            return P()
        if way == "tensor":
            name = path_text(path)
            found = next((spec for glob, spec in case.tensor.items() if fnmatchcase(name, glob)), P())
            return found if len(found) <= leaf.ndim else P()
        count = int(np.prod(list(sizes.values())))
        dims = [dim for dim, length in enumerate(leaf.shape) if length % count == 0]
        if not dims:
            return P()
        largest = max(dims, key=lambda dim: leaf.shape[dim])
        return P(*[None] * largest, everything)

    state, batch = arguments
    rows = P("data") if way == "tensor" else P(everything)
    return jax.tree_util.tree_map_with_path(of_state, state), jax.tree.map(lambda _: rows, batch)


def path_text(path: Any) -> str:
    """A path as plans write it."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def example(arguments: Any) -> Any:
    """Arrays of these types: small numbers for parameters and data, zeros for what an optimizer remembers."""
    random = np.random.default_rng(0)

    def of(path: Any, leaf: Any) -> Any:
        if "opt_state" in path_text(path):
            return np.zeros(leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return random.integers(0, 16, leaf.shape).astype(leaf.dtype)
        return (0.05 * random.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(of, arguments)

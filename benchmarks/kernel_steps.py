"""Train steps with what language models use: kernels, 8-bit products, experts without capacity, offloading.

In:     "small" (kernels interpreted, float32, for a CPU) or not (for GPUs).
Out:    `STEPS`: for each name a step and the types of its state and batch.
Method: one model; each step replaces another part of it by a kernel. Kernels for TPUs are interpreted everywhere, as loops
        over blocks. For GPUs the layers are as wide as those of a GPT of 1.3 B: in a model of 0.1 GB, weights that are
        gathered ahead of their layer, buffers for small arrays that are sent together, and gaps in XLA's heap are a tenth to
        a third of the memory; in a model of several GB they are a hundredth. Steps that are about neither attention nor
        norms use cuDNN's attention there: XLA's own would take most of the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from cases import Made
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.gpu import attention, rms_norm
from jax.experimental.pallas.ops.tpu import megablox
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from parts import make_train_step, state_types

EXPERTS = 4


@dataclass(frozen=True)
class Sizes:
    """Of the model; the defaults are those for GPUs."""

    batch: int = 32
    tokens: int = 2048
    layers: int = 8
    heads: int = 16
    head: int = 128
    vocabulary: int = 32768
    dtype: Any = jnp.bfloat16

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.heads * self.head


FULL = Sizes()
SMALL = Sizes(batch=16, tokens=32, layers=2, heads=4, head=16, vocabulary=64, dtype=jnp.float32)
Layer = Mapping[str, jax.Array]


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, small: bool) -> jax.Array:
    """XLA's own."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def flash(q: jax.Array, k: jax.Array, v: jax.Array, small: bool) -> jax.Array:
    """Pallas's for GPUs."""
    names = "block_q block_k block_q_dkv block_kv_dkv block_q_dq block_kv_dq".split()
    blocks = attention.BlockSizes(**dict.fromkeys(names, 16 if small else 64))
    return attention.mha(q, k, v, segment_ids=None, causal=True, block_sizes=blocks, interpret=small)


def splash(q: jax.Array, k: jax.Array, v: jax.Array, small: bool) -> jax.Array:
    """Pallas's for TPUs."""
    shape = (q.shape[1], k.shape[1])
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask(shape)] * q.shape[2])
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, interpret=True)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, small: bool) -> jax.Array:
    """NVIDIA's; of a CPU plain attention, for it has none."""
    if small:
        return plain_attention(q, k, v, small)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def plain_norm(x: jax.Array, layer: Layer, small: bool) -> jax.Array:
    """Of root mean squares."""
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-5)
    return (x * scale).astype(x.dtype) * layer["scale"].astype(x.dtype) + layer["shift"].astype(x.dtype)


def fused_norm(x: jax.Array, layer: Layer, small: bool) -> jax.Array:
    """The same as a Pallas kernel."""
    return rms_norm.rms_norm(x, layer["scale"].astype(x.dtype), layer["shift"].astype(x.dtype), interpret=small)


def dense(x: jax.Array, layer: Layer, small: bool) -> jax.Array:
    """Two products."""
    return jax.nn.gelu(x @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype)


def grouped(multiply: Callable[..., jax.Array], x: jax.Array, layer: Layer, small: bool) -> jax.Array:
    """Two experts for each token, without capacity: rows are sorted, multiplied in groups, and added up where they were."""
    rows = x.reshape(-1, x.shape[-1])
    weights, picks = jax.lax.top_k(jax.nn.softmax((rows @ layer["router"].astype(x.dtype)).astype(jnp.float32)), 2)
    order = jnp.argsort(picks.reshape(-1))
    sizes = jnp.bincount(picks.reshape(-1), length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.gelu(multiply(rows[order // 2], layer["ups"].astype(x.dtype), sizes))
    out = multiply(hidden, layer["downs"].astype(x.dtype), sizes)
    gates = weights.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(rows).at[order // 2].add(out * gates).reshape(x.shape)


def in_blocks(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """JAX's kernel for grouped products."""
    tiles = (min(256, len(rows)), *(min(128, n) for n in weights.shape[1:]))
    return megablox.gmm(rows, weights, sizes, rows.dtype, tiles, interpret=True)


@dataclass(frozen=True)
class Parts:
    """What a model consists of.

    Attributes:
        attend: Attention of queries, keys and values `[batch, tokens, heads, head]`.
        norm: Of the residual stream, and a layer's parameters.
        feed: What is between two norms, without attention.
        policy: What a layer keeps for its gradients; None: all.
        small: Changes of the sizes for a CPU.
        full: And for GPUs.
        leaves: Parameters of what is between two norms.
    """

    attend: Callable[..., jax.Array] = plain_attention
    norm: Callable[..., jax.Array] = plain_norm
    feed: Callable[..., jax.Array] = dense
    policy: Any = None
    small: Sizes = SMALL
    full: Sizes = FULL
    leaves: tuple[str, ...] = ("up", "down")

    def make(self, small: bool) -> Made:
        """The step, and the types of its state and batch."""
        sizes = self.small if small else self.full
        loss = functools.partial(loss_of, parts=self, sizes=sizes, small=small)
        optimizer = optax.sgd(0.1) if small else optax.adamw(1e-3)
        params = jax.tree.map(lambda shape: of(jnp.float32, *shape), self.shapes(sizes), is_leaf=_is_shape)
        tokens = of(jnp.int32, sizes.batch, sizes.tokens)
        return make_train_step(loss, optimizer), state_types(params, optimizer), {"tokens": tokens, "next": tokens}

    def shapes(self, sizes: Sizes) -> Any:
        """Of the parameters."""
        d, wide = sizes.width, 4 * sizes.width
        every = {
            "up": (d, wide),
            "down": (wide, d),
            "router": (d, EXPERTS),
            "ups": (EXPERTS, d, d),
            "downs": (EXPERTS, d, d),
        }
        layer = {"scale": (d,), "shift": (d,), "qkv": (3, d, sizes.heads, sizes.head), "out": (d, d)}
        layer |= {name: every[name] for name in self.leaves}
        layers = {name: (sizes.layers, *shape) for name, shape in layer.items()}
        return {"embed": (sizes.vocabulary, d), "layers": layers}


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """A type."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def loss_of(params: Any, batch: Any, parts: Parts, sizes: Sizes, small: bool) -> jax.Array:
    """Mean cross entropy of the next token; the table of the tokens is the last layer, too."""

    def block(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
        q, k, v = jnp.einsum("btd,ndhe->nbthe", parts.norm(x, layer, small), layer["qkv"].astype(x.dtype))
        heads = checkpoint_name(parts.attend(q, k, v, small), "heads")
        x = x + heads.reshape(x.shape) @ layer["out"].astype(x.dtype)
        return x + parts.feed(parts.norm(x, layer, small), layer, small), None

    x = params["embed"][batch["tokens"]].astype(sizes.dtype)
    body = block if parts.policy is None else jax.checkpoint(block, policy=parts.policy)
    x, _ = jax.lax.scan(body, x, params["layers"])
    logits = (x @ params["embed"].astype(x.dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def eight_bits(small: bool) -> Made:
    """Flax's dense layers of 8-bit floats, whose scales follow a history of the largest numbers."""
    from flax import linen

    layers, width, wide, rows = (2, 64, 64, 128) if small else (4, 2048, 8192, 65536)
    dtype = jnp.float32 if small else jnp.bfloat16

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            how: Any = {"dot_general_cls": linen.Fp8DirectDotGeneralOp, "use_bias": False, "dtype": dtype}
            for _ in range(layers):
                x = x + linen.Dense(width, **how)(jnp.tanh(linen.Dense(wide, **how)(x)))
            return x

    model = Model()

    def train_step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            return jnp.mean((model.apply(state, batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads["params"])
        return {"params": params, "_overwrite_with_gradient": grads["_overwrite_with_gradient"]}, value

    rows_of = of(dtype, rows, width)
    return train_step, jax.eval_shape(model.init, jax.random.key(0), rows_of), {"x": rows_of, "y": rows_of}


_OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["heads"],
    offload_src="device",
    offload_dst="pinned_host",
)
_SPLASH = Sizes(batch=16, tokens=128, layers=2, heads=4, head=16, vocabulary=64, dtype=jnp.float32)
_EXPERT_LEAVES = ("router", "ups", "downs")
_MODELS = {
    "flash attention, Pallas GPU": Parts(attend=flash),
    "splash attention, Pallas TPU": Parts(attend=splash, small=_SPLASH),
    "cuDNN attention": Parts(attend=cudnn),
    "fused norm, Pallas GPU": Parts(norm=fused_norm),
    "megablox, Pallas TPU": Parts(feed=functools.partial(grouped, in_blocks), leaves=_EXPERT_LEAVES),
    "experts, ragged_dot": Parts(
        attend=cudnn, feed=functools.partial(grouped, jax.lax.ragged_dot), leaves=_EXPERT_LEAVES
    ),
    "offloading policy": Parts(attend=cudnn, policy=_OFFLOAD),
    "vocabulary of 50257": Parts(
        attend=cudnn,
        small=Sizes(batch=16, tokens=8, layers=2, heads=4, head=4, vocabulary=50257, dtype=jnp.float32),
        full=Sizes(vocabulary=50257),
    ),
}
STEPS: Mapping[str, Callable[[bool], Made]] = {
    **{name: parts.make for name, parts in _MODELS.items()},
    "8-bit floats, Flax": eight_bits,
}

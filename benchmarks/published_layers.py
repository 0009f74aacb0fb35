"""The layers of published models in JAX: the work of one microbatch on the devices of one tensor-parallel group.

In:     sizes (`Sizes`).
Out:    `layer_step` and `ends_step`: functions with their arguments' types and Megatron's shardings of them.
Method: one layer of GPT, Llama or T5, forward and backward, as in Megatron-LM and similar frameworks; and what surrounds the
        layers: embedding, last norm, logits, loss. Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., 2022.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from published_attention import flash, plain, rotate

AXIS = "x"
CORE = "attention_core"
"""Name scope of attention between its projections: what selective recomputation runs again."""


@dataclass(frozen=True)
class Sizes:
    """What decides about the seconds of one microbatch in one tensor-parallel group.

    `joined`: whether products of the same operand are one, as most frameworks have queries, keys and values, and what is
    gated with its gate. `size`: of a head, 0 for its part of the width. `blocks`: of which a layer consists here. `experts`:
    on one device, `rows` tokens for each, which came from `senders` tokens of its own. `memory`: tokens of an encoder that a
    decoder's layer looks at in its block "cross".
    """

    samples: int
    tokens: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    gated: bool
    flash: bool
    dtype: str
    tensor: int
    sequence: bool
    context: int = 1
    joined: bool = False
    size: int = 0
    causal: bool = True
    blocks: tuple[str, ...] = ("attention", "mlp")
    experts: int = 0
    rows: int = 0
    senders: int = 0
    memory: int = 0

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.size or self.width // self.heads


@dataclass(frozen=True)
class Step:
    """A function to plan: its arguments' types, and the PartitionSpec of each by path."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    pins: dict[str, P]


def layer_step(sizes: Sizes) -> Step:
    """One layer, forward and backward."""
    width, dtype = sizes.width, storage(sizes)
    shapes = weights(sizes)
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    norms = tuple(
        f"norm{number}" for number, block in enumerate(("attention", "mlp", "cross"), 1) if block in sizes.blocks
    )
    params |= {name: {"scale": jax.ShapeDtypeStruct((width,), dtype)} for name in norms}
    if not sizes.gated:
        for name in norms:
            params[name]["bias"] = jax.ShapeDtypeStruct((width,), dtype)
        params |= {f"{name}_bias": jax.ShapeDtypeStruct(shape[1:], dtype) for name, shape in shapes.items()}
    x, memory = (
        jax.ShapeDtypeStruct((sizes.samples, tokens // sizes.context, width), dtype)
        for tokens in (sizes.tokens, sizes.memory)
    )

    def step(params, x, dy, *memory):
        y, backward = jax.vjp(functools.partial(layer, sizes), params, x, *memory)
        dparams, *dx = backward(dy)
        return resident(sizes, y), dparams, [resident(sizes, d) for d in dx]

    last = ("o", "down", "co")
    pins = {f"params/{name}": P(AXIS, None) if name in last else P(None, AXIS) for name in shapes}
    pins |= {f"params/{name}_bias": P() if name in last else P(AXIS) for name in shapes if not sizes.gated}
    pins |= {"params/norm*": P(), "x": spec(sizes), "dy": spec(sizes)} | (
        {"memory*": spec(sizes)} if sizes.memory else {}
    )
    return Step(step, (params, x, x, *((memory,) if sizes.memory else ())), pins if sizes.tensor > 1 else {})


def weights(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights; joined ones by what goes to one device together: heads that share keys, or columns."""
    width, hidden, size = sizes.width, sizes.hidden, sizes.head_size
    queries = sizes.heads // sizes.kv_heads
    if sizes.joined:
        first: dict[str, tuple[int, ...]] = {"qkv": (width, sizes.kv_heads, (queries + 2) * size)}
        second: dict[str, tuple[int, ...]] = {"up": (width, hidden, 2) if sizes.gated else (width, hidden)}
    else:
        first = {"q": (width, sizes.heads * size)} | dict.fromkeys("kv", (width, sizes.kv_heads * size))
        second = dict.fromkeys(("up", "gate") if sizes.gated else ("up",), (width, hidden))
    first["o"], second["down"] = (sizes.heads * size, width), (hidden, width)
    cross = {"cq": (width, sizes.heads * size), "ckv": (width, sizes.kv_heads, 2 * size), "co": first["o"]}
    found = {"attention": first, "cross": cross, "mlp": second}
    return {name: shape for block in sizes.blocks for name, shape in found[block].items()}


def experts_step(sizes: Sizes) -> Step:
    """The experts of one device and what sends tokens there and back, forward and backward; sums by tokens are its own."""
    dtype, width, number = storage(sizes), sizes.width, sizes.experts
    gate = 2 if sizes.gated else 1
    params = {
        "up": jax.ShapeDtypeStruct((number, width, gate * sizes.hidden), dtype),
        "down": jax.ShapeDtypeStruct((number, sizes.hidden, width), dtype),
        "norm2": {"scale": jax.ShapeDtypeStruct((width,), dtype)},
    }
    x = jax.ShapeDtypeStruct((sizes.senders, width), dtype)
    # Who sends to whom is not known before the run: as many come as go.
    chosen = jax.ShapeDtypeStruct((number, sizes.rows), jnp.int32)
    weight = jax.ShapeDtypeStruct((number, sizes.rows), dtype)

    def step(params, x, chosen, weight, dy):
        def block(params, x, weight):
            sent = norm(sizes, params["norm2"], x)[chosen]
            inside = batched(sizes, sent, params["up"])
            if sizes.gated:
                inside = jax.nn.silu(inside[..., : sizes.hidden]) * inside[..., sizes.hidden :]
            else:
                inside = jax.nn.gelu(inside)
            return x.at[chosen].add(batched(sizes, inside, params["down"]) * weight[..., None])

        y, backward = jax.vjp(block, params, x, weight)
        return y, backward(dy)

    return Step(step, (params, x, chosen, weight, x), {})


def batched(sizes: Sizes, x: jax.Array, w: jax.Array) -> jax.Array:
    """A dense layer of each expert, in the run's precision."""
    one = functools.partial(eight_bits, sizes.dtype) if sizes.dtype in NARROW else jnp.matmul
    return jax.vmap(one)(x, w)


def ends_step(sizes: Sizes) -> Step:
    """Embedding, last norm, logits and loss, forward and backward."""
    dtype, vocabulary = storage(sizes), sizes.vocabulary
    params = {
        "embed": jax.ShapeDtypeStruct((vocabulary, sizes.width), dtype),
        "head": jax.ShapeDtypeStruct((sizes.width, vocabulary), dtype),
        "norm": {"scale": jax.ShapeDtypeStruct((sizes.width,), dtype)},
    }
    shape = (sizes.samples, sizes.tokens // sizes.context)

    def step(params, tokens, labels):
        def loss_of(params):
            x = resident(sizes, params["embed"][tokens])
            x = enter(sizes, norm(sizes, params["norm"], x))
            logits = by_columns(sizes, x @ params["head"]).astype(jnp.float32)
            peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
            total = jnp.log(jnp.exp(logits - peak).sum(-1)) + peak[..., 0]
            mine = jnp.where(labels[..., None] == jnp.arange(vocabulary), logits, 0.0).sum(-1)
            return (total - mine).mean()

        return jax.value_and_grad(loss_of)(params)

    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    pins = {
        "params/embed": P(AXIS, None),
        "params/head": P(None, AXIS),
        "params/norm*": P(),
        "tokens": P(),
        "labels": P(),
    }
    return Step(step, (params, tokens, tokens), pins if sizes.tensor > 1 else {})


def storage(sizes: Sizes) -> Any:
    """Type of activations and of weights as they are multiplied; eight bits are made of it on the way."""
    return jnp.float32 if sizes.dtype == "float32" else jnp.bfloat16


def spec(sizes: Sizes) -> P:
    """How activations lie between the parts of a layer."""
    return P(None, AXIS, None) if sizes.sequence else P(None, None, None)


def resident(sizes: Sizes, x: jax.Array) -> jax.Array:
    """Pin activations to how they lie between the parts of a layer."""
    if sizes.tensor == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _placed(sizes, spec(sizes)))


def by_heads(sizes: Sizes, x: jax.Array) -> jax.Array:
    """Pin heads to be split, where there are enough of them."""
    if sizes.tensor == 1 or x.shape[2] % sizes.tensor:
        return x
    return jax.lax.with_sharding_constraint(x, _placed(sizes, P(None, None, AXIS, None)))


def enter(sizes: Sizes, x: jax.Array) -> jax.Array:
    """Before products whose weights are split by columns: all of `x` on every device; of its gradient, sums."""
    return x if sizes.tensor == 1 else _conjugate(_placed(sizes, P(None, None, None)), _placed(sizes, spec(sizes)), x)


def leave(sizes: Sizes, x: jax.Array) -> jax.Array:
    """Behind a product whose weights are split by rows: the sum, as it is resident; its gradient whole."""
    return x if sizes.tensor == 1 else _conjugate(_placed(sizes, spec(sizes)), _placed(sizes, P(None, None, None)), x)


def _placed(sizes: Sizes, how: P) -> NamedSharding:
    # JAX 0.11 takes axes of no stated type for explicit ones, which no constraint may name.
    return NamedSharding(AbstractMesh((sizes.tensor,), (AXIS,), axis_types=(AxisType.Auto,)), how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conjugate(forward: NamedSharding, backward: NamedSharding, x: jax.Array) -> jax.Array:
    """Where activations change how they lie, Megatron's `f` and `g`: activations move, and no weights."""
    return jax.lax.with_sharding_constraint(x, forward)


def _conjugate_forward(forward: NamedSharding, backward: NamedSharding, x: jax.Array) -> Any:
    return jax.lax.with_sharding_constraint(x, forward), None


def _conjugate_backward(forward: NamedSharding, backward: NamedSharding, saved: None, dy: jax.Array) -> Any:
    return (jax.lax.with_sharding_constraint(dy, backward),)


_conjugate.defvjp(_conjugate_forward, _conjugate_backward)


def by_columns(sizes: Sizes, x: jax.Array) -> jax.Array:
    """Pin the last dim to be split: activations move and not weights, whichever would be less."""
    if sizes.tensor == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _placed(sizes, P(*[None] * (x.ndim - 1), AXIS)))


def layer(sizes: Sizes, params: Any, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
    """One transformer layer: norms first, the residual stream resident between."""
    if "attention" in sizes.blocks:
        x = resident(sizes, x + attention(sizes, params, enter(sizes, norm(sizes, params["norm1"], x))))
    if memory is not None:
        h = enter(sizes, norm(sizes, params["norm3"], x))
        x = resident(sizes, x + cross_attention(sizes, params, h, enter(sizes, memory)))
    if "mlp" not in sizes.blocks:
        return x
    h = enter(sizes, norm(sizes, params["norm2"], x))
    if sizes.gated and sizes.joined:
        both = by_heads(sizes, dense(sizes, params, "up", h))
        inside = by_columns(sizes, jax.nn.silu(both[..., 0]) * both[..., 1])
    else:
        up = by_columns(sizes, dense(sizes, params, "up", h))
        inside = (
            jax.nn.silu(by_columns(sizes, dense(sizes, params, "gate", h))) * up if sizes.gated else jax.nn.gelu(up)
        )
    return resident(sizes, x + leave(sizes, dense(sizes, params, "down", inside)))


def norm(sizes: Sizes, params: Any, x: jax.Array) -> jax.Array:
    """Layer norm, or RMS norm where there is no bias."""
    wide = x.astype(jnp.float32)
    if "bias" in params:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * params["scale"].astype(jnp.float32)
    return (wide + params["bias"].astype(jnp.float32) if "bias" in params else wide).astype(x.dtype)


def dense(sizes: Sizes, params: Any, name: str, x: jax.Array) -> jax.Array:
    """A dense layer in the run's precision."""
    w = params[name]
    is_narrow = sizes.dtype in NARROW
    y = eight_bits(sizes.dtype, x, w) if is_narrow else jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))
    return y + params[f"{name}_bias"] if f"{name}_bias" in params else y


NARROW = {
    "float8": (jnp.float8_e4m3fn, jnp.bfloat16),
    "float4": (jnp.float4_e2m1fn, jnp.bfloat16),
    "int8": (jnp.int8, jnp.int32),
}
"""Of types that activations are made into to be multiplied: what they are, and what products are added up in."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def eight_bits(dtype: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """A product of eight bits or fewer, and its gradients."""
    return _narrow(dtype, x, w, (((x.ndim - 1,), (0,)), ((), ())))


def _narrow(dtype: str, a: jax.Array, b: jax.Array, numbers: Any) -> jax.Array:
    narrow, summed = NARROW[dtype]
    product = jax.lax.dot_general(a.astype(narrow), b.astype(narrow), numbers, preferred_element_type=summed)
    return product.astype(jnp.bfloat16)


def _eight_bits_backward(dtype: str, saved: Any, dy: jax.Array) -> Any:
    """Products of 8 bits have what they add up over last in both operands: each is made narrow in a second order, too."""
    x, w = saved
    lead, out = x.ndim - 1, dy.ndim - x.ndim + 1
    turned_w = w.transpose(*range(1, w.ndim), 0)
    dx = _narrow(dtype, dy, turned_w, ((tuple(range(lead, dy.ndim)), tuple(range(out))), ((), ())))
    turned_x = x.transpose(lead, *range(lead))
    turned_dy = dy.transpose(*range(lead, dy.ndim), *range(lead))
    sums = tuple(range(1, lead + 1)), tuple(range(out, dy.ndim))
    return dx, _narrow(dtype, turned_x, turned_dy, (sums, ((), ())))


eight_bits.defvjp(lambda dtype, x, w: (eight_bits(dtype, x, w), (x, w)), _eight_bits_backward)


def attention(sizes: Sizes, params: Any, x: jax.Array) -> jax.Array:
    """Self-attention, fused or written out."""
    samples, tokens, _ = x.shape
    size = sizes.head_size
    if sizes.joined:
        joined = by_heads(sizes, dense(sizes, params, "qkv", x))
        ends = joined.shape[-1] - 2 * size, joined.shape[-1] - size
        q, k, v = (joined[..., a:b] for a, b in zip((0, *ends), (*ends, None), strict=True))
    else:
        q, k, v = (dense(sizes, params, name, x) for name in ("q", "k", "v"))
    q = q.reshape(samples, tokens, sizes.heads, size)
    k, v = (t.reshape(samples, tokens, sizes.kv_heads, size) for t in (k, v))
    if sizes.gated:
        q, k = rotate(q), rotate(k)
    q, k, v = (by_heads(sizes, t) for t in (q, k, v))
    with jax.named_scope(CORE):
        mixed = by_heads(sizes, mix(sizes, q, k, v, sizes.causal))
    return leave(sizes, dense(sizes, params, "o", mixed.reshape(samples, tokens, sizes.heads * size)))


def cross_attention(sizes: Sizes, params: Any, x: jax.Array, memory: jax.Array) -> jax.Array:
    """Attention of a decoder's tokens to all of an encoder's."""
    samples, tokens, _ = x.shape
    size = sizes.head_size
    q = dense(sizes, params, "cq", x).reshape(samples, tokens, sizes.heads, size)
    both = by_heads(sizes, dense(sizes, params, "ckv", memory))
    q, k, v = (by_heads(sizes, t) for t in (q, both[..., :size], both[..., size:]))
    with jax.named_scope(CORE):
        mixed = by_heads(sizes, mix(sizes, q, k, v, causal=False))
    return leave(sizes, dense(sizes, params, "co", mixed.reshape(samples, tokens, sizes.heads * size)))


def mix(sizes: Sizes, q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """What each token takes of the others, in one kernel or not."""
    return flash(q, k, v, sizes.context, causal) if sizes.flash else plain(q, k, v)

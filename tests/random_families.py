"""More families of random programs: masks, transforms, complex numbers, batched indexing, recurrences, orders, segments.

In:     a draw of `random_programs.py`, and the number of a value.
Out:    a line, or None where the family does not fit; as the families there.
Method: what is decided (a mask, an order, an index) is decided on exact values. Operations that compute more than one thing
        state the magnitude of their terms themselves (`Arithmetic.rounded`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Drawn = tuple[str, Callable[..., Any], tuple[int, ...], dict[str, Any]] | None
PLACE = 501
"""The first of the numbers by which these families tell their roundings apart; below them are those of whole lines."""


def _exact(draw: Any, k: int) -> int | None:
    """An exact float value of the shape of value `k`."""
    fit = [j for j, v in enumerate(draw.known) if v.exact and draw.floats(j) and v.shape == draw.known[k].shape]
    return draw.pick(fit) if fit else None


def masks(draw: Any, k: int) -> Drawn:
    """Logic on booleans, their products and reductions; what is kept by them."""
    p = _exact(draw, k)
    if p is None or not draw.floats(k) or not draw.known[k].shape:
        return None
    axis = int(draw.random.integers(len(draw.known[k].shape)))
    made = {
        "and": lambda p, x: jnp.where((p > -0.5) & (p < 0.5), x, 0),
        "xor": lambda p, x: jnp.where((p > 0) ^ (p > 0.5), x, -x),
        "product": lambda p, x: jnp.where((p > -0.5) * (p < 0.5), x, 1),
        "any": lambda p, x: jnp.where(jnp.any(p > 0.5, axis, keepdims=True), x, 0),
        "all": lambda p, x: jnp.where(jnp.all(p > -1, axis), jnp.max(x, axis), 0),
        "kept": lambda p, x: jnp.sum(jnp.where(p > 0, x, 0) / 16, axis),
        "number": lambda p, x: jnp.cumsum((p > 0).astype(jnp.int32), axis) + jnp.sum(p > 0.5, axis, keepdims=True),
        "first": lambda p, x: jnp.argmax(p > 0, axis).astype(jnp.int32),
        "odd": lambda p, x: lax.reduce_xor((p > 0).astype(jnp.int32), (axis,)),
        "bits": lambda p, x: lax.population_count((p > 0).astype(jnp.int32) << 2 | jnp.int32(1)) % 3,
        "pairs": lambda p, x: (p.reshape(-1)[:, None] > p.reshape(-1)[None, :4]).astype(jnp.int32).sum(0),
        "together": lambda p, x: lax.dot(
            (p > 0).reshape(-1, p.shape[-1]).astype(jnp.int32).T, (p > 0.5).reshape(-1, p.shape[-1]).astype(jnp.int32)
        ),
    }
    name = draw.pick(sorted(made))
    return f"mask {name} {axis}", lambda _, p, x: made[name](p, x), (p, k), {"sums": name == "kept"}


def fourier(draw: Any, k: int) -> Drawn:
    shape, kind = draw.known[k].shape, draw.pick(["rfft", "fft", "irfft", "fft2", "long convolution"])
    if not shape or not draw.floats(k) or draw.flawed or (kind == "fft2" and len(shape) < 2):
        return None
    axis = int(draw.random.integers(len(shape)))

    def function(a: Any, x: jax.Array) -> jax.Array:
        x = jnp.tanh(a.cast(x, "float32")) / 16
        if kind == "rfft":
            made = jnp.fft.rfft(x, axis=axis)
        elif kind == "fft":
            made = jnp.fft.ifft(jnp.fft.fft(x, axis=axis) * jnp.exp(1j * x), axis=axis)
        elif kind == "irfft":
            made = jnp.fft.irfft(lax.complex(x, x * 0.5), axis=axis) + 0j
        elif kind == "fft2":
            made = jnp.fft.fft2(x)
        else:
            n = 2 * shape[axis]
            made = jnp.fft.irfft(jnp.fft.rfft(x, n, axis) * jnp.fft.rfft(x[::-1], n, axis), n, axis) + 0j
        size = jnp.sum(jnp.abs(lax.stop_gradient(x)))
        return a.rounded(made.real + 2 * made.imag, "float32", 8 * size + jnp.zeros(made.shape), PLACE)

    return f"{kind} {axis}", function, (k,), {}


def complex_numbers(draw: Any, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape or not draw.floats(k) or draw.flawed:
        return None
    name = draw.pick(["rotated", "product", "scan", "mean"])

    def function(a: Any, x: jax.Array) -> jax.Array:
        x = jnp.tanh(a.cast(x, "float32"))
        z = lax.complex(x, jnp.sin(x))
        if name == "product":
            z = jnp.tensordot(z, jnp.conj(z), ((z.ndim - 1,), (z.ndim - 1,)))[0] / 4 if z.ndim > 1 else z * jnp.conj(z)
        elif name == "scan":
            z = lax.associative_scan(lambda f, g: (g[0] * f[0], g[0] * f[1] + g[1]), (z / 2, z), axis=0)[1]
        elif name == "mean":
            z = jnp.mean(z, 0, keepdims=True) * z
        else:
            z = z * jnp.exp(1j * x.shape[0] * x)
        made = z.real - z.imag
        return a.rounded(made, "float32", jnp.abs(lax.stop_gradient(made)) + 4, PLACE + 1)

    return f"complex {name}", function, (k,), {}


def batched_indexing(draw: Any, k: int) -> Drawn:
    """Gathers and scatters under `vmap`; indices that differ from row to row."""
    shape = draw.known[k].shape
    other = draw.other(k)
    if len(shape) < 2 or not draw.floats(k) or other is None:
        return None
    rows, length = shape[:2]
    at = jnp.arange(rows, dtype=jnp.int32) * 5
    table = {
        "row of each": lambda x, y, n: jax.vmap(lambda row, i: row[(i + n) % length])(x, at),
        "slice of each": lambda x, y, n: jax.vmap(
            lambda row, i: lax.dynamic_slice_in_dim(row, (i + n) % length, max(1, length // 2), 0)
        )(x, at),
        "rows of each": lambda x, y, n: jax.vmap(lambda row, i: row[jnp.stack([i, i + n, i * 2]) % length])(x, at),
        "column of each": lambda x, y, n: jax.vmap(
            lambda column, i: column[(i + n) % rows], in_axes=(1, 0), out_axes=-1
        )(x, jnp.arange(length)),
        "add to each": lambda x, y, n: jax.vmap(
            lambda row, new, i: row.at[(i + n) % length].add(new[0].astype(row.dtype) / 4)
        )(x, y, at),
        "set in each": lambda x, y, n: jax.vmap(
            lambda row, new, i: row.at[(i + n) % length].set(new[-1].astype(row.dtype))
        )(x, y, at),
        "slice into each": lambda x, y, n: jax.vmap(
            lambda row, new, i: lax.dynamic_update_slice_in_dim(row, new[:1].astype(row.dtype), (i + n) % length, 0)
        )(x, y, at),
        "shared rows": lambda x, y, n: jax.vmap(lambda i: x[(i + n) % rows])(jnp.arange(8)),
        "elements": lambda x, y, n: x[(at + n) % rows, (at * 3 + n) % length],
        "add elements": lambda x, y, n: x.at[(at + n) % rows, (at * 3) % length].add(y[:, 0].astype(x.dtype) / 4),
        "along": lambda x, y, n: jnp.take_along_axis(
            x, (jnp.arange(length).reshape(1, -1, *[1] * (x.ndim - 2)) * 3 + n) % length, 1
        ),
        "one hot": lambda x, y, n: jnp.einsum("i...,ij->j...", x, jax.nn.one_hot((at + n) % 4, 4, dtype=x.dtype)) / 4,
        "embedded": lambda x, y, n: jnp.tensordot(
            jax.nn.one_hot((jnp.arange(6) + n) % rows, rows, dtype=x.dtype), x, 1
        ),
        "put along": lambda x, y, n: jnp.put_along_axis(
            x, jnp.zeros_like(x, jnp.int32)[:, :1] + n % length, 0.5, 1, inplace=False
        ),
    }
    name = draw.pick(sorted(table))
    sums = name in ("one hot", "add elements", "add to each")
    return f"batched {name}", lambda _, x, y, n: table[name](x, y, n), (k, other, 2), {"sums": sums}


def recurrence(draw: Any, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape or not draw.floats(k) or draw.flawed:
        return None
    axis, reverse = int(draw.random.integers(len(shape))), bool(draw.random.integers(2))
    table = {
        "linear": lambda x: lax.associative_scan(
            lambda f, g: (f[0] * g[0], g[0] * f[1] + g[1]), (jnp.tanh(x) / 2, x), axis=axis, reverse=reverse
        )[1],
        "maximum": lambda x: lax.associative_scan(jnp.maximum, x, axis=axis, reverse=reverse),
        "cumprod": lambda x: lax.cumprod(1 + jnp.tanh(x) / 8, axis, reverse),
        "cummin": lambda x: lax.cummin(x, axis, reverse),
        "cumlogsumexp": lambda x: lax.cumlogsumexp(jnp.tanh(x), axis, reverse),
        "differences": lambda x: jnp.diff(x, axis=axis, prepend=0),
        "scan back": lambda x: lax.scan(
            lambda c, row: ((jnp.tanh(c[0] + row), c[1] + 1), c[0] * c[1]),
            (jnp.zeros_like(jnp.moveaxis(x, axis, 0)[0]), jnp.zeros((), x.dtype)),
            jnp.moveaxis(x, axis, 0),
            reverse=reverse,
        )[1],
    }
    name = draw.pick(sorted(table))

    def function(a: Any, x: jax.Array) -> jax.Array:
        made = table[name](a.cast(x, "float32") if name == "linear" else x)
        if name in ("maximum", "cummin"):
            return made
        magnitude = jnp.abs(lax.stop_gradient(made)) + jnp.max(jnp.abs(lax.stop_gradient(x)))
        return a.rounded(made, "float32" if name == "linear" else draw_dtype, shape[axis] * magnitude, PLACE + 2)

    draw_dtype = draw.known[k].dtype
    return f"recurrence {name} {axis}", function, (k,), {"moves": name in ("maximum", "cummin")}


def orders(draw: Any, k: int) -> Drawn:
    """Values in the order of exact keys."""
    p = _exact(draw, k)
    if p is None or not draw.floats(k) or not draw.known[k].shape or draw.flawed:
        return None
    axis = int(draw.random.integers(len(draw.known[k].shape)))
    size = draw.known[k].shape[axis]

    def top(p: jax.Array, x: jax.Array) -> jax.Array:
        places = lax.top_k(jnp.moveaxis(p, axis, -1), max(1, size // 2))[1]
        return jnp.take_along_axis(jnp.moveaxis(x, axis, -1), places, -1)

    table = {
        "sort": lambda p, x: lax.sort((p, x), dimension=axis, num_keys=1)[1],
        "sort by two": lambda p, x: lax.sort(((p > 0).astype(jnp.int32), p, x), dimension=axis, num_keys=2)[2],
        "sort stably": lambda p, x: lax.sort(((p > 0).astype(jnp.int32), x), dimension=axis, num_keys=1)[1],
        "order": lambda p, x: jnp.take_along_axis(x, jnp.argsort(p, axis), axis),
        "descending": lambda p, x: jnp.take_along_axis(x, jnp.argsort(p, axis, descending=True), axis),
        "ranks": lambda p, x: jnp.argsort(jnp.argsort(p, axis), axis).astype(jnp.int32),
        "top": top,
        "least": lambda p, x: jnp.take_along_axis(x, jnp.argmin(p, axis, keepdims=True), axis),
        "searched": lambda p, x: jnp.searchsorted(jnp.sort(p.reshape(-1)), jnp.linspace(-1, 1, 5).astype(p.dtype)),
        "found": lambda p, x: jnp.take(x, jnp.nonzero(p.reshape(-1) > 0, size=4, fill_value=0)[0] % size, axis),
    }
    name = draw.pick(sorted(table))
    return f"ordered {name} {axis}", lambda _, p, x: table[name](p, x), (p, k), {"moves": True}


def segments(draw: Any, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape or not draw.floats(k):
        return None
    name, rows = draw.pick(["sum", "max", "min", "mean", "sorted", "histogram"]), shape[0]

    def function(_: Any, x: jax.Array, n: jax.Array) -> jax.Array:
        places = (jnp.arange(rows, dtype=jnp.int32) * 7 + n) % 5
        if name == "max":
            return jnp.maximum(jax.ops.segment_max(x, places, 6), -4)
        if name == "min":
            return jnp.minimum(jax.ops.segment_min(x, places, 6), 4)
        if name == "mean":
            counts = jax.ops.segment_sum(jnp.ones(rows, x.dtype), places, 6)
            return (jax.ops.segment_sum(x / 4, places, 6).T / jnp.maximum(counts, 1)).T
        if name == "histogram":
            return jnp.bincount(places, length=8).astype(jnp.int32)
        if name == "sorted":
            return jax.ops.segment_sum(x / 4, jnp.sort(places), 6, indices_are_sorted=True)[places]
        return jax.ops.segment_sum(x / 4, places, 6)

    return f"segment {name}", function, (k, 2), {"sums": name in ("sum", "mean", "sorted")}


def convolutions(draw: Any, k: int) -> Drawn:
    """Grouped, dilated, strided, transposed; one or two dims of space; weights are values of the program, or a slice."""
    shape = draw.known[k].shape
    if len(shape) != 3 or not draw.floats(k) or draw.flawed or shape[1] % 2 or shape[2] < 3:
        return None
    kinds = {
        "plain": {"window_strides": (1,), "padding": "SAME"},
        "grouped": {"window_strides": (1,), "padding": "SAME", "feature_group_count": 2},
        "depthwise": {"window_strides": (1,), "padding": [(2, 0)], "feature_group_count": shape[1]},
        "dilated": {"window_strides": (1,), "padding": "SAME", "rhs_dilation": (2,)},
        "strided": {"window_strides": (2,), "padding": [(1, 1)]},
        "transposed": {"window_strides": (1,), "padding": [(1, 2)], "lhs_dilation": (2,)},
        "of groups of samples": {"window_strides": (1,), "padding": "SAME", "batch_group_count": 2},
    }
    name = draw.pick(sorted(kinds))
    params = kinds[name]
    if name == "of groups of samples" and shape[0] % 2:
        return None
    outs, ins = 2 * shape[1], shape[1] // params.get("feature_group_count", 1)
    own = draw.random.normal(size=(outs, ins, 3)) / 2

    def function(a: Any, x: jax.Array) -> jax.Array:
        weights = jnp.asarray(own, x.dtype)
        if a.amount is not None:  # the constant as the program has it
            weights = jnp.asarray(np.asarray(own).astype(jnp.dtype(dtype)), x.dtype)
        run = lambda x, w: lax.conv_general_dilated(x, w, **params)  # noqa: E731
        x = jnp.tanh(x)
        made = run(x, weights)
        size = run(jnp.abs(lax.stop_gradient(x)), jnp.abs(weights))
        return a.rounded(made, dtype, size, PLACE + 3)

    dtype = draw.known[k].dtype
    return f"convolution {name}", function, (k,), {}


def control(draw: Any, k: int) -> Drawn:
    """Loops of a number of trips that is known at run time, branches by sample, derivatives of one's own."""
    shape = draw.known[k].shape
    p = _exact(draw, k)
    if not shape or not draw.floats(k) or p is None:
        return None

    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))

    @jax.custom_jvp
    def softened(x: jax.Array) -> jax.Array:
        return jnp.abs(x)

    softened.defjvp(lambda x, t: (jnp.abs(x[0]), jnp.tanh(x[0]) * t[0]))
    table = {
        "trips": lambda p, x, n: lax.fori_loop(0, n, lambda i, h: jnp.sin(h) + 0.5, lax.stop_gradient(x)),
        "until": lambda p, x, n: lax.while_loop(
            lambda c: c[0] < n + 2, lambda c: (c[0] + 1, jnp.cos(c[1])), (jnp.int32(0), lax.stop_gradient(x))
        )[1],
        "switch": lambda p, x, n: lax.switch(n % 3, [jnp.sin, lambda x: x * 0.5, lambda x: x - jnp.max(x, 0)], x),
        "by sample": lambda p, x, n: jax.vmap(lambda q, row: lax.cond(jnp.max(q) > 1, jnp.sin, lambda r: r * 0.5, row))(
            p, x
        ),
        "clipped": lambda p, x, n: clipped(x),
        "softened": lambda p, x, n: softened(x),
        "mapped": lambda p, x, n: lax.map(lambda row: jnp.tanh(row) - jnp.max(row), x),
        "jitted": lambda p, x, n: jax.jit(lambda x: jnp.cos(x) * 0.5)(x),
        "batches": lambda p, x, n: lax.map(lambda row: jnp.sin(row) * 2, x, batch_size=max(1, shape[0] // 2)),
    }
    name = draw.pick(sorted(table))
    return f"control {name}", lambda _, p, x, n: table[name](p, x, n), (p, k, 2), {}


def chance(draw: Any, k: int) -> Drawn:
    """What a key draws: which are kept, an order, a choice."""
    if not draw.floats(k) or not draw.known[k].shape:
        return None
    shape, name = draw.known[k].shape, draw.pick(["dropout", "permutation", "integers", "of each", "categorical"])

    def function(a: Any, x: jax.Array, n: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.PRNGKey(draw.seed + 1), n)
        if name == "dropout":
            return jnp.where(jax.random.bernoulli(key, 0.7, shape), x * 1.25, 0)
        if name == "permutation":
            return x[jax.random.permutation(key, shape[0])]
        if name == "integers":
            return jnp.take(x, jax.random.randint(key, (4,), 0, shape[0]), 0)
        if name == "of each":
            kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, shape[1:]))(jax.random.split(key, shape[0]))
            return jnp.where(kept, x, 0)
        return jnp.take(x, jax.random.categorical(key, jnp.zeros((3, shape[0]), jnp.float32)), 0)

    return f"chance {name}", function, (k, 2), {"moves": name != "dropout"}


def shapes(draw: Any, k: int) -> Drawn:
    """Triangles, diagonals, repeats, rolls by a number of the state; contractions of three."""
    shape = draw.known[k].shape
    if len(shape) < 2 or not draw.floats(k):
        return None
    rows, columns = shape[-2:]
    table = {
        "triangle": jnp.tril,
        "diagonal": lambda x: jnp.diagonal(x, axis1=-2, axis2=-1) if rows == columns else x[..., ::-1],
        "repeat": lambda x: jnp.repeat(x, 2, -2),
        "pairs": lambda x: x[..., :, None, :] - x[..., None, :4, :],
        "folded": lambda x: x.reshape(*shape[:-2], rows * columns)[..., ::3],
        "edges": lambda x: jnp.pad(x, [*((0, 0) for _ in shape[:-2]), (1, 1), (0, 2)], mode="edge"),
        "around": lambda x: jnp.pad(x, [*((0, 0) for _ in shape[:-2]), (1, 1), (0, 0)], mode="wrap"),
        "halves": lambda x: jnp.concatenate(jnp.array_split(x, 2, -1)[::-1], -1),
        "windows": lambda x: jnp.stack([x[..., i : columns - 1 + i] for i in range(2)], -1) if columns > 1 else x,
        "blocks": lambda x: x.reshape(*shape[:-1], -1, 2).swapaxes(-1, -2).reshape(shape) if columns % 2 == 0 else x,
        "spread": lambda x: lax.pad(x, jnp.zeros((), x.dtype), [*((0, 0, 0) for _ in shape[:-1]), (1, 1, 1)]),
        "strips": lambda x: jnp.flip(x, (-2, -1))[..., ::-2, :],
    }
    name = draw.pick(sorted(table))
    moves = name != "pairs"
    return f"shape {name}", lambda _, x: table[name](x), (k,), {"moves": moves}


MORE = (
    masks,
    masks,
    fourier,
    complex_numbers,
    batched_indexing,
    batched_indexing,
    recurrence,
    orders,
    segments,
    convolutions,
)
MORE += (control, chance, shapes)

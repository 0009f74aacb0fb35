"""Small programs at random, from all families of the rule table: what `test_random_programs.py` and the sweep compare with jit.

In:     a seed.
Out:    `Program`: a step over a state and a batch, which is 3 to 12 operations, perhaps in a loop or a branch, perhaps with
        its gradient, in single and half precision; NaN, infinities and terms that cancel among its inputs.
Method: how far results may be from jit's is not guessed: `Program.errors` runs the same program in float64, once exactly and
        a few times with every value, and every cotangent, off by its dtype's rounding at random (stochastic arithmetic:
        Vignes, "A stochastic arithmetic for reliable scientific computation", 1993). A sum is off by as much of the sum of
        its terms' magnitudes. What is decided (sorted, compared, counted) is decided on values without rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.random_families import MORE

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
SIZES = (8, 16, 4, 3, 1)


@dataclass(frozen=True)
class Arithmetic:
    """How floats are computed: as they are; or all in float64, off at random by `amount` times their roundings."""

    amount: Any = None
    seed: Any = 0.0

    def cast(self, x: jax.Array, dtype: str) -> jax.Array:
        return x.astype(dtype if self.amount is None else "float64")

    def rounded(self, x: jax.Array, dtype: str, magnitude: jax.Array | None, place: int) -> jax.Array:
        """A value that was computed in `dtype`, of terms of this magnitude."""
        if self.amount is None or dtype not in EPSILON:
            return x
        return _off(x, jnp.abs(x) if magnitude is None else magnitude, self.amount * EPSILON[dtype], self.seed + place)


@functools.partial(jax.custom_vjp, nondiff_argnums=())
def _off(x, magnitude, amount, seed):
    return x + jnp.where(jnp.isfinite(magnitude), magnitude, 0.0) * amount * _dice(x.shape, seed)


def _off_forward(x, magnitude, amount, seed):
    return _off(x, magnitude, amount, seed), (x, amount, seed)


def _off_backward(kept, g):
    x, amount, seed = kept
    return g * (1 + amount * _dice(x.shape, seed + 0.5)), jnp.zeros_like(g), None, None


_off.defvjp(_off_forward, _off_backward)


def _dice(shape: tuple[int, ...], seed: Any) -> jax.Array:
    """Numbers between -1 and 1 that look random."""
    count = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float64).reshape(shape)
    wave = jnp.sin(count * 78.233 + seed * 12.9898) * 43758.5453
    return 2 * (wave - jnp.floor(wave)) - 1


@dataclass(frozen=True)
class Value:
    """What is known of a value: its dtype, and whether it is an input that was at most moved."""

    shape: tuple[int, ...]
    dtype: str
    exact: bool


@dataclass(frozen=True)
class Operation:
    """One line: `function(arithmetic, *operands)`; `sums`: of magnitudes it makes the magnitude of its result's terms."""

    name: str
    function: Callable[..., Any]
    operands: tuple[int, ...]
    dtype: str
    sums: bool = False
    moves: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """Inputs, lines, and which values come out."""

    seed: int
    state: tuple[np.ndarray, ...]
    batch: tuple[np.ndarray, ...]
    lines: tuple[Operation, ...]
    results: tuple[int, ...]
    replaced: tuple[tuple[int, int], ...]
    gradient: bool

    def __str__(self) -> str:
        inputs = [f"{x.dtype}{list(x.shape)}" for x in (*self.state, *self.batch)]
        first = len(inputs)
        lines = [f"{first + k} = {op.name}{list(op.operands)} {op.dtype}" for k, op in enumerate(self.lines)]
        return f"seed {self.seed}: {inputs}; {'; '.join(lines)} -> {self.results}" + ", gradient" * self.gradient

    def run(self, state: Sequence[Any], batch: Sequence[Any], arithmetic: Arithmetic) -> tuple[list[Any], list[Any]]:
        """New state, and results."""
        loss = functools.partial(self.loss, batch=batch, arithmetic=arithmetic)
        if not self.gradient:
            values = self.values(state, batch, arithmetic)
            return self.new_state(state, values), [values[k] for k in self.results]
        floats = [k for k, x in enumerate(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        with_values = jax.value_and_grad(lambda own: loss([*_placed(state, floats, own)]), has_aux=True)
        (value, values), gradient = with_values([state[k] for k in floats])
        return self.new_state(state, values), [value, *gradient, *(values[k] for k in self.results)]

    def new_state(self, state: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        new = dict(self.replaced)
        return [values[new[k]] if k in new else x for k, x in enumerate(state)]

    def loss(self, state: Sequence[Any], batch: Sequence[Any], arithmetic: Arithmetic) -> tuple[jax.Array, list[Any]]:
        values = self.values(state, batch, arithmetic)
        terms = [jnp.mean(arithmetic.cast(values[k], "float32")) for k in self.results if _is_float(values[k])]
        return sum(terms, arithmetic.cast(jnp.zeros(()), "float32")), values

    def values(self, state: Sequence[Any], batch: Sequence[Any], arithmetic: Arithmetic) -> list[Any]:
        found = [*state, *batch]
        for place, line in enumerate(self.lines):
            operands = [found[k] for k in line.operands]
            result = line.function(arithmetic, *operands)
            if not line.moves and _is_float(result):
                magnitude = None
                if line.sums and arithmetic.amount is not None:
                    sizes = [jnp.abs(lax.stop_gradient(x)) if _is_float(x) else x for x in operands]
                    magnitude = jnp.abs(line.function(arithmetic, *sizes))
                result = arithmetic.rounded(result, line.dtype, magnitude, place + 1)
            found.append(result)
        return found


def _placed(state: Sequence[Any], at: Sequence[int], own: Sequence[Any]) -> list[Any]:
    given = dict(zip(at, own, strict=True))
    return [given.get(k, x) for k, x in enumerate(state)]


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def draw_program(seed: int) -> Program:
    """The program of this seed."""
    return _Draw(seed).program()


class _Draw:
    def __init__(self, seed: int):
        self.seed, self.random = seed, np.random.default_rng(seed)
        self.known: list[Value] = []
        self.lines: list[Operation] = []
        self.flawed = self.random.random() < 0.25

    def program(self) -> Program:
        state = tuple(self.input(self.shape()) for _ in range(2))
        batch = tuple(self.input((16, *self.shape()[: self.random.integers(0, 3)])) for _ in range(2))
        state += (np.asarray(self.random.integers(0, 4), np.int32),)
        self.known.append(Value((), "int32", True))
        self.known[2], self.known[3:] = self.known[4], self.known[2:4]  # as `run` numbers them: the state first
        wanted = int(self.random.integers(3, 13))
        for _ in range(200):
            if len(self.lines) == wanted:
                break
            self.line()
        first = len(state) + len(batch)
        used = {k for line in self.lines for k in line.operands}
        ends = [k for k in range(first, len(self.known)) if k not in used]
        extra = [int(k) for k in self.random.choice(range(first, len(self.known)), 2)]
        replaced: dict[int, int] = {}
        for k in ends:
            same = [
                j
                for j, x in enumerate(state)
                if j not in replaced and (x.shape, x.dtype.name) == (self.known[k].shape, self.known[k].dtype)
            ]
            if same:
                replaced[same[0]] = k
        has_gradient = not any(
            line.name.endswith("multiply") for line in self.lines
        )  # JAX has none of `.at[].multiply`
        gradient = not self.flawed and self.random.random() < 0.5 and has_gradient
        results = tuple(dict.fromkeys([*ends, *extra]))
        return Program(self.seed, state, batch, tuple(self.lines), results, tuple(replaced.items()), gradient)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.random.integers(len(options)))]

    def shape(self) -> tuple[int, ...]:
        return tuple(self.pick(SIZES[:3] * 3 + SIZES) for _ in range(self.random.integers(1, 4)))

    def input(self, shape: tuple[int, ...]) -> np.ndarray:
        dtype = self.pick(["float32"] * 4 + ["bfloat16", "float16"])
        x = self.random.normal(size=shape)
        if shape[0] % 2 == 0 and self.random.random() < 0.3:  # the second half nearly cancels the first
            half = 100 * x[: shape[0] // 2]
            x = np.concatenate([half, 0.5 - half])
        if self.flawed:
            at = self.random.integers(x.size, size=max(1, x.size // 16))
            x.reshape(-1)[at] = self.random.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], at.size)
        self.known.append(Value(shape, dtype, True))
        return np.asarray(x).astype(jnp.dtype(dtype))

    def line(self) -> None:
        """One more line, if what is drawn fits what is there."""
        family = self.pick(FAMILIES)
        k = int(self.random.integers(max(0, len(self.known) - 6), len(self.known)))
        drawn = family(self, k)
        if drawn is None:
            return
        name, function, operands, options = drawn
        values = [self.known[j] for j in operands]
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
        made = jax.eval_shape(functools.partial(function, Arithmetic()), *structs)
        if made.size > 4096 or made.size == 0:
            return
        exact = all(v.exact for v in values) and (options.get("moves", False) or not _is_float(made))
        self.known.append(Value(tuple(made.shape), made.dtype.name, exact))
        self.lines.append(Operation(name, function, operands, made.dtype.name, **options))

    def floats(self, k: int) -> bool:
        return self.known[k].dtype in EPSILON

    def other(self, k: int, shape: tuple[int, ...] | None = None) -> int | None:
        """Another float value, of this shape; the same as a last resort."""
        want = self.known[k].shape if shape is None else shape
        fit = [j for j, v in enumerate(self.known) if v.shape == want and v.dtype in EPSILON]
        return self.pick(fit) if fit else None


# Families: a draw and the number of a value to a line, or None where it does not fit.

Drawn = tuple[str, Callable[..., Any], tuple[int, ...], dict[str, Any]] | None
UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "logistic": jax.nn.sigmoid,
    "abs": jnp.abs,
    "neg": jnp.negative,
    "erf": lax.erf,
    "atan": jnp.arctan,
    "square": lambda x: jnp.square(jnp.tanh(x)),
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(1 + jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(1 + jnp.abs(x)),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "power": lambda x: lax.integer_pow(jnp.tanh(x), 3),
    "half": lambda x: x * 0.5,
    "cbrt": lambda x: jnp.cbrt(1 + jnp.abs(x)),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": lambda x, y: x * jnp.tanh(y),
    "div": lambda x, y: x / (1 + jnp.abs(y)),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "atan2": lambda x, y: jnp.arctan2(x, 1 + jnp.abs(y)),
}
FLAWED_BINARY = {"mul": jnp.multiply, "div": lambda x, y: x / jnp.maximum(y, 0)}
"""Of programs with infinities among their inputs: times infinity, over zero, where it is one beyond doubt."""
REDUCTIONS = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min}


def unary(draw: _Draw, k: int) -> Drawn:
    name = draw.pick(sorted(UNARY))
    if not draw.floats(k) or (name == "softmax" and not draw.known[k].shape):
        return None
    return name, lambda _, x: UNARY[name](x), (k,), {}


def binary(draw: _Draw, k: int) -> Drawn:
    other, name = draw.other(k), draw.pick(sorted(BINARY))
    if other is None or not draw.floats(k):
        return None
    table = BINARY | (FLAWED_BINARY if draw.flawed and draw.known[other].exact else {})
    return name, lambda _, x, y: table[name](x, y), (k, other), {}


def cast(draw: _Draw, k: int) -> Drawn:
    dtype = draw.pick(sorted(EPSILON))
    if draw.known[k].dtype == dtype or draw.known[k].dtype == "bool":
        return None
    return f"to {dtype}", lambda a, x: a.cast(x, dtype), (k,), {}


def reduction(draw: _Draw, k: int) -> Drawn:
    shape, name = draw.known[k].shape, draw.pick(sorted(REDUCTIONS))
    if not shape or not draw.floats(k):
        return None
    axis = tuple(d for d in range(len(shape)) if draw.random.random() < 0.6) or (0,)
    moves = name in ("max", "min")
    if name == "sum":  # of halves of large numbers it would be beyond float16
        return "sum", lambda _, x: jnp.sum(x / 16, axis), (k,), {"sums": True}
    return f"{name} {axis}", lambda _, x: REDUCTIONS[name](x, axis), (k,), {"sums": not moves, "moves": moves}


def wide_sum(draw: _Draw, k: int) -> Drawn:
    """A sum in float32, cast down."""
    shape, dtype = draw.known[k].shape, draw.pick(["bfloat16", "float16"])
    if not shape or not draw.floats(k):
        return None
    axis = int(draw.random.integers(len(shape)))

    def function(a: Arithmetic, x: jax.Array) -> jax.Array:
        total = jnp.sum(a.cast(x, "float32"), axis)
        size = jnp.sum(jnp.abs(lax.stop_gradient(a.cast(x, "float32"))), axis)
        return a.cast(a.rounded(total, "float32", size, 77), dtype)

    return f"sum, {dtype} {axis}", function, (k,), {}


def running(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape or not draw.floats(k):
        return None
    axis, name = int(draw.random.integers(len(shape))), draw.pick(["cumsum", "cummax", "logsumexp"])
    if name == "logsumexp":
        return name, lambda _, x: jax.nn.logsumexp(x, axis), (k,), {}
    if name == "cummax":
        return name, lambda _, x: lax.cummax(x, axis), (k,), {"moves": True}
    return name, lambda _, x: lax.cumsum(x / 16, axis), (k,), {"sums": True}


def movement(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape:
        return None
    axis = int(draw.random.integers(len(shape)))
    size = shape[axis]
    moves = {
        "transpose": lambda x: jnp.moveaxis(x, axis, 0),
        "flatten": lambda x: jnp.reshape(x, (-1,)),
        "split dim": lambda x: (
            jnp.reshape(x, (*shape[:axis], 2, size // 2, *shape[axis + 1 :])) if size % 2 == 0 else x.T
        ),
        "flip": lambda x: jnp.flip(x, axis),
        "roll": lambda x: jnp.roll(x, 1, axis),
        "pad": lambda x: jnp.pad(x, [(1, 2) if d == axis else (0, 0) for d in range(len(shape))]),
        "slice": lambda x: lax.slice_in_dim(x, size // 2, size, axis=axis),
        "stride": lambda x: lax.slice_in_dim(x, 0, size, 2, axis),
        "twice": lambda x: jnp.concatenate([x, x[::-1]], axis),
        "broadcast": lambda x: jnp.broadcast_to(jnp.expand_dims(x, axis), (*shape[:axis], 8, *shape[axis:])),
        "tile": lambda x: jnp.tile(x, 2),
        "stack": lambda x: jnp.stack([x, jnp.flip(x, axis)], axis),
    }
    name = draw.pick(sorted(moves))
    return f"{name} {axis}", lambda _, x: moves[name](x), (k,), {"moves": True}


def product(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape or not draw.floats(k):
        return None
    fit = [j for j, v in enumerate(draw.known) if v.dtype in EPSILON and shape[-1] in v.shape and len(v.shape) < 4]
    if not fit:
        return None
    other = draw.pick(fit)
    dim = draw.known[other].shape.index(shape[-1])

    def bounded(x: jax.Array) -> jax.Array:
        near = jnp.clip(x, -2, 2)
        return jnp.where(jnp.isinf(x), x, near) if draw.flawed else near

    return (
        "dot",
        lambda _, x, y: jnp.tensordot(bounded(x), bounded(y), ((x.ndim - 1,), (dim,))),
        (k, other),
        {"sums": True},
    )


def index_of(draw: _Draw) -> int:
    return 2  # the counter of the state


def reading(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    if not shape:
        return None
    places = np.asarray(draw.random.integers(-shape[0], shape[0] + 2, draw.pick([1, 4, 8])), np.int32)
    shift, mode = int(draw.random.integers(-2, shape[0])), draw.pick(["clip", "fill", None])
    if draw.flawed or mode is None or not draw.floats(k):
        mode = "clip"
    reads = {
        "rows": lambda x, n: x.at[jnp.arange(places.size) * 3 % 7 + n].get(mode=mode),
        "row": lambda x, n: x.at[n + shift].get(mode=mode),
        "dynamic slice": lambda x, n: lax.dynamic_slice_in_dim(x, n + shift, max(1, shape[0] // 2), 0),
        "dynamic row": lambda x, n: lax.dynamic_index_in_dim(x, n + shift, 0, keepdims=False),
        "last dim": lambda x, n: jnp.take_along_axis(
            x, (jnp.zeros(x.shape[:-1] + (1,), jnp.int32) + n) % shape[-1], -1
        ),
    }
    name = draw.pick(sorted(reads))
    return f"{name} {shift} {mode}", lambda _, x, n: reads[name](x, n), (k, index_of(draw)), {"moves": True}


def writing(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    other = draw.other(k)
    if not shape or not draw.floats(k) or other is None:
        return None
    shift, how = int(draw.random.integers(-2, shape[0] + 1)), draw.pick(["set", "add", "min", "max", "multiply"])
    many = jnp.arange

    def write(at: Any, y: jax.Array) -> jax.Array:
        return getattr(at, how)(y.astype(at.array.dtype) / 4)

    writes = {
        "row": lambda x, y, n: write(x.at[n + shift], y[0]),
        "last row": lambda x, y, n: write(x.at[-1], y[0]),
        "element": lambda x, y, n: write(x.at[(n + shift,) * x.ndim], y[(0,) * y.ndim]),
        "rows": lambda x, y, n: write(x.at[(many(shape[0]) * 3 + n) % shape[0]], y) if shape[0] != 3 else x + 1,
        "column": lambda x, y, n: write(x.at[..., n], y[..., 0]),
        "dynamic": lambda x, y, n: lax.dynamic_update_slice_in_dim(x, y[:1].astype(x.dtype), n + shift, 0),
    }
    name = draw.pick(sorted(writes))
    return f"write {name} {shift} {how}", lambda _, x, y, n: writes[name](x, y, n), (k, other, index_of(draw)), {}


def ordering(draw: _Draw, k: int) -> Drawn:
    value = draw.known[k]
    if not value.shape or not draw.floats(k) or value.shape[-1] < 3:
        return None
    values = {
        "sort": lambda x: jnp.sort(x, -1),
        "top_k": lambda x: lax.top_k(x, 3)[0],
        "median": lambda x: jnp.sort(x, 0)[0],
    }
    places = {
        "argsort": lambda x: jnp.argsort(x, -1).astype(jnp.int32),
        "argmax": lambda x: jnp.argmax(x, 0).astype(jnp.int32),
        "places": lambda x: lax.top_k(x, 3)[1],
        "greater": lambda x: (x > 0.25).astype(jnp.int32),
    }
    table = {**values, **(places if value.exact else {})}
    name = draw.pick(sorted(table))
    return name, lambda _, x: table[name](x), (k,), {"moves": True}


def selection(draw: _Draw, k: int) -> Drawn:
    other, exact = draw.other(k), [j for j, v in enumerate(draw.known) if v.exact and v.shape == draw.known[k].shape]
    if other is None or not exact or not draw.floats(k):
        return None
    return "where", lambda _, p, x, y: jnp.where(p > 0, x, y.astype(x.dtype)), (draw.pick(exact), k, other), {}


def window(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    if len(shape) != 2 or shape[1] % 2 or not draw.floats(k):
        return None
    ones = (1, 2), (1, 2), "VALID"
    kinds = {
        "max pool": (lambda x: lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, *ones), {"moves": True}),
        "mean pool": (lambda x: lax.reduce_window(x, np.array(0, x.dtype), lax.add, *ones), {"sums": True}),
        "convolution": (
            lambda x: jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3, x.dtype), "same"))(x),
            {"sums": True},
        ),
    }
    name = draw.pick(sorted(kinds))
    return name, lambda _, x: kinds[name][0](x), (k,), kinds[name][1]


def decomposition(draw: _Draw, k: int) -> Drawn:
    shape = draw.known[k].shape
    if len(shape) != 2 or shape[0] > 8 or draw.known[k].dtype != "float32" or draw.flawed:
        return None

    def function(_: Arithmetic, x: jax.Array) -> jax.Array:
        bounded = jnp.tanh(x)
        lower = jnp.linalg.cholesky(bounded @ bounded.T + 4 * jnp.eye(shape[0], dtype=x.dtype))
        return lax.linalg.triangular_solve(lower, bounded, left_side=True, lower=True)

    return "cholesky", function, (k,), {}


def loop(draw: _Draw, k: int) -> Drawn:
    """Sums, maxima and rows from trip to trip; over rows, or over weights."""
    shape, name = draw.known[k].shape, draw.pick(["scan of rows", "scan of weights", "fori", "branch", "recomputed"])
    if not shape or not draw.floats(k):
        return None

    def of_rows(_: Arithmetic, x: jax.Array) -> jax.Array:
        carry, rows = lax.scan(lambda c, row: (jnp.tanh(c + row), c * 0.5), jnp.zeros(shape[1:], x.dtype), x)
        return rows + carry

    def of_weights(a: Arithmetic, x: jax.Array) -> jax.Array:
        weights = a.cast(jnp.stack([jnp.ones(shape[-1]), jnp.full(shape[-1], 0.5)]), str(draw.known[k].dtype))
        return lax.scan(lambda h, w: (jnp.tanh(h * w) + jnp.mean(h, 0), None), x, weights)[0]

    def counted(_: Arithmetic, x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda i, h: h * 0.5 + jnp.sin(h + i), x)

    def branch(_: Arithmetic, x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.cond(n > 1, lambda: jnp.tanh(x) + jnp.max(x, 0), lambda: x * 0.5)

    def recomputed(_: Arithmetic, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x) * 2))(x)

    table = {
        "scan of rows": (of_rows, (k,)),
        "scan of weights": (of_weights, (k,)),
        "fori": (counted, (k, index_of(draw))),
        "branch": (branch, (k, index_of(draw))),
        "recomputed": (recomputed, (k,)),
    }
    function, operands = table[name]
    return name, function, operands, {}


def noise(draw: _Draw, k: int) -> Drawn:
    """Random bits of a key in the program."""
    if not draw.floats(k) or draw.known[k].dtype != "float32":
        return None

    def function(a: Arithmetic, x: jax.Array, n: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(draw.seed), n)
        return x + a.cast(jax.random.uniform(key, x.shape, jnp.float32), "float32")

    return "random", function, (k, index_of(draw)), {}


FAMILIES = (
    unary,
    unary,
    binary,
    binary,
    cast,
    reduction,
    reduction,
    wide_sum,
    running,
    movement,
    movement,
    product,
    product,
)
FAMILIES += (reading, reading, writing, writing, ordering, selection, window, decomposition, loop, loop, noise)
FAMILIES += MORE

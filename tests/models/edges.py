"""Where numbers end: single places written, parts that cancel or overflow, NaN, infinity and zeros with a sign."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.registry import case

_SHAPE = (16, 8)


def _batches():
    random = np.random.default_rng(0)
    return tuple({"x": jnp.asarray(random.normal(size=_SHAPE), jnp.float32)} for _ in range(3))


@case("one_place_written")
def one_place_written():
    """An amax history, counters, a table and a cache, in each of which one element or row is written."""

    def step(state, batch):
        x, n = batch["x"], state["n"]
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        new = {
            "n": n + 1,
            "w": state["w"] - 0.1 * gradient,
            "amax": jnp.roll(state["amax"], 1).at[0].set(jnp.abs(x).max()),
            "sorted": jnp.sort(state["sorted"]).at[5].add(loss),
            "summed": jnp.cumsum(state["summed"] / 8).at[n].add(1.0),
            "kept": x.at[n].multiply(3.0),
            "table": state["table"].at[5, 3].set(loss).at[n + 9].min(0.5).at[:, n].max(0.1),
            "row": state["row"].at[n].set(x[2 * n]).at[-1, n].add(loss),
        }
        return new, {"loss": loss, "seen": new["table"][n + 4], "beyond": state["row"].at[n + 15].add(1.0, mode="drop")}

    state = {
        "n": jnp.int32(0),
        "w": jnp.ones((8, 8)) / 8,
        "amax": jnp.arange(16.0),
        "sorted": jnp.sin(jnp.arange(16.0)),
        "summed": jnp.ones(16),
        "kept": jnp.zeros(_SHAPE),
        "table": jnp.sin(jnp.arange(128.0)).reshape(_SHAPE),
        "row": jnp.cos(jnp.arange(128.0)).reshape(_SHAPE),
    }
    return step, state, _batches()


def _means(dtype, scale):
    def opposed(seed):
        """The second half of the rows and of the columns nearly cancels the first; all are exact in the dtype."""
        x = scale * np.random.default_rng(seed).uniform(0.5, 1, _SHAPE)
        rows = np.concatenate([x, 0.01 * scale - x])
        return {"x": jnp.asarray(np.concatenate([rows, 0.02 * scale - rows], 1), dtype)}

    def step(state, batch):
        x, wide = batch["x"], batch["x"].astype(jnp.float32)
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(wide * w.astype(jnp.float32)))(state["w"])
        metrics = {
            "loss": value.astype(dtype),
            "mean": x.mean(),
            "rows": x.mean(1),
            "columns": x.mean(0),
            "sum": (wide.sum() / 64).astype(dtype),
            "product": jnp.einsum("ab,b->b", x, jnp.ones(16, dtype), preferred_element_type=jnp.float32).astype(dtype),
            "count": (x > 0).sum().astype(dtype),
        }
        return {"w": state["w"] - gradient}, metrics

    return step, {"w": jnp.ones(16, dtype)}, tuple(opposed(seed) for seed in range(3))


@case("half_means_that_cancel")
def half_means_that_cancel():
    return *_means(jnp.bfloat16, 300.0), 2.0**-7, "bfloat16 has 8 bits"


@case("float16_parts_that_overflow")
def float16_parts_that_overflow():
    return *_means(jnp.float16, 50000.0), 2.0**-10, "float16 has 11 bits"


@case("no_numbers")
def no_numbers():
    """What is largest where some are NaN, or infinite, or zeros of either sign."""

    def step(state, batch):
        x = batch["x"]
        flawed = x.at[3, 2].set(jnp.nan).at[5, 0].set(jnp.inf).at[:, 6].set(-jnp.inf).at[7].set(-0.0).at[8, 1].set(0.0)
        rest = jnp.where(jnp.isnan(flawed), 0.0, flawed)
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.max(x * w, axis=1)))(state["w"])
        metrics = {
            "norm": jnp.abs(flawed).max(),
            "max": [flawed.max(0), flawed.max(1), rest.max(), rest.max(1), flawed.astype(jnp.bfloat16).max(1)],
            "min": [flawed.min(0), flawed.min(1), rest.min(), rest.min(0), flawed.astype(jnp.float16).min(0)],
            "finite": jnp.isfinite(flawed).all(),
            "softmax": jax.nn.softmax(flawed, axis=1),
            "value": value,
        }
        return {"w": state["w"] - gradient, "largest": jnp.maximum(state["largest"], rest.max(0))}, metrics

    return step, {"w": jnp.ones(8), "largest": jnp.zeros(8)}, _batches()

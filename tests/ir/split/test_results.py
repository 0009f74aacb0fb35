"""What comes of the loop: metrics as sums, largest values, and rows that are put back in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autopar.ir.split.placement import SUM, Split
from tests.ir.split.cases import (
    BATCH,
    CLASSES,
    WIDTH,
    Case,
    Step,
    Tree,
    assert_equals_full_batch,
    cases_in_parts,
    descend,
    mlp,
    split_case,
    step_number,
)


def metrics_step(metrics: dict[str, Callable[..., Any]]) -> Step:
    """Trains on the mean cross entropy; each `metric(losses, logits, batch, grads, state)` is reported."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        def loss(params: Tree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            logits = mlp(params, batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (losses, logits)

        grads, (losses, logits) = jax.grad(loss, has_aux=True)(state["params"])
        values = dict(losses=losses, logits=logits, batch=batch, grads=grads, state=state)
        reported = {name: metric(**values) for name, metric in metrics.items()}
        return {**state, "step": state["step"] + 1, "params": descend(state["params"], grads)}, reported

    return step


def _correct(logits: jax.Array, batch: Tree) -> jax.Array:
    return logits.argmax(-1) == batch["label"]


METRICS: dict[str, dict[str, Callable[..., Any]]] = {
    "sums": {
        "sum": lambda losses, **_: losses.sum(),
        "mean": lambda losses, **_: losses.mean(),
        "masked mean": lambda losses, batch, **_: (losses * batch["mask"]).sum() / batch["mask"].sum(),
        "correct": lambda logits, batch, **_: _correct(logits, batch).sum(dtype=jnp.int32),
        "accuracy": lambda logits, batch, **_: _correct(logits, batch).mean(),
        "correct of each class": lambda logits, batch, **_: (
            jnp.zeros(CLASSES, jnp.int32).at[batch["label"]].add(_correct(logits, batch).astype(jnp.int32))
        ),
        "confusion": lambda logits, batch, **_: jnp.einsum(
            "bi,bj->ij", jax.nn.one_hot(batch["label"], CLASSES), jax.nn.one_hot(logits.argmax(-1), CLASSES)
        ),
    },
    "extremes": {
        "max": lambda losses, **_: losses.max(),
        "min": lambda losses, **_: losses.min(),
        "max over samples and classes": lambda logits, **_: jnp.abs(logits).max(),
        "min of integers": lambda logits, **_: logits.argmax(-1).min(),
        "range": lambda losses, **_: losses.max() - losses.min(),
        "any": lambda logits, batch, **_: _correct(logits, batch).any(),
        "none": lambda losses, **_: (losses < 0).any(),
        "all": lambda logits, **_: jnp.isfinite(logits).all(),
        "not all": lambda losses, **_: (losses > 1.0).all(),
    },
    "samples": {
        "losses in order": lambda losses, **_: losses,
        "logits in order": lambda logits, **_: logits,
        "transposed logits": lambda logits, **_: logits.T,
        "predictions": lambda logits, **_: logits.argmax(-1),
        "losses from last to first": lambda losses, **_: losses[::-1],
        "first sample": lambda logits, **_: logits[0],
        "top losses": lambda losses, **_: lax.top_k(losses, 3),
        "median": lambda losses, **_: jnp.median(losses),
        "worst sample": lambda losses, **_: losses.argmax(),
        "running sum": lambda losses, **_: jnp.cumsum(losses),
    },
    "functions of sums": {
        "gradient norm": lambda grads, **_: jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads))),
        "norms of gradients": lambda grads, **_: jax.tree.map(jnp.linalg.norm, grads),
        "norm of logits": lambda logits, **_: jnp.sqrt((logits**2).sum()),
        "deviation": lambda losses, **_: losses.std(),
        "perplexity": lambda losses, **_: jnp.exp(losses.mean()),
        "log of sum of exp": lambda losses, **_: jax.nn.logsumexp(losses),
    },
    "others": {
        "value of the state": lambda state, **_: (state["step"], state["params"]["bias"]),
        "value of the batch": lambda batch, **_: (batch["label"], batch["mask"].sum()),
        "constants": lambda **_: (1.0, jnp.arange(3), jnp.ones((BATCH, 2))),
        "learning rate": lambda state, **_: 0.1 * jnp.minimum(1.0, state["step"] / 10),
        "moving average": lambda losses, state, **_: 0.9 * state["step"] + 0.1 * losses.mean(),
    },
}

METRIC_CASES = {kind: Case(metrics_step(metrics), extra=step_number(3)) for kind, metrics in METRICS.items()}


@cases_in_parts(METRIC_CASES)
def test_metrics(case, count):
    assert_equals_full_batch(case, count)


def test_samples_are_results_in_parts():
    case = METRIC_CASES["samples"]
    _, split = split_case(case, 4)
    shares = {r.var.aval.shape: r.placement for r in split.results}
    assert shares[(BATCH,)] == Split(0) and shares[(CLASSES, BATCH)] == Split(1)


def visits(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Counts what it has seen, by hand."""
    seen = state["table"].at[batch["label"]].add(jnp.tanh(batch["x"] @ state["params"]["w1"]))
    return {**state, "table": seen, "count": state["count"].at[batch["label"]].add(1)}, {}


def test_what_is_added_to_the_state_begins_there_once():
    extra = {"table": jnp.linspace(-1, 1, CLASSES * WIDTH).reshape(CLASSES, WIDTH), "count": jnp.arange(CLASSES)}
    case = Case(visits, extra=lambda: extra)
    assert_equals_full_batch(case, 2)
    _, split = split_case(case, 2)
    assert {r.placement for r in split.results} == {SUM}
    late = [eqn for eqn in split.after if eqn.primitive.name == "scatter-add"]
    assert all(eqn.outvars[0].aval.ndim == 1 for eqn in late), "the counts are little work, the table is not"

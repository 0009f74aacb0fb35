"""Parts that the models of the benchmarks share: dense layers, layer norm, and the train step around a loss.

In:     sizes; a loss and an optimizer.
Out:    `dense_params`, `norm_params` and the functions that apply them; `make_train_step`, `state_types`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def dense_params(rows: int, columns: int, lead: tuple[int, ...] = ()) -> Any:
    """Of a dense layer; of a stack of them, `lead`."""
    return {"kernel": jnp.zeros((*lead, rows, columns)), "bias": jnp.zeros((*lead, columns))}


def norm_params(width: int, lead: tuple[int, ...] = ()) -> Any:
    """Of a norm; of a stack of them, `lead`."""
    return {"scale": jnp.ones((*lead, width)), "bias": jnp.zeros((*lead, width))}


def apply(layer: Any, x: jax.Array) -> jax.Array:
    """Dense layer."""
    return x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype)


def normalize(layer: Any, x: jax.Array) -> jax.Array:
    """Layer norm."""
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return centred * scale * layer["scale"].astype(x.dtype) + layer["bias"].astype(x.dtype)


def make_train_step(
    loss_of: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """The step of a loss of (parameters, batch): from state and batch to state and loss."""

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def state_types(params: Any, optimizer: optax.GradientTransformation) -> Any:
    """Types of the step's state, of those of its parameters; nothing is allocated."""
    return {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}

"""Supports Keras 3 on JAX: `model.fit` runs its training step on many devices.

In:     a compiled Keras model.
Out:    the same model; its `fit` calls a parallel step, `evaluate` and `predict` ones that use the weights where they are.
Method: Keras' own hook: on JAX a model's `train_function` maps (state, iterator) to (logs, state), where the state is lists of
        variables' values, and `fit` makes its own only if there is none. The lists are converted to dicts by the variables'
        paths, so that plans and constraints use Keras' names. Before the first training step Keras itself evaluates and
        predicts, since the weights are where it has put them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from autopar.api import parallelize
from autopar.errors import AutoparError
from autopar.follow import follow
from autopar.mesh import Cluster
from autopar.search.methods import Method
from autopar.step import ParallelStep

TRAINED = ("trainable", "non_trainable", "optimizer", "metrics")
TESTED = ("trainable", "non_trainable", "metrics")
ASKED = ("trainable", "non_trainable")


def distribute(
    model: keras.Model, *, cluster: Cluster | None = None, method: Method | str | None = None
) -> ParallelStep:
    """Make `model.fit`, `model.evaluate` and `model.predict` run on many devices.

    Call it after each `model.compile(...)`, which undoes it. The plan is made at the first batch.

    Args:
        model: A compiled model, on Keras' JAX backend.
        cluster: As in `parallelize`.
        method: As in `parallelize`.

    Returns:
        The training step, `(state, batch)` to `(state, logs)`: after a `fit`, `step.latest().plan` is its plan.

    Raises:
        AutoparError: Keras has another backend, the model is not compiled, or it has several steps per execution.
    """
    _check(model)
    variables = _Variables()
    train_step, test_step, predict_step = _steps(model, variables)
    step = parallelize(train_step, cluster=cluster, method=method, batch_argnums=1)
    test, predict = follow(test_step, step, batch_argnums=3), follow(predict_step, step, batch_argnums=2)
    _set_functions(model, variables, step, test, predict)
    return step


class _Variables:
    """Converts a model's variables between Keras' lists of values and dicts by path, by group.

    `names`: the paths of each group; read at the first batch, since `fit` creates missing variables.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def values(self, state: dict[str, Any], groups: Sequence[str]) -> tuple[list[Any], ...]:
        return tuple([state[group][name] for name in self.names[group]] for group in groups)

    def named(self, lists: Sequence[Any], groups: Sequence[str]) -> dict[str, Any]:
        return {group: dict(zip(self.names[group], own, strict=True)) for group, own in zip(groups, lists, strict=True)}


def _steps(model: Any, variables: _Variables) -> list[Callable[..., tuple[Any, Any]]]:
    """The model's training, evaluation and prediction steps, on dicts of variables by path."""
    values, named = variables.values, variables.named

    def train_step(state: dict[str, Any], batch: Any) -> tuple[Any, Any]:
        logs, lists = model.train_step(values(state, TRAINED), batch)
        return named(lists, TRAINED), logs

    def test_step(trainable: Any, non_trainable: Any, metrics: Any, batch: Any) -> tuple[Any, Any]:
        state = {"trainable": trainable, "non_trainable": non_trainable, "metrics": metrics}
        logs, lists = model.test_step(values(state, TESTED), batch)
        return named(lists, TESTED), logs

    def predict_step(trainable: Any, non_trainable: Any, batch: Any) -> tuple[Any, Any]:
        state = {"trainable": trainable, "non_trainable": non_trainable}
        outputs, others = model.predict_step(values(state, ASKED), batch)
        return outputs, named([others], ASKED[1:])["non_trainable"]

    steps: list[Callable[..., tuple[Any, Any]]] = [train_step, test_step, predict_step]
    for own in steps:
        own.__name__ = f"{model.name}_{own.__name__}"
    return steps


def _set_functions(model: Any, variables: _Variables, step: Any, test: Any, predict: Any) -> None:
    """Have Keras call these steps by its own hook; before the first training step, Keras' own functions."""
    values, named = variables.values, variables.named
    model.make_test_function(force=True)
    model.make_predict_function(force=True)
    tested_by_keras, predicted_by_keras = model.test_function, model.predict_function

    def train_function(lists: Sequence[Any], batches: Iterator[Any]) -> tuple[Any, Any]:
        if not variables.names:
            variables.names = {group: _paths(own) for group, own in _groups(model).items()}
        state, logs = step(named(lists, TRAINED), next(batches))
        return logs, values(state, TRAINED)

    def test_function(lists: Sequence[Any], batches: Iterator[Any]) -> tuple[Any, Any]:
        if step.latest() is None:
            return tested_by_keras(lists, batches)
        state, logs = test(*named(lists, TESTED).values(), next(batches))
        return logs, values(state, TESTED)

    def predict_function(lists: Sequence[Any], batches: Iterator[Any]) -> tuple[Any, Any]:
        if step.latest() is None:
            return predicted_by_keras(lists, batches)
        trainable, non_trainable = named(lists, ASKED).values()
        outputs, non_trainable = predict(trainable, non_trainable, next(batches))
        return outputs, values({"trainable": trainable, "non_trainable": non_trainable}, ASKED)

    model.train_function, model.test_function, model.predict_function = train_function, test_function, predict_function


def _groups(model: Any) -> dict[str, Sequence[Any]]:
    return {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        "optimizer": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }


def _paths(variables: Sequence[Any]) -> list[str]:
    """The variables' paths; equal ones are numbered."""
    counts = Counter(v.path for v in variables)
    return [v.path if counts[v.path] == 1 else f"{v.path}/{number}" for number, v in enumerate(variables)]


def _check(model: Any) -> None:
    if keras.backend.backend() != "jax":
        raise AutoparError(
            "Keras does not run on JAX.",
            given=f"keras.backend.backend() == {keras.backend.backend()!r}",
            wrong="autopar reads steps that JAX traces.",
            do='set KERAS_BACKEND="jax" in the environment before Keras is imported.',
        )
    if not model.compiled or model.steps_per_execution != 1:
        raise AutoparError(
            "this model has no training step to distribute.",
            given=f"`{model.name}`, " + ("several steps per execution" if model.compiled else "not compiled"),
            wrong="a model has a loss and an optimizer once it is compiled, and one step is planned at a time.",
            do="call model.compile(optimizer, loss) before, without steps_per_execution.",
        )

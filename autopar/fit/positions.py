"""Saves and restores the position of a loader, so that no batches need be drawn and dropped.

In:     a source of batches and the iterator over it.
Out:    its position, as JSON; later, the iterator at that position.
Method: `state_dict` and `load_state_dict` as in torchdata's loaders, `get_state` and `set_state` as in grain's iterators, and
        `skip` as in tf.data's datasets, which have no position. Bytes, arrays and tensors are encoded as base64.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np

from autopar.errors import warn

_WAYS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def position_of(source: Any, iterator: Iterator[Any]) -> Any | None:
    """The position of a source or its iterator, as JSON; None: it has none, or one that cannot be encoded."""
    found = _holder(source, iterator)
    if found is None:
        return None
    holder, (tell, _) = found
    try:
        return _encoded(getattr(holder, tell)())
    except TypeError as error:
        warn(f"the position of {type(holder).__name__} cannot be saved ({error}): a run that resumes draws and drops.")
        return None


def iterator_at(source: Any, position: Any) -> Iterator[Any] | None:
    """An iterator at a position; None: the source cannot go there, and the caller must draw and drop."""
    state = _decoded(position)
    tell, go = _WAYS[0]
    if hasattr(source, tell) and hasattr(source, go):
        return iter(source) if _goes(source, go, state) else None
    iterator = iter(source)
    found = _holder(source, iterator)
    if found is None:
        return None
    return iterator if _goes(found[0], found[1][1], state) else None


def _goes(holder: Any, go: str, state: Any) -> bool:
    try:
        getattr(holder, go)(state)
    except (
        Exception
    ) as error:  # a loader's own, which compares its data with that of the run before, such as by its `repr`
        name = f"{type(holder).__name__}.{go}"
        warn(f"{name} refuses where the run was ({error}): batches are drawn and dropped instead.")
        return False
    return True


def has_position(source: Any) -> bool:
    """Whether a source can save and restore its position."""
    return any(all(hasattr(source, name) for name in way) for way in _WAYS)


def iterator_after(source: Any, number: int) -> tuple[Iterator[Any], int]:
    """An iterator, and the number of batches that it has skipped: `number` if the source can skip, else 0."""
    if number and type(source).__module__.partition(".")[0] == "tensorflow" and hasattr(source, "skip"):
        return iter(source.skip(number)), number
    return iter(source), 0


def as_arrays(batch: Any) -> Any:
    """The batch with tensors of torch and TensorFlow converted to NumPy arrays."""
    import jax

    def as_array(leaf: Any) -> Any:
        match type(leaf).__module__.partition(".")[0]:
            case "torch" if hasattr(leaf, "detach"):
                return _of_torch(leaf)
            case "tensorflow" if hasattr(leaf, "numpy"):
                return leaf.numpy()
        return leaf

    return jax.tree.map(as_array, batch)


def _of_torch(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:  # a dtype that only JAX adds to NumPy, such as bfloat16
        import torch

        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.contiguous().view(bits).numpy().view(str(tensor.dtype).removeprefix("torch."))


def _holder(source: Any, iterator: Iterator[Any]) -> tuple[Any, tuple[str, str]] | None:
    for holder in (source, iterator):
        for way in _WAYS:
            if all(hasattr(holder, name) for name in way):
                return holder, way
    return None


def _encoded(state: Any) -> Any:
    match state:
        case None | bool() | int() | float() | str():
            return state
        case bytes():
            return {"~": "bytes", "data": base64.b64encode(state).decode()}
        case dict():
            return {"~": "dict", "items": [[_encoded(key), _encoded(value)] for key, value in state.items()]}
        case list() | tuple() if type(state) in (list, tuple):
            return {"~": type(state).__name__, "items": [_encoded(value) for value in state]}
        case np.ndarray() | np.generic():
            data = base64.b64encode(np.ascontiguousarray(state).tobytes()).decode()
            return {"~": "array", "dtype": state.dtype.str, "shape": list(state.shape), "data": data}
    if type(state).__module__.partition(".")[0] == "torch" and hasattr(state, "numpy"):
        return _encoded(state.numpy()) | {"~": "tensor"}
    raise TypeError(f"it holds {type(state).__name__}")


def _decoded(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    match found["~"]:
        case "bytes":
            return base64.b64decode(found["data"])
        case "dict":
            return {_decoded(key): _decoded(value) for key, value in found["items"]}
        case "list":
            return [_decoded(value) for value in found["items"]]
        case "tuple":
            return tuple(_decoded(value) for value in found["items"])
        case kind:
            data = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"]).copy()
            if kind == "array":
                return data
            import torch

            return torch.from_numpy(data)

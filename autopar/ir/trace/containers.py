"""Puts one value per array (a `PartitionSpec`, a sharding) into the user's own containers.

In:     a tree of arrays, and one value per leaf that is no array.
Out:    the same containers around the values; where a class takes nothing but arrays, an ordered dict by the keys of the
        paths. Leaves keep their order.
Method: classes are tried from the outside in: one that raises, or does not return the leaves it was given, becomes a dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, PyTreeDef, SequenceKey

from autopar._jax import outermost_node


def in_containers(tree: PyTreeDef, values: Sequence[object], keys: Sequence[KeyPath]) -> Any:
    """Put values into the containers of `tree`.

    `values`: one per leaf, no pytrees themselves.
    `keys`: path of each leaf, for the names in dicts; empty where unknown: then children are numbered.
    """
    return _filled(tree, list(values), list(keys) or [()] * len(values), 0)


def accepts(tree: PyTreeDef, values: Sequence[object]) -> bool:
    """Whether all classes in `tree` take these values in place of their arrays."""
    return _unflattened(tree, values) is not None


class _Anything:
    """A leaf that is no array, and no `object()` either, which some classes accept as JAX's own placeholder."""


def plain_containers(value: object) -> PyTreeDef:
    """The structure of a tree, with dicts in place of classes that do not take arbitrary leaves."""
    paths, tree = jax.tree_util.tree_flatten_with_path(value)
    return jax.tree.structure(in_containers(tree, [_Anything() for _ in paths], [keys for keys, _ in paths]))


def key_text(key: object) -> str:
    """A key of a path as the user would write it: "kernel", "0"."""
    text = jax.tree_util.keystr((key,), simple=True)
    is_plain = isinstance(key, DictKey | FlattenedIndexKey | SequenceKey | GetAttrKey)
    return text if is_plain else text.strip(".[]'\"")


def _filled(tree: PyTreeDef, values: list[object], keys: list[KeyPath], depth: int) -> object:
    made = _unflattened(tree, values)
    if made is not None:
        return made[0]
    assert not jax.tree_util.treedef_is_leaf(tree), "a leaf refused its value"
    children, names, start = [], [], 0
    for number, child in enumerate(tree.children()):
        span = slice(start, start + child.num_leaves)
        children.append(_filled(child, values[span], keys[span], depth + 1))
        known = child.num_leaves and len(keys[start]) > depth
        names.append(key_text(keys[start][depth]) if known else str(number))
        start += child.num_leaves
    made = _unflattened(outermost_node(tree), children)
    return made[0] if made is not None else OrderedDict(zip(names, children, strict=True))


def _unflattened(tree: PyTreeDef, values: Sequence[object]) -> tuple[object] | None:
    """The tree of these values, in a tuple; None: one of its classes refuses or changes them."""
    try:
        made = jax.tree.unflatten(tree, values)
        held = tree.flatten_up_to(made)
    except Exception:  # whatever the user's class raises for leaves that are no arrays
        return None
    return (made,) if all(a is b for a, b in zip(held, values, strict=True)) else None

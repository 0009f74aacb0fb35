"""A key of a pytree's path as the user would write it: "kernel", "0".

In:     a key of `jax.tree_util`.
Out:    its text.
"""

from __future__ import annotations

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def key_text(key: object) -> str:
    """The text of one key."""
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return key.name
    return str(key).strip(".[]'\"")

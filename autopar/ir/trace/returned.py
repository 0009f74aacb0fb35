"""The return value of a step on framework objects: the objects' new arrays, and the step's own result.

In:     from an adapter (`frameworks.py`), inside the trace: arrays only.
Out:    `Returned`, a pytree like any other result, whose structure also tells which arguments hold objects.
Method: data that is no array (how to rebuild objects from arrays) is auxiliary data of the pytree, compared by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef, SequenceKey


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Which arguments hold objects, as positions among the program's arguments: positional ones, then by name.

    Attributes:
        arguments: The arguments that hold objects.
        updated: Those of them that the step has changed, in the order of `Returned.updates`.
        static: Data of the adapter.
    """

    arguments: tuple[int, ...] = ()
    updated: tuple[int, ...] = ()
    static: Any = None


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a step on objects.

    Attributes:
        updates: New arrays of each updated argument, under the argument's paths.
        result: What the user's function returns, with arrays in place of objects.
        objects: The arguments that the updates belong to.
    """

    updates: tuple[object, ...]
    result: object
    objects: Objects

    def tree_flatten_with_keys(self) -> tuple[list[tuple[SequenceKey, object]], Objects]:
        """Children: updates first, then the result."""
        children = [*self.updates, self.result]
        return [(SequenceKey(k), child) for k, child in enumerate(children)], self.objects

    @classmethod
    def tree_unflatten(cls, objects: Objects, children: Sequence[object]) -> Returned:
        """The inverse of `tree_flatten_with_keys`."""
        *updates, result = children
        return cls(tuple(updates), result, objects)


def is_of_objects(out_tree: PyTreeDef) -> bool:
    """Whether a structure is that of a `Returned`."""
    data = out_tree.node_data()
    return data is not None and data[0] is Returned


def objects_in(out_tree: PyTreeDef) -> Objects:
    """The arguments that hold objects, from the structure of a step's result; none for a step on pytrees."""
    return out_tree.node_data()[1] if is_of_objects(out_tree) else Objects()


def num_updated(out_tree: PyTreeDef) -> int:
    """How many of a step's first result leaves are new arrays of objects."""
    return sum(child.num_leaves for child in out_tree.children()[: len(objects_in(out_tree).updated)])

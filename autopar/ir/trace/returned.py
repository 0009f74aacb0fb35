"""What a step on objects returns: new arrays of the objects it was passed, and its result.

In:     from an adapter (`frameworks.py`), inside of the trace, arrays only.
Out:    `Returned`, a pytree like any other result; from its structure alone, which arguments hold objects.
Method: what is no array (how objects are made of the arrays again) rides in the structure, by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef, SequenceKey


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Which arguments hold objects, counted as a program's are: by position, then by name.

    Attributes:
        arguments: Those that do.
        updated: Those of them in which something has changed, in the order of `Returned.updates`.
        static: The adapter's own.
    """

    arguments: tuple[int, ...] = ()
    updated: tuple[int, ...] = ()
    static: Any = None


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a step on objects.

    Attributes:
        updates: New arrays of each argument that is updated, under the paths of the argument.
        result: What the user's function returns, arrays for objects.
        objects: Whose arrays they are.
    """

    updates: tuple[object, ...]
    result: object
    objects: Objects

    def tree_flatten_with_keys(self) -> tuple[list[tuple[SequenceKey, object]], Objects]:
        """Updates first, then the result."""
        children = [*self.updates, self.result]
        return [(SequenceKey(k), child) for k, child in enumerate(children)], self.objects

    @classmethod
    def tree_unflatten(cls, objects: Objects, children: Sequence[object]) -> Returned:
        """The inverse."""
        *updates, result = children
        return cls(tuple(updates), result, objects)


def is_of_objects(out_tree: PyTreeDef) -> bool:
    """Whether this is the structure of a `Returned`."""
    data = out_tree.node_data()
    return data is not None and data[0] is Returned


def objects_in(out_tree: PyTreeDef) -> Objects:
    """Which arguments hold objects, of the structure of a step's result; none of a step on pytrees."""
    return out_tree.node_data()[1] if is_of_objects(out_tree) else Objects()


def num_updated(out_tree: PyTreeDef) -> int:
    """How many of a step's result leaves are new arrays of its arguments' objects: the first ones."""
    return sum(child.num_leaves for child in out_tree.children()[: len(objects_in(out_tree).updated)])

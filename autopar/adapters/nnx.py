"""Supports steps on Flax NNX objects (models, optimizers, metrics, random streams), as `nnx.jit` does.

In:     a call that passes graph nodes, alone or in containers, which may share variables.
Out:    their arrays under the user's paths ("model/layers/0/kernel"); after the step the same objects, updated in place.
Method: the four steps of NNX (`nnx.update_context`): flatten the nodes outside of the trace, rebuild them inside, flatten them
        there with the index numbers that they had outside, and update the objects with these numbers. All nodes of a call
        are flattened together, so that a shared variable is one array. An argument of which no array has changed is not a
        result of the program: it is read, not trained.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.nnx import graph

from autopar.errors import TraceError
from autopar.frameworks import Apart
from autopar.ir.trace.returned import Objects, Returned


@dataclass(frozen=True, slots=True)
class _Node:
    """A graph node without its arrays: its `GraphDef`, and the paths of its arrays."""

    definition: Any
    paths: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class _Tree:
    """A pytree without the arrays of its graph nodes; `nodes`: the node of each leaf, None if the leaf is not a node."""

    outer: Any
    nodes: tuple[_Node | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _After:
    """The arguments of a call after it, and its result, without arrays."""

    arguments: tuple[_Tree, ...]
    result: _Tree


class NnxAdapter:
    """The adapter of `flax.nnx`."""

    updates_in_place = True

    def claims(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has a graph node or a variable; an `nnx.State` is a plain pytree."""
        values = [*args, *kwargs.values()]
        return any(map(_is_node, values)) or any(map(_is_node, jax.tree.leaves(values, is_leaf=_is_leaf)))

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Apart:
        """Take a call apart into the arrays of its nodes, each once, and the nodes without arrays."""
        numbers = graph.RefMap()
        trees, arrays = [], []
        for value in _in_order(args, kwargs):
            leaves, outer = jax.tree.flatten(value, is_leaf=_is_leaf)
            tree, own = _flatten(leaves, outer, numbers, None)
            trees.append(tree)
            arrays.append(own)
        return Apart(self, *_as_passed(arrays, kwargs), tuple(trees), graph.IndexMap.from_refmap(numbers))

    def rebuild(self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with new nodes of these arrays."""
        return _rebuild(static, args, kwargs, graph.IndexMap())

    def run(self, fn: Callable[..., Any], static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        """Call the function on new nodes, and flatten them and the result afterwards."""
        found = graph.IndexMap()
        made_args, made_kwargs = _rebuild(static, args, kwargs, found)
        result = fn(*made_args, **made_kwargs)
        known, numbers = graph.RefMap.from_indexmap(found), graph.RefMap()

        def is_ours(value: Any) -> bool:
            return _is_node(value) and (not isinstance(value, nnx.Variable) or value in known)

        trees, updated, updates, holders = [], [], [], []
        before = _in_order(args, kwargs)
        after = _in_order(made_args, made_kwargs)
        for number, (was, value, tree) in enumerate(zip(before, after, static, strict=True)):
            nodes = [x if node else None for x, node in zip(tree.outer.flatten_up_to(value), tree.nodes, strict=True)]
            now, arrays = _flatten(nodes, tree.outer, numbers, known)
            trees.append(now)
            if any(tree.nodes):
                holders.append(number)
                if _has_changed(tree, was, now, arrays):
                    updated.append(number)
                    updates.append(arrays)
        leaves, outer = jax.tree.flatten(result, is_leaf=is_ours)
        result_tree, result = _flatten(leaves, outer, numbers, known)
        objects = Objects(tuple(holders), tuple(updated), _After(tuple(trees), result_tree))
        return Returned(tuple(updates), result, objects)

    def put_together(self, apart: Apart, returned: Returned) -> Any:
        """The result, in which the user's own nodes stand for those that were passed; these are updated in place."""
        after, made = returned.objects.static, graph.IndexMap()
        updates = dict(zip(returned.objects.updated, returned.updates, strict=True))
        before = _in_order(apart.args, apart.kwargs)
        for number, tree in enumerate(after.arguments):
            if any(tree.nodes):
                _unflatten(tree, updates.get(number, before[number]), made, apart.objects)
        return _unflatten(after.result, returned.result, made, apart.objects)


@functools.cache
def _is_node_type(kind: type) -> bool:
    return kind in graph.GRAPH_REGISTRY or issubclass(kind, nnx.Variable)


def _is_node(value: object) -> bool:
    kind: Any = type(value)
    return _is_node_type(kind)


def _is_leaf(value: object) -> bool:
    return _is_node(value) or isinstance(value, nnx.State)


def _in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The positional arguments, then keyword arguments sorted by name."""
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def _as_passed(values: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Values in that order, split into positional and keyword arguments again."""
    count = len(values) - len(kwargs)
    return tuple(values[:count]), dict(zip(sorted(kwargs), values[count:], strict=True))


def _flatten(leaves: Sequence[Any], outer: Any, numbers: Any, outside: Any) -> tuple[_Tree, Any]:
    """The pytree of these leaves and structure without its nodes' arrays, and the same with nested arrays for nodes.

    `numbers`: index numbers of nodes; extended. `outside`: their numbers outside of the trace; None: this is outside.
    """
    nodes: list[_Node | None] = []
    arrays: list[Any] = []
    for leaf in leaves:
        if not _is_node(leaf):
            nodes.append(None)
            arrays.append(leaf)
            continue
        definition, state = graph.flatten(leaf, ref_index=numbers, ref_outer_index=outside, graph=True)
        paths = tuple(state.paths)
        nodes.append(_Node(definition, paths))
        arrays.append(_nested(paths, [_array(path, x) for path, x in zip(paths, state.leaves, strict=True)]))
    return _Tree(outer, tuple(nodes)), outer.unflatten(arrays)


def _array(path: tuple[Any, ...], leaf: Any) -> Any:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    if isinstance(value, jax.Ref):
        name = "/".join(map(str, path))
        raise TraceError(
            "a variable holds a mutable array.",
            given=f"{name}, a {type(leaf).__name__} around {value}",
            wrong="autopar writes programs without references: what is written into one would be lost.",
            do="make the model without `ref=True`: variables are updated in place all the same.",
            path=name,
        )
    return value


def _nested(paths: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> Any:
    """Values in nested dicts by the parts of their paths; for a node that is one variable, its value."""
    if paths == ((),):
        return values[0]
    root: OrderedDict[Any, Any] = OrderedDict()
    for path, value in zip(paths, values, strict=True):
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, OrderedDict())
        place[path[-1]] = value
    return root


def _values(paths: Sequence[tuple[Any, ...]], nested: Any) -> Iterator[Any]:
    for path in paths:
        value = nested
        for key in path:
            value = value[key]
        yield value


def _unflatten(tree: _Tree, arrays: Any, made: Any, outside: Any) -> Any:
    """A pytree of nodes with these arrays; `outside`: the existing objects to update, by number."""
    leaves = [
        leaf
        if node is None
        else graph.unflatten(
            node.definition, list(_values(node.paths, leaf)), index_ref=made, outer_index_outer_ref=outside
        )
        for node, leaf in zip(tree.nodes, tree.outer.flatten_up_to(arrays), strict=True)
    ]
    return tree.outer.unflatten(leaves)


def _rebuild(
    trees: Sequence[_Tree], args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pairs = zip(trees, _in_order(args, kwargs), strict=True)
    return _as_passed([_unflatten(tree, value, made, None) for tree, value in pairs], kwargs)


def _has_changed(was: _Tree, before: Any, now: _Tree, after: Any) -> bool:
    """Whether an array of a node was replaced, or has another path."""
    pairs = zip(was.nodes, was.outer.flatten_up_to(before), now.nodes, now.outer.flatten_up_to(after), strict=True)
    for node, old, new_node, new in pairs:
        if node is not None:
            assert new_node is not None, "a node stays a node"
            if node.paths != new_node.paths:
                return True
            if any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)):
                return True
    return False

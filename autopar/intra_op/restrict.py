"""Restricts choices to the user's constraints; methods are in `hand_plans.py`.

In:     the decision graph, pins on inputs and outputs, the user's `with_sharding_constraint`s.
Out:    `Allowed`: for each restricted node a mask over its choices, and a key by which tying respects it.
Method: restrictions only forbid choices: the same ILP, under the same costs, finds automatic and hand-made plans, so that a
        hand-made plan never beats the automatic one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from autopar.errors import ConstraintError, warn
from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.problem import Problem
from autopar.ir.region import equations_within
from autopar.ir.source import source_line
from autopar.mesh import LogicalMesh, Sharding


@dataclass(eq=False, slots=True)
class Allowed:
    """Masks over the choices of nodes.

    Attributes:
        masks: Node index -> `[choice]`, True where allowed.
        keys: Node index -> key of its restrictions; equal keys mean equal masks.
        reasons: Node index -> its pins, for error messages.
    """

    masks: dict[int, np.ndarray] = field(default_factory=dict)
    keys: dict[int, object] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)

    def only(self, node: Node, mask: Sequence[bool] | np.ndarray, key: object, reason: str = "") -> None:
        """Allow only the choices of `node` where `mask` is True (on top of earlier restrictions)."""
        allowed = np.asarray(mask, dtype=bool)
        if node.index in self.masks:
            allowed, key = allowed & self.masks[node.index], (self.keys[node.index], key)
        self.masks[node.index], self.keys[node.index] = allowed, key
        if reason:
            self.reasons.setdefault(node.index, []).append(reason)


def keep_keys_whole(graph: Graph, inputs: Sequence[int], outputs: Sequence[int], allowed: Allowed) -> None:
    """Forbid splitting the words of typed random keys: they are no dim of the user's array, and JAX cannot split them.

    Args:
        graph: The decision graph.
        inputs: Positions of inputs that are keys.
        outputs: Positions of outputs that are keys.
        allowed: Extended.
    """
    for index in dict.fromkeys([*(graph.inputs[k] for k in inputs), *(graph.outputs[k] for k in outputs)]):
        keep_node_whole(graph.nodes[index], allowed)


def keep_node_whole(node: Node, allowed: Allowed) -> None:
    """Forbid splitting the words of a key, or of an array of keys."""
    allowed.only(node, [not s.dims[-1] for s in node.shardings], "key")


def pin_node(graph: Graph, node: Node, pin: tuple[str, object], path: str, allowed: Allowed) -> None:
    """Pin a node that chooses the sharding of an array.

    Args:
        graph: The decision graph.
        node: One of its ports.
        pin: (the user's text, PartitionSpec).
        path: Path of the argument or result.
        allowed: Extended.

    Raises:
        ConstraintError: The spec names an axis the mesh lacks, has too many entries, or splits a dim unevenly.
    """
    text, spec = pin
    sharding, free = read_spec(spec, tuple(node.var.aval.shape), graph.mesh, f"constraint {text!r} on {path}")
    mask = [matches_spec(s, sharding, free) for s in node.shardings]
    allowed.only(node, mask, ("pin", sharding, free), f"constraint {text!r} pins {path} to {spec}")


def pin_constraints(graph: Graph, allowed: Allowed) -> None:
    """Apply every `jax.lax.with_sharding_constraint` in the user's code."""
    for eqn, _ in equations_within(graph.jaxpr):
        if eqn.primitive.name == "sharding_constraint":
            node = graph.nodes[graph.op_node[eqn]]
            what = f"with_sharding_constraint at {source_line(eqn)}"
            spec = getattr(eqn.params["sharding"], "spec", None)
            if spec is None:
                raise ConstraintError(
                    "autopar reads only named shardings.",
                    given=f"{eqn.params['sharding']} in {what}",
                    wrong="it names no mesh axes.",
                    do="pass a NamedSharding or a PartitionSpec.",
                    path=what,
                    spec=None,
                )
            own = eqn.params["sharding"].mesh.shape
            single = [name for name, size in own.items() if size == 1 and name not in graph.mesh.axis_sizes]
            spec = _without_axes(spec, single)  # they split nothing
            do = _NAME_AXES + " Or leave the constraint out: the plan shards this array by itself."
            sharding, free = read_spec(spec, tuple(eqn.outvars[0].aval.shape), graph.mesh, what, do)
            mask = [matches_spec(s.results[0], sharding, free) for s in node.strategies]
            allowed.only(node, mask, ("pin", sharding, free), f"{what} asks for {spec}")


_NAME_AXES = (
    "name axes of the mesh (ShardParallel(mesh_shape=LogicalMesh(shape, axis_names=...)) gives them names) and split dims "
    "that divide."
)


def _without_axes(spec: Any, axes: Collection[str]) -> Any:
    def kept(entry: Any) -> Any:
        if isinstance(entry, str):
            return None if entry in axes else entry
        return tuple(axis for axis in entry if axis not in axes) if isinstance(entry, tuple | list) else entry

    return PartitionSpec(*map(kept, spec))


def read_spec(
    spec: Any, shape: tuple[int, ...], mesh: LogicalMesh, what: str, do: str = _NAME_AXES
) -> tuple[Sharding, tuple[bool, ...]]:
    """Convert a PartitionSpec to a sharding, and for each dim whether it is left open (`PartitionSpec.UNCONSTRAINED`).

    The axes of a dim are taken in mesh order, with a warning if the spec names them in another. `do`: said in the error.

    Raises `ConstraintError`: it does not fit the shape or the mesh.
    """
    entries = tuple(spec)
    problem = None
    if len(entries) > len(shape):
        problem = f"the spec has {len(entries)} entries, the array {len(shape)} dims."
    entries = entries + (None,) * (len(shape) - len(entries))
    dims, free = [], []
    for dim, entry in enumerate(entries[: len(shape)]):
        open_dim = entry is not None and not isinstance(entry, str | tuple | list)
        axes = () if entry is None or open_dim else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [a for a in axes if a not in mesh.axis_sizes]
        if unknown:
            problem = problem or (
                f"the mesh {mesh} has no axis {unknown[0]!r}; its axes are {', '.join(map(repr, mesh.axis_sizes))}."
            )
        else:
            parts = int(np.prod([mesh.axis_sizes[a] for a in axes]))
            if shape[dim] % parts:
                problem = problem or f"dim {dim} has length {shape[dim]}, which {parts} devices do not divide."
            ordered = tuple(a for a in mesh.axis_sizes if a in axes)
            if ordered != axes and not problem:
                warn(
                    f"{what}: {spec} lays dim {dim} out over {axes}, and the axes of the mesh are in the order "
                    f"{tuple(mesh.axis_sizes)}. It is split over {ordered}: the same parts, on other devices. Results are the "
                    "same; for that order give the mesh its axes so, mesh_shape=LogicalMesh(shape, axis_names)."
                )
            axes = ordered
        dims.append(axes)
        free.append(open_dim)
    if problem:
        raise ConstraintError(
            "a sharding constraint cannot be met.",
            given=f"{spec} for {what}, an array of shape {shape}",
            wrong=problem,
            do=do,
            path=what,
            spec=spec,
        )
    return Sharding(tuple(dims)), tuple(free)


def matches_spec(sharding: Sharding, wanted: Sharding, free: Sequence[bool]) -> bool:
    """Whether `sharding` equals `wanted` in every dim that is not left open, and is not partial."""
    return not sharding.partial and all(f or s == w for s, w, f in zip(sharding.dims, wanted.dims, free, strict=True))


Restrict = Callable[[Graph, Allowed], None]


def narrowed_problem(problem: Problem, graph: Graph, class_of: Sequence[int], restrict: Restrict) -> Problem | None:
    """The problem under further restrictions; None: they leave a node without a choice."""
    further = Allowed()
    restrict(graph, further)
    costs = list(problem.costs)
    masks = {(class_of[index], id(mask)): mask for index, mask in further.masks.items()}  # most are shared
    for (number, _), mask in masks.items():
        costs[number] = np.where(mask, costs[number], np.inf)
    if any(not np.isfinite(cost).any() for cost in costs):
        return None
    return Problem(costs, problem.edges)

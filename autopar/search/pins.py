"""Resolves the user's constraints to pins, for a whole step and for its stages.

In:     `{path glob: PartitionSpec}`, the paths of the step's arguments; a step that is cut, a stage of it.
Out:    pins by position; for a stage, a restriction to the pins on its inputs and to unsplit random keys.
Method: globs are matched on the user's own arguments. Each part of a stacked argument inherits its pins; of a batch argument
        each microbatch is pinned. Axes are those of the stage's mesh.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autopar._jax import Jaxpr, Var
from autopar.errors import ConstraintError
from autopar.inter_op.cut import CutStep
from autopar.inter_op.stage import StageProgram
from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.restrict import Allowed, Restrict, keep_keys_whole, keep_node_whole, pin_node
from autopar.ir.region import equations_within
from autopar.mesh import Cluster, LogicalMesh, linked_mesh, logical_meshes

RESULT = "result"
"""Constraints with this prefix may name results of a step without stages."""
RestrictStage = Callable[[StageProgram, LogicalMesh], tuple[Restrict | None, Hashable]]
"""The restriction of a stage on a mesh, and a key: equal stages with equal keys have equal restrictions."""


def unrestricted(program: StageProgram, mesh: LogicalMesh) -> tuple[Restrict | None, Hashable]:
    """No restriction."""
    return None, ()


@dataclass(frozen=True, slots=True)
class Pins:
    """The pins of one constraint: position -> (the user's glob, spec)."""

    inputs: dict[int, tuple[str, Any]]
    outputs: dict[int, tuple[str, Any]]


def meshes_of_constraints(jaxpr: Jaxpr, cluster: Cluster) -> list[LogicalMesh]:
    """The meshes of the user's own `with_sharding_constraint`s that are as large as the cluster.

    None, if the axes that they name are among those that every mesh has.
    """
    found = []
    usual = {name for mesh in logical_meshes(cluster) for name in mesh.axis_names}
    for eqn, _ in equations_within(jaxpr):
        sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
        if isinstance(sharding, NamedSharding) and sharding.mesh.size == cluster.num_devices:
            sizes = {name: size for name, size in sharding.mesh.shape.items() if size > 1}
            entries = [(entry,) if isinstance(entry, str) else entry for entry in sharding.spec]
            named = {axis for entry in entries if isinstance(entry, tuple) for axis in entry}
            if not usual.issuperset(named & sizes.keys()):
                found.append(linked_mesh(cluster, tuple(sizes.values()), tuple(sizes)))
    return list(dict.fromkeys(found))


def find_pins(in_paths: Sequence[str], constraints: Mapping[str, Any], out_paths: Sequence[str] = ()) -> list[Pins]:
    """The pins of each constraint: on arguments, and on results if it begins with `result`.

    Raises `ConstraintError`: a constraint names no argument and no result, or is no PartitionSpec.
    """
    pins = []
    for glob, spec in constraints.items():
        _check_spec(glob, spec)
        inputs = [k for k, path in enumerate(in_paths) if fnmatch.fnmatchcase(path, glob)]
        of_results = out_paths if glob.startswith(RESULT) else ()
        outputs = [k for k, path in enumerate(of_results) if fnmatch.fnmatchcase(path, glob)]
        if not inputs and not outputs:
            paths, what = (of_results, "result") if of_results else (in_paths, "argument")
            near = list(dict.fromkeys([*difflib.get_close_matches(glob, paths, n=6, cutoff=0.5), *paths]))[:6]
            raise ConstraintError(
                f"a constraint names no {what}.",
                given=f"constraints={{{glob!r}: {spec}}}",
                wrong=f"none of the {len(paths)} {what}s has a path that matches; there are {', '.join(near)}"
                + (", ..." if len(near) < len(paths) else "")
                + ".",
                do="use one of the paths (print(step.plan(...)) without the constraint lists them), or a glob over them.",
                path=glob,
                spec=spec,
            )
        pins.append(Pins(dict.fromkeys(inputs, (glob, spec)), dict.fromkeys(outputs, (glob, spec))))
    return pins


def _check_spec(glob: str, spec: object) -> None:
    problem = ""
    if not isinstance(spec, PartitionSpec | tuple | list):
        problem = f"{spec!r} is of type {type(spec).__name__}, not PartitionSpec."
    else:
        named = [
            axis
            for entry in spec
            if isinstance(entry, str | tuple | list)
            for axis in ((entry,) if isinstance(entry, str) else entry)
        ]
        twice = [axis for k, axis in enumerate(named) if axis in named[:k]]
        if twice:
            problem = f"it names axis {twice[0]!r} twice; an axis can split one dim."
    if problem:
        raise ConstraintError(
            "a constraint is not a valid PartitionSpec.",
            given=f"constraints={{{glob!r}: {spec!r}}}",
            wrong=problem,
            do="pass jax.sharding.PartitionSpec, one entry per dim: None, an axis, or a tuple of axes.",
            path=glob,
            spec=spec,
        )


def restrict_stages(
    cut: CutStep, constraints: Mapping[str, Any], restrict: RestrictStage = unrestricted
) -> RestrictStage:
    """Combine the user's pins, unsplit random keys, and further restrictions (`restrict`) of stages.

    Raises `ConstraintError`: a constraint names no argument, or is no PartitionSpec.
    """
    arguments = cut.program.jaxpr.invars
    pins_of: dict[Var, list[tuple[str, PartitionSpec]]] = {}
    for pins in find_pins(cut.paths, constraints):
        for k, (glob, spec) in pins.inputs.items():
            for at in cut.stacks.inputs[k]:
                spec = PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec))
                pins_of.setdefault(arguments[at], []).append((glob, spec))
    path_of = dict(zip(arguments, cut.program.in_paths, strict=False))
    keys = {arguments[k] for k, impl in enumerate(cut.program.key_inputs) if impl}
    key_results = {k for k, impl in enumerate(cut.program.key_outputs) if impl}
    if not (pins_of or keys or key_results):
        return restrict

    def restrict_stage(stage: StageProgram, mesh: LogicalMesh) -> tuple[Restrict | None, Hashable]:
        further, key = restrict(stage, mesh)
        inputs = {**stage.arguments, **{at: var for at, (var, _) in stage.stacks.items()}}
        pins = [(at, pin, path_of[var]) for at, var in inputs.items() for pin in pins_of.get(var, ())]
        into = tuple(at for at, var in inputs.items() if var in keys)
        out_of = tuple(at for at, result in stage.outputs.items() if result in key_results)
        if not (pins or into or out_of):
            return further, ((), (), (), key)

        def all_of_them(graph: Graph, allowed: Allowed) -> None:
            keep_keys_whole(graph, into, out_of, allowed)
            for at in (at for at in into if at in stage.stacks):
                keep_node_whole(_node(stage, graph, at), allowed)
            for at, pin, path in pins:
                part = f", {stage.count} microbatches" if at in stage.stacks else ""
                pin_node(graph, _node(stage, graph, at), pin, path + part, allowed)
            if further is not None:
                further(graph, allowed)

        return all_of_them, (tuple((at, pin) for at, pin, _ in pins), into, out_of, key)

    return restrict_stage


def _node(stage: StageProgram, graph: Graph, at: int) -> Node:
    """The node of an input; of a batch argument, that of one microbatch, in the loop."""
    if at not in stage.stacks:
        return graph.nodes[graph.inputs[at]]
    number = list(stage.scan.stacked).index(stage.stacks[at][1])
    return graph.nodes[graph.ports[stage.scan.eqn, "xs", 1 + number]]

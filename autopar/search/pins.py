"""The user's constraints: which arguments they pin, of a whole step and of one stage; a stage's random keys.

In:     `{path glob: PartitionSpec}`, the paths of the step's arguments; a step that is cut, a stage of it.
Out:    pins by position; of a stage, those on what it reads, as a restriction of choices, and keys in one piece.
Method: globs are matched on the user's own arguments. A stacked argument that is cut into parts hands its pins to each; of
        the batch, which comes in microbatches, the rows of each microbatch are pinned. Axes are those of the stage's mesh.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autopar._jax import Var
from autopar.errors import ConstraintError
from autopar.inter_op.cut import CutStep
from autopar.inter_op.stage import StageProgram
from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.restrict import Allowed, Restrict, keep_keys_whole, keep_node_whole, pin_node
from autopar.mesh import LogicalMesh

RESULT = "result"
"""Constraints that begin so may name results of a step without stages."""
RestrictStage = Callable[[StageProgram, LogicalMesh], tuple[Restrict | None, Hashable]]
"""What is forbidden of a stage on a mesh, and a key that tells it from what is forbidden of an equal stage."""


def unrestricted(program: StageProgram, mesh: LogicalMesh) -> tuple[Restrict | None, Hashable]:
    """Nothing is forbidden."""
    return None, ()


@dataclass(frozen=True, slots=True)
class Pins:
    """What one constraint pins: position -> (what the user wrote, spec)."""

    inputs: dict[int, tuple[str, Any]]
    outputs: dict[int, tuple[str, Any]]


def find_pins(in_paths: Sequence[str], constraints: Mapping[str, Any], out_paths: Sequence[str] = ()) -> list[Pins]:
    """Per constraint, what it pins: arguments, and results where it begins with `result`.

    Raises:
        ConstraintError: One names no argument and no result, or is no PartitionSpec.
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
            "a constraint is no way to split an array.",
            given=f"constraints={{{glob!r}: {spec!r}}}",
            wrong=problem,
            do="pass jax.sharding.PartitionSpec, one entry per dim: None, an axis, or a tuple of axes.",
            path=glob,
            spec=spec,
        )


def restrict_stages(
    cut: CutStep, constraints: Mapping[str, Any], restrict: RestrictStage = unrestricted
) -> RestrictStage:
    """Stages keep the user's pins, and random keys in one piece, and what is `restrict`ed beside.

    Raises:
        ConstraintError: A constraint names no argument, or is no PartitionSpec.
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
            for at in into:
                if at in stage.stacks:
                    keep_node_whole(_in_the_loop(stage, graph, at)[0], allowed)
            _pin(stage, pins, graph, allowed)
            if further is not None:
                further(graph, allowed)

        return all_of_them, (tuple((at, pin) for at, pin, _ in pins), into, out_of, key)

    return restrict_stage


def _pin(
    stage: StageProgram, pins: Sequence[tuple[int, tuple[str, PartitionSpec], str]], graph: Graph, allowed: Allowed
) -> None:
    """Keep pins: (position, pin, path)."""
    for at, pin, path in pins:
        node, var = graph.nodes[graph.inputs[at]], stage.jaxpr.invars[at]
        if at in stage.stacks:
            node, var = _in_the_loop(stage, graph, at)
            path = f"{path}, {stage.count} microbatches"
        pin_node(graph, node, tuple(var.aval.shape), pin, path, allowed)


def _in_the_loop(stage: StageProgram, graph: Graph, at: int) -> tuple[Node, Var]:
    """The decision on one microbatch of a batch argument."""
    var = stage.stacks[at][1]
    number = list(stage.scan.stacked).index(var)
    return graph.nodes[graph.ports[stage.scan.eqn, "xs", 1 + number]], var

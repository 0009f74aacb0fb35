"""The user's constraints: which arguments they pin, of a whole step and of one stage.

In:     `{path glob: PartitionSpec}`, the paths of the step's arguments; a step that is cut, a stage of it.
Out:    pins by position; of a stage, those on what it reads, as a restriction of choices.
Method: globs are matched on the user's own arguments. A stacked argument that is cut into parts hands its pins to each; of
        the batch, which comes in microbatches, the rows of each microbatch are pinned. Axes are those of the stage's mesh.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autopar._jax import Var
from autopar.errors import ConstraintError
from autopar.inter_op.stage_program import StageProgram
from autopar.intra_op.graph import Graph
from autopar.intra_op.restrict import Allowed, Restrict, pin_node
from autopar.mesh import LogicalMesh
from autopar.plan.cut import CutStep

RestrictStage = Callable[[StageProgram, LogicalMesh], tuple[Restrict | None, Hashable]]
"""What is forbidden of a stage on a mesh, and a key that tells it from what is forbidden of an equal stage."""


def unrestricted(program: StageProgram, mesh: LogicalMesh) -> tuple[Restrict | None, Hashable]:
    """Nothing is forbidden."""
    return None, ()


def find_pins(paths: Sequence[str], constraints: Mapping[str, Any]) -> list[dict[int, tuple[str, Any]]]:
    """Per constraint, the arguments it pins: position -> (what the user wrote, spec).

    Raises:
        ConstraintError: One names no argument, or is no PartitionSpec.
    """
    pins = []
    for glob, spec in constraints.items():
        _check_spec(glob, spec)
        found = [k for k, path in enumerate(paths) if fnmatch.fnmatchcase(path, glob)]
        if not found:
            near = difflib.get_close_matches(glob, paths, n=6, cutoff=0.5) or paths[:6]
            raise ConstraintError(
                "a constraint names no argument.",
                given=f"constraints={{{glob!r}: {spec}}}",
                wrong=f"none of the {len(paths)} arguments has a path that matches; there are {', '.join(near)}"
                + (", ..." if len(near) < len(paths) else "")
                + ".",
                do="use one of the paths (print(step.plan(...)) without the constraint lists them), or a glob over them.",
                path=glob,
                spec=spec,
            )
        pins.append({k: (glob, spec) for k in found})
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


def restrict_to_pins(
    cut: CutStep, constraints: Mapping[str, Any], restrict: RestrictStage = unrestricted
) -> RestrictStage:
    """The user's pins on the stages of a step, and what is `restrict`ed beside.

    Raises:
        ConstraintError: A constraint names no argument, or is no PartitionSpec.
    """
    if not constraints:
        return restrict
    pins_of: dict[Var, list[tuple[str, PartitionSpec]]] = {}
    for pins in find_pins(cut.paths, constraints):
        for k, (glob, spec) in pins.items():
            for at in cut.stacks.inputs[k]:
                spec = PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec))
                pins_of.setdefault(cut.program.jaxpr.invars[at], []).append((glob, spec))
    path_of = dict(zip(cut.program.jaxpr.invars, cut.program.in_paths, strict=False))

    def restrict_stage(stage: StageProgram, mesh: LogicalMesh) -> tuple[Restrict | None, Hashable]:
        further, key = restrict(stage, mesh)
        inputs = {**stage.arguments, **{at: var for at, (var, _) in stage.stacks.items()}}
        pins = [(at, pin, path_of[var]) for at, var in inputs.items() for pin in pins_of.get(var, ())]
        return (_pinned(stage, pins, further) if pins else further), (tuple((at, pin) for at, pin, _ in pins), key)

    return restrict_stage


def _pinned(
    stage: StageProgram, pins: Sequence[tuple[int, tuple[str, PartitionSpec], str]], further: Restrict | None
) -> Restrict:
    """A restriction that keeps pins (position, pin, path), and what is `further` restricted."""

    def restrict(graph: Graph, allowed: Allowed) -> None:
        for at, pin, path in pins:
            node, var = graph.nodes[graph.inputs[at]], stage.jaxpr.invars[at]
            if at in stage.stacks and stage.scan is not None:
                var = stage.stacks[at][1]
                number = list(stage.scan.stacked).index(var)
                node = graph.nodes[graph.ports[id(stage.scan.eqn), "xs", 1 + number]]
                path = f"{path}, {stage.count} microbatches"
            pin_node(graph, node, tuple(var.aval.shape), pin, path, allowed)
        if further is not None:
            further(graph, allowed)

    return restrict

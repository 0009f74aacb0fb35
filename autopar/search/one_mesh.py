"""Shards a whole step on one mesh under a method.

In:     the request, a logical mesh.
Out:    `Sharded`.
Method: the method and the user's pins restrict choices; well-known plans are compared with the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

from autopar.debug import dump
from autopar.errors import BatchError, InfeasibleError, NoPlanFoundError
from autopar.inter_op.cut import CARRIES, FREE, LEAN, SORTED, SWAPPED, Rewritten, check_rewritten
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.exposure import Exposure
from autopar.intra_op.graph import Graph
from autopar.intra_op.hand_plans import restrict_to_axes, restrict_to_data_parallel
from autopar.intra_op.read_off import Sharded
from autopar.intra_op.restrict import Allowed, Restrict, keep_keys_whole, pin_node
from autopar.intra_op.shard import shard
from autopar.ir.passes import Pass, run_passes
from autopar.ir.program import Program
from autopar.ir.rewrite.duplicates import merge_duplicates
from autopar.ir.rewrite.fission import cut_after_gradients
from autopar.ir.rewrite.joined_updates import join_updates
from autopar.ir.rewrite.late_narrowing import narrow_late
from autopar.ir.rewrite.stacked import stack_decompositions
from autopar.ir.split.microbatches.microbatch import how_to_divide
from autopar.ir.split.rounds.rounds import accumulate_in_rounds
from autopar.ir.trace.batch_text import batch_text
from autopar.ir.trace.state import Roles
from autopar.mesh import LogicalMesh
from autopar.options import MicrobatchSemantics
from autopar.plan.words import mesh_text
from autopar.search.methods import DataParallel, Method, ThreeD, count_of
from autopar.search.pins import find_pins
from autopar.search.request import Request
from autopar.tuning import TUNING

STACKED: Pass[Rewritten] = Pass(
    "stacked",
    "equal decompositions are one of a stack of matrices, which devices share",
    lambda step: step.by(lambda jaxpr: stack_decompositions(jaxpr, step.num_devices)),
)
MERGED: Pass[Rewritten] = Pass(
    "duplicates", "arguments that are cast or reshaped alike are so once", lambda step: step.by(merge_duplicates)
)
UPDATES: Pass[Rewritten] = Pass(
    "joined_updates", "elementwise work that updates one array of the state is one", lambda step: step.by(join_updates)
)
WHOLE: tuple[Pass[Rewritten], ...] = (MERGED, SORTED, LEAN, FREE, STACKED, UPDATES)
"""The passes of a step on one mesh that takes its batch at once."""
MICROBATCHES: tuple[Pass[Rewritten], ...] = (
    MERGED,
    SORTED,
    CARRIES,
    Pass("fission", "conditions end behind the gradients that they take", lambda step: step.by(cut_after_gradients)),
    Pass("late_narrowing", "casts to 16 bits leave loops", lambda step: step.by(narrow_late)),
    LEAN,
    FREE,
    SWAPPED,
    Pass(
        "rounds",
        "before the loop over microbatches, the loop as a scan, behind it; where samples wait, twice",
        lambda step: step.by(lambda jaxpr: accumulate_in_rounds(jaxpr, *step.how)),
    ),
    STACKED,
    UPDATES,
)
"""The passes of a step on one mesh in microbatches."""


def in_microbatches(
    program: Program, roles: Roles, count: int, semantics: MicrobatchSemantics, num_devices: int = 1
) -> Program:
    """Rewrite a program to loop over `count` microbatches, or, if that is 1, to take its batch at once.

    `num_devices`: number of devices that samples may be spread over.

    Raises:
        BatchError: The batch does not divide.
        MicrobatchError: Microbatches would change what the step computes.
    """
    passes = MICROBATCHES if count > 1 else WHOLE
    step = run_passes(passes, Rewritten(program, roles, count, semantics, num_devices), check_rewritten)
    if count > 1:
        dump("microbatches", step.program.__str__)
    return step.program


def shard_on(
    request: Request,
    mesh: LogicalMesh,
    compare: bool = True,
    beat: float = math.inf,
    exposure: Exposure | None = None,
    like: Graph | None = None,
    begin: Sequence[Sharded] = (),
    explore: bool = False,
    misled: float = 0.0,
) -> Sharded:
    """Shard the program on one mesh under the method's restrictions; `compare` it with data parallelism.

    If the answer fits the memory but for the gaps between its arrays, it is done again within the rest. `like`: the graph of
    the program on a mesh. Other arguments as in `shard`.
    """
    roles, device, options = request.roles, request.cluster.device, request.options
    if like is not None and like.mesh == mesh:
        graph = like
    else:
        graph = build_graph(request.program.jaxpr, mesh, roles.aliases, roles.dims, like=like)
    is_known = isinstance(request.method, DataParallel | ThreeD)
    known = _known_plans(request, mesh) if compare and not is_known else ()
    budget, found = options.budget_bytes(device.memory_bytes), None
    for _ in range(TUNING.placing_turns):
        try:
            found = shard(
                graph,
                device,
                options,
                partial(restrict_plan, request, mesh),
                roles.donated,
                known,
                beat,
                exposure=exposure or Exposure(1 - device.achieved.overlap),
                begin=begin,
                explore=explore,
                misled=misled,
                fastest=request.beat,
            )
        except InfeasibleError:
            if found is None:
                raise
            break
        if found.fits(budget):
            return found
        gaps = found.peak_bytes - found.liveness.peak_bytes
        options = dataclasses.replace(options, memory_budget_bytes=budget - gaps)
    assert found is not None, "there is a turn"
    raise NoPlanFoundError(
        "no sharding was found that fits the memory budget.",
        given=f"memory_budget_bytes={budget:.0f} on each device of {mesh}",
        wrong=f"the last that was tried takes {found.peak_bytes}, {gaps} of them for gaps between arrays of different sizes.",
        do=f"memory_budget_bytes={found.peak_bytes} will do; or use more devices, wrap layers in jax.checkpoint, or use a "
        "smaller batch.",
        budget_bytes=int(budget),
        needed_bytes=found.peak_bytes,
    )


def _known_plans(request: Request, mesh: LogicalMesh) -> list[Restrict]:
    """Data parallelism of every ZeRO stage, as restrictions; [] if the batch does not divide."""
    try:
        check_batch(request, mesh)
    except BatchError:
        return []
    batch, state = request.roles.dims, _state_in_parts(request)
    return [partial(restrict_to_data_parallel, batch_inputs=batch, state_inputs=state, zero=zero) for zero in (0, 1, 3)]


def _state_in_parts(request: Request) -> list[int]:
    """State that may be stored split: all but random keys."""
    return [k for k in request.roles.state if not request.program.key_inputs[k]]


def restrict_plan(request: Request, mesh: LogicalMesh, graph: Graph, allowed: Allowed) -> None:
    """Apply the restrictions of the method, the user's constraints and random keys."""
    program, roles, method = request.program, request.roles, request.method
    into, out_of = ([k for k, key in enumerate(of) if key] for of in (program.key_inputs, program.key_outputs))
    keep_keys_whole(graph, into, out_of, allowed)
    match method:
        case DataParallel(zero=zero):
            check_batch(request, mesh)
            restrict_to_data_parallel(graph, allowed, roles.dims, _state_in_parts(request), zero)
        case ThreeD():
            restrict_to_axes(graph, allowed, _state_in_parts(request), method.zero, method.sequence)
    for pins in find_pins(program.in_paths, request.options.constraints, program.out_paths):
        inputs = ((graph.inputs[at], pin, program.in_paths[at]) for at, pin in pins.inputs.items())
        outputs = ((graph.outputs[at], pin, program.out_paths[at]) for at, pin in pins.outputs.items())
        for index, pin, path in (*inputs, *outputs):
            pin_node(graph, graph.nodes[index], pin, path, allowed)
    _check_pinned(program, method, mesh, graph, allowed)


def check_batch(request: Request, mesh: LogicalMesh) -> None:
    """Check that the batch, in the microbatches asked for, divides over the devices of a data-parallel mesh.

    Raises `BatchError`: it does not, or there is none.
    """
    program, roles = request.program, request.roles
    if not roles.batch:
        leaves = range(len(program.in_paths))
        others = [k for k in leaves if k not in roles.state] or leaves
        shown = [f"{program.in_paths[k]}: {program.in_avals[k].str_short()}" for k in others]
        raise BatchError(
            "there is no batch to split.",
            given=", ".join(shown[:8]),
            wrong=batch_text(program, roles),
            do="pass what has no row per sample (a mask, a graph's edges) as an argument of its own, or say batch_argnums=...; "
            "for a step without a batch (it draws its own samples, holds them in its state, or works on one whole graph), use "
            "ShardParallel() or Auto(): they split what pays, whatever it is.",
            candidates={},
        )
    count, devices = count_of(request.method), mesh.num_devices
    undivided = request.undivided(count, devices)
    if undivided is not None:
        path, size, wanted = undivided
        over = f"{count} microbatches, each on all {devices} devices" if wanted > devices else f"{devices} devices"
        raise BatchError(
            "the batch does not divide over the devices.",
            given=f"{path} with {size} samples, {over}",
            wrong=f"{size} is no multiple of {wanted}.",
            do=("use fewer microbatches, or " if wanted > devices else "")
            + f"pass batches of a multiple of {wanted} samples: {how_to_divide(request.batch_sizes)}. Or use Auto(), which "
            "splits other dims where the batch does not divide.",
            size=size,
        )


def _check_pinned(program: Program, method: Method, mesh: LogicalMesh, graph: Graph, allowed: Allowed) -> None:
    """Check that every argument has a sharding left.

    Raises `InfeasibleError`: names the pins on one argument that contradict each other or the method.
    """
    for k, path in enumerate(program.in_paths):
        mask = allowed.masks.get(graph.inputs[k])
        if mask is not None and not mask.any():
            reasons = list(allowed.reasons.get(graph.inputs[k], ()))
            if isinstance(method, DataParallel):
                reasons.append(f"method=DataParallel(zero={method.zero})")
            raise InfeasibleError(
                "the pins on an argument contradict each other or the method.",
                given="\n".join(reasons),
                wrong=f"no sharding of {path}, of shape {tuple(program.in_avals[k].shape)} on the mesh "
                f"{mesh_text(mesh)}, keeps all of them.",
                do="drop one of them, or choose another method or mesh.",
                constraint=reasons[0],
                path=path,
            )

"""Prepares a step for cutting into stages: splits its scans over layers, its phases, and its loop into segments.

In:     a traced step, the numbers of parts and of microbatches.
Out:    `CutStep`: the step with its scans over layers in parts, its phases, the segments of its loop.
Method: the passes of `APART`, then `ir/split/rounds/stage_phases.py`, `pass_order.py` and `chain.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autopar._jax import Jaxpr, Var
from autopar.debug import check_after
from autopar.errors import PipelineError
from autopar.inter_op.chain import Chain, make_chain
from autopar.inter_op.pass_order import pass_order
from autopar.inter_op.rematerialized_residuals import rematerialize_residuals
from autopar.intra_op.batch import BatchDims, follow_batch
from autopar.ir.check import check_program
from autopar.ir.dataflow import descendants
from autopar.ir.passes import Pass, run_passes
from autopar.ir.program import Program
from autopar.ir.region import equations_within, is_region
from autopar.ir.rewrite.barriers import drop_barriers
from autopar.ir.rewrite.carries_apart import take_carries_apart
from autopar.ir.rewrite.fission import fission
from autopar.ir.rewrite.late_narrowing import narrow_late
from autopar.ir.rewrite.swapped_products import swap_products
from autopar.ir.rewrite.trips_at_once import trips_at_once
from autopar.ir.rewrite.unrolled_steps import unroll_steps
from autopar.ir.split.layers.layers import LayerSplit, layer_count, split_layers, whole_stacks
from autopar.ir.split.microbatches.microbatch import Microbatches, check_phases
from autopar.ir.split.placement import Batch
from autopar.ir.split.rounds.stage_phases import split_at_joins, whole_batch
from autopar.ir.split.sorted_rows.sorted_parts import sort_in_parts
from autopar.ir.trace.batch_text import batch_text
from autopar.ir.trace.state import Roles
from autopar.ir.work import EqualRules
from autopar.options import MicrobatchSemantics
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True, eq=False)
class CutStep:
    """A step in phases, ready to be cut into stages.

    Attributes:
        program: The step, its scans over layers in parts.
        roles: The roles of its arguments.
        stacks: How the stacked arguments and results of the user's step were split.
        split: Its phases.
        chain: The segments of its loop.
        after_pass: Value made between passes of the loop -> the pass after which it is made.
        batch: Dims of the loop's values that run over samples.
        paths: Paths of the arguments of the user's step.
    """

    program: Program
    roles: Roles
    stacks: LayerSplit
    split: Microbatches
    chain: Chain
    after_pass: Mapping[Var, int]
    batch: BatchDims
    paths: tuple[str, ...]


Layout = tuple[int, int, Mapping[int, int]]
"""How stacks are split: number of parts, number of layers, and the stacked inputs with their stacked dim."""


def in_parts(
    program: Program, roles: Roles, num_parts: int, layout: Layout | None = None
) -> tuple[Program, Roles, LayerSplit]:
    """Split the step's scans over layers into parts, if it has any.

    `num_parts`: number of parts, at most one per layer; if it does not divide the layers, some parts have one more.
    `layout`: a given split of the stacks; None: as `num_parts` says.
    """
    count, there, stacked = (0, 0, {}) if layout is None else layout
    length = layer_count(program.jaxpr, roles.may_hold_layers, roles.aliases, stacked)
    count = count or min(length, num_parts)
    if count < 2 or (layout is not None and not stacked):
        return program, roles, whole_stacks(program.jaxpr)
    if layout is not None:
        length = there if there % count else length if length % count == 0 else 0
    stacks = split_layers(program.jaxpr, length, count, roles.aliases, stacked)
    if layout is None and length % count and not _has_parts(stacks, roles):
        equal = dividing_count(length, count)  # some operations on stacks need equal parts
        stacks = split_layers(program.jaxpr, length, equal, roles.aliases, stacked)
    if not _has_parts(stacks, roles):
        return program, roles, whole_stacks(program.jaxpr)  # a scan over time, or over chunks: its weights are shared
    ins, outs = (stacks.inputs[: program.num_args], stacks.input_dims), (stacks.outputs, stacks.output_dims)
    paths = _part_paths(program.in_paths, *ins, stacks.jaxpr.invars)
    out_paths = _part_paths(program.out_paths, *outs, stacks.jaxpr.outvars)
    parted = dataclasses.replace(
        program,
        jaxpr=stacks.jaxpr,
        in_paths=tuple(paths),
        out_paths=tuple(out_paths),
        in_avals=tuple(var.aval for var in stacks.jaxpr.invars[: len(paths)]),
        out_avals=tuple(a.aval for a in stacks.jaxpr.outvars),
        num_args=len(paths),
        key_inputs=_of_parts(program.key_inputs, stacks.inputs),
        key_outputs=_of_parts(program.key_outputs, stacks.outputs),
        raw_keys=tuple(at for k in program.raw_keys for at in stacks.inputs[k]),
    )
    aliases = {
        out: into
        for k, old in roles.aliases.items()
        for out, into in zip(stacks.outputs[k], stacks.inputs[old], strict=True)
    }
    parted_roles = Roles(
        aliases,
        tuple(sorted(at for k in roles.state for at in stacks.inputs[k])),
        tuple(at for k in roles.batch for at in stacks.inputs[k]),
        tuple(roles.donated[k] for k, parts in enumerate(stacks.inputs) for _ in parts),
        {at: dims for k, dims in roles.dims.items() for at in stacks.inputs[k]},
    )
    return parted, parted_roles, stacks


def _has_parts(stacks: LayerSplit, roles: Roles) -> bool:
    """Whether any weights were split into parts."""
    return any(len(stacks.inputs[k]) > 1 for k in roles.may_hold_layers)


def _of_parts(impls: Sequence[str | None], positions: Sequence[Sequence[int]]) -> tuple[str | None, ...]:
    """The key implementation of each part: that of its stack."""
    return tuple(impl for impl, parts in zip(impls, positions, strict=False) for _ in parts)


def _part_paths(
    paths: Sequence[str], positions: Sequence[Sequence[int]], dims: Sequence[int], atoms: Sequence[Any]
) -> list[str]:
    """Paths of all parts; a part of a stack is called by its range of layers."""
    found = []
    for path, parts, dim in zip(paths, positions, dims, strict=False):
        if len(parts) == 1:
            found.append(path)
            continue
        ends = list(itertools.accumulate((atoms[at].aval.shape[dim] for at in parts), initial=0))
        found += [f"{path}[{':, ' * dim}{first}:{end}]" for first, end in itertools.pairwise(ends)]
    return found


def dividing_count(length: int, num_parts: int) -> int:
    """The least number of equal parts of `length` layers that is at least `num_parts`."""
    return next((n for n in range(num_parts, length + 1) if length % n == 0), length)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A step that is being rewritten for microbatches.

    Attributes:
        program: The step.
        roles: The roles of its arguments.
        count: Number of microbatches.
        semantics: `"exact"` or `"per_microbatch"`.
        num_devices: Number of devices that samples may be spread over.
    """

    program: Program
    roles: Roles
    count: int
    semantics: MicrobatchSemantics
    num_devices: int

    def by(self, rewrite: Callable[[Jaxpr], Jaxpr]) -> Self:
        """The step with its program rewritten; inputs and results stay the same."""
        jaxpr = rewrite(self.program.jaxpr)
        return dataclasses.replace(self, program=dataclasses.replace(self.program, jaxpr=jaxpr))

    @property
    def how(self) -> tuple[int, Batch, bool, str]:
        """Arguments of `split_at_joins` and `accumulate_in_rounds`: number of microbatches, the batch, whether each
        microbatch takes its own sums, and the batch in messages."""
        text = batch_text(self.program, self.roles)
        return self.count, self.roles.leading, self.semantics == "per_microbatch", text


@dataclass(frozen=True, slots=True)
class TakenApart(Rewritten):
    """A step that is being rewritten for stages.

    Attributes:
        stacks: How its stacks were split.
        num_parts: Number of parts for its scans over layers.
        layout: A given split of the stacks; None: as `num_parts` says.
    """

    stacks: LayerSplit
    num_parts: int
    layout: Layout | None


def check_rewritten(step: Rewritten) -> None:
    """Assert that the step is a flat program, with a path for each argument and result."""
    check_program(step.program.jaxpr)
    inputs, outputs = step.program.jaxpr.invars, step.program.jaxpr.outvars
    assert len(step.program.in_paths) == step.program.num_args <= len(inputs), "an argument without a path"
    assert len(step.program.out_paths) == len(outputs), "a result without a path"


def _in_parts(step: TakenApart) -> TakenApart:
    program, roles, stacks = in_parts(step.program, step.roles, step.num_parts, step.layout)
    return dataclasses.replace(step, program=program, roles=roles, stacks=stacks)


SORTED: Pass[Any] = Pass(
    "sorted_parts",
    "rows that are sorted are sorted in parts, for devices and microbatches",
    lambda step: step.by(lambda jaxpr: sort_in_parts(jaxpr, step.num_devices, step.count)),
)
LEAN: Pass[Any] = Pass(
    "rematerialized_residuals", "loops that keep less for their gradient", lambda step: step.by(rematerialize_residuals)
)
FREE: Pass[Any] = Pass(
    "barriers",
    "barriers hold back only what has to wait",
    lambda step: step.by(lambda jaxpr: drop_barriers(jaxpr, step.roles.batch)),
)
CARRIES: Pass[Any] = Pass(
    "carries_apart",
    "what loops add up of samples alone, as a mask, is added up in loops of its own",
    lambda step: step.by(lambda jaxpr: take_carries_apart(jaxpr, step.roles.batch)) if step.count > 1 else step,
)
SWAPPED: Pass[Any] = Pass(
    "swapped_products",
    "sums over microbatches lie as their reader wants them",
    lambda step: step.by(swap_products) if step.count > 1 else step,
)
APART: tuple[Pass[TakenApart], ...] = (
    Pass(
        "trips_at_once",
        "a loop that adds up the gradients of as many parts as there are microbatches is the loop over these",
        lambda step: step.by(lambda jaxpr: trips_at_once(jaxpr, step.count)) if step.count > 1 else step,
    ),
    Pass(
        "unrolled_steps",
        "loops of a few training steps, step by step",
        lambda step: step.by(lambda jaxpr: unroll_steps(jaxpr, TUNING.written_steps)),
    ),
    SORTED,
    CARRIES,
    Pass("fission", "conditions in as many as share no work", lambda step: step.by(fission)),
    Pass(
        "late_narrowing",
        "where microbatches are added up, casts to 16 bits leave loops",
        lambda step: step.by(narrow_late) if step.count > 1 else step,
    ),
    Pass("layers", "scans over layers in parts", _in_parts),
    LEAN,
    FREE,
    SWAPPED,
)
"""The passes of a step that is cut into stages."""


def cut_step(
    program: Program,
    roles: Roles,
    num_parts: int,
    num_microbatches: int,
    semantics: MicrobatchSemantics = "exact",
    layout: Layout | None = None,
    num_devices: int = 1,
) -> CutStep:
    """Split a step into parts of its scans over layers, phases and segments.

    `num_parts`: number of parts for scans over layers.
    `layout`: a given split of the stacks; None: as `num_parts` says.
    `num_devices`: number of devices that samples may be spread over.

    Raises:
        BatchError: The batch does not divide.
        MicrobatchError: Microbatches would change what the step computes.
    """
    paths = program.in_paths
    stacks = whole_stacks(program.jaxpr)
    step = TakenApart(program, roles, num_microbatches, semantics, num_devices, stacks, num_parts, layout)
    made = run_passes(APART, step, check_rewritten)
    program, roles, stacks = made.program, made.roles, made.stacks
    if num_microbatches > 1:
        jaxpr, split = split_at_joins(program.jaxpr, *made.how)
    else:
        jaxpr, split = whole_batch(program.jaxpr, roles.leading)
    program = dataclasses.replace(program, jaxpr=jaxpr)
    check_after("microbatch", check_phases(program.jaxpr), split)
    order = pass_order(split)
    chain = make_chain(split.loop, _of_arguments(program.jaxpr, split), order)
    samples = {program.jaxpr.invars[k]: dims for k, dims in roles.dims.items()}
    entering = enumerate((*split.invariants, *split.pieces), start=1)
    given = {k: samples[var] for k, var in entering if var in samples}
    known = EqualRules()
    rules = {eqn: known.of(eqn) for eqn, _ in equations_within(split.loop) if not is_region(eqn)}
    batch = follow_batch(split.loop, rules, given)
    return CutStep(program, roles, stacks, split, chain, order.after_pass, batch, paths)


def _of_arguments(jaxpr: Jaxpr, split: Microbatches) -> list[Var]:
    """Loop invariants that depend on arguments; others, such as constant masks, can be made anywhere."""
    made = descendants((*split.before, *split.between), given=jaxpr.invars)
    return [var for var, outside in split.invariant_of.items() if outside in made]


def check_stage_count(cut: CutStep, num_stages: int, chunks: int = 1) -> None:
    """Check that there are at least as many segments as stages; each mesh holds `chunks` stages.

    Raises `PipelineError`: the program has fewer segments than stages are wanted.
    """
    if num_stages > cut.chain.num_segments:
        raise PipelineError(
            "the step cannot be cut into so many stages.",
            given=f"num_stages={num_stages // chunks}"
            + (f", a schedule that makes {chunks} stages of each: {num_stages}" if chunks > 1 else ""),
            wrong="places where a stage could begin, in its forward pass before the gradient is taken: "
            f"{cut.chain.num_segments}. A loop around the gradient is one place.",
            do="use fewer stages; on one mesh, any step can be split: ShardParallel(), DataParallel().",
            num_stages=num_stages,
        )

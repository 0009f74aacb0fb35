"""Lowers a solved graph to the sharded program, with exactly the conversions that were chosen.

In:     the flat program, the decision graph, one choice per node.
Out:    `Body` (`sharded.py`).
Method: values are converted when first needed, through the hub's sharding if there is a hub; within a phase all copies
        made on the way may be reused. Between phases a value waits in the sharding of its keep, to which it is converted
        after its last reader in the earlier phase; the later phase has that copy alone. A gather that is repeated waits
        for the results of the one before the last, so that at most one is ahead of its use.
        Then unread copies are dropped (`unread.py`), sums sent early (`early.py`), small collectives fused (`fuse.py`), and
        conditions of loops are not sent where devices may differ (`alone.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.cost.reshard import cheapest_reshard
from autopar.cost.steps import apply_to_sharding, step_kind
from autopar.intra_op.alone import end_alone
from autopar.intra_op.check import check_body
from autopar.intra_op.early import send_early
from autopar.intra_op.fuse import fuse_collectives, sent_together, small_bytes
from autopar.intra_op.graph import PHASES, Graph, Keep, Phase, stacked
from autopar.intra_op.narrow import narrow_dtype
from autopar.intra_op.sharded import BUCKET_BYTES, Body, Compute, Copy, Gate, Instruction, Move, Region, describe
from autopar.intra_op.unread import drop_unread
from autopar.ir.dataflow import inputs_of
from autopar.ir.passes import Pass, run_passes
from autopar.ir.region import Role, is_region, region_of
from autopar.ir.work import num_bytes
from autopar.mesh import LogicalMesh, Sharding


def lower(graph: Graph, choices: Sequence[int], bucket: int = BUCKET_BYTES) -> Body:
    """Lower a graph's program under one choice per node; `bucket`: the most bytes that are sent as one message."""
    chosen = [graph.nodes[node].shardings[choices[node]] for node in (*graph.inputs, *graph.outputs)]
    inputs, outputs = chosen[: len(graph.inputs)], chosen[len(graph.inputs) :]
    given = Lowered(graph.jaxpr, graph, choices, inputs, outputs, bucket=bucket)
    return run_passes(LOWER, given, check_lowered).body


def lower_task(
    jaxpr: Jaxpr,
    graph: Graph,
    choices: Sequence[int],
    inputs: Sequence[Sharding],
    outputs: Sequence[Sharding],
    gates: Mapping[JaxprEqn, Sequence[Var]] | None = None,
    bucket: int = BUCKET_BYTES,
) -> Body:
    """Lower a task: some equations of a graph's program.

    Args:
        jaxpr: The task's equations; its invars may be any variables of the program.
        graph: The decision graph of the whole program.
        choices: One per node.
        inputs: The sharding of each invar.
        outputs: The sharding of each outvar.
        gates: Equation -> (awaited, *delayed): from there on, readers of the delayed values wait for the awaited one.
        bucket: As in `lower`.
    """
    given = Lowered(jaxpr, graph, choices, inputs, outputs, gates or {}, is_task=True, bucket=bucket)
    return run_passes(LOWER, given, check_lowered).body


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """A program that is being lowered: arguments as in `lower_task`, and the body so far."""

    jaxpr: Jaxpr
    graph: Graph
    choices: Sequence[int]
    inputs: Sequence[Sharding]
    outputs: Sequence[Sharding]
    gates: Mapping[JaxprEqn, Sequence[Var]] = field(default_factory=dict)
    is_task: bool = False
    bucket: int = BUCKET_BYTES
    body: Body = Body((), (), ())

    def by(self, rewrite: Callable[..., Body], *how: Any) -> Lowered:
        """The program with its body rewritten: `rewrite(body, *how)`."""
        return dataclasses.replace(self, body=rewrite(self.body, *how))


def check_lowered(lowered: Lowered) -> None:
    """Assert that the sharded program can be run."""
    check_body(lowered.body, lowered.graph.mesh)


def _convert(given: Lowered) -> Lowered:
    lowering = _Lowering(given.graph, given.choices, given.gates)
    if given.is_task:
        lowering.arrived.update(zip(given.jaxpr.invars, given.inputs, strict=True))
    return dataclasses.replace(given, body=lowering.body(given.jaxpr, given.inputs, given.outputs))


LOWER: tuple[Pass[Lowered], ...] = (
    Pass("lower", "every conversion in its place, those that were chosen and no others", _convert),
    Pass("unread", "conversions that nothing reads go", lambda given: given.by(drop_unread)),
    Pass(
        "early",
        "sums over devices are sent once they are there",
        lambda given: given.by(send_early, given.graph.phases),
    ),
    Pass(
        "fuse",
        "small collectives of one kind that are ready together are sent as one",
        lambda given: given.by(fuse_collectives, given.graph.mesh, given.bucket),
    ),
    Pass(
        "alone",
        "devices leave loops whose samples end by themselves when their own are done, if they send nothing in them",
        lambda given: given.by(end_alone, given.graph.own_ends, given.graph.mesh),
    ),
)
"""The passes that lower a step, or a task of a stage."""


class _Lowering:
    def __init__(self, graph: Graph, choices: Sequence[int], gates: Mapping[JaxprEqn, Sequence[Var]]):
        self.graph, self.choices, self.mesh, self.gates = graph, choices, graph.mesh, gates
        self.made: dict[Var, Sharding] = {}
        self.arrived: dict[Var, Sharding] = {}  # inputs of a task: their keeps are already applied
        self.copies: dict[tuple[Var, Phase], list[Sharding]] = {}  # available in each phase
        self.ever: dict[Copy, None] = {}
        self.narrow: dict[Copy, np.dtype | None] = {}
        self.emitted: list[list[Instruction]] = []
        self.last: Copy | None = None
        self.pace: list[list[Copy]] = []  # per open body, first results computed from repeated gathers, in order
        self.is_again = False  # whether the current equation reads a repeated gather
        self.small = small_bytes(self.mesh)
        self.computes: dict[tuple[int, int], Compute] = graph.cached("lowered", dict)

    def chosen(self, node: int) -> Sharding:
        """The chosen sharding of a port, hub or keep."""
        return self.graph.nodes[node].shardings[self.choices[node]]

    def port(self, eqn: JaxprEqn, role: Role, k: int) -> Sharding:
        return self.chosen(self.graph.ports[eqn, role, k])

    def body(self, jaxpr: Jaxpr, inputs: Sequence[Sharding], outputs: Sequence[Sharding]) -> Body:
        self.emitted.append([])
        self.pace.append([])
        self.made.update(zip(jaxpr.invars, inputs, strict=True))
        leaving = self.leaving(jaxpr, outputs)
        for position, eqn in enumerate(jaxpr.eqns):
            if eqn in self.gates:
                self.gate(*self.gates[eqn])
            if is_region(eqn):
                self.region(eqn)
            else:
                self.compute(eqn)
            for var, phase in leaving.get(position, ()):
                self.available(var, phase, eqn)
        for atom, sharding in zip(jaxpr.outvars, outputs, strict=True):
            self.need(atom, sharding)
        self.pace.pop()
        instructions = tuple(self.emitted.pop())
        return Body(
            tuple(zip(jaxpr.invars, inputs, strict=True)), instructions, tuple(zip(jaxpr.outvars, outputs, strict=True))
        )

    def leaving(self, jaxpr: Jaxpr, outputs: Sequence[Sharding]) -> dict[int, list[tuple[Var, Phase]]]:
        """Position of an equation -> the (value, phase) keeps to be made after it, the last reader in the earlier phase."""
        keeps, reads = self.graph.keeps, self.last_readers(jaxpr)
        wanted = dict.fromkeys([place for place in reads if place in keeps])
        for atom, sharding in zip(jaxpr.outvars, outputs, strict=True):
            if not isinstance(atom, Literal):
                keep = keeps.get((atom, "b"))
                wanted[atom, "b" if keep is not None and self.chosen(keep.node) == sharding else "o"] = None
        found: dict[int, list[tuple[Var, Phase]]] = {}
        for var, phase in wanted:
            if (var, phase) in keeps:
                last = reads.get((var, "f"), reads.get((var, "b")) if phase == "o" else None)
                if last is not None:
                    found.setdefault(last, []).append((var, phase))
        return found

    def last_readers(self, jaxpr: Jaxpr) -> dict[tuple[Var, Phase], int]:
        """(value, phase) -> position of its last reader in that phase; cached."""
        phases = self.graph.phases
        return self.graph.cached(
            ("last readers", jaxpr),
            lambda: {
                (var, phases.get(eqn, "f")): position
                for position, eqn in enumerate(jaxpr.eqns)
                for var in inputs_of(eqn)
            },
        )

    def gate(self, earlier: Var, *gated: Var) -> None:
        """Make readers of `gated` values wait for `earlier` from here on."""
        copies = [(var, s) for (var, _), found in self.copies.items() if var in gated for s in found]
        copies += [(var, self.made[var]) for var in gated]
        self.emit(Gate((earlier, self.made[earlier]), tuple(dict.fromkeys(copies))))

    def emit(self, instruction: Instruction) -> None:
        narrow = narrow_dtype(instruction, self.narrow)
        if narrow is not None and isinstance(instruction, Move) and step_kind(instruction.step) is not None:
            instruction = dataclasses.replace(instruction, narrow=narrow)
        if narrow is not None or self.narrow:
            for copy in instruction.makes:
                self.narrow[copy] = narrow
        self.emitted[-1].append(instruction)

    def need(self, atom: Var | Literal, sharding: Sharding, eqn: JaxprEqn | None = None) -> None:
        """Make the copy of `atom` in `sharding` for `eqn` (None: a result), unless it exists."""
        if isinstance(atom, Literal):
            return
        phase: Phase = "o" if eqn is None else self.graph.phases.get(eqn, "f")
        if eqn is None and (sharding == self.made[atom] or self.was_made(atom, sharding)):
            return
        copies = self.copies.get((atom, phase)) or self.available(atom, phase, eqn)
        if sharding in copies:
            return
        hub = self.graph.hubs.get((atom, phase))
        if hub is not None:
            self.convert(atom, self.chosen(hub), copies, phase, eqn)
        self.convert(atom, sharding, copies, phase, eqn)

    def was_made(self, var: Var, sharding: Sharding) -> bool:
        """Whether any phase of this body had the copy."""
        return any(sharding in self.copies.get((var, phase), ()) for phase in PHASES)

    def available(self, var: Var, phase: Phase, reader: JaxprEqn | None) -> list[Sharding]:
        """The copies of a value available in a phase; on first use, the one that the phase begins with."""
        if (var, phase) not in self.copies:
            keep = self.graph.keeps.get((var, phase))
            if keep is None or var in self.arrived:
                self.copies[var, phase] = [self.made[var]]
            else:
                self.copies[var, phase] = [self.kept(var, keep, phase, reader)]
        return self.copies[var, phase]

    def kept(self, var: Var, keep: Keep, phase: Phase, reader: JaxprEqn | None) -> Sharding:
        """Make the copy in which a value waits, unless it exists."""
        target = self.chosen(keep.node)
        copies = self.copies.get((var, "f")) or self.copies.get((var, "b")) or [self.made[var]]
        if target not in (self.made[var], *copies):
            self.convert(var, keep.used.shardings[self.choices[keep.used.node]], copies, phase, reader)
            self.convert(var, target, copies, phase, reader)
        return target

    def convert(
        self, var: Var, target: Sharding, copies: list[Sharding], phase: Phase, reader: JaxprEqn | None
    ) -> None:
        """Convert one of the available copies to `target`, by the cheapest reshard."""
        if target in copies:
            return
        shape, itemsize, mesh = tuple(var.aval.shape), var.aval.dtype.itemsize, self.as_priced(var)
        routes = [(source, cheapest_reshard(shape, itemsize, source, target, mesh)) for source in copies]
        at, route = min(routes, key=lambda pair: (pair[1].seconds, len(pair[1].steps)))
        for step in route.steps:
            following = apply_to_sharding(step, at, self.mesh)
            if following not in copies and step_kind(step) is None and self.exists(var, following):
                copies.append(following)
            elif following not in copies:
                again = (var, following) in self.ever and step_kind(step) is not None
                earlier = self.hold_back() if again else None
                name = "result" if reader is None else describe(reader)
                self.emit(Move(var, at, following, step, name, earlier, phase))
                self.ever[var, following] = None
                copies.append(following)
            at = following
        assert at == target, f"reshard of {var} ended in {at}, not {target}"

    def as_priced(self, var: Var) -> LogicalMesh:
        """The mesh by which conversions of a value are priced: other links have other cheapest routes."""
        if var in self.graph.samples or (size := num_bytes(var)) > self.small:
            return self.mesh
        return self.graph.cached(("sent together", size), lambda: sent_together(self.mesh, size))

    def exists(self, var: Var, sharding: Sharding) -> bool:
        """Whether any phase of this body began with the copy or made it."""
        return self.made[var] == sharding or self.was_made(var, sharding)

    def hold_back(self) -> Copy | None:
        """The copy that a repeated gather waits for: the result computed from the one before the last."""
        pace = self.pace[-1]
        if not pace and self.last is not None:
            pace.append(self.last)
        self.is_again = True
        return pace[max(0, len(pace) - 2)] if pace else None

    def compute(self, eqn: JaxprEqn) -> None:
        index = self.graph.op_node[eqn]
        chosen = self.choices[index]
        instruction = self.computes.get((index, chosen))
        if instruction is None:
            node = self.graph.nodes[index]
            instruction = self.computes[index, chosen] = Compute(eqn, node.rule, node.strategies[chosen])
        phase = self.graph.phases.get(eqn, "f")
        for var, sharding in instruction.reads:
            if sharding not in self.copies.get((var, phase), ()):
                self.need(var, sharding, eqn)
        if instruction.rule.moves_data:
            self.emit(instruction)
        else:  # new values, which are not narrow
            self.emitted[-1].append(instruction)
        self.define(instruction.makes)

    def define(self, copies: Sequence[Copy]) -> None:
        self.made.update(copies)
        if copies:
            self.last = copies[0]
            if self.is_again:
                self.pace[-1].append(self.last)
        self.is_again = False

    def region(self, eqn: JaxprEqn) -> None:
        region = region_of(eqn)
        inside = [self.port(eqn, role, k) for (role, k), _ in region.named()]
        outside = [stacked(s) if b.is_stacked else s for b, s in zip(region.bindings, inside, strict=True)]
        operands, results = region.of_operands(outside), region.of_results(outside)
        for atom, sharding in zip(eqn.invars, operands, strict=True):
            self.need(atom, sharding, eqn)
        is_again, self.is_again = self.is_again, False
        bodies = []
        for k, body in enumerate(region.bodies):
            self.last = None
            bodies.append(self.body(body, region.entering(k, inside), region.leaving(k, inside)))
        self.is_again = is_again
        region_run = Region(eqn, tuple(operands), tuple(results), tuple(bodies))
        self.emit(region_run)
        self.define(region_run.makes)

"""Builds the joint program of a stage: everything it does in one step, as one flat program to shard as a whole.

In:     `Tasks`, the index of a stage; or a step on one mesh, and its sharding there.
Out:    `StageProgram`: the joint program (equations before the loop; a `scan` over the microbatches, whose body is the
        stage's forward and backward; its part of the update), so that parameters, residuals, gradients and optimizer state
        are sharded together; and the tasks cut from it.
Method: values received per microbatch are scanned over, values sent are stacked, and sums over microbatches are carries,
        which may stay partial. A step on one mesh is one stage with one task: its joint program is the step itself, and the
        task's body the lowered step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autopar._jax import JaxprEqn, Literal, Var, make_jaxpr, new_var
from autopar.inter_op.residuals import CHEAP
from autopar.inter_op.stage import Slot, StageProgram, Task
from autopar.inter_op.stage_plan import StagePlan, TaskPlan, placed
from autopar.inter_op.stage_tasks import stage_tasks
from autopar.inter_op.tasks import Tasks
from autopar.inter_op.update_rounds import AFTER_LOOP, UpdateRound
from autopar.intra_op.read_off import Sharded
from autopar.ir.dataflow import makers, read_by, variables
from autopar.ir.program import Program
from autopar.ir.region import bodies_of
from autopar.ir.rewrite.fission import merge_conditions
from autopar.ir.split.microbatches.accumulate import AccumulatingScan, accumulating_scan, stack_type
from autopar.ir.trace.state import Roles


def stage_program(tasks: Tasks, stage: int) -> StageProgram:
    """Build the program of one stage."""
    return _Builder(tasks, stage).build()


def with_tasks(program: StageProgram, tasks: Tasks) -> StageProgram:
    """Replace a program's tasks by those of `tasks`, in which the stage may recompute more or less."""
    kept = frozenset(var for each in tasks.kept(program.stage) for var in each.values)
    return dataclasses.replace(program, tasks=stage_tasks(tasks, program), kept=kept)


class _Builder:
    def __init__(self, tasks: Tasks, stage: int):
        self.tasks, self.stage, self.step_aliases = tasks, stage, tasks.cut.roles.aliases
        self.split, self.update = tasks.split, tasks.update
        self.piece_of = self.split.piece_of
        self.stacks: dict[Var, Var] = {}
        self.sent: list[Var] = []
        self.joined = {var: new_var(var.aval) for var in tasks.cut.after_pass}
        self.joins: dict[Var, Var] = {}

    def build(self) -> StageProgram:
        scan = self.scan()
        rounds = [
            dataclasses.replace(each, eqns=tuple(merge_conditions(each.eqns)))
            for each in self.update.rounds[self.stage]
        ]
        if scan.after and not any(each.after_pass == AFTER_LOOP for each in rounds):
            rounds.append(UpdateRound(AFTER_LOOP, 0, ()))
        after = [*scan.after, *(eqn for each in rounds for eqn in each.eqns)]
        eqns = [*self.tasks.before[self.stage], *scan.eqns, *after]
        made = makers(eqns)
        arguments = self.arguments(eqns)
        arrived = [v for v in read_by(after, self.joins.values()) if v not in made and v not in arguments]
        outputs = self.results({*made, *arguments})
        atoms = [self.tasks.jaxpr.outvars[k] for k in outputs]
        leaving = [v for v in self.leaving(made) if v not in atoms]
        invars = [*arguments, *self.stacks.values(), *arrived, *self.joins]
        at = {var: k for k, var in enumerate(invars)}
        aliases = self.aliases(outputs, at)
        cut = self.tasks.cut
        dims_of = {at[stack]: cut.batch.dims_or_lent(v) for v, stack in self.stacks.items()}
        batch = {k: frozenset(d + 1 for d in dims) for k, dims in dims_of.items() if dims}
        given = [(cut.program.jaxpr.invars[k], dims) for k, dims in cut.roles.dims.items()]
        batch |= {at[var]: dims for var, dims in given if var in at}
        twice = self.twice()
        program = StageProgram(
            stage=self.stage,
            count=self.split.count,
            jaxpr=make_jaxpr(invars, [*atoms, *leaving, *scan.sent], eqns),
            scan=scan,
            sent=tuple(self.sent),
            arguments=dict(enumerate(arguments)),
            stacks={at[stack]: (self.piece_of[v], v) for v, stack in self.stacks.items() if v in self.piece_of},
            received={at[stack]: v for v, stack in self.stacks.items() if v not in self.piece_of},
            aliases=aliases,
            donated=tuple(k in aliases.values() for k in range(len(invars))),
            outputs=dict(enumerate(outputs)),
            batch=batch,
            rounds=tuple(rounds),
            anew=frozenset(
                (*(var for eqn in scan.eqns for body in bodies_of(eqn) for var in body.invars), *makers(twice))
            ),
            twice=frozenset(twice),
            joins=self.joins,
        )
        return with_tasks(program, self.tasks)

    def twice(self) -> list[JaxprEqn]:
        """Equations of the loop that both the forward and the backward pass run."""
        # At level `CHEAP` whatever the stage's level is, so that its decision graph does not depend on that.
        cheap = self.tasks.at_level(self.stage, CHEAP).rounds[self.stage]
        return [eqn for each in cheap for eqn in each.forward if eqn in {*each.backward.eqns, *each.backward.weight}]

    def scan(self) -> AccumulatingScan:
        """The stage's part of the loop, as a scan in the loop's order of equations."""
        own = set(self.tasks.in_loop(self.stage))
        eqns = [eqn for eqn in self.split.loop.eqns if eqn in own]
        pairs = zip(self.split.results, self.split.loop.outvars, strict=True)
        results = [(result, own) for result, own in pairs if result.var in self.update.results[self.stage]]
        if not eqns and not results:
            return AccumulatingScan()
        made, read = makers(eqns), read_by(eqns, [own for _, own in results])
        consts = {v: self.joined.get(outer, outer) for v, outer in self.split.invariant_of.items() if v in read}
        self.joins = {v: outer for outer, v in self.joined.items() if v in consts.values()}
        received = [v for v in read if v in self.tasks.made_at and v not in made]
        for var in (*(v for v in self.piece_of if v in read), *received):
            self.stacks[var] = new_var(stack_type(var.aval, self.split.count))
        self.sent = self.read_elsewhere(eqns)
        return accumulating_scan(self.split.count, self.split.number, eqns, consts, self.stacks, results, self.sent)

    def read_elsewhere(self, eqns: Sequence[JaxprEqn]) -> list[Var]:
        """Values of the loop that this stage makes and other stages read, in order."""
        mine = [v for v in makers(eqns) if v in self.tasks.made_at and self.tasks.made_at[v].stage == self.stage]
        return [v for v in mine if not self.tasks.readers.get(v, set()) <= {self.stage}]

    def arguments(self, eqns: Sequence[JaxprEqn]) -> list[Var]:
        """Arguments that this stage reads, and those it is home of that are returned, updated or not."""
        results, read = set(variables(self.tasks.jaxpr.outvars)), read_by(eqns)
        results.update(self.tasks.jaxpr.invars[at] for at in self.step_aliases.values())
        invars, readers, home = self.tasks.jaxpr.invars, self.update.readers, self.update.home
        passing = [v for v in invars if v in results and home[v] == self.stage]
        found = [v for v in invars if self.stage in readers.get(v, ()) and (v in read or v in passing)]
        return list(dict.fromkeys([*found, *passing]))

    def results(self, known: Collection[Var]) -> list[int]:
        """Positions of the step's results that this stage returns."""
        return [
            k
            for k, atom in enumerate(self.tasks.jaxpr.outvars)
            if self.update.outputs[k] == self.stage and (isinstance(atom, Literal) or atom in known)
        ]

    def aliases(self, outputs: Sequence[int], at: Mapping[Var, int]) -> dict[int, int]:
        """Output position -> input position, for arguments whose home is this stage."""
        found = {}
        for own, k in enumerate(outputs):
            if k in self.step_aliases:
                replaced = self.tasks.jaxpr.invars[self.step_aliases[k]]
                if self.update.home[replaced] == self.stage and replaced in at:
                    found[own] = at[replaced]
        return found

    def leaving(self, made: Collection[Var]) -> list[Var]:
        """Values made here outside of the loop that other stages, or later passes of the loop, read."""
        wanted = dict.fromkeys([*self.tasks.left_behind_loop[self.stage], *self.joins.values()])
        return [v for v in wanted if v in made]


def fused_program(program: Program, roles: Roles) -> StageProgram:
    """The whole step, microbatches included, as the program of its only stage."""
    jaxpr = program.jaxpr
    inputs = tuple(Slot("argument", var, var) for var in jaxpr.invars)
    outputs = tuple(Slot("value", atom, atom) for atom in jaxpr.outvars)
    return StageProgram(
        stage=0,
        count=1,
        jaxpr=jaxpr,
        arguments=dict(enumerate(jaxpr.invars)),
        aliases=roles.aliases,
        donated=tuple(roles.donated),
        outputs={k: k for k in range(len(jaxpr.outvars))},
        batch=roles.dims,
        tasks=(Task("step", program.name, 0, 0, jaxpr, inputs, outputs),),
    )


def fused_stage(program: StageProgram, sharded: Sharded) -> StagePlan:
    """The plan of the only stage, from the sharded step."""
    (task,), body = program.tasks, sharded.body
    inputs, outputs = (
        tuple(
            placed(slot, sharding, atom.aval.shape, atom.aval.dtype, sharded.mesh)
            for slot, (atom, sharding) in zip(slots, atoms, strict=True)
        )
        for slots, atoms in ((task.inputs, body.inputs), (task.outputs, body.outputs))
    )
    plan = TaskPlan(
        task,
        body,
        inputs,
        outputs,
        sharded.step_seconds,
        sharded.communication_seconds,
        sharded.exposed_seconds,
        0.0,
        max(0, sharded.peak_bytes - sum(v.num_bytes for v in inputs)),
        sharded.collectives,
    )
    return StagePlan(program, sharded, (plan,))

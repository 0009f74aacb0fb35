"""Cuts the program of a stage into tasks, over the same equations and variables.

In:     the step cut into stages, the program of one of them.
Out:    `Task`s in the order of a step: before the loop, forward, between passes, backward, weight gradients, rounds of the
        update.
Method: the task that makes a microbatch's contribution to a result of the loop also accumulates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar._jax import Atom, JaxprEqn, Literal, Var, make_jaxpr
from autopar.inter_op.stage import Slot, StageProgram, StepKind, Task, TaskKind
from autopar.inter_op.tasks import Made, Round, Tasks
from autopar.inter_op.update_rounds import AFTER_LOOP
from autopar.ir.dataflow import inputs_of, makers, needed, read_by, variables
from autopar.ir.split.microbatches.accumulate import Joined


def stage_tasks(tasks: Tasks, program: StageProgram) -> tuple[Task, ...]:
    """The tasks of one stage."""
    builder = _Builder(tasks, program)
    rest = [*builder.loop(), *builder.behind_passes()]
    return (builder.before(), *sorted(rest, key=_when))


def _when(task: Task) -> tuple[int, bool]:
    """Sort key of a task in a step: the pass it belongs to or follows, and whether it follows."""
    if task.is_in_loop:
        return 2 * task.round + (task.kind != "F"), False
    return task.after_pass, True


def read_as_given(tasks: Sequence[Task], unchanged: Collection[int]) -> tuple[Task, ...]:
    """Let the tasks of a stage read unchanged loop constants straight from the arguments.

    `unchanged`: positions of such constants among the results of the first task, which makes them no longer, and is dropped
    if it then makes nothing.
    """
    if not unchanged:
        return tuple(tasks)
    first, *others = tasks
    argument = {slot.key: slot.var for at, slot in enumerate(first.outputs) if at in unchanged}
    outputs = [slot for at, slot in enumerate(first.outputs) if at not in unchanged]
    results = [slot.var for at, slot in enumerate(first.outputs[: len(first.jaxpr.outvars)]) if at not in unchanged]
    read = read_by(first.jaxpr.eqns, results)
    inputs = [slot for slot in first.inputs if slot.var in read]
    jaxpr = make_jaxpr([slot.var for slot in inputs], results, first.jaxpr.eqns)
    made = [dataclasses.replace(first, jaxpr=jaxpr, inputs=tuple(inputs), outputs=tuple(outputs))] if outputs else []
    for task in others:
        own = [
            Slot("argument", argument[s.key], s.var) if s.kind == "const" and s.key in argument else s
            for s in task.inputs
        ]
        made.append(dataclasses.replace(task, inputs=tuple(own)))
    return tuple(made)


class _Builder:
    def __init__(self, tasks: Tasks, program: StageProgram):
        self.tasks, self.stage, self.program = tasks, program.stage, program
        self.arguments = list(program.arguments.values())
        self.joined = program.scan.joined

    def task(
        self, kind: TaskKind, number: int, inputs: Sequence[Slot], outputs: Sequence[Slot], eqns: Sequence[JaxprEqn]
    ) -> Task:
        jaxpr = make_jaxpr([s.var for s in inputs], [s.var for s in outputs], eqns)
        name = f"stage{self.stage}/{kind}" + (str(number) if number else "")
        return Task(kind, name, self.stage, number, jaxpr, tuple(inputs), tuple(outputs))

    def before(self) -> Task:
        """The task before the loop, which also begins sums and rows."""
        eqns = self.tasks.before[self.stage]
        made = makers(eqns)
        in_rounds = (eqn for each in self.program.rounds for eqn in each.eqns)
        later = read_by(in_rounds, (*self.program.results, *self.program.leaving))
        consts, joins = self.program.scan.consts, self.program.joins
        outputs = [Slot("const", inner, outer) for inner, outer in consts.items() if outer not in joins]
        outputs += [Slot("value", v, v) for v in later if v in made]
        read = read_by(eqns, [s.var for s in outputs])
        inputs = [Slot("argument", v, v) for v in self.arguments if v in read]
        task = self.task("init", 0, inputs, outputs, eqns)
        return dataclasses.replace(task, outputs=(*outputs, *(_slot(each, each.before) for each in self.joined)))

    def loop(self) -> Iterator[Task]:
        """The tasks that are run once per microbatch."""
        rounds = self.tasks.rounds[self.stage]
        for number, each in enumerate(rounds):
            later = read_by(e for other in rounds[number + 1 :] for eqns in other.by_kind.values() for e in eqns)
            yield from self.round(number, each, later)

    def round(self, number: int, each: Round, read_later: Mapping[Var, None]) -> Iterator[Task]:
        """The tasks of one round; `read_later`: values that later rounds read."""
        for_weights, passed = (
            read_by(each.backward.weight),
            {v: Slot("loop", c, v) for v, c in each.backward.passed.items()},
        )
        waiting: dict[str, Iterable[Var]] = {"F": each.backward.kept.values, "B": for_weights, "W": ()}
        kinds: tuple[StepKind, ...] = ("F", "B", "W")
        for kind in kinds:
            eqns = each.by_kind[kind]
            own = [j for j in self.joined if self.made_at(j.contribution)[:2] == (kind, number)]
            if eqns or own:
                whole = _after_operands(eqns, [j.eqns for j in own])
                read = dict.fromkeys((*self.program.sent, *waiting[kind], *read_later))
                outputs = [Slot("loop", v, v) for v in read if self.tasks.made_at.get(v) == (kind, number, self.stage)]
                outputs += passed.values() if kind == "B" else ()
                rows = [j.after for j in own if j.before is None]
                inputs = self.loop_inputs(whole, rows, passed if kind == "W" else {})
                # Each result reuses the memory of the first operand of its type: another order would cost copies.
                place = {slot.var: at for at, slot in enumerate(inputs)} | {None: len(inputs)}
                own.sort(key=lambda j: place.get(j.before, -1))
                outputs += [_slot(j, j.after) for j in own]
                made = self.task(kind, number, inputs, outputs, whole)
                yield dataclasses.replace(made, gates=each.backward.gates.get(kind, {}))

    def made_at(self, value: Atom) -> Made:
        """The task that makes a value of the loop; for a literal the first task."""
        first = Made("F", 0, self.stage)
        return first if isinstance(value, Literal) else self.tasks.made_at.get(value, first)

    def loop_inputs(self, eqns: Sequence[JaxprEqn], results: Sequence[Any], passed: Mapping[Var, Slot]) -> list[Slot]:
        made, read = makers(eqns), read_by(eqns, results)
        split = self.tasks.split
        known = {split.number: Slot("number", split.number, split.number)}
        known |= {v: Slot("const", v, v) for v in split.invariant_of} | {v: Slot("piece", v, v) for v in split.piece_of}
        known |= {each.before: _slot(each, each.before) for each in self.joined if each.before is not None}
        known |= passed
        return [known.get(v) or Slot("loop", v, v) for v in read if v not in made]

    def behind_passes(self) -> Iterator[Task]:
        """The tasks that run after a pass of all microbatches: between passes, and the update."""
        program, rounds = self.program, self.program.rounds
        known = {v: Slot("argument", v, v) for v in self.arguments}
        known |= {each.total: _slot(each, each.total) for each in self.joined}
        done: dict[Var, None] = {}
        for at, each in enumerate(rounds):
            eqns = [*(self.finished(each.after_pass, done) if each.number == 0 else ()), *each.eqns]
            made, late = makers(eqns), self.late(each.after_pass)
            wanted = dict.fromkeys(variables((*program.results, *program.leaving)))
            wanted |= read_by(eqn for other in rounds[at + 1 :] for eqn in other.eqns)
            outputs = [Slot("value", v, v) for v in wanted if v in made and v not in known]
            outputs += [Slot("const", inner, v) for v, inner in late.items() if v in made]
            done.update(dict.fromkeys(made))
            inputs = [known.get(v) or Slot("value", v, v) for v in read_by(eqns) if v not in made]
            is_last = all(other.after_pass != each.after_pass for other in rounds[at + 1 :])
            kind: TaskKind = "U" if each.after_pass == AFTER_LOOP else "M"
            number = each.number if kind == "U" else 2 * at
            if eqns:
                made_here = self.task(kind, number, inputs, outputs, eqns)
                yield dataclasses.replace(made_here, after_pass=each.after_pass, round=each.number)
            foreign = {v: inner for v, inner in late.items() if v not in done} if is_last else {}
            if foreign:  # made elsewhere: in a last task of its own, since their makers may wait for the tasks above
                slots = (
                    [Slot("value", v, v) for v in foreign],
                    [Slot("const", inner, v) for v, inner in foreign.items()],
                )
                handed_on = self.task("M", 2 * at + 1, *slots, ())
                yield dataclasses.replace(handed_on, after_pass=each.after_pass, round=AFTER_LOOP)

    def finished(self, after_pass: int, done: Collection[Var]) -> list[JaxprEqn]:
        """The equations that turn the loop's sums into values of the step, for values first wanted after this pass."""
        read = read_by(eqn for each in self.program.rounds if each.after_pass == after_pass for eqn in each.eqns)
        read |= {v: None for v, first in self.tasks.left_behind_loop[self.stage].items() if first == after_pass}
        if after_pass == AFTER_LOOP:
            read |= dict.fromkeys(variables((*self.program.results, *self.program.leaving)))
        return [e for e in needed(self.program.scan.after, read) if not any(var in done for var in e.outvars)]

    def late(self, after_pass: int) -> dict[Var, Var]:
        """Values made after a pass that later passes of this stage read: the step's variable -> the loop's."""
        joins, at = self.program.joins, self.tasks.cut.after_pass
        return {
            joins[v]: inner
            for inner, v in self.program.scan.consts.items()
            if v in joins and at[joins[v]] == after_pass
        }


def _after_operands(eqns: Sequence[JaxprEqn], added: Iterable[Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """Insert each group of `added` right after its operands are made: a gradient is accumulated at once, and freed."""
    made_at = {var: k for k, eqn in enumerate(eqns) for var in eqn.outvars}
    following: dict[int, list[JaxprEqn]] = {}
    for group in added:
        last = max((made_at.get(a, -1) for eqn in group for a in inputs_of(eqn)), default=-1)
        following.setdefault(last, []).extend(group)
    return [*following.get(-1, ()), *(e for k, eqn in enumerate(eqns) for e in (eqn, *following.get(k, ())))]


def _slot(joined: Joined, var: Atom | None) -> Slot:
    """The slot of a result that a task begins or accumulates, under the task's variable `var`."""
    return Slot("rows" if joined.before is None else "sum", joined.result.var, var, joined.result.placement)

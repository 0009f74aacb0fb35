"""The tasks of one stage: the parts of its program that are run one by one, over the same equations and variables.

In:     the step cut into stages, the program of one of them.
Out:    `Task`s in the order of a step: before the loop, forward, what comes between, backward, weight gradients, rounds of
        the update.
Method: a result of the loop is added up by the task that makes a microbatch's part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar._jax import Atom, JaxprEqn, Literal, Var, make_jaxpr
from autopar.inter_op.stage import Slot, StageProgram, Task, TaskKind
from autopar.inter_op.tasks import Tasks
from autopar.ir.dataflow import inputs_of, makers, needed, read_by, variables
from autopar.ir.split.accumulate import Joined


def stage_tasks(tasks: Tasks, program: StageProgram) -> tuple[Task, ...]:
    """The tasks of one stage."""
    builder = _Builder(tasks, program)
    loop = [*builder.loop()]
    forward = [task for task in loop if task.kind == "F"]
    return (builder.before(), *forward, *builder.between(), *loop[len(forward) :], *builder.updates())


def read_as_given(tasks: Sequence[Task], unchanged: Collection[int]) -> tuple[Task, ...]:
    """The tasks of a stage whose loop reads arguments as they are.

    `unchanged` are positions among the results of its first task, which makes these no more, and is left out if it makes
    nothing.
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
        gates = self.tasks.behind[self.stage].gates.get(kind, {})
        name = f"stage{self.stage}/{kind}" + (str(number) if number else "")
        return Task(kind, name, self.stage, number, jaxpr, tuple(inputs), tuple(outputs), gates)

    def before(self) -> Task:
        """What comes before the loop; its sums and rows begin without a program of their own."""
        eqns = self.tasks.before[self.stage]
        made = makers(eqns)
        behind = (self.tasks.between[self.stage], *self.program.rounds)
        later = read_by((eqn for eqns in behind for eqn in eqns), (*self.program.results, *self.program.leaving))
        consts, joins = self.program.scan.consts, self.program.joins
        outputs = [Slot("const", inner, outer) for inner, outer in consts.items() if outer not in joins]
        outputs += [Slot("value", v, v) for v in later if v in made]
        read = read_by(eqns, [s.var for s in outputs])
        inputs = [Slot("argument", v, v) for v in self.arguments if v in read]
        task = self.task("init", 0, inputs, outputs, eqns)
        return dataclasses.replace(task, outputs=(*outputs, *(_slot(each, each.before) for each in self.joined)))

    def loop(self) -> Iterator[Task]:
        """The tasks that are run once per microbatch."""
        tasks, stage = self.tasks, self.stage
        behind = tasks.behind[stage]
        for_weights = read_by(behind.weight)
        passed = {v: Slot("loop", copy, v) for v, copy in behind.passed.items()}
        passes: tuple[tuple[TaskKind, Sequence[JaxprEqn], Iterable[Var]], ...] = (
            ("F", tasks.forward[stage], behind.kept.values),
            ("B", behind.eqns, for_weights),
            ("W", behind.weight, ()),
        )
        for kind, eqns, waiting in passes:
            own = [each for each in self.joined if self.kind_of(each.contribution) == kind]
            if eqns or own:
                whole = _beside_makers(eqns, [each.eqns for each in own])
                read_later = dict.fromkeys((*self.program.sent, *waiting))
                outputs = [Slot("loop", v, v) for v in read_later if tasks.made_at.get(v) == (kind, stage)]
                outputs += passed.values() if kind == "B" else ()
                rows = [each.after for each in own if each.before is None]
                inputs = self.loop_inputs(whole, rows, passed if kind == "W" else {})
                # Results take the memory of the first operand of their type: another order would cost copies.
                place = {slot.var: at for at, slot in enumerate(inputs)} | {None: len(inputs)}
                own.sort(key=lambda each: place.get(each.before, -1))
                outputs += [_slot(each, each.after) for each in own]
                yield self.task(kind, 0, inputs, outputs, whole)

    def kind_of(self, value: Atom) -> str:
        """The task that makes a value of a microbatch."""
        return "F" if isinstance(value, Literal) else self.tasks.made_at.get(value, ("F", self.stage))[0]

    def loop_inputs(self, eqns: Sequence[JaxprEqn], results: Sequence[Any], passed: Mapping[Var, Slot]) -> list[Slot]:
        made, read = makers(eqns), read_by(eqns, results)
        split = self.tasks.split
        known = {split.number: Slot("number", split.number, split.number)}
        known |= {v: Slot("const", v, v) for v in split.invariant_of} | {v: Slot("piece", v, v) for v in split.piece_of}
        known |= {each.before: _slot(each, each.before) for each in self.joined if each.before is not None}
        known |= passed
        return [known.get(v) or Slot("loop", v, v) for v in read if v not in made]

    def between(self) -> Iterator[Task]:
        """What runs when all forward passes have: first what other stages wait for, then what the backward passes do."""
        tasks, scan, joins = self.tasks, self.program.scan, self.program.joins
        inner = {joins[outer]: v for v, outer in scan.consts.items() if outer in joins}
        outputs: tuple[list[Slot], list[Slot]] = (
            [Slot("value", v, v) for v in tasks.joined_for_others(self.stage)],
            [Slot("const", inner[v], v) for v in joins.values()],
        )
        known = self.behind_the_loop()
        for number, own in enumerate(outputs):
            if own:
                eqns = needed((*scan.after, *tasks.between[self.stage]), [s.var for s in own])
                made = makers(eqns)
                read = [v for v in read_by(eqns) if v not in made]
                yield self.task("M", number, [known.get(v) or Slot("value", v, v) for v in read], own, eqns)

    def behind_the_loop(self) -> dict[Var, Slot]:
        """What is there when the loop, or its first half, has run."""
        known = {v: Slot("argument", v, v) for v in self.arguments}
        return known | {each.total: _slot(each, each.total) for each in self.joined}

    def updates(self) -> Iterator[Task]:
        rounds, known = self.program.rounds, self.behind_the_loop()
        made_in = {var: k for k, eqns in enumerate(rounds) for eqn in eqns for var in eqn.outvars}
        known |= {v: Slot("value", v, v) for v in self.tasks.joined_for_others(self.stage)}
        for number, eqns in enumerate(rounds):
            if eqns:
                read = [v for v in read_by(eqns) if made_in.get(v) != number]
                wanted = dict.fromkeys(variables((*self.program.results, *self.program.leaving)))
                wanted |= read_by(eqn for after in rounds[number + 1 :] for eqn in after)
                inputs = [known.get(v) or Slot("value", v, v) for v in read]
                outputs = [Slot("value", v, v) for v in wanted if made_in.get(v) == number and v not in known]
                yield self.task("U", number, inputs, outputs, eqns)


def _beside_makers(eqns: Sequence[JaxprEqn], added: Iterable[Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """Equations with others behind what these read: a gradient is added when it is made, and need not wait."""
    made_at = {var: k for k, eqn in enumerate(eqns) for var in eqn.outvars}
    behind: dict[int, list[JaxprEqn]] = {}
    for group in added:
        last = max((made_at.get(a, -1) for eqn in group for a in inputs_of(eqn)), default=-1)
        behind.setdefault(last, []).extend(group)
    return [*behind.get(-1, ()), *(e for k, eqn in enumerate(eqns) for e in (eqn, *behind.get(k, ())))]


def _slot(joined: Joined, var: Atom | None) -> Slot:
    """The result that a task begins or adds to, as it has it."""
    return Slot("rows" if joined.before is None else "sum", joined.result.var, var, joined.result.placement)

"""The program of one stage: everything it does in one step, as one flat program that can be sharded at once.

In:     `Tasks`, the number of a stage.
Out:    `StageProgram`: a joint program (what comes before; a `scan` over the microbatches, whose body is the stage's
        forward and backward; its part of the update), so that parameters, residuals, gradients and optimizer state are
        sharded together; and `Task`s, the parts of it that are run one by one, over the same equations and variables.
Method: what other stages send per microbatch is scanned over, what is sent to them is stacked, sums over microbatches are
        carries, which may stay partial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar._jax import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    make_jaxpr,
    new_eqn,
    new_scan_params,
    new_var,
    open_jaxpr,
    primitives,
    shaped,
    trace,
)
from autopar.inter_op.tasks import Tasks
from autopar.ir.accumulate import accumulator_type, first_value, joined
from autopar.ir.flatten import flatten, inline
from autopar.ir.pieces import Cut, Share

Dims = frozenset[int]


@dataclass(frozen=True, slots=True)
class Slot:
    """One operand or result of a task.

    Attributes:
        kind: `"argument"`: of the step; `"value"`: made before the loop or by the update; `"const"`: what every
            microbatch reads, prepared once per step; `"piece"`: the microbatch's part of a batch argument; `"number"`:
            that of the microbatch; `"loop"`: made once per microbatch; `"sum"`: added up over the microbatches;
            `"rows"`: stacked over them.
        key: The variable that names it to all tasks.
        var: The variable in the task's own program.
    """

    kind: str
    key: Var
    var: Any


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A part of a stage's program that is run at once.

    Attributes:
        kind: `"init"`, `"F"`, `"B"`, `"W"` or `"U"`.
        stage: Its stage.
        round: Of an update: which.
        jaxpr: Over variables of the joint program.
        inputs: What its invars are.
        outputs: What its outvars are.
    """

    kind: str
    stage: int
    round: int
    jaxpr: Jaxpr
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def name(self) -> str:
        """As programs are called: "stage0/F"."""
        return f"stage{self.stage}/{self.kind}" + (str(self.round) if self.kind == "U" and self.round else "")


@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """Everything one stage does.

    Attributes:
        stage: Its number.
        count: Number of microbatches.
        jaxpr: The joint program.
        loop: The equation of its scan; None if no microbatch passes here.
        arguments: Invars that are arguments of the step, by position.
        stacks: Invars that are batch arguments in pieces: position -> (argument, variable in the loop).
        received: Invars that hold what other stages send per microbatch: position -> variable in the loop.
        aliases: Output position -> position of the argument whose new value it is.
        outputs: Output position -> position among the step's results, for those that are.
        batch: Dims of inputs that run over samples.
        tasks: In order of a step.
        consts: Variables in the loop -> variable outside, in the order of the scan's constants.
        carried: Results that are carries, in order.
        stacked: Results that are stacked, then variables that are sent, in the order of the scan's stacked outputs.
        shares: How each result is joined.
    """

    stage: int
    count: int
    jaxpr: Jaxpr
    loop: JaxprEqn | None
    arguments: Mapping[int, Var]
    stacks: Mapping[int, tuple[Var, Var]]
    received: Mapping[int, Var]
    aliases: Mapping[int, int]
    outputs: Mapping[int, int]
    batch: Mapping[int, Dims]
    tasks: tuple[Task, ...]
    consts: tuple[tuple[Var, Var], ...]
    carried: tuple[Var, ...]
    stacked: tuple[Var, ...]
    shares: Mapping[Var, Share]


def stage_program(
    tasks: Tasks, stage: int, aliases: Mapping[int, int], batch_dims: Callable[[Var], Dims]
) -> StageProgram:
    """Build the program of one stage.

    Args:
        tasks: The step cut into stages.
        stage: Which.
        aliases: Of the step: output -> argument.
        batch_dims: Dims of a value of the loop that run over samples.
    """
    return _Builder(tasks, stage, aliases, batch_dims).build()


def _operands(eqn: JaxprEqn) -> list[Var]:
    return [a for a in eqn.invars if not isinstance(a, Literal)]


class _Builder:
    def __init__(self, tasks: Tasks, stage: int, aliases: Mapping[int, int], batch_dims: Callable[[Var], Dims]):
        self.tasks, self.stage, self.step_aliases, self.batch_dims = tasks, stage, aliases, batch_dims
        split = self.split = tasks.split
        self.count = split.count
        self.forward, self.backward, self.weight = tasks.forward[stage], tasks.backward[stage], tasks.weight[stage]
        self.number = split.loop.invars[0]
        first = 1 + len(split.invariants)
        self.invariant_of = dict(zip(split.loop.invars[1:first], split.invariants, strict=True))
        self.piece_of = dict(zip(split.loop.invars[first:], split.pieces, strict=True))
        self.update = tasks.update

    def build(self) -> StageProgram:
        split, stage, update = self.split, self.stage, self.update
        own = {id(eqn): eqn for eqn in (*self.forward, *self.backward, *self.weight)}
        order = {id(eqn): k for k, eqn in enumerate(split.loop.eqns)}
        eqns = sorted(own.values(), key=lambda eqn: order[id(eqn)])
        read = dict.fromkeys(a for eqn in eqns for a in _operands(eqn))
        made = {var for eqn in eqns for var in eqn.outvars}
        consts = [v for v in self.invariant_of if v in read]
        pieces = [v for v in self.piece_of if v in read]
        received = [v for v in read if v in self.tasks.made_at and v not in made]
        sent = self.sent(made)
        results = [
            (r, atom)
            for r, atom in zip(split.results, split.loop.outvars, strict=True)
            if r.var in update.results[stage]
        ]
        # A result that is an input of the loop, or a literal, is read like any other value.
        for _, atom in results:
            if not isinstance(atom, Literal) and atom not in made:
                for known, listed in ((self.invariant_of, consts), (self.piece_of, pieces)):
                    if atom in known and atom not in listed:
                        listed.append(atom)
        carried = [(r, a) for r, a in results if not isinstance(r.share, Cut)]
        rows = [(r, a) for r, a in results if isinstance(r.share, Cut)]

        # Sums: each is added up by the task that makes it.
        sums = [new_var(shaped(accumulator_type(r.var.aval, r.share))) for r, _ in carried]
        updated: list[Any] = []
        adding: dict[str, list[JaxprEqn]] = {kind: [] for kind in "FBW"}
        slots: dict[str, list[tuple[Slot, Slot]]] = {kind: [] for kind in "FBW"}
        for (r, atom), before in zip(carried, sums, strict=True):
            kind = self.kind_of(atom)
            share = r.share
            more, (after,) = _small(lambda a, b, share=share: joined(share, a, b, self.count), [before, atom])
            adding[kind] += more
            updated.append(after)
            slots[kind].append((Slot("sum", r.var, before), Slot("sum", r.var, after)))

        outer: list[JaxprEqn] = list(self.tasks.before[stage])
        arguments = [v for v in self.tasks.jaxpr.invars if stage in update.readers.get(v, ())]
        passing = self.passing()
        arguments += [v for v in passing if v not in arguments]
        piece_stacks = {v: new_var(_stack_aval(v.aval, self.count)) for v in pieces}
        received_stacks = {v: new_var(_stack_aval(v.aval, self.count)) for v in received}
        whole: dict[Var, list[JaxprEqn]] = {}
        totals: dict[Var, Var] = {}
        stacks_of: dict[Var, Var] = {}
        loop = None
        if eqns or results:
            starts = []
            for (r, _), var in zip(carried, sums, strict=True):
                more, (start,) = _small(lambda var=var, r=r: first_value(var.aval, r.share), [])
                outer += more
                starts.append(start)
            more, (numbers,) = _small(lambda: jnp.arange(self.count, dtype=jnp.int32), [])
            outer += more
            parts = [*(a for _, a in rows), *sent]
            body = make_jaxpr(
                [*consts, *sums, self.number, *pieces, *received],
                [*updated, *parts],
                [*eqns, *(eqn for kind in "FBW" for eqn in adding[kind])],
            )
            out_totals = [new_var(v.aval) for v in sums]
            out_stacks = [new_var(_stack_aval(a.aval, self.count)) for a in parts]
            operands = [
                *(self.invariant_of[v] for v in consts),
                *starts,
                numbers,
                *piece_stacks.values(),
                *received_stacks.values(),
            ]
            loop = new_eqn(
                primitives.scan_p,
                operands,
                [*out_totals, *out_stacks],
                new_scan_params(self.count, body, len(consts), len(sums)),
            )
            outer.append(loop)
            for (r, _), total in zip(carried, out_totals, strict=True):
                totals[r.var] = total
                aval = r.var.aval
                more, (value,) = _small(lambda x, aval=aval: x.astype(aval.dtype), [total])
                whole[r.var] = [*more, _copy(value, r.var)]
            for (r, _), stack in zip(rows, out_stacks, strict=False):
                stacks_of[r.var] = stack
                shape, dim = r.var.aval.shape, r.share.dim  # type: ignore[union-attr]
                more, (value,) = _small(
                    lambda x, shape=shape, dim=dim: jnp.reshape(jnp.moveaxis(x, 0, dim), shape), [stack]
                )
                whole[r.var] = [*more, _copy(value, r.var)]
        rounds = self.rounds(whole)
        for round_eqns in rounds:
            outer += round_eqns
        joint_made = {var for eqn in outer for var in eqn.outvars}
        arrived = [
            v
            for v in dict.fromkeys(a for eqns_ in rounds for eqn in eqns_ for a in _operands(eqn))
            if v not in joint_made and v not in arguments
        ]
        used = {a for eqn in outer for a in _operands(eqn)} | set(passing)
        arguments = [v for v in arguments if v in used]
        invars = [*arguments, *piece_stacks.values(), *received_stacks.values(), *arrived]
        outputs, output_of = self.step_outputs(joint_made, set(arguments))
        leaving = [v for v in self.leaving(joint_made) if v not in outputs]
        sent_stacks = list(loop.outvars[len(carried) + len(rows) :]) if loop is not None else []
        jaxpr = make_jaxpr(invars, [*outputs, *leaving, *sent_stacks], outer)
        position = {var: k for k, var in enumerate(arguments)}
        in_of = {k: var for k, var in enumerate(self.tasks.jaxpr.invars)}
        aliases = {
            at: position[in_of[self.step_aliases[k]]]
            for at, k in output_of.items()
            if k in self.step_aliases
            and update.home[in_of[self.step_aliases[k]]] == stage
            and in_of[self.step_aliases[k]] in position
        }
        batch = self.batch_of(invars, piece_stacks, received_stacks)
        tasks = self.make_tasks(
            consts, slots, adding, rows, sent, rounds, totals, stacks_of, arguments, outputs, leaving
        )
        first = len(arguments)
        return StageProgram(
            stage,
            self.count,
            jaxpr,
            loop,
            dict(enumerate(arguments)),
            {first + k: (self.piece_of[v], v) for k, v in enumerate(pieces)},
            {first + len(pieces) + k: v for k, v in enumerate(received)},
            aliases,
            output_of,
            batch,
            tasks,
            tuple((v, self.invariant_of[v]) for v in consts),
            tuple(r.var for r, _ in carried),
            (*(r.var for r, _ in rows), *sent),
            {r.var: r.share for r, _ in results},
        )

    def kind_of(self, atom: Any) -> str:
        at = self.tasks.made_at.get(atom) if not isinstance(atom, Literal) else None
        return at[0] if at is not None else "F"

    def sent(self, made: Iterable[Var]) -> list[Var]:
        """Values of the loop made here that other stages read, in order."""
        made_here = {v for v in made if self.tasks.made_at.get(v, ("", -1))[1] == self.stage}
        found: dict[Var, None] = {}
        for other in range(self.tasks.num_stages):
            if other != self.stage:
                eqns = (*self.tasks.forward[other], *self.tasks.backward[other], *self.tasks.weight[other])
                theirs = {var for eqn in eqns for var in eqn.outvars}
                found.update((a, None) for eqn in eqns for a in _operands(eqn) if a in made_here and a not in theirs)
        return [v for eqn in self.split.loop.eqns for v in eqn.outvars if v in found]

    def passing(self) -> list[Var]:
        """Arguments that live here and are results of the step as they are."""
        results = {a for a in self.tasks.jaxpr.outvars if not isinstance(a, Literal)}
        return [v for v in self.tasks.jaxpr.invars if v in results and self.update.home[v] == self.stage]

    def rounds(self, whole: Mapping[Var, list[JaxprEqn]]) -> list[list[JaxprEqn]]:
        rounds = [list(eqns) for eqns in self.update.rounds[self.stage]]
        if whole:
            rounds = rounds or [[]]
            rounds[0] = [eqn for eqns in whole.values() for eqn in eqns] + rounds[0]
        return rounds

    def step_outputs(self, made: set[Var], arguments: set[Var]) -> tuple[list[Any], dict[int, int]]:
        """The step's results that are found here, and which they are."""
        found: list[Any] = []
        of: dict[int, int] = {}
        for k, atom in enumerate(self.tasks.jaxpr.outvars):
            if self.update.outputs[k] == self.stage and (
                isinstance(atom, Literal) or atom in made or atom in arguments
            ):
                of[len(found)] = k
                found.append(atom)
        return found, of

    def leaving(self, made: set[Var]) -> list[Var]:
        """Values of the update made here that other stages read."""
        found: dict[Var, None] = {}
        for other in range(self.tasks.num_stages):
            if other != self.stage:
                for eqns in self.update.rounds[other]:
                    for eqn in eqns:
                        found.update(
                            (a, None) for a in _operands(eqn) if a in made and self.update.stage_of.get(a) == self.stage
                        )
        return list(found)

    def batch_of(
        self, invars: Sequence[Var], pieces: Mapping[Var, Var], received: Mapping[Var, Var]
    ) -> dict[int, Dims]:
        position = {var: k for k, var in enumerate(invars)}
        found = {}
        for inner, stack in (*pieces.items(), *received.items()):
            dims = self.batch_dims(inner)
            if dims:
                found[position[stack]] = frozenset(d + 1 for d in dims)
        return found

    # Tasks.

    def make_tasks(
        self,
        consts: Sequence[Var],
        sums: Mapping[str, Sequence[tuple[Slot, Slot]]],
        adding: Mapping[str, Sequence[JaxprEqn]],
        rows: Sequence[tuple[Any, Any]],
        sent: Sequence[Var],
        rounds: Sequence[Sequence[JaxprEqn]],
        totals: Mapping[Var, Var],
        stacks: Mapping[Var, Var],
        arguments: Sequence[Var],
        outputs: Sequence[Any],
        leaving: Sequence[Var],
    ) -> tuple[Task, ...]:
        found = []
        later = [a for eqns in rounds for eqn in eqns for a in _operands(eqn)]
        later += [a for a in (*outputs, *leaving) if not isinstance(a, Literal)]
        found.append(self.init(consts, sums, rows, later, arguments))
        kept = self.tasks.kept[self.stage].values
        for kind, eqns in (("F", self.forward), ("B", self.backward), ("W", self.weight)):
            task = self.loop_task(kind, eqns, adding[kind], sums[kind], rows, sent, kept)
            if task is not None:
                found.append(task)
        found += self.update_tasks(rounds, totals, stacks, arguments, outputs, leaving)
        return tuple(found)

    def init(
        self,
        consts: Sequence[Var],
        sums: Mapping[str, Sequence[tuple[Slot, Slot]]],
        rows: Sequence[tuple[Any, Any]],
        later: Sequence[Var],
        arguments: Sequence[Var],
    ) -> Task:
        """What comes before the loop; its sums and rows begin without a program of their own."""
        eqns = self.tasks.before[self.stage]
        made = {var for eqn in eqns for var in eqn.outvars}
        outputs = [Slot("const", v, self.invariant_of[v]) for v in consts]
        outputs += [Slot("value", v, v) for v in dict.fromkeys(later) if v in made]
        read = dict.fromkeys([*(a for eqn in eqns for a in _operands(eqn)), *(s.var for s in outputs)])
        inputs = [Slot("argument", v, v) for v in arguments if v in read]
        jaxpr = make_jaxpr([s.var for s in inputs], [s.var for s in outputs], eqns)
        begun = [slot for kind in "FBW" for slot, _ in sums[kind]] + [Slot("rows", r.var, None) for r, _ in rows]
        return Task("init", self.stage, 0, jaxpr, tuple(inputs), (*outputs, *begun))

    def loop_task(
        self,
        kind: str,
        eqns: Sequence[JaxprEqn],
        adding: Sequence[JaxprEqn],
        sums: Sequence[tuple[Slot, Slot]],
        rows: Sequence[tuple[Any, Any]],
        sent: Sequence[Var],
        kept: Sequence[Var],
    ) -> Task | None:
        made_at = self.tasks.made_at
        own_rows = [(r, a) for r, a in rows if self.kind_of(a) == kind]
        if not eqns and not sums and not own_rows:
            return None
        all_eqns = [*eqns, *adding]
        made = {var for eqn in all_eqns for var in eqn.outvars}
        read = dict.fromkeys(a for eqn in all_eqns for a in _operands(eqn) if a not in made)
        read.update((a, None) for _, a in own_rows if not isinstance(a, Literal) and a not in made)
        accumulators = {slot.var: slot for slot, _ in sums}
        inputs = []
        for v in read:
            if v in accumulators:
                inputs.append(accumulators[v])
            elif v is self.number:
                inputs.append(Slot("number", v, v))
            elif v in self.invariant_of:
                inputs.append(Slot("const", v, v))
            elif v in self.piece_of:
                inputs.append(Slot("piece", v, v))
            else:
                inputs.append(Slot("loop", v, v))
        leaving = [v for v in sent if v in made and made_at.get(v) == (kind, self.stage)]
        if kind == "F":
            leaving += [v for v in kept if v in made and v not in leaving]
        if kind == "B":
            later = dict.fromkeys(a for eqn in self.weight for a in _operands(eqn))
            leaving += [v for v in later if made_at.get(v) == ("B", self.stage) and v not in leaving]
        outputs = [Slot("loop", v, v) for v in leaving]
        outputs += [after for _, after in sums]
        outputs += [Slot("rows", r.var, a) for r, a in own_rows]
        jaxpr = make_jaxpr([s.var for s in inputs], [s.var for s in outputs], all_eqns)
        return Task(kind, self.stage, 0, jaxpr, tuple(inputs), tuple(outputs))

    def update_tasks(
        self,
        rounds: Sequence[Sequence[JaxprEqn]],
        totals: Mapping[Var, Var],
        stacks: Mapping[Var, Var],
        arguments: Sequence[Var],
        outputs: Sequence[Any],
        leaving: Sequence[Var],
    ) -> list[Task]:
        made_in = {var: k for k, eqns in enumerate(rounds) for eqn in eqns for var in eqn.outvars}
        of_total = {total: var for var, total in totals.items()} | {stack: var for var, stack in stacks.items()}
        results = dict.fromkeys(a for a in outputs if not isinstance(a, Literal))
        found = []
        is_argument = set(arguments)
        for number, eqns in enumerate(rounds):
            if not eqns:
                continue
            read = dict.fromkeys(a for eqn in eqns for a in _operands(eqn) if made_in.get(a) != number)
            inputs = []
            for v in read:
                if v in of_total:
                    inputs.append(Slot("sum" if of_total[v] in totals else "rows", of_total[v], v))
                else:
                    inputs.append(Slot("argument" if v in is_argument else "value", v, v))
            wanted = dict.fromkeys((*results, *leaving))
            for after in rounds[number + 1 :]:
                wanted.update((a, None) for eqn in after for a in _operands(eqn))
            out = [Slot("value", v, v) for v in wanted if made_in.get(v) == number]
            jaxpr = make_jaxpr([s.var for s in inputs], [s.var for s in out], eqns)
            found.append(Task("U", self.stage, number, jaxpr, tuple(inputs), tuple(out)))
        return found


def _stack_aval(aval: Any, count: int) -> Any:
    return shaped(jax.ShapeDtypeStruct((count, *aval.shape), aval.dtype))


def _copy(value: Any, var: Var) -> JaxprEqn:
    return new_eqn(primitives.copy_p, [value], [var], {})


def _small(program: Callable[..., Any], operands: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations of a small function of ours."""
    flat, consts = flatten(*open_jaxpr(trace(program, *(a.aval for a in operands))))
    assert not consts, "constants in a program of ours"
    return inline(flat, operands)

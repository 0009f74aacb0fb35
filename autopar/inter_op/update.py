"""Places the update on stages: at the homes of parameters, with few bytes crossing between stages.

In:     a step in phases whose loop is cut into stages.
Out:    `Update`: the equations after the loop and between its passes, per stage in rounds (values cross stages between
        rounds only); the home stage of every argument, and the stage of every result.
Method: an equation that makes new state runs where the old state lives, any other where its largest operand does.
        Small values of several stages (the norm of all gradients, whether all are finite) are joined on the last stage,
        after those of each stage have been joined there. Values of small arguments alone (a learning rate) are computed
        by every stage that reads them. Scalars that only accumulate or count (metrics) live on the last stage, as losses
        do, so that one can be divided by the other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, new_var, replace_eqn
from autopar.ir.dataflow import ancestors, inputs_of, makers, needed, read_by, variables, with_makers
from autopar.ir.split.microbatches.microbatch import Microbatches
from autopar.ir.work import num_bytes, num_elements_of
from autopar.tuning import TUNING

_JOINS = frozenset({"add", "add_any", "and", "or", "max", "min", "mul"})
AFTER_LOOP = 2**31
"""Greater than the number of any pass of the loop."""
_Round = tuple[int, int]
"""The pass after which the round runs, and its number there."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateRound:
    """Equations that a stage runs together, after a pass of all microbatches.

    Attributes:
        behind: The pass of the loop after which it runs; `AFTER_LOOP`: after all of them.
        number: Index among the rounds after that pass.
        eqns: The equations, in order; there may be none.
    """

    behind: int
    number: int
    eqns: tuple[JaxprEqn, ...]


@dataclass(frozen=True, eq=False)
class Update:
    """Placement of the equations between passes and after the loop, and of the step's arguments and results.

    Attributes:
        rounds: Per stage, its rounds in order.
        stage_of: Stage of each value that the update makes; values that every reader makes for itself have none.
        results: Per stage, the results of the loop that it makes.
        home: Home stage of each argument.
        readers: Stages that read each argument.
        outputs: Stage that returns each result of the step.
    """

    rounds: tuple[tuple[UpdateRound, ...], ...]
    stage_of: Mapping[Var, int]
    results: tuple[tuple[Var, ...], ...]
    home: Mapping[Var, int]
    readers: Mapping[Var, tuple[int, ...]]
    outputs: tuple[int, ...]


def place_update(
    jaxpr: Jaxpr,
    split: Microbatches,
    in_loop: Sequence[Sequence[JaxprEqn]],
    made_at: Mapping[Var, Any],
    aliases: Mapping[int, int],
    behind: Mapping[Var, int],
) -> Update:
    """Place the update.

    Args:
        in_loop: Per stage, its equations of the loop.
        made_at: Value of the loop -> the task that makes it (`Made`).
        aliases: Result of the step -> argument whose new value it is.
        behind: Value made between passes of the loop -> the pass after which it is made.
    """
    outside = [split.read_outside(eqns) for eqns in in_loop]
    read_by_loop = [_arguments_needed(jaxpr, wanted, split.before) for wanted in outside]
    late = [[var for var in wanted if var in behind] for wanted in outside]
    result_at = {
        r.var: made_at[a].stage if not isinstance(a, Literal) and a in made_at else 0
        for r, a in zip(split.results, split.loop.outvars, strict=True)
    }
    eqns = [*split.between, *split.after]
    first = _Placement(jaxpr, split, read_by_loop, result_at, aliases, eqns, late, dict(behind))
    return replace(first, eqns=first.joined_locally(), stage={}, stage_of_eqn={}).update()


def _arguments_needed(jaxpr: Jaxpr, wanted: Mapping[Var, None], eqns: Sequence[JaxprEqn]) -> dict[Var, None]:
    """Arguments of the step among the values `wanted`, or read by the equations that make them."""
    behind = {**wanted, **read_by(needed(eqns, wanted, effects=False))}
    return {var: None for var in jaxpr.invars if var in behind}


@dataclass(frozen=True, slots=True, eq=False)
class _Join:
    """A maximal tree of joins of one kind, each read by the next alone: its equations, the last first, and its leaves."""

    eqns: list[JaxprEqn]
    parts: list[Atom]

    def is_like(self, eqn: JaxprEqn) -> bool:
        """Whether an equation is of the join's primitive and type."""
        return self.eqns[0].primitive is eqn.primitive and self.eqns[0].outvars[0].aval == eqn.outvars[0].aval

    def is_of_one_type(self) -> bool:
        """Whether all leaves are of the result's type."""
        wanted = self.eqns[0].outvars[0].aval
        return all(p.aval.shape == wanted.shape and p.aval.dtype == wanted.dtype for p in self.parts)


@dataclass(eq=False)
class _Placement:
    jaxpr: Jaxpr
    split: Microbatches
    read_by_loop: Sequence[Mapping[Var, None]]
    result_at: Mapping[Var, int]
    aliases: Mapping[int, int]
    eqns: Sequence[JaxprEqn]
    late: Sequence[Sequence[Var]]
    behind: dict[Var, int]
    stage: dict[Var, int] = field(default_factory=dict)
    stage_of_eqn: dict[JaxprEqn, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_stages = len(self.read_by_loop)
        self.arguments = dict.fromkeys(self.jaxpr.invars)
        self.before = makers(self.split.before)
        self.stage.update(self.result_at)
        for stage in reversed(range(self.num_stages)):
            for var in self.read_by_loop[stage]:
                if not _is_scalar(var):
                    self.stage[var] = stage
        self.read_at = {v: stage for stage in reversed(range(self.num_stages)) for v in self.read_by_loop[stage]}
        outvars, invars = self.jaxpr.outvars, self.jaxpr.invars
        self.replaced = {outvars[k]: invars[at] for k, at in self.aliases.items() if isinstance(outvars[k], Var)}
        self.joined: dict[Var, Any] = {}  # made by joins: value -> the primitive that joins; None: computed from a join
        self.load = [0] * self.num_stages
        # Equations of unplaced state alone (`b1 * mu`) wait for a reader with a placed operand, and are placed with it.
        waiting: dict[Var, JaxprEqn] = {}
        for eqn in self.eqns:
            operands = inputs_of(eqn)
            if eqn in self.joint:
                continue
            if any(var in self.stage for var in operands):
                self.settle(eqn, self.stage_for(eqn), waiting)
            elif (
                eqn.effects
                or any(var in waiting for var in operands)
                or any(num_elements_of(var) > TUNING.copied_elements for var in (*operands, *eqn.outvars))
            ):
                waiting.update(dict.fromkeys(eqn.outvars, eqn))
        for eqn in self.eqns:
            if any(waiting.get(var) is eqn for var in eqn.outvars):
                self.settle(eqn, min(range(self.num_stages), key=lambda s: (self.load[s], s)), waiting)
            elif not eqn.outvars and eqn not in self.stage_of_eqn:  # it is there for its effect
                self.settle(eqn, 0, waiting)

    @functools.cached_property
    def joint(self) -> frozenset[JaxprEqn]:
        """Joins of samples after the only forward pass: each stage repeats them, once it has the others' contributions."""
        return frozenset(self.split.between if set(self.behind.values()) == {0} else ())

    def settle(self, eqn: JaxprEqn, at: int, waiting: dict[Var, JaxprEqn]) -> None:
        """Place an equation on stage `at`, with the equations that waited for it and its unplaced arguments."""
        todo = [eqn]
        while todo:
            eqn = todo.pop()
            self.stage_of_eqn[eqn] = at
            for var in eqn.outvars:
                self.stage[var] = at
                waiting.pop(var, None)
            for var in inputs_of(eqn):
                if var in waiting:
                    todo.append(waiting.pop(var))
                elif var in self.arguments and var not in self.stage and not _is_scalar(var):
                    self.stage[var] = at
                    self.load[at] += num_bytes(var)

    def stage_for(self, eqn: JaxprEqn) -> int:
        """Stage of an equation: the home of the state it makes; for joins the last; else that of its largest operand."""
        placed = [var for var in inputs_of(eqn) if var in self.stage]
        joins = self.is_join(eqn)
        if joins or all(var in self.joined for var in placed):
            self.joined.update(dict.fromkeys(eqn.outvars, eqn.primitive if joins else None))
        old = self.replaced.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
        if old is not None and (old in self.stage or old in self.read_at):
            return self.stage[old] if old in self.stage else self.read_at[old]
        if old in inputs_of(eqn) and eqn.primitive.name in _JOINS and all(map(_is_scalar, inputs_of(eqn))):
            return self.num_stages - 1
        return self.num_stages - 1 if joins else -max((num_bytes(var), -self.stage[var]) for var in placed)[1]

    def is_join(self, eqn: JaxprEqn) -> bool:
        """Whether an equation joins scalars of several stages; not if one is computed from a join (a clip factor)."""
        operands = inputs_of(eqn)
        return (
            eqn.primitive.name in _JOINS
            and all(map(_is_scalar, operands))
            and len({var.aval.shape for var in operands}) == 1
            and len({self.stage[var] for var in operands if var in self.stage}) > 1
            and all(self.joined.get(var, eqn.primitive) is eqn.primitive for var in operands)
        )

    def joined_locally(self) -> list[JaxprEqn]:
        """The equations, with joins over several stages regrouped: first within each stage, then across stages."""
        times_read = Counter(variables([*(a for eqn in self.eqns for a in eqn.invars), *self.jaxpr.outvars]))
        joins: dict[Atom, _Join] = {}
        for eqn in self.eqns:
            if eqn.primitive.name in _JOINS and len(eqn.invars) == 2 and all(map(_is_scalar, eqn.invars)):
                join = joins[eqn.outvars[0]] = _Join([eqn], [])
                for atom in eqn.invars:
                    inner = joins.get(atom) if isinstance(atom, Var) and times_read[atom] == 1 else None
                    if inner is not None and inner.is_like(eqn):
                        join.eqns.extend(joins.pop(atom).eqns)
                        join.parts.extend(inner.parts)
                    else:
                        join.parts.append(atom)
        replaced: dict[JaxprEqn, list[JaxprEqn]] = {}
        for join in joins.values():
            groups: dict[int, list[Atom]] = {}
            for part in join.parts:
                groups.setdefault(self.stage.get(part, -1) if isinstance(part, Var) else -1, []).append(part)
            if len(join.parts) > 2 and len(groups.keys() - {-1}) > 1 and join.is_of_one_type():
                root, *gone = join.eqns
                chains = _chains(root, groups)
                replaced |= {eqn: [] for eqn in gone} | {root: chains}
                if root.outvars[0] in self.behind:
                    self.behind |= {var: self.behind[root.outvars[0]] for eqn in chains for var in eqn.outvars}
        return [each for eqn in self.eqns for each in replaced.get(eqn, [eqn])]

    def update(self) -> Update:
        floating = makers(eqn for eqn in self.eqns if eqn not in self.stage_of_eqn)
        last = self.num_stages - 1
        made_last = [var for var in variables(self.jaxpr.outvars) if var in floating]  # whoever else reads it
        rounds = _Rounds(self, floating)
        for eqn in (eqn for eqn in self.eqns if eqn in self.stage_of_eqn):
            behind = max((self.behind.get(var, AFTER_LOOP) for var in eqn.outvars), default=AFTER_LOOP)
            rounds.add(eqn, self.stage_of_eqn[eqn], behind)
        for stage, late in enumerate(self.late):
            for var in late:
                rounds.want(var, stage, self.behind[var])
        for var in made_last:
            rounds.want(var, last, AFTER_LOOP)
        of_stages = tuple(map(rounds.of_stage, range(self.num_stages)))
        at_home = {**self.stage, **dict.fromkeys(made_last, last)}
        outputs = [at_home.get(atom, 0) if isinstance(atom, Var) else 0 for atom in self.jaxpr.outvars]
        readers: dict[Var, dict[int, None]] = {}
        for stage, own in enumerate(of_stages):
            for var in (*self.read_by_loop[stage], *self.update_reads([each.eqns for each in own])):
                readers.setdefault(var, {})[stage] = None
        home = self.homes(outputs, readers)
        results = [[r.var for r in self.split.results if self.result_at[r.var] == s] for s in range(self.num_stages)]
        return Update(
            of_stages,
            dict(self.stage),
            tuple(map(tuple, results)),
            home,
            {var: tuple(sorted(stages)) for var, stages in readers.items()},
            tuple(outputs),
        )

    def homes(self, outputs: list[int], readers: dict[Var, dict[int, None]]) -> dict[Var, int]:
        """Home stage of each argument; for replaced state, the stage that returns its new value.

        `outputs`: stage of each result; set for results that are arguments or made before the loop.
        `readers`: stages that read each argument; extended by those that make such results.
        """
        home = {}
        for var in self.jaxpr.invars:
            stages = sorted(readers.get(var, ()))
            home[var] = self.stage[var] if var in self.stage else stages[0] if stages else 0
        passed = {}
        for k, atom in enumerate(self.jaxpr.outvars):
            if not isinstance(atom, Literal) and atom in self.before:
                # Made at the home of an argument that it depends on.
                outputs[k] = min((home[v] for v in _sources(atom, self.before, self.arguments)), default=0)
                for var in _sources(atom, self.before, self.arguments):
                    readers.setdefault(var, {})[outputs[k]] = None
            if k in self.aliases:
                old = self.jaxpr.invars[self.aliases[k]]
                if isinstance(atom, Var) and atom in self.arguments:
                    passed[old] = atom
                else:
                    home[old] = outputs[k]
        for var in passed:
            home[var] = _home_after(var, passed, home)
        for k, atom in enumerate(self.jaxpr.outvars):
            if not isinstance(atom, Literal) and atom in self.arguments:
                outputs[k] = home[atom]
        return home

    def update_reads(self, rounds: Sequence[Sequence[JaxprEqn]]) -> list[Var]:
        """Arguments of the step that a stage's update reads, also through equations before the loop."""
        wanted = read_by(eqn for eqns in rounds for eqn in eqns)
        return [*_arguments_needed(self.jaxpr, wanted, self.split.before)]


class _Rounds:
    """Builds the rounds of each stage; `floating`: value -> its maker, for values that every reader makes for itself."""

    def __init__(self, placement: _Placement, floating: Mapping[Var, JaxprEqn]):
        self.placement, self.floating = placement, floating
        self.order = {eqn: k for k, eqn in enumerate(placement.eqns)}
        self.round_of: dict[Var, _Round] = {}
        self.eqns: list[dict[_Round, list[JaxprEqn]]] = [{} for _ in range(placement.num_stages)]
        self.wanted: list[dict[_Round, list[Var]]] = [{} for _ in range(placement.num_stages)]

    def add(self, eqn: JaxprEqn, at: int, behind: int) -> None:
        """Add an equation to the first round in which a stage has its operands; call it in order of equations."""
        number = self.number_at(self.makers_of([eqn], ()), at, behind)
        self.round_of.update(dict.fromkeys(eqn.outvars, (behind, number)))
        self.eqns[at].setdefault((behind, number), []).append(eqn)

    def want(self, var: Var, at: int, behind: int) -> None:
        """Let a stage make a floating value for itself."""
        number = self.number_at(self.makers_of((), [var]), at, behind)
        self.wanted[at].setdefault((behind, number), []).append(var)

    def makers_of(
        self, eqns: Sequence[JaxprEqn], wanted: Sequence[Var], done: Collection[JaxprEqn] = ()
    ) -> list[JaxprEqn]:
        return with_makers(eqns, wanted, self.floating, self.order, done)

    def number_at(self, eqns: Sequence[JaxprEqn], at: int, behind: int) -> int:
        """The first round after a pass in which a stage has all operands of equations."""
        number, stage_of = 0, self.placement.stage
        for var in read_by(eqns):
            if var in stage_of and var not in self.placement.arguments:
                before, so_far = self.round_of.get(var, (behind, 0))
                if var not in self.round_of and stage_of[var] != at:
                    self.eqns[stage_of[var]].setdefault((behind, 0), [])  # an empty round, from which it is sent
                if before == behind:
                    number = max(number, so_far + (stage_of[var] != at))
        return number

    def of_stage(self, stage: int) -> tuple[UpdateRound, ...]:
        """A stage's rounds, in order; numbers after a pass are contiguous from 0, so some may be empty."""
        own, wanted = self.eqns[stage], self.wanted[stage]
        most: dict[int, int] = {}
        for behind, number in own.keys() | wanted:
            most[behind] = max(number, most.get(behind, 0))
        done: dict[JaxprEqn, None] = {}
        found = []
        for place in ((behind, number) for behind in sorted(most) for number in range(most[behind] + 1)):
            eqns = self.makers_of(own.get(place, ()), wanted.get(place, ()), done)
            done.update(dict.fromkeys(eqns))
            found.append(UpdateRound(*place, tuple(eqns)))
        return tuple(found)


def _is_scalar(atom: Var) -> bool:
    return num_elements_of(atom) <= TUNING.joined_elements


def _home_after(var: Var, passed: Mapping[Var, Var], home: Mapping[Var, int]) -> int:
    """Home at the end of a chain of arguments that each take over the next one's value; for a cycle, its first stage."""
    chain = [var]
    while chain[-1] in passed and passed[chain[-1]] not in chain:
        chain.append(passed[chain[-1]])
    circle = chain[chain.index(passed[chain[-1]]) :] if chain[-1] in passed else chain[-1:]
    return min(home[v] for v in circle)


def _sources(var: Var, made_by: Mapping[Var, JaxprEqn], arguments: Mapping[Var, None]) -> list[Var]:
    """Arguments that a value depends on."""
    behind = ancestors([var], lambda v: inputs_of(made_by[v]) if v in made_by and v not in arguments else ())
    return [v for v in behind if v in arguments]


def _chains(root: JaxprEqn, groups: Mapping[int, Sequence[Atom]]) -> list[JaxprEqn]:
    """The same join, first within each stage, then of the stages' results."""
    made: list[JaxprEqn] = []

    def chain(parts: Sequence[Atom]) -> Atom:
        so_far = parts[0]
        for part in parts[1:]:
            made.append(replace_eqn(root, invars=[so_far, part], outvars=[new_var(root.outvars[0].aval)]))
            so_far = made[-1].outvars[0]
        return so_far

    chain([chain(groups[stage]) for stage in sorted(groups)])
    return [*made[:-1], replace_eqn(made[-1], outvars=root.outvars)]

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.inter_op.local_joins import JOINS, is_scalar, join_locally
from autopar.inter_op.update_rounds import AFTER_LOOP, Rounds, UpdateRound
from autopar.ir.dataflow import ancestors, inputs_of, makers, needed, read_by, variables, with_makers
from autopar.ir.split.microbatches.microbatch import Microbatches
from autopar.ir.work import num_bytes, num_elements_of
from autopar.tuning import TUNING


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
    after_pass: Mapping[Var, int],
) -> Update:
    """Place the update.

    Args:
        in_loop: Per stage, its equations of the loop.
        made_at: Value of the loop -> the task that makes it (`Made`).
        aliases: Result of the step -> argument whose new value it is.
        after_pass: Value made between passes of the loop -> the pass after which it is made.
    """
    outside = [split.read_outside(eqns) for eqns in in_loop]
    step = _Step(
        jaxpr,
        split,
        aliases,
        read_by_loop=[_arguments_needed(jaxpr, wanted, split.before) for wanted in outside],
        result_at={
            r.var: made_at[a].stage if not isinstance(a, Literal) and a in made_at else 0
            for r, a in zip(split.results, split.loop.outvars, strict=True)
        },
    )
    # Joins of samples after the only forward pass: each stage repeats them, once it has the others' contributions.
    placed = _place(step, frozenset(split.between if set(after_pass.values()) == {0} else ()), after_pass)
    last = step.num_stages - 1
    made_last = {var: last for var in variables(jaxpr.outvars) if var in placed.floating}  # whoever else reads it
    rounds = _rounds(step, placed, outside, made_last)

    stage_of_result = {**placed.stage_of, **made_last}
    readers, sources = _readers(step, rounds), _made_before(step)
    home, outputs = _homes(
        step,
        {var: placed.stage_of.get(var, min(readers.get(var, ()), default=0)) for var in jaxpr.invars},
        [stage_of_result.get(atom, 0) if isinstance(atom, Var) else 0 for atom in jaxpr.outvars],
        sources,
    )
    for k, read in sources.items():
        for var in read:
            readers.setdefault(var, set()).add(outputs[k])
    return Update(
        rounds,
        placed.stage_of,
        tuple(tuple(r.var for r in split.results if step.result_at[r.var] == s) for s in range(step.num_stages)),
        home,
        {var: tuple(sorted(stages)) for var, stages in readers.items()},
        outputs,
    )


def _arguments_needed(jaxpr: Jaxpr, wanted: Mapping[Var, None], eqns: Sequence[JaxprEqn]) -> dict[Var, None]:
    """Arguments of the step among the values `wanted`, or read by the equations that make them."""
    found = {**wanted, **read_by(needed(eqns, wanted, effects=False))}
    return {var: None for var in jaxpr.invars if var in found}


@dataclass(frozen=True, eq=False)
class _Step:
    """What is placed: the step in phases, and which stages of its loop read its arguments and make its results."""

    jaxpr: Jaxpr
    split: Microbatches
    aliases: Mapping[int, int]
    read_by_loop: Sequence[Mapping[Var, None]]
    result_at: Mapping[Var, int]

    @property
    def num_stages(self) -> int:
        return len(self.read_by_loop)

    @functools.cached_property
    def arguments(self) -> dict[Var, None]:
        return dict.fromkeys(self.jaxpr.invars)

    @functools.cached_property
    def read_at(self) -> dict[Var, int]:
        """The first stage whose part of the loop reads each argument."""
        return {var: stage for stage in reversed(range(self.num_stages)) for var in self.read_by_loop[stage]}

    @functools.cached_property
    def replaced(self) -> dict[Var, Var]:
        """New value -> the argument that it replaces."""
        outvars, invars = self.jaxpr.outvars, self.jaxpr.invars
        return {outvars[k]: invars[at] for k, at in self.aliases.items() if isinstance(outvars[k], Var)}


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """The update on stages.

    Attributes:
        eqns: Its equations, in order; what joins values of several stages joins those of each stage first.
        after_pass: Value made between passes of the loop -> the pass after which it is made.
        stage_of: Stage of each value.
        stage_of_eqn: Stage of each equation, in order.
        floating: Value -> its maker, for values that every reader makes for itself.
    """

    eqns: Sequence[JaxprEqn]
    after_pass: Mapping[Var, int]
    stage_of: Mapping[Var, int]
    stage_of_eqn: Mapping[JaxprEqn, int]
    floating: Mapping[Var, JaxprEqn]


def _place(step: _Step, joint: Collection[JaxprEqn], after_pass: Mapping[Var, int]) -> _Placed:
    """Place the equations; `joint`: those left without a stage."""
    ungrouped = [*step.split.between, *step.split.after]
    stage_of, _ = _stages(step, ungrouped, joint)
    eqns, after_pass = join_locally(step.jaxpr, ungrouped, stage_of, after_pass)
    stage_of, stage_of_eqn = _stages(step, eqns, joint)
    return _Placed(eqns, after_pass, stage_of, stage_of_eqn, makers(eqn for eqn in eqns if eqn not in stage_of_eqn))


def _stages(
    step: _Step, eqns: Sequence[JaxprEqn], joint: Collection[JaxprEqn]
) -> tuple[dict[Var, int], dict[JaxprEqn, int]]:
    """The stage of values and of equations, in order; what every reader makes for itself has none."""
    stage_of = {**step.result_at, **{var: s for var, s in step.read_at.items() if not is_scalar(var)}}
    stage_of_eqn: dict[JaxprEqn, int] = {}
    order = {eqn: k for k, eqn in enumerate(eqns)}
    joined: dict[Var, Any] = {}  # made by joins: value -> the primitive that joins; None: computed from a join
    load = [0] * step.num_stages
    # Equations of unplaced state alone (`b1 * mu`) wait for a reader with a placed operand, and are placed with it.
    waiting: dict[Var, JaxprEqn] = {}

    def settle(eqn: JaxprEqn, at: int) -> None:
        """Place an equation on a stage, with the equations that waited for it and its unplaced arguments."""
        settled = with_makers([eqn], (), waiting, order)
        for var in read_by(settled):
            if var in step.arguments and var not in stage_of and not is_scalar(var):
                stage_of[var] = at
                load[at] += num_bytes(var)
        stage_of_eqn.update(dict.fromkeys(settled, at))
        for var in makers(settled):
            stage_of[var] = at
            waiting.pop(var, None)

    for eqn in eqns:
        operands = inputs_of(eqn)
        placed = [var for var in operands if var in stage_of]
        if eqn in joint:
            continue
        if placed:
            joins = _joins_stages(eqn, stage_of, joined)
            if joins or all(var in joined for var in placed):
                joined.update(dict.fromkeys(eqn.outvars, eqn.primitive if joins else None))
            settle(eqn, _stage_for(step, eqn, stage_of, joins))
        elif (
            eqn.effects
            or any(var in waiting for var in operands)
            or any(num_elements_of(var) > TUNING.copied_elements for var in (*operands, *eqn.outvars))
        ):
            waiting.update(dict.fromkeys(eqn.outvars, eqn))
    for eqn in eqns:
        if any(waiting.get(var) is eqn for var in eqn.outvars):
            settle(eqn, load.index(min(load)))
        elif not eqn.outvars and eqn not in stage_of_eqn:  # it is there for its effect
            settle(eqn, 0)
    return stage_of, {eqn: stage_of_eqn[eqn] for eqn in eqns if eqn in stage_of_eqn}


def _joins_stages(eqn: JaxprEqn, stage_of: Mapping[Var, int], joined: Mapping[Var, Any]) -> bool:
    """Whether an equation joins scalars of several stages; not if one is computed from a join (a clip factor)."""
    operands = inputs_of(eqn)
    return (
        eqn.primitive.name in JOINS
        and all(map(is_scalar, operands))
        and len({var.aval.shape for var in operands}) == 1
        and len({stage_of[var] for var in operands if var in stage_of}) > 1
        and all(joined.get(var, eqn.primitive) is eqn.primitive for var in operands)
    )


def _stage_for(step: _Step, eqn: JaxprEqn, stage_of: Mapping[Var, int], joins: bool) -> int:
    """Stage of an equation: the home of the state it makes; for joins the last; else that of its largest operand."""
    operands, last = inputs_of(eqn), step.num_stages - 1
    old = step.replaced.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
    if old is not None and (old in stage_of or old in step.read_at):
        return stage_of[old] if old in stage_of else step.read_at[old]
    accumulates = old in operands and eqn.primitive.name in JOINS and all(map(is_scalar, operands))
    if joins or accumulates:
        return last
    return -max((num_bytes(var), -stage_of[var]) for var in operands if var in stage_of)[1]


def _rounds(
    step: _Step, placed: _Placed, outside: Sequence[Mapping[Var, None]], made_last: Mapping[Var, int]
) -> tuple[tuple[UpdateRound, ...], ...]:
    """The rounds of each stage.

    Args:
        step: The step in phases.
        placed: Its update on stages.
        outside: Per stage, the values that its part of the loop reads from outside.
        made_last: Floating results of the step -> the stage that makes them.
    """
    after_pass = placed.after_pass
    results = variables(step.jaxpr.outvars)
    building = Rounds(placed.eqns, step.num_stages, step.arguments, placed.stage_of, placed.floating, results)
    for eqn, stage in placed.stage_of_eqn.items():
        building.add(eqn, stage, max((after_pass.get(var, AFTER_LOOP) for var in eqn.outvars), default=AFTER_LOOP))
    for stage, read in enumerate(outside):
        for var in read:
            if var in after_pass:
                building.want(var, stage, after_pass[var])
    for var, stage in made_last.items():
        building.want(var, stage, AFTER_LOOP)
    return tuple(map(building.of_stage, range(step.num_stages)))


def _readers(step: _Step, rounds: Sequence[Sequence[UpdateRound]]) -> dict[Var, set[int]]:
    """Stages that read each argument, in the loop or in the update, also through equations before the loop."""
    readers: dict[Var, set[int]] = {}
    for stage, own in enumerate(rounds):
        wanted = read_by(eqn for each in own for eqn in each.eqns)
        for var in (*step.read_by_loop[stage], *_arguments_needed(step.jaxpr, wanted, step.split.before)):
            readers.setdefault(var, set()).add(stage)
    return readers


def _made_before(step: _Step) -> dict[int, list[Var]]:
    """Results of the step that are made before the loop -> the arguments that they depend on."""
    made_by = makers(step.split.before)
    return {
        k: [
            var
            for var in ancestors([atom], lambda v: inputs_of(made_by[v]) if v in made_by else ())
            if var in step.arguments
        ]
        for k, atom in enumerate(step.jaxpr.outvars)
        if isinstance(atom, Var) and atom in made_by
    }


def _homes(
    step: _Step, home: Mapping[Var, int], outputs: Sequence[int], sources: Mapping[int, Sequence[Var]]
) -> tuple[dict[Var, int], tuple[int, ...]]:
    """Home stage of each argument, for replaced state the stage that returns its new value; and the stage of each result.

    Args:
        home: Stage of each argument by its readers alone.
        outputs: Stage of each result that the update makes.
        sources: Results made before the loop -> the arguments that they depend on: made at the home of one.
    """
    home, outputs = dict(home), list(outputs)
    passed = {}
    for k, atom in enumerate(step.jaxpr.outvars):
        if k in sources:
            outputs[k] = min((home[var] for var in sources[k]), default=0)
        if k in step.aliases:
            old = step.jaxpr.invars[step.aliases[k]]
            if isinstance(atom, Var) and atom in step.arguments:
                passed[old] = atom
            else:
                home[old] = outputs[k]
    for var in passed:
        home[var] = _home_after(var, passed, home)
    for k, atom in enumerate(step.jaxpr.outvars):
        if not isinstance(atom, Literal) and atom in step.arguments:
            outputs[k] = home[atom]
    return home, tuple(outputs)


def _home_after(var: Var, passed: Mapping[Var, Var], home: Mapping[Var, int]) -> int:
    """Home at the end of a chain of arguments that each take over the next one's value; for a cycle, its first stage."""
    chain = [var]
    while chain[-1] in passed and passed[chain[-1]] not in chain:
        chain.append(passed[chain[-1]])
    circle = chain[chain.index(passed[chain[-1]]) :] if chain[-1] in passed else chain[-1:]
    return min(home[v] for v in circle)

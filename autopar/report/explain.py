"""Explains why an argument or an operation is sharded as it is.

In:     a plan with its planning problem in memory; the path of an argument, a glob, or part of an operation's name and line.
Out:    text: each alternative with the predicted step time if it is forced and everything else is chosen anew; what forbids
        other choices; the readers of the value, and the conversions for them.
Method: alternatives are solved (`alternatives.py`); conversions are read off the sharded program. Identical layers are one
        decision: forcing it forces all of them. Each stage of a pipeline is a problem of its own, and equal stages are
        explained together. `"stages"` explains where the step is cut, `"compute"` where its time goes.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from autopar._jax import Literal, Var
from autopar.errors import AutoparError, listed
from autopar.grouping import grouped
from autopar.intra_op.graph import Node
from autopar.intra_op.sharded import Compute, Region, describe, local_bytes
from autopar.intra_op.strategies import Strategy
from autopar.ir.signature import canonical_key
from autopar.mesh import LogicalMesh, Sharding
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, seconds_text, type_text
from autopar.report.alternatives import Study, studies
from autopar.report.page import Page, Table
from autopar.report.paths import collapse_paths, numbers_text
from autopar.report.readers import conversions, describe_phase, readers, result_sharding
from autopar.report.text import page_text
from autopar.report.topics import compute_page, cuts_page

MAX_DECISIONS = 4
MAX_FORBIDDEN = 6


def explain(plan: Decision, path_or_op: str) -> str:
    """Explain why an argument or an operation is sharded as it is.

    Args:
        plan: From `step.plan`, or from a file and compiled since.
        path_or_op: Path of an argument ("state/params/w"), its end ("params/w"), a glob, or part of an operation's name
            and line ("dot_general at train.py:12"); or "compute": the operations that take the step's time; or, for a
            pipeline, "stages": why it is cut where it is.

    Raises:
        AutoparError: Nothing has this name, or the plan was read from a file and not compiled since.
    """
    if plan.origin is None:
        raise AutoparError(
            "this plan is not attached to a program.",
            given=f"explain({path_or_op!r}) on a plan of `{plan.name}` read from a file",
            wrong="the file holds what was decided, not the problem; alternatives cannot be costed without it.",
            do="call compiled = step.compile(..., plan=plan) first, then compiled.plan.explain(...).",
        )
    if path_or_op == "compute":
        return page_text(compute_page(plan))
    if path_or_op == "stages":
        return page_text(_stages_page(plan))
    of_stages = studies(plan)
    paths = dict.fromkeys(path for study in of_stages for path in study.paths.values())
    found = _matching_paths(list(paths), path_or_op)
    if found:
        what, page_of = "arguments", _argument_page
        decisions = _decisions(of_stages, lambda study: _arguments_named(study, found))
    else:
        what, page_of = "operations", _operation_page
        decisions = _decisions(of_stages, lambda study: _operations_named(study, path_or_op))
    if not decisions:
        raise _unknown(plan, of_stages, path_or_op)
    texts = [page_text(page_of(decision)) for decision in decisions[:MAX_DECISIONS]]
    if len(decisions) > MAX_DECISIONS:
        left = len(decisions) - MAX_DECISIONS
        texts.append(f"and {left} more decisions over {what} with this name: ask for one of them")
    return "\n\n".join(texts)


def _stages_page(plan: Decision) -> Page:
    if plan.is_one_program:
        raise AutoparError(
            "this plan has no stages.",
            given=f"explain('stages') on a plan of `{plan.name}` by {plan.method}",
            wrong="the whole step is one program on one mesh, so it is cut nowhere.",
            do="ask for an argument, an operation or 'compute'; or plan with method=PipelineParallel(num_stages=...).",
        )
    return cuts_page(plan)


def _matching_paths(paths: Sequence[str], asked: str) -> list[str]:
    """The argument with this path, or all its parts; else arguments whose paths end with it, else those a glob matches."""
    for matches in (
        lambda path: path == asked,
        lambda path: path.endswith("/" + asked),
        lambda path: fnmatch.fnmatchcase(path, asked) or fnmatch.fnmatchcase(path, "*/" + asked),
    ):
        found = [path for path in paths if matches(path) or matches(_PART.sub("", path))]
        if found:
            return found
    return []


_PART = re.compile(r"\[(:, )*\d+:\d+\]$")
"""The end of the path of a part of a stack over several stages: its layers."""


def _unknown(plan: Decision, of_stages: Sequence[Study], asked: str) -> AutoparError:
    paths = list(dict.fromkeys(path for s in of_stages for path in s.paths.values()))
    operations = list(dict.fromkeys(_name(n) for s in of_stages for n in s.graph.nodes if n.kind == "op"))
    near = difflib.get_close_matches(asked, paths + operations, n=5, cutoff=0.4)
    if not near:  # perhaps only the beginning of the path is wrong
        near = [path for path in paths if path.rpartition("/")[2] == asked.rpartition("/")[2]][:5]
    return AutoparError(
        "there is no such argument or operation.",
        given=f"explain({asked!r})",
        wrong=f"`{plan.name}` has {len(paths)} arguments and {len(operations)} different operations, none so named.",
        do=f"did you mean {', '.join(near)}?"
        if near
        else f"name one such as {', '.join(paths[:4])}; print(plan) has them all. Or 'compute', or 'stages' of a pipeline.",
        near=tuple(near),
    )


@dataclass(frozen=True, slots=True)
class _Decision:
    """A decision to explain, the same in all equal stages.

    Attributes:
        study: The problem of the first of these stages.
        number: The decision.
        stages: These stages.
        titles: The arguments or operations that were asked for, in all of them.
        places: Their positions among the inputs, or numbers of their nodes, in the first stage.
    """

    study: Study
    number: int
    stages: list[int] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


_Asked = Iterator[tuple[int, str, int]]
"""What is asked for in a stage: (decision, title, position of the input or number of the node)."""


def _decisions(of_stages: Sequence[Study], asked: Callable[[Study], _Asked]) -> list[_Decision]:
    """The decisions that are asked for in each stage, equal stages merged."""
    found: dict[Hashable, _Decision] = {}
    for study in of_stages:
        alike: Hashable = None
        if study.stage is not None:
            alike = canonical_key(study.graph.jaxpr), study.mesh, tuple(study.sharded.choices)
        for number, title, place in asked(study):
            decision = found.setdefault((alike, number), _Decision(study, number))
            decision.titles.append(title)
            if study.stage is not None and study.stage not in decision.stages:
                decision.stages.append(study.stage)
            if decision.study is study:
                decision.places.append(place)
    return list(found.values())


def _arguments_named(study: Study, paths: Sequence[str]) -> _Asked:
    for position, path in study.paths.items():
        if path in paths:
            yield study.class_of[study.graph.inputs[position]], path, position


def _operations_named(study: Study, asked: str) -> _Asked:
    for node in study.graph.nodes:
        if node.kind == "op" and (asked in _name(node) or fnmatch.fnmatchcase(_name(node), asked)):
            yield study.class_of[node.index], _name(node), node.index


def _stage_facts(decision: _Decision) -> list[tuple[str, str]]:
    stages = decision.stages
    if not stages:
        return []
    return [("stage" if len(stages) == 1 else "stages", numbers_text(stages) + (", equal" if len(stages) > 1 else ""))]


def _time_fact(study: Study) -> tuple[str, str]:
    step = seconds_text(study.plan.cost.step_seconds)
    if study.stage is None:
        apart = seconds_text(study.base)  # by the costs of the problem, by which alternatives are compared
        one_by_one = "" if apart == step else f"; {apart} by the costs that are compared below"
        return "step time", f"{step} predicted{one_by_one}"
    return "stage time", f"{seconds_text(study.base)} predicted, its work in one step; the step takes {step}"


# Arguments


def _argument_page(decision: _Decision) -> Page:
    study, number, first = decision.study, decision.number, decision.places[0]
    node = study.graph.nodes[study.graph.inputs[first]]
    shape, dtype = tuple(node.var.aval.shape), node.var.aval.dtype
    chosen = node.shardings[study.chosen[number]]
    tied = [path for k, path in study.paths.items() if study.class_of[study.graph.inputs[k]] == number]
    facts = [
        *_stage_facts(decision),
        ("type", type_text(shape, str(dtype))),
        ("sharding", f"{chosen}, {bytes_text(local_bytes(node.var, chosen, study.mesh))} on each device"),
        _time_fact(study),
    ]
    if len(tied) > 1:
        facts.append(("one decision", ", ".join(path for path, _, _ in collapse_paths([(p, "") for p in tied]))))

    def cells(choice: int) -> tuple[str, str]:
        sharding = node.shardings[choice]
        return str(sharding), bytes_text(local_bytes(node.var, sharding, study.mesh))

    return Page(
        ", ".join(path for path, _, _ in collapse_paths([(title, "") for title in dict.fromkeys(decision.titles)])),
        tuple(facts),
        (
            _alternatives(study, number, ("sharding", "per device"), cells, (1, 2)),
            _forbidden_shardings(study, number, node),
            _readers_table(study, node.var),
            *_new_value_tables(study, first),
        ),
    )


def _alternatives(
    study: Study,
    number: int,
    columns: tuple[str, str],
    cells: Callable[[int], tuple[str, str]],
    numbers: tuple[int, ...],
) -> Table:
    """A table of the costs of a decision's choices, the plan's first; `cells`: the first cells of a choice's row."""
    outcomes = study.outcomes(number)
    compared = [(seconds_text(study.base), "chosen"), *map(study.compared, outcomes[1:])]
    return Table(
        f"Alternatives: the whole {study.what} if this is forced and everything else chosen anew",
        (*columns, f"{study.what} time", "against the plan"),
        tuple((*cells(outcome.choice), *text) for outcome, text in zip(outcomes, compared, strict=True)),
        numbers,
        study.unsolved(number, len(outcomes)),
    )


def _forbidden_shardings(study: Study, number: int, node: Node) -> Table:
    """A table of the other shardings of the array, and what forbids them."""
    shape, sizes = tuple(node.var.aval.shape), study.mesh.axis_sizes
    odd: list[tuple[str, str]] = []
    listed = set(node.shardings)
    wide = [axis for axis, size in sizes.items() if size > 1]
    for places in itertools.product([None, *range(len(shape))], repeat=len(wide)):
        dims = tuple(tuple(a for a, place in zip(wide, places, strict=True) if place == d) for d in range(len(shape)))
        uneven = [d for d, axes in enumerate(dims) if shape[d] % math.prod(sizes[a] for a in axes)]
        if uneven and Sharding(dims) not in listed:
            dim, axes = uneven[0], dims[uneven[0]]
            odd.append(
                (f"dim {dim} has length {shape[dim]}, which {','.join(axes)} does not divide", str(Sharding(dims)))
            )
    return _forbidden(study, number, "sharding", [str(s) for s in node.shardings], odd)


def _forbidden_strategies(study: Study, number: int, node: Node) -> Table:
    odd = [
        (f"{factor} has length {node.rule.sizes[factor]}, which {axis} does not divide", f"{axis}: {factor}")
        for axis, size in study.mesh.axis_sizes.items()
        for factor in node.rule.splittable()
        if node.rule.sizes[factor] % size
    ]
    names = [f"({_strategy_text(s, study.mesh)})" for s in node.strategies]
    return _forbidden(study, number, "axis: factor", names, odd)


def _forbidden(
    study: Study, number: int, what: str, names: Sequence[str], impossible: Sequence[tuple[str, str]]
) -> Table:
    """A table of choices that the user or the method forbids, with their cost if allowed, and of `impossible` ones, given as
    (reason, choice)."""
    rows: list[tuple[str, ...]] = []
    masked = [k for k, ok in enumerate(study.allowed(number)) if not ok]
    reason = study.forbidden_by(number)
    if masked and reason:
        lifted = study.lifted_outcomes(number)
        for outcome in lifted:
            seconds, against = study.compared(outcome)
            rows.append((names[outcome.choice], reason, against if outcome.why_not else f"{seconds}, {against}"))
        solved = {outcome.choice for outcome in lifted}
        masked = [k for k in masked if k not in solved]
    if masked:
        shown = listed([names[k] for k in masked], MAX_FORBIDDEN, "  ")
        rows.append((shown, reason or "devices that share memory have no such collective", ""))
    rows += [(listed(found, MAX_FORBIDDEN, "  "), reason, "") for reason, found in grouped(impossible).items()]
    return Table(
        "Forbidden", (what, "by", f"{study.what} time without that"), tuple(rows), (), "" if rows else "nothing"
    )


def _readers_table(study: Study, var: Var) -> Table:
    rows = []
    for reader, asks, at_each_turn in readers(study.sharded.body, var):
        rows.append((reader, str(asks), f"{at_each_turn} times" if at_each_turn > 1 else "once"))
    moves = list(conversions(study.sharded.body, var, study.mesh))
    counted = {row: rows.count(row) for row in rows}
    return Table(
        "Read by",
        ("operation", "in this sharding", "runs"),
        tuple((f"{row[0]} ({n} of them)" if n > 1 else row[0], *row[1:]) for row, n in counted.items()),
        (),
        _moves_text(moves, "no conversion needed" if rows else "nothing reads it"),
    )


def _moves_text(moves: Sequence[str], none: str) -> str:
    return "\n".join(["converted", *moves]) if moves else none


def _new_value_tables(study: Study, argument: int) -> Iterator[Table]:
    """For state: where its new value comes from, and the conversions to the sharding of the old value."""
    body = study.sharded.body
    for output, source in study.aliases.items():
        atom, sharding = body.outputs[output]
        if source != argument or isinstance(atom, Literal):
            continue
        made = next(
            (
                (describe(i.eqn), result_sharding(i, atom))
                for i in body.instructions
                if isinstance(i, Compute | Region) and atom in i.eqn.outvars
            ),
            None,
        )
        moves = list(conversions(body, atom, study.mesh))
        rows = ((made[0], str(made[1]), str(sharding)),) if made else ()
        note = _moves_text(moves, "no conversion needed" if made else "it comes back as it is")
        yield Table("Its new value", ("made by", "as", "kept as"), rows, (), note)


# Operations


def _name(node: Node) -> str:
    return describe_phase(node.eqn)


def _operation_page(decision: _Decision) -> Page:
    study, number = decision.study, decision.number
    node = study.graph.nodes[decision.places[0]]
    chosen = node.strategies[study.chosen[number]]
    types = ", ".join(type_text(tuple(v.aval.shape), str(v.aval.dtype)) for v in node.eqn.invars)
    facts = [
        *_stage_facts(decision),
        ("operands", types),
        ("factors", f"{node.rule}  with " + ", ".join(f"{f}={n}" for f, n in node.rule.sizes.items())),
        ("strategy", f"{_strategy_text(chosen, study.mesh)}: {_shardings_text(chosen)}"),
        _time_fact(study),
    ]
    if len(decision.places) > 1:
        facts.append(("one decision", f"{len(decision.places)} such operations, planned alike"))

    def cells(choice: int) -> tuple[str, str]:
        strategy = node.strategies[choice]
        return _strategy_text(strategy, study.mesh), _shardings_text(strategy)

    alternatives = _alternatives(study, number, ("axis: factor", "operands -> results"), cells, (2,))
    return Page(_name(node), tuple(facts), (alternatives, _forbidden_strategies(study, number, node)))


def _strategy_text(strategy: Strategy, mesh: LogicalMesh) -> str:
    words = {"-": "idle"}
    return ", ".join(
        f"{axis}: {words.get(what, f'partial sums {what}' if what[0] == '+' else what)}"
        for axis, what in zip(mesh.axis_names, strategy.choice, strict=True)
    )


def _shardings_text(strategy: Strategy) -> str:
    return f"{' '.join(map(str, strategy.operands))} -> {' '.join(map(str, strategy.results))}"

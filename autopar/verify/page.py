"""What the compiler says of a plan, as text and as a page.

In:     `Findings`.
Out:    text; HTML that needs nothing else.
"""

from __future__ import annotations

from html import escape

from autopar.cost.steps import COLLECTIVE_KINDS
from autopar.markup import tag
from autopar.plan.words import bytes_text, seconds_text
from autopar.report.html import table_html, wrapped
from autopar.report.page import Table
from autopar.report.text import wide_text
from autopar.verify.findings import MOVES, Findings


def verification_text(found: Findings) -> str:
    """The verdict, and the tables."""
    return "\n".join([_title(found), *(f"  {fact}" for fact in _facts(found)), "", wide_text(_tables(found), 200)])


def verification_html(found: Findings) -> str:
    """The same as a page."""
    tables = "\n".join(table_html(table, is_open=True) for table in _tables(found))
    facts = tag("ul", *(tag("li", escape(fact)) for fact in _facts(found)))
    return wrapped("\n".join([tag("h1", escape(_title(found))), facts, tables]))


def _title(found: Findings) -> str:
    verdict = "the compiler agrees" if found.ok else "NOT verified"
    return f"`{found.plan}` compiled for {found.target}: {verdict}"


def _facts(found: Findings) -> list[str]:
    facts = list(found.problems)
    for mesh, (predicted, compiled) in enumerate(zip(found.predicted_bytes, found.compiled_bytes, strict=True)):
        where = f"mesh {mesh}, " if len(found.compiled_bytes) > 1 else ""
        facts.append(
            f"{where}memory of one device: {bytes_text(compiled)} by XLA, {bytes_text(predicted)} predicted "
            f"({compiled / max(predicted, 1):.3f} of it)"
        )
    if found.communication_seconds:
        facts.append(
            f"collectives: {found.async_share:.0%} of their seconds asynchronous, {found.exposed_share:.0%} exposed"
        )
    return facts


def _tables(found: Findings) -> list[Table]:
    programs = [
        (
            program.name,
            str(program.runs),
            bytes_text(program.predicted_bytes),
            bytes_text(program.compiled_bytes),
            f"{program.compiled_bytes / max(program.predicted_bytes, 1):.3f}",
            seconds_text(program.compute_seconds),
            seconds_text(program.exposed_seconds),
            ", ".join(f"{name} x {times}" for name, times in program.kernels.items()),
        )
        for program in found.programs
    ]
    columns = ("program", "runs", "predicted", "XLA's peak", "ratio", "kernels", "waiting", "kernels not of XLA")
    collectives = []
    for program in found.programs:
        for kind in MOVES:
            of_kind = [c for c in program.collectives if c.kind == kind]
            planned, emitted = program.planned.get(kind, 0), program.emitted.get(kind, 0)
            if planned or emitted:
                total = sum(c.times * c.seconds for c in of_kind) or 1.0
                going = sum(c.times * c.seconds for c in of_kind if c.is_async) / total
                hidden = sum(c.times * min(c.seconds, c.hidden_seconds) for c in of_kind) / total
                shown = (bytes_text(planned), bytes_text(emitted), "equal" if planned == emitted else "DIFFERENT")
                shares = (f"{going:.0%}", f"{hidden:.0%}") if kind in COLLECTIVE_KINDS else ("", "")
                collectives.append((program.name, kind, *shown, *shares))
    return [
        Table("Programs, one run of each on one device", columns, tuple(programs), tuple(range(1, 7))),
        Table(
            "Bytes that move in one run, loops counted",
            ("program", "move", "planned", "executed", "", "asynchronous", "kernels meanwhile"),
            tuple(collectives),
            (2, 3, 5, 6),
        ),
    ]

"""Compares and shows what a plan predicts and what XLA compiles.

In:     (made by `verify.py`.)
Out:    `Checked`, for one program; `Verification`, for all: as text, and as self-contained HTML.
Method: executed bytes must be equal for each kind of collective (not their number, since XLA combines small ones), and for
        copies between devices and hosts. Memory must fit the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path

from autopar.cost.steps import COLLECTIVE_KINDS
from autopar.markup import tag
from autopar.plan.words import bytes_text, seconds_text
from autopar.report.html import table_html, whole_file, wrapped
from autopar.report.page import Table
from autopar.report.show import write_page
from autopar.report.text import wide_text
from autopar.verify.host_copies import DIRECTIONS
from autopar.verify.schedule import Emitted


@dataclass(frozen=True, slots=True)
class Checked:
    """One program, as planned and as compiled.

    Attributes:
        name: Name in the plan's streams.
        stage: The stage whose mesh it runs on.
        runs: Runs per step.
        predicted_bytes: Predicted peak memory of one device.
        compiled_bytes: The same by XLA.
        planned: Planned bytes of collectives in one run, by kind, and of copies to and from host memory.
        emitted: The same by XLA.
        collectives: Collectives of the compiled program.
        compute_seconds: Seconds of its kernels in one run; XLA has not tuned them.
        exposed_seconds: Seconds in which kernels wait for collectives or are slowed down by them.
        predicted_exposed_seconds: The same, predicted.
        kernels: Executions of kernels that are not XLA's own, by name and first result.
    """

    name: str
    stage: int
    runs: int
    predicted_bytes: int
    compiled_bytes: int
    planned: dict[str, int]
    emitted: dict[str, int]
    collectives: tuple[Emitted, ...]
    compute_seconds: float
    exposed_seconds: float
    predicted_exposed_seconds: float
    kernels: dict[str, int]

    @property
    def moves(self) -> Iterator[tuple[str, int, int]]:
        """(kind, planned bytes, executed bytes) of collectives and host copies, in a fixed order."""
        for kind in (*COLLECTIVE_KINDS, *DIRECTIONS):
            yield kind, self.planned.get(kind, 0), self.emitted.get(kind, 0)


@dataclass(frozen=True, repr=False)
class Verification:
    """A plan compared with what XLA compiles.

    Attributes:
        plan: Name of the step.
        target: The device that was compiled for.
        programs: Its programs.
        predicted_bytes: Per mesh, the predicted peak of one device.
        compiled_bytes: The same by XLA.
        budget_bytes: Memory budget of one device.
    """

    plan: str
    target: str
    programs: tuple[Checked, ...]
    predicted_bytes: tuple[int, ...]
    compiled_bytes: tuple[int, ...]
    budget_bytes: float

    @property
    def problems(self) -> tuple[str, ...]:
        """Disagreements between the compiler and the plan; (): the plan is verified."""
        return tuple(self._problems())

    @property
    def ok(self) -> bool:
        """Whether there are no problems: bytes are equal, and memory fits."""
        return not self.problems

    def _problems(self) -> Iterator[str]:
        for program in self.programs:
            for kind, planned, emitted in program.moves:
                if planned != emitted:
                    yield f"{program.name}: {kind} of {emitted:,} B are executed, and {planned:,} B planned."
        for mesh, peak in enumerate(self.compiled_bytes):
            if peak > self.budget_bytes:
                where = f"mesh {mesh}: " if len(self.compiled_bytes) > 1 else ""
                yield f"{where}XLA takes {bytes_text(peak)}, over the budget of {bytes_text(self.budget_bytes)}."

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives of a step, on all meshes."""
        return sum(p.runs * c.times * c.seconds for p in self.programs for c in p.collectives)

    @property
    def async_share(self) -> float:
        """Fraction of the collectives' seconds that are asynchronous."""
        total = self.communication_seconds
        going = sum(p.runs * c.times * c.seconds for p in self.programs for c in p.collectives if c.is_async)
        return going / total if total else 0.0

    @property
    def exposed_share(self) -> float:
        """Fraction of the collectives' seconds that kernels lose to them."""
        return self._share(sum(p.runs * p.exposed_seconds for p in self.programs))

    @property
    def predicted_exposed_share(self) -> float:
        """The same, predicted."""
        return self._share(sum(p.runs * p.predicted_exposed_seconds for p in self.programs))

    def _share(self, seconds: float) -> float:
        total = self.communication_seconds
        return min(1.0, seconds / total) if total else 0.0

    # Shown.

    def __str__(self) -> str:
        return "\n".join([self._title, *(f"  {fact}" for fact in self._facts()), "", wide_text(self._tables(), 200)])

    def __repr__(self) -> str:
        return f"Verification({self.plan} for {self.target}: {'agrees' if self.ok else self.problems[0]})"

    def _repr_html_(self) -> str:
        tables = "\n".join(table_html(table, is_open=True) for table in self._tables())
        facts = tag("ul", *(tag("li", escape(fact)) for fact in self._facts()))
        return wrapped("\n".join([tag("h1", escape(self._title)), facts, tables]))

    def save_html(self, path: str | PathLike) -> Path:
        """Write the page as a self-contained file."""
        return write_page(Path(path), whole_file(f"{self.plan}, compiled for {self.target}", self._repr_html_()))

    @property
    def _title(self) -> str:
        verdict = "the compiler agrees" if self.ok else "NOT verified"
        return f"`{self.plan}` compiled for {self.target}: {verdict}"

    def _facts(self) -> list[str]:
        facts = list(self.problems)
        for mesh, (predicted, compiled) in enumerate(zip(self.predicted_bytes, self.compiled_bytes, strict=True)):
            where = f"mesh {mesh}, " if len(self.compiled_bytes) > 1 else ""
            facts.append(
                f"{where}memory of one device: {bytes_text(compiled)} by XLA, {bytes_text(predicted)} predicted "
                f"({compiled / max(predicted, 1):.3f} of it)"
            )
        if self.communication_seconds:
            facts.append(
                f"collectives: {self.async_share:.0%} of their seconds asynchronous, {self.exposed_share:.0%} exposed "
                f"({self.predicted_exposed_share:.0%} predicted)"
            )
        return facts + [f"XLA sends {text}" for text in self._rewritten()]

    def _rewritten(self) -> Iterator[str]:
        """What XLA sends in another form than it is asked to, or adds."""
        total: Counter[str] = Counter()
        for program in self.programs:
            for c in program.collectives:
                if c.is_added or c.sent_as is not None:
                    how = "of its own" if c.is_added else f"as {c.sent_as}"
                    total[f"of {c.kind} {how}"] += program.runs * c.times * c.bytes
        return (f"{bytes_text(size)} {what}" for what, size in total.items())

    def _tables(self) -> list[Table]:
        programs = [
            (
                program.name,
                str(program.runs),
                bytes_text(program.predicted_bytes),
                bytes_text(program.compiled_bytes),
                f"{program.compiled_bytes / max(program.predicted_bytes, 1):.3f}",
                seconds_text(program.compute_seconds),
                seconds_text(program.exposed_seconds),
                seconds_text(program.predicted_exposed_seconds),
                ", ".join(f"{name} x {times}" for name, times in program.kernels.items()),
            )
            for program in self.programs
        ]
        headings = "predicted", "XLA's peak", "ratio", "kernels", "waiting", "predicted waiting", "kernels not of XLA"
        columns = ("program", "runs", *headings)
        collectives = []
        for program in self.programs:
            for kind, planned, emitted in program.moves:
                of_kind = [c for c in program.collectives if c.kind == kind]
                if planned or emitted:
                    total = sum(c.times * c.seconds for c in of_kind) or 1.0
                    going = sum(c.times * c.seconds for c in of_kind if c.is_async) / total
                    hidden = sum(c.times * min(c.seconds, c.hidden_seconds) for c in of_kind) / total
                    shown = (bytes_text(planned), bytes_text(emitted), "equal" if planned == emitted else "DIFFERENT")
                    shares = (f"{going:.0%}", f"{hidden:.0%}") if kind in COLLECTIVE_KINDS else ("", "")
                    collectives.append((program.name, kind, *shown, *shares))
        return [
            Table("Programs, one run of each on one device", columns, tuple(programs), tuple(range(1, 8))),
            Table(
                "Bytes that move in one run, loops counted",
                ("program", "move", "planned", "executed", "", "asynchronous", "kernels meanwhile"),
                tuple(collectives),
                (2, 3, 5, 6),
            ),
        ]

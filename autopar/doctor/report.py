"""The findings as a table or as JSON.

In:     findings.
Out:    text; 0 if everything necessary works, else 1.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.doctor.findings import Finding

_MARKS = {"ok": "[green]ok[/]", "absent": "[yellow]absent[/]", "failed": "[bold red]failed[/]"}


def print_report(findings: Sequence[Finding], as_json: bool) -> int:
    """Print findings; 0 if everything necessary works, else 1."""
    broken = [f.part for f in findings if f.status == "failed" and f.necessary]
    if as_json:
        print(json.dumps({"ok": not broken, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
        return 1 if broken else 0
    table = Table(show_edge=False, pad_edge=False)
    for heading in ("part", "", "found", "do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.part, _MARKS[finding.status], escape(finding.found), escape(finding.fix))
    console = Console(force_jupyter=False)
    console.print(table)
    console.print(f"\nautopar cannot work here: {', '.join(broken)}" if broken else "\neverything necessary works")
    return 1 if broken else 0

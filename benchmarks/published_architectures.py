"""Fills in the sizes of public models that a row names without stating them.

In:     a row of a table of runs; `data/architectures.tsv`, one public architecture per row, with its source.
Out:    the row with its empty cells filled, and which cells these are.
Method: the architecture is found by name. If the row states another depth or width, it is another model of the same name, and
        nothing is filled.
"""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path

from published_cells import Cells, number_of, text_of

ARCHITECTURES = Path(__file__).parent / "data" / "architectures.tsv"
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "experts", "experts_active")


@functools.cache
def _architectures() -> tuple[tuple[re.Pattern[str], dict[str, str]], ...]:
    with ARCHITECTURES.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return tuple((re.compile(row["name"], re.IGNORECASE), row) for row in rows)


def kind_of(name: str) -> str | None:
    """Whether a model is a decoder, an encoder or an encoder with a decoder, if its name is that of a public architecture."""
    return next((row["kind"] for pattern, row in _architectures() if pattern.search(name)), None)


def with_sizes(row: Cells) -> tuple[Cells, tuple[str, ...]]:
    """A row with the sizes of the architecture that it names, and the names of the columns that were filled."""
    name = re.sub(r"\s*[()\[\],]\s*", " ", text_of(row, "model")).strip()
    names = name, _OTHER_WORDS.sub("", name)
    known = next((row for text in names for pattern, row in _architectures() if pattern.search(text)), None)
    if known is None or any((number_of(row, side) or float(known[side])) != float(known[side]) for side in _DEPTH):
        return row, ()
    # With other heads, it has other heads of keys too.
    other = (
        () if (number_of(row, "heads") or float(known["heads"])) == float(known["heads"]) else ("kv_heads", "head_size")
    )
    columns = [column for column in _SIZES if known[column] and column not in other and not text_of(row, column)]
    filled = {column: known[column] for column in columns}
    return {**row, **filled}, tuple(filled)


_DEPTH = ("layers", "hidden")
_OTHER_WORDS = re.compile(r"[-_ ]*\b(moe|dense|base|instruct|it|pretrain(ing)?|sft|llm)\b", re.IGNORECASE)

"""The words and colours that pictures share: kinds of work, what a picture's colours mean.

In:     kinds, as of `Timeline` and `Collective`.
Out:    names for people, and the line of colours under a picture.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from autopar.markup import tag

KIND_NAMES = {
    "init": "before the first microbatch",
    "F": "forward",
    "M": "between two passes of all microbatches",
    "B": "backward",
    "W": "gradients of weights",
    "U": "update",
    "transfer": "sending",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all of unequal counts",
    "collective-permute": "permute",
    "wait": "waiting",
}
"""Kinds of work in the order in which they are drawn; each has a colour of its name."""


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(class of a colour, what it means) as a line under a picture."""
    return tag(
        "p",
        *(tag("span", tag("i", class_=f"swatch {name}"), escape(words), class_="key") for name, words in entries),
        class_="legend",
    )


def kinds_legend(kinds: Iterable[str]) -> str:
    """The legend of kinds that occur."""
    found = set(kinds)
    return legend((f"k-{kind}", words) for kind, words in KIND_NAMES.items() if kind in found)

"""Writes SVG and HTML: tags, tables, shapes, ticks, legends.

In:     names, attributes, children.
Out:    text. Colours are CSS classes, so that one style sheet serves light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

WIDTH = 960
"""Width of every picture in its own units; a page scales it."""
FONT = 12
"""Font size, in the same units."""


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element. `class_` becomes `class`, other underscores dashes, and None is left out; children are markup."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    return f"<{' '.join(words)}>{''.join(children)}</{name}>"


def grid(head: str, rows: Iterable[str], class_: str | None = None) -> str:
    """A table; `head`: the row that names its columns."""
    return tag("table", tag("thead", head), tag("tbody", *rows), class_=class_)


def picture(height: float, *children: str, label: str, width: float = WIDTH) -> str:
    """A whole SVG, scaled to the width available."""
    return tag(
        "svg",
        tag("title", escape(label)),
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        xmlns="http://www.w3.org/2000/svg",
        style=f"max-width:{width:g}px",
    )


def box(x: float, y: float, width: float, height: float, class_: str, tip: str = "", **attributes: object) -> str:
    """A rectangle; `tip`: its tooltip."""
    inner = (tag("title", escape(tip)),) if tip else ()
    return tag("rect", *inner, x=x, y=y, width=max(width, 0.4), height=height, class_=class_, **attributes)


def text(x: float, y: float, words: str, class_: str = "", anchor: str | None = None) -> str:
    """Text whose baseline begins at (x, y); `anchor` is `"middle"` or `"end"`."""
    return tag("text", escape(words), x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def room_for(words: str, size: float = FONT) -> float:
    """An upper bound of a text's width, in a plain font."""
    return len(words) * size * 0.62


def ticks(end: float, count: int = 6) -> Iterator[float]:
    """About `count` round numbers from 0 to `end`."""
    if not end > 0 or not math.isfinite(end):
        return
    rough = end / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * (1 - 1e-9))
    for k in range(int(end / step * (1 + 1e-9)) + 1):
        yield k * step


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A small table of an object's properties for notebooks, in the notebook's own colours."""
    cell = "text-align:left; padding:1px 14px 1px 0; vertical-align:top"
    rows = (
        tag("tr", tag("th", escape(name), style=cell), tag("td", escape(words), style=cell)) for name, words in pairs
    )
    return tag("div", tag("b", escape(title)), tag("table", *rows))


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
"""Kinds of work -> their names, in drawing order; each kind has a CSS class."""


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """The legend of a picture, from (CSS class, meaning)."""
    return tag(
        "p",
        *(tag("span", tag("i", class_=f"swatch {name}"), escape(words), class_="key") for name, words in entries),
        class_="legend",
    )


def kinds_legend(kinds: Iterable[str]) -> str:
    """The legend of the kinds that occur in a picture."""
    found = set(kinds)
    return legend((f"k-{kind}", words) for kind, words in KIND_NAMES.items() if kind in found)

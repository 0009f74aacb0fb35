"""The style of a page: one style sheet for light, dark and print, and a short script for tooltips and search.

In:     nothing.
Out:    `STYLE` (`style.css`, with its colours), `SCRIPT` (`script.js`), to be put into a page; both affect only elements of
        class `autopar-plan`.
Method: colours are variables; dark mode follows the reader's system or notebook. The page works without the script:
        tooltips are then titles.
"""

from __future__ import annotations

import importlib.resources
import string

_LIGHT = """--bg:#fff; --ink:#1d2329; --soft:#66707c; --line:#dde1e6; --card:#f5f6f8; --wait:#edf0f3; --on:#fff;
 --f:#3f7fd6; --b:#2b9a74; --w:#86cdb0; --u:#dd9933; --init:#9aa3af; --transfer:#b565a7; --gather:#c65f94; --scatter:#8a63c4;
 --reduce:#d0605e; --alltoall:#a8557f; --permute:#77558f; --area:#bcd3f2;
 --stroke:#3f7fd6; --budget:#c23b33; --whole:#c9cfd7;"""
_DARK = """--bg:#14181d; --ink:#e8ebef; --soft:#9aa5b1; --line:#343c46; --card:#1d232a; --wait:#242b33; --on:#0f1317;
 --f:#6aa5f2; --b:#4cc294; --w:#2e7a5c; --u:#e8b35a; --init:#7d8896; --transfer:#cf8bc4; --gather:#e089b5; --scatter:#ac8ae0;
 --reduce:#e98683; --alltoall:#cc7fa5; --permute:#a284ba; --area:#25405f;
 --stroke:#6aa5f2; --budget:#f0766d; --whole:#4a535e;"""
_PARTS = ("#3f7fd6", "#dd9933", "#2b9a74", "#8a63c4", "#d0605e", "#4fb3bf", "#b08968", "#c65f94", "#9aa3af")
_PIECES = (
    *("#3f7fd6", "#dd9933", "#2b9a74", "#d0605e", "#8a63c4", "#4fb3bf"),
    *("#c65f94", "#a3b144", "#7088a8", "#b08968", "#5b6ee1", "#6fae5c"),
)
_KINDS = {
    "F": "f",
    "M": "init",
    "B": "b",
    "W": "w",
    "U": "u",
    "init": "init",
    "transfer": "transfer",
    "all-gather": "gather",
    "reduce-scatter": "scatter",
    "all-reduce": "reduce",
    "all-to-all": "alltoall",
    "ragged-all-to-all": "alltoall",
    "collective-permute": "permute",
    "wait": "wait",
}


def _fills() -> str:
    """CSS rules with the fill (for shapes) and background (for swatches in text) of each colour."""
    pairs = [(f"k-{kind}", f"var(--{name})") for kind, name in _KINDS.items()]
    pairs += [(f"c{k}", colour) for k, colour in enumerate(_PARTS)]
    pairs += [(f"p{k}", colour) for k, colour in enumerate(_PIECES)]
    pairs.append(("whole", "var(--whole)"))
    return "\n".join(f".autopar-plan .{name} {{ fill:{colour}; background:{colour} }}" for name, colour in pairs)


def _file(name: str) -> str:
    return importlib.resources.files("autopar.report").joinpath(name).read_text(encoding="utf-8")


STYLE = f"<style>\n{string.Template(_file('style.css')).substitute(light=_LIGHT, dark=_DARK, fills=_fills())}</style>"
SCRIPT = f"<script>\n{_file('script.js')}</script>"

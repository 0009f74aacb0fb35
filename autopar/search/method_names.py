"""Parses methods from text: common names, and Python calls.

In:     `"fsdp"`, or `"PipelineParallel(num_stages=4, num_microbatches=8)"`.
Out:    the method.
Method: a table of names; other texts are parsed as calls with literal arguments. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from typing import Any

from autopar.errors import AutoparError
from autopar.search.methods import Auto, DataParallel, Inference, Method, PipelineParallel, ShardParallel, ThreeD

CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Auto, DataParallel, Inference, PipelineParallel, ShardParallel, ThreeD)
}
NAMES: dict[str, Method] = {
    "auto": Auto(),
    "dp": DataParallel(),
    "ddp": DataParallel(),
    "dataparallel": DataParallel(),
    "zero1": DataParallel(zero=1),
    "zero2": DataParallel(zero=2),
    "zero3": DataParallel(zero=3),
    "fsdp": DataParallel(zero=3),
    "spmd": ShardParallel(),
    "gspmd": ShardParallel(),
    "alpa": Auto(),
    "inference": Inference(),
    "latency": Inference(),
    "throughput": Inference(latency=False),
}
"""Names that need no numbers, without spaces, dashes and underscores."""
MEANT = {
    "zero": "zero1, zero2 or zero3: DataParallel(zero=...)",
    "tp": "ThreeD(tensor=8), or ShardParallel(), which finds out",
    "tensorparallel": "ThreeD(tensor=8), or ShardParallel(), which finds out",
    "megatron": "ThreeD(data=..., tensor=..., pipeline=...)",
    "3d": "ThreeD(data=..., tensor=..., pipeline=...)",
    "pp": "PipelineParallel(num_stages=...)",
    "pipeline": "PipelineParallel(num_stages=...)",
    "gpipe": 'PipelineParallel(num_stages=..., schedule="gpipe")',
    "1f1b": 'PipelineParallel(num_stages=..., schedule="1f1b")',
    "hsdp": "ShardParallel(mesh_shape=(hosts, devices_per_host)), which finds out",
}
"""Ambiguous names -> what to write instead."""


def method_of(text: str) -> Method:
    """The method that a name or a call stands for.

    Raises `AutoparError`: there is no such method, with suggestions; or its settings are wrong.
    """
    plain = re.sub(r"[\s_\-.]+", "", text.lower())
    if plain in NAMES:
        return NAMES[plain]
    called = _called(text)
    if called is not None:
        return called
    classes = {name.lower(): f"{name}(...)" for name in CLASSES}
    near = difflib.get_close_matches(plain, [*NAMES, *MEANT, *classes])
    near.sort(key=lambda name: sorted(name) != sorted(plain))  # anagrams first
    meant = MEANT.get(plain) or next((MEANT.get(name) or classes.get(name) or name for name in near), "")
    raise AutoparError(
        "unknown method.",
        given=f"method={text!r}",
        wrong="it is neither a name that autopar knows nor one of its methods."
        if plain not in MEANT
        else "it does not say how much of it.",
        do=(f"did you mean {meant}? " if meant else "")
        + f"Names are {', '.join(NAMES)}; methods are {', '.join(f'{name}(...)' for name in CLASSES)}.",
    )


def _called(text: str) -> Method | None:
    """The method that a call with literal arguments makes; None: the text is no call of a method."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    if isinstance(call, ast.Name | ast.Attribute):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call):
        return None
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if name not in CLASSES:
        return None
    try:
        positional = [ast.literal_eval(value) for value in call.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return CLASSES[name](*positional, **named)
    except (TypeError, ValueError) as error:
        raise AutoparError(
            "the settings of the method are wrong.",
            given=f"method={text!r}",
            wrong=f"{error}.".replace(".__init__()", "")
            if isinstance(error, TypeError)
            else "one of them is neither a number nor a text.",
            do=f"write numbers and texts only. Its settings are {', '.join(inspect.signature(CLASSES[name]).parameters)}.",
        ) from error

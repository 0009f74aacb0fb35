"""Chooses the most likely settings for rows that leave something open.

In:     a run with `unstated` columns; a function that predicts a run.
Out:    the run with the chosen settings, and its prediction.
Method: published runs were tuned, so the fastest settings that fit in memory are assumed for what the row leaves open:
        microbatch, recomputation, chunks of stages, degrees. An open size has its usual value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from published_frameworks import usual_pipeline
from published_runs import Run
from published_steps import Prediction, predict

_SIZES = ("heads", "size", "hidden", "vocabulary", "sizes", "decoder", "experts")
_SETTINGS = (*_SIZES, "seconds", "kernel", "dtype", "zero", "mesh")


def settle(run: Run, predict: Callable[[Run], Prediction] = predict) -> tuple[Run, Prediction]:
    """The run with all that its row leaves open decided, and its prediction.

    Raises:
        AutoparError: It cannot be predicted.
    """
    recomputing = any(name == "recompute" for name, _ in run.unstated)
    found = _tried(alternatives(run), recomputing, predict)
    fitting = [row for row in found if _fits(row[1])]
    if run.may_split and run.seconds is not None and not fitting:
        # It ran, and nothing denies that replicas split the optimizer's state among them.
        split = (replace(taken, zero=1, shards=taken.data * taken.context) for taken in alternatives(run))
        found = _tried(split, recomputing, predict)
        fitting = [row for row in found if _fits(row[1])]
    # Where nothing fits, more was done for memory than is known here: what keeps least is nearest to it.
    thrifty = [row for row in found if row[0].recompute == "full"] if recomputing else _least(found)
    return min(fitting or thrifty, key=lambda row: row[1].seconds)


def _tried(
    several: Iterator[Run], recomputing: bool, predict: Callable[[Run], Prediction]
) -> list[tuple[Run, Prediction]]:
    """Each of several runs with its prediction, and what lies between them if layers may be made again."""
    found = [(taken, _whole_or_in_part(taken, predict)) for taken in several]
    return found + list(_in_part(found)) if recomputing else found


def _fits(predicted: Prediction) -> bool:
    return predicted.needed_bytes <= 1.001 * predicted.capacity_bytes


def _least(found: Sequence[tuple[Run, Prediction]]) -> list[tuple[Run, Prediction]]:
    """Of each layout, the run that needs least memory."""
    by_layout: dict[tuple[int, ...], tuple[Run, Prediction]] = {}
    for run, p in found:
        layout = run.tensor, run.pipeline, run.data
        by_layout[layout] = min(by_layout.get(layout, (run, p)), (run, p), key=lambda row: row[1].needed_bytes)
    return list(by_layout.values())


def _in_part(found: Sequence[tuple[Run, Prediction]]) -> Iterator[tuple[Run, Prediction]]:
    """As many layers made again as memory asks for (Megatron-LM's `--recompute-method block`), where that is not all."""
    whole = {replace(run, recompute=""): p for run, p in found if run.recompute == "full"}
    for run, none in found:
        full = whole.get(replace(run, recompute=""))
        if run.recompute != "none" or full is None or not full.needed_bytes < none.capacity_bytes < none.needed_bytes:
            continue
        part = (none.needed_bytes - none.capacity_bytes) / (none.needed_bytes - full.needed_bytes)
        yield replace(run, recompute="full", recomputed=part), _mixed(none, full, part)


def _whole_or_in_part(run: Run, predict: Callable[[Run], Prediction]) -> Prediction:
    """The prediction of a run of which all layers are made again, none, or as many as its row says."""
    if run.recompute != "full" or run.recomputed == 1:
        return predict(run)
    none = predict(replace(run, recompute="none"))
    return _mixed(none, predict(run), run.recomputed)


def _mixed(none: Prediction, full: Prediction, part: float) -> Prediction:
    """Where a part of the layers is made again and the others are not."""
    return Prediction(
        **{f.name: (1 - part) * getattr(none, f.name) + part * getattr(full, f.name) for f in fields(none)}
    )


def alternatives(run: Run) -> Iterator[Run]:
    """All that a run may have been, itself if its row says all."""
    named = {name: values for name, values in run.unstated if name not in _SETTINGS}
    found: list[Run] = []
    for values in itertools.product(*named.values()):
        for taken in _with_experts(_with(run, dict(zip(named, values, strict=True)))):
            taken = replace(taken, **{name: value for name, value in usual_pipeline(taken).items() if name in named})
            if taken.batch % (taken.data * taken.microbatch) == 0 and taken not in found:
                found.append(taken)
    yield from found


def _with(run: Run, chosen: dict[str, Any]) -> Run:
    if "layout" not in chosen:
        return replace(run, **chosen)
    layout = chosen.pop("layout")
    tensor, pipeline, data, context = layout
    shards = data * context if run.shards == run.data * run.context else min(run.shards, data * context)
    taken = replace(run, tensor=tensor, pipeline=pipeline, data=data, context=context, shards=shards, **chosen)
    if taken.microbatch * data > taken.batch or "microbatch" not in chosen:
        taken = replace(taken, microbatch=min(taken.microbatch, taken.batch // data))
    return replace(taken, chunks=1) if pipeline == 1 else taken


def _with_experts(run: Run) -> Iterator[Run]:
    """Where the row does not say to how many devices experts are dealt out: to as many of a stage as can have equally many.

    Who splits the state over all may as well gather all experts.
    """
    if run.experts is None or ("experts", (None,)) not in run.unstated:
        yield run
        return
    most = math.gcd(run.experts.number, run.devices // run.pipeline)
    for parallel in dict.fromkeys((most, 1) if run.zero == 3 else (most,)):
        yield replace(run, experts=replace(run.experts, parallel=parallel))

"""Damaged plan files: whatever is lost, changed or there twice, the answer is `PlanFileError`, or a plan that can be used.

Each entry of two files is damaged in each way. What still reads as a plan must print, compare and save; attached to its
step it is taken, refused as damaged, or, where a fingerprint was changed, as stale.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from autopar import PipelineParallel, Plan, ShardParallel
from autopar.errors import PlanFileError, StalePlanError

WRONG: list[Any] = [None, True, -1, 0, 3, 2**62, 10**400, 1e308, 0.5, "x", "", "\ud800", "inf", [], {}, [[]]]
NUM_ATTACHED = 12
METHODS = {
    "one mesh": ShardParallel(mesh_shape=(2, 4), num_microbatches=2),
    "pipeline": PipelineParallel(num_stages=2, num_microbatches=2),
}


@pytest.fixture(scope="module", params=METHODS)
def damaged(request, make_step, types, tmp_path_factory):
    """The step, its arguments, its plan's record, and the plan."""
    step = make_step(METHODS[request.param])
    args = types(num_layers=2, batch=64)
    plan = step.plan(*args)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return step, args, json.loads(path.read_text()), plan


def entries(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all entries; of a list the first item stands for all."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from entries(inner, (*path, key))


def damages(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what was done, the file): each entry lost, of a list twice, and of each wrong value."""
    for path in entries(record):
        *above, key = path
        holder: Any = record
        for part in above:
            holder = holder[part]
        name, kept = "/".join(map(str, path)), copy.copy(holder)
        for value in WRONG:
            if value != kept[key]:
                holder[key] = value
                yield f"{name} {value}", json.dumps(record)
        holder[key] = kept[key]
        del holder[key]
        yield f"{name} lost", json.dumps(record)
        if isinstance(holder, list):
            holder[:] = [*kept[: key + 1], *kept[key:]]
            yield f"{name} twice", json.dumps(record)
            holder[:] = kept
        else:
            holder.clear()
            holder.update(kept)


def read(path, text: str) -> Plan | None:
    path.unlink(missing_ok=True)  # to write over a file waits for the disk
    path.write_text(text)
    try:
        return Plan.load(path)
    except PlanFileError:
        return None


def test_every_entry_in_every_way(damaged, tmp_path):
    step, args, record, plan = damaged
    traced, path, readable = step._roles(args, {}), tmp_path / "plan.json", []
    for what, text in damages(copy.deepcopy(record)):
        loaded = read(path, text)
        if loaded is not None:
            readable.append((what, loaded))
    assert len(readable) > 2 * NUM_ATTACHED
    random.Random(0).shuffle(readable)
    structural = ("num_microbatches", "parts", "schedule", "stages/0/shape", "stages/0/layers", "stages/0/choices")
    first = [pair for pair in readable if pair[0].startswith(structural)]
    for what, loaded in [*first[:NUM_ATTACHED], *readable[:NUM_ATTACHED]]:
        try:
            assert str(loaded) and loaded._repr_html_() and loaded.timeline().json(), what
            loaded.diff(plan)
            loaded.save(path)
            assert Plan.load(path) == loaded, what
        except Exception as error:
            raise AssertionError(f"a plan with {what} was read, and cannot be used") from error
        try:
            step._attach(*traced, loaded)
        except PlanFileError:
            continue
        except StalePlanError:
            assert what.startswith("fingerprints"), what


def test_text_cut_off_or_overwritten(damaged, tmp_path):
    text, rng = json.dumps(damaged[2]), random.Random(0)
    for _ in range(40):
        at = rng.randrange(len(text))
        assert read(tmp_path / "plan.json", text[:at]) is None
        read(tmp_path / "plan.json", text[:at] + rng.choice('{}[],:"0-x\x00') + text[at + 1 :])


@pytest.mark.parametrize(
    "old, new, wrong",
    [
        ('"name":', '"name": "other", "name":', '"name" stands twice'),
        ('"planning_seconds":', '"planning_seconds": NaN, "x":', "NaN is no number"),
        ('"planning_seconds":', '"planning_seconds": -Infinity, "x":', "-Infinity is no number"),
        ('"planning_seconds":', '"planning_seconds": 1e999, "x":', "not a number"),
    ],
)
def test_what_json_has_no_word_for(damaged, tmp_path, old, new, wrong):
    text = json.dumps(damaged[2])
    assert old in text
    (tmp_path / "plan.json").write_text(text.replace(old, new, 1))
    with pytest.raises(PlanFileError, match=wrong):
        Plan.load(tmp_path / "plan.json")


def test_a_number_of_microbatches_that_does_not_divide(damaged, tmp_path):
    step, args, record, _ = damaged
    loaded = read(tmp_path / "plan.json", json.dumps(record | {"num_microbatches": 3}))
    assert loaded is not None
    with pytest.raises(PlanFileError, match="does not divide into microbatches"):
        step.attach(*args, plan=loaded)

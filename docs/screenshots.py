"""The pictures of the documents, taken of pages as they are: docs/images/*.png.

    python docs/screenshots.py              (needs Chromium; takes a minute, most of it planning)

Plans the benchmarks' GPT for machines that nobody here owns, as a pipeline and on one mesh, and photographs parts of the
pages in a browser.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpt  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import autopar  # noqa: E402
from autopar.report.html import device_places, section, whole_file, wrapped  # noqa: E402
from autopar.report.pictures.memory import memory_pictures  # noqa: E402
from autopar.report.pictures.model import model_picture  # noqa: E402
from autopar.report.pictures.tensors import tensor_table  # noqa: E402
from autopar.report.pictures.time import time_picture  # noqa: E402
from autopar.report.pictures.timetable import timetable_picture  # noqa: E402
from tests.report.browser import evaluate, screenshot  # noqa: E402

WIDTH = 1010


def photograph(name: str, *sections: tuple[str, str]) -> None:
    """Write docs/images/<name>.png: sections of a page, as high as they are."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(whole_file(name, wrapped("".join(section(*each) for each in sections))), encoding="utf-8")
        height = evaluate(page, "return document.querySelector('.autopar-plan').offsetHeight", width=WIDTH)
        image = ROOT / "docs" / "images" / f"{name}.png"
        screenshot(page, image, width=WIDTH, height=height)
        print(image.relative_to(ROOT), f"{image.stat().st_size / 1000:.0f} kB")


step, state, tokens = gpt.make_step(gpt.Config())
method = autopar.PipelineParallel(num_stages=4, num_microbatches=8, schedule="zb-h1")
pipeline = autopar.parallelize(step, cluster=autopar.Cluster.of("2x8 h100"), method=method).plan(state, tokens)
places = device_places(pipeline)
photograph(
    "plan_time",
    ("Where the time goes", time_picture(pipeline)),
    ("The pipeline's timetable", timetable_picture(pipeline.events.events, places)),
)
fullest = dataclasses.replace(pipeline.profile, memory=pipeline.profile.memory[:2])
photograph(
    "plan_memory",
    ("Memory over the step", memory_pictures(dataclasses.replace(pipeline, profile=fullest))),
    ("The model, and where it is cut", model_picture(pipeline)),
)
columns, rows = P(None, "y"), P("y", None)
megatron = {"qkv": columns, "out": rows, "up": columns, "down": rows}
pins = {f"state/params/layers/*/{name}/kernel": spec for name, spec in megatron.items()}
method = autopar.ShardParallel(mesh_shape=(2, 4), constraints=pins | {"batch": P("x", None)})
mesh = autopar.parallelize(step, cluster=autopar.Cluster.of("8 h100"), method=method).plan(state, tokens)
kept = [v for v in mesh.values if v.name.startswith(("state/params", "batch")) and "norm" not in v.name]
made = list(dict.fromkeys(v for v in mesh.values if v.role == "activation" and "(block)" in v.name))
kept += made[:4]
photograph("plan_tensors", ("How each tensor lies", tensor_table(dataclasses.replace(mesh, values=tuple(kept)))))

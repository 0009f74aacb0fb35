"""Pages in a real browser: text fits, nothing overlaps, nothing is loaded, and what the script promises it does."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from autopar import Auto, Cluster, DataParallel, PipelineParallel, compare
from autopar.markup import picture, tag, text
from autopar.report.html import plan_html, whole_file, wrapped
from autopar.report.show import pair_html
from tests.report.browser import evaluate, find_browser, screenshot

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no browser: apt-get install chromium")

MEASURE = """
const wrong = [], name = e => e.textContent.trim().slice(0, 40) || e.className;
const meets = (a, b, by) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > by
                         && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > by;
const boxes = found => [...found].map(e => [e, e.getBoundingClientRect()]).filter(([, r]) => r.width);
const apart = (found, what) => found.forEach(([a, ra], k) => found.slice(k + 1).forEach(([b, rb]) => {
  if (meets(ra, rb, 1)) wrong.push(`${what}: "${name(a)}" over "${name(b)}"`);
}));
document.querySelectorAll('svg').forEach(svg => {
  const frame = svg.getBoundingClientRect(), texts = boxes(svg.querySelectorAll('text'));
  texts.forEach(([e, r]) => {
    if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1)
      wrong.push(`out of its picture: "${name(e)}"`);
    const bar = e.classList.contains('on') && e.previousElementSibling.getBoundingClientRect();
    if (bar && (r.left < bar.left || r.right > bar.right)) wrong.push(`wider than its bar: "${name(e)}"`);
  });
  apart(texts, 'text');
});
apart(boxes(document.querySelectorAll('section')), 'section');
apart(boxes(document.querySelectorAll('.card, .stage, .border')), 'box');
apart(boxes(document.querySelectorAll('.memory > div')), 'memory');
document.querySelectorAll('.card, .block, .stage, .legend .key, h1, p').forEach(e => {
  if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline') wrong.push(`cut off: "${name(e)}"`);
});
if (document.documentElement.scrollWidth > innerWidth) wrong.push('the page is wider than its window');
return {wrong, texts: document.querySelectorAll('svg text').length, pictures: document.querySelectorAll('section').length,
        loaded: performance.getEntriesByType('resource').length};
"""


@pytest.fixture(scope="module")
def plans(make_step, types, plan):
    def pipeline(**settings):
        return make_step(PipelineParallel(**settings)).plan(*types())

    return {
        "one mesh": plan,
        "pipeline": pipeline(num_stages=2, num_microbatches=4, schedule="zb-h1"),
        "interleaved": pipeline(num_stages=2, num_microbatches=16, schedule="interleaved"),
        "tiny": make_step(Auto(), Cluster.of("8 h100")).plan(*types(batch=8, num_layers=1)),
    }


def written(tmp_path, body):
    page = tmp_path / "plan.html"
    page.write_text(whole_file("a page", body), encoding="utf-8")
    return page


@pytest.mark.parametrize("width", [1010, 640])
@pytest.mark.parametrize("which", ["one mesh", "pipeline", "interleaved", "tiny"])
def test_a_plan(plans, which, width, tmp_path):
    found = evaluate(written(tmp_path, plan_html(plans[which])), MEASURE, width=width)
    assert found["wrong"] == []
    assert found["loaded"] == 0 and found["texts"] > 8
    assert found["pictures"] == (6 if plans[which].schedule != "none" else 5)


def test_two_plans(plans, make_step, types, tmp_path):
    other = make_step(DataParallel(zero=3)).plan(*types())
    for page in (pair_html(plans["pipeline"], other), pair_html(plans["one mesh"], other)):
        found = evaluate(written(tmp_path, page), MEASURE)
        assert found["wrong"] == [] and found["pictures"] >= 4


def test_long_names_and_a_budget_that_is_near(plans, tmp_path):
    long = dataclasses.replace(
        plans["pipeline"],
        name="a_step_whose_name_goes_on_" * 8,
        budget_bytes=1.2 * max(plans["pipeline"].cost.peak_bytes),
    )
    assert evaluate(written(tmp_path, plan_html(long)), MEASURE)["wrong"] == []


def test_what_is_wrong_is_found(tmp_path):
    crowded = picture(20, text(0, 12, "one text"), text(10, 12, "another"), text(900, 12, "beyond the edge"), label="")
    page = written(tmp_path, wrapped(tag("section", crowded)))
    wrong = " ".join(evaluate(page, MEASURE)["wrong"])
    assert 'text: "one text" over "another"' in wrong and 'out of its picture: "beyond' in wrong


def test_the_mouse_and_the_search(plans, tmp_path):
    found = evaluate(
        written(tmp_path, plan_html(plans["pipeline"])),
        """
const bar = document.querySelector('rect.k-F'), tip = document.querySelector('.tip');
bar.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: 50, clientY: 50}));
const words = tip.style.display === 'block' ? tip.textContent : '';
const find = document.querySelector('.find'), rows = [...document.querySelectorAll('.tensors tbody tr')];
find.value = 'momentum kernel';
find.dispatchEvent(new Event('input'));
const left = rows.filter(row => row.style.display !== 'none').map(row => row.textContent);
return {words, left, all: rows.length};
""",
    )
    assert "forward" in found["words"]
    assert 0 < len(found["left"]) < found["all"] and all("momentum" in row and "kernel" in row for row in found["left"])


@pytest.mark.parametrize("flags", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_a_screenshot(plans, flags, tmp_path):
    page, image = written(tmp_path, plan_html(plans["pipeline"])), tmp_path / "plan.png"
    screenshot(page, image, *flags)
    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1010, 1400)
    assert len(data) > 20_000, "an empty page is smaller"
    ground = evaluate(page, "return getComputedStyle(document.querySelector('.autopar-plan')).backgroundColor", *flags)
    assert ground == ("rgb(20, 24, 29)" if flags else "rgb(255, 255, 255)")


def test_a_comparison_keeps_names_on_one_line(make_step, types, tmp_path):
    methods = [DataParallel(zero=3), "fsdp", PipelineParallel(num_stages=2, num_microbatches=4, schedule="1f1b")]
    prices = {"h100": {"per_hour": 2.5, "watts": 700}}
    page = compare(make_step(Auto()), types(), ["8 h100"], methods, prices=prices).save_html(tmp_path / "page.html")
    lines = "[...document.querySelectorAll('td.name')].map(e => Math.round(e.clientHeight / 18))"
    seen = evaluate(page, f"const {{wrong}} = (() => {{{MEASURE}}})(); return {{wrong, lines: {lines}}};", width=900)
    assert seen == {"wrong": [], "lines": [1] * 6}

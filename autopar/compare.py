"""`autopar.compare`: compares machines and methods for one step, in one table, and as a page with a bar for each.

In:     a step, its arguments or their types; clusters, which one need not own; methods; the user's prices of devices.
Out:    `Comparison`: a row for each cluster and method, the fastest first, with rates, free memory, price and energy; a row
        without a plan says why. As text, and as HTML that loads nothing.
Method: each is planned as if it were to be run; the figures are those of the plans (`Cost`). Prices and watts that the user
        gives here override those that clusters and devices state; no price is built in.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from autopar.api import parallelize
from autopar.errors import AutoparError, ClusterError, check_choice
from autopar.markup import WIDTH, box, legend, picture, room_for, tag, text
from autopar.mesh import Cluster
from autopar.mesh.find_device import known_device
from autopar.plan.words import bytes_text, seconds_text, share_text
from autopar.report.html import section, table_html, whole_file, wrapped
from autopar.report.page import Table
from autopar.report.pictures.timetable import RIGHT, TOP, clock_axis
from autopar.report.plan import Plan
from autopar.report.show import write_page
from autopar.report.text import wide_text
from autopar.search.figures import sum_stated
from autopar.search.method_names import method_of
from autopar.search.methods import Method, method_text
from autopar.step import ParallelStep


def compare(
    step: ParallelStep | Callable[..., Any],
    args: Sequence[Any],
    clusters: Sequence[Cluster | str],
    methods: Sequence[Method | str] | None = None,
    *,
    prices: Mapping[str, Any] | str | PathLike | None = None,
    sort: Sort = "step",
) -> Comparison:
    """Plan a step for several clusters, by several methods; touches no device.

    Args:
        step: A step, made by `parallelize`, or a plain function.
        args: Its arguments, or their types (`jax.ShapeDtypeStruct`).
        clusters: Machines, as `Cluster` or as text for `Cluster.of`.
        methods: Methods, as in `parallelize`; None: the step's own.
        prices: `{"per_hour": ..., "watts": ...}` of one device, by the device's name, and perhaps `"currency"`; or a TOML
            file with such tables. None: prices and watts as clusters and devices state them.
        sort: `"step"`, `"rate"`, `"price"` or `"energy"`.

    Raises:
        ClusterError: A cluster cannot be read.
        AutoparError: A method, a price or the order cannot be read.
    """
    step = step if isinstance(step, ParallelStep) else parallelize(step)
    chosen = [method_of(m) if isinstance(m, str) else m for m in (methods or [step.method])]
    machines = [(c, Cluster.of(c)) if isinstance(c, str) else (str(c), c) for c in clusters]
    if not machines:
        raise ClusterError(
            "there is nothing to compare.", given="clusters=[]", do='name some: ["8 h100", "16 a100-80"].'
        )
    stated, currency = read_prices(prices)
    rows = [
        _row(step.replan(cluster, method), tuple(args), name, cluster, method_text(method), stated)
        for name, cluster in machines
        for method in chosen
    ]
    return Comparison(getattr(step, "__name__", "step"), tuple(rows), currency).sorted_by(sort)


def _row(
    step: ParallelStep, args: tuple[Any, ...], name: str, cluster: Cluster, method: str, stated: Mapping[str, Price]
) -> Row:
    try:
        plan = step.plan(*args)
    except AutoparError as error:
        return Row(name, method, None, error.summary.rstrip(".") + (f": {error.wrong}" if error.wrong else ""))
    groups = cluster.groups or (cluster,)
    known = [(g, stated.get(g.device.name, Price())) for g in groups]
    per_hour = [
        None if hourly is None else g.num_devices * hourly
        for g, price in known
        for hourly in (g.price_per_hour if price.per_hour is None else price.per_hour,)
    ]
    watts = [
        None if rated is None else g.num_devices * rated
        for g, price in known
        for rated in (g.device.watts if price.watts is None else price.watts,)
    ]
    return Row(name, method, plan, "", sum_stated(per_hour), sum_stated(watts))


@dataclass(frozen=True, slots=True)
class Price:
    """The price per hour and the power of one device; None: not stated."""

    per_hour: float | None = None
    watts: float | None = None


def read_prices(given: Mapping[str, Any] | str | PathLike | None) -> tuple[dict[str, Price], str]:
    """Prices by the name of a device, the catalog's or the user's own; and the currency.

    `given`: as in `compare`.

    Raises `AutoparError`: it is not such a table.
    """
    if given is None:
        return {}, ""
    if not isinstance(given, Mapping):
        try:
            given = tomllib.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise _no_prices(str(given), f"{getattr(error, 'strerror', None) or error}") from error
    found = {}
    for name, figures in given.items():
        if name == "currency":
            continue
        if not isinstance(figures, Mapping) or not set(figures) <= {"per_hour", "watts"}:
            raise _no_prices(f"{name} = {figures!r}", "a device has `per_hour` and `watts`, or one of them.")
        for what, value in figures.items():
            if not isinstance(value, int | float) or not value >= 0:
                raise _no_prices(f"{name}.{what} = {value!r}", "it is no number, 0 or more.")
        model = known_device(name)
        key = name if model is None else model.device.name  # a name that the catalog lacks is one of the user's devices
        found[key] = Price(figures.get("per_hour"), figures.get("watts"))
    return found, str(given.get("currency", ""))


def _no_prices(given: str, wrong: str) -> AutoparError:
    return AutoparError(
        "the prices cannot be read.",
        given=given,
        wrong=wrong,
        do='write one table for each device: currency = "EUR", then [h100] with per_hour = 2.5 and watts = 700, of one.',
    )


Sort = Literal["step", "rate", "price", "energy"]
ROW, BAR = 30, 20
PARTS = (("F", "kernels"), ("all-gather", "exposed communication"), ("wait", "bubbles"))
"""The parts of a step: (CSS class of the colour, name)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster and method.

    Attributes:
        cluster: The cluster, as text.
        method: The method, as text.
        plan: The plan; None: there is none.
        problem: Why there is no plan, in one line.
        price_per_hour: Price of all devices; None: not stated.
        watts: Power of all devices; None: not stated.
    """

    cluster: str
    method: str
    plan: Plan | None
    problem: str = ""
    price_per_hour: float | None = None
    watts: float | None = None

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one step; inf: there is no plan."""
        return math.inf if self.plan is None else self.plan.cost.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        return 0.0 if self.plan is None else self.plan.cost.mfu

    @property
    def amount(self) -> int:
        """How many of `unit` one step trains on."""
        return 0 if self.plan is None else self.plan.cost.figures.amount

    @property
    def unit(self) -> str:
        """`"tokens"` or `"samples"`."""
        return "samples" if self.plan is None else self.plan.cost.figures.unit

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the step in which devices wait for collectives."""
        return 0.0 if self.plan is None else self.plan.cost.exposed_communication_seconds

    @property
    def rate(self) -> float:
        """Units per second."""
        return 0.0 if self.plan is None else self.plan.cost.rate

    @property
    def left_bytes(self) -> float:
        """Free bytes of the memory budget on the fullest device."""
        return 0.0 if self.plan is None else self.plan.budget_bytes - max(self.plan.cost.peak_bytes)

    @property
    def price_per_million(self) -> float | None:
        """Price of a million units; None: not stated."""
        return self._per_million(self.price_per_hour, 3600)

    @property
    def kwh_per_million(self) -> float | None:
        """Energy for a million units, in kWh; None: the watts are not stated."""
        return self._per_million(self.watts, 3.6e6)

    def _per_million(self, per_hour: float | None, seconds: float) -> float | None:
        return None if per_hour is None or not self.rate else per_hour / seconds * 1e6 / self.rate


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows, the best first, those without a plan last.

    Attributes:
        name: The name of the step.
        rows: One for each cluster and method.
        currency: The currency of the prices.
    """

    name: str
    rows: tuple[Row, ...]
    currency: str = ""

    def sorted_by(self, key: Sort) -> Comparison:
        """Sorted by `"step"` time, `"rate"`, `"price"` or `"energy"`; rows without the figure come last."""
        check_choice("compare", "sort", key, get_args(Sort))

        def place(row: Row) -> tuple[bool, float]:
            value = {
                "step": row.step_seconds,
                "rate": -row.rate,
                "price": row.price_per_million,
                "energy": row.kwh_per_million,
            }
            found = value[key]
            return row.plan is None or found is None, math.inf if found is None else found

        return Comparison(self.name, tuple(sorted(self.rows, key=place)), self.currency)

    def __str__(self) -> str:
        table = replace(self._table(), title=self._title)
        return "\n".join(filter(None, [wide_text([table], 240), table.note]))

    def _repr_html_(self) -> str:
        figures = table_html(self._table(), is_open=True)  # the main content
        bars = section("Where the time goes", _bars(self.rows))
        return wrapped("\n".join([tag("h1", escape(self._title)), bars, figures]))

    def save_html(self, path: str | PathLike) -> Path:
        """Write the page as a file that loads nothing; returns its path."""
        return write_page(Path(path), whole_file(self._title, self._repr_html_()))

    @property
    def _title(self) -> str:
        return f"{self.name}, one step"

    def _table(self) -> Table:
        """The figures as a table of text."""
        rows = self.rows
        unit = next((row.unit for row in rows if row.plan is not None), "samples")
        has_price = any(row.price_per_million is not None for row in rows)
        has_watts = any(row.kwh_per_million is not None for row in rows)
        columns = ["cluster", "method", "step", "MFU", f"{unit}/s", "peak", "left", "exposed", "bubbles"]
        columns += [f"{self.currency or 'price'} per million"] * has_price + ["kWh per million"] * has_watts
        cells = tuple(_cells(row, has_price, has_watts) for row in rows)
        problems = "\n".join(f"{row.cluster}, {row.method}: {row.problem}" for row in rows if row.problem)
        return Table("All figures", tuple(columns), cells, tuple(range(2, len(columns))), problems, (0, 1))


def _cells(row: Row, has_price: bool, has_watts: bool) -> tuple[str, ...]:
    more = [row.price_per_million] * has_price + [row.kwh_per_million] * has_watts
    if row.plan is None:
        return (row.cluster, row.method, "no plan", *[""] * (6 + len(more)))
    cost = row.plan.cost
    return (
        row.cluster,
        row.method,
        seconds_text(cost.step_seconds),
        share_text(row.mfu),
        f"{row.rate:,.0f}",
        bytes_text(max(cost.peak_bytes)),
        bytes_text(row.left_bytes),
        f"{row.exposed_seconds / (cost.step_seconds or 1):.0%}",
        f"{cost.bubble_seconds / (cost.step_seconds or 1):.0%}",
        *("?" if value is None else f"{value:.3g}" for value in more),
    )


def _bars(rows: Sequence[Row]) -> str:
    planned = [row for row in rows if row.plan is not None]
    if not planned:
        return tag("p", "There is no plan.")
    names = [f"{row.cluster}, {row.method}" for row in planned]
    left = min(WIDTH / 2, max(map(room_for, names)) + 12)
    end = max(row.step_seconds for row in planned)
    scale = (WIDTH - left - RIGHT) / end
    parts = clock_axis(end, scale, TOP + ROW * len(planned), left)
    for number, (row, name) in enumerate(zip(planned, names, strict=True)):
        x, y = left, TOP + number * ROW
        fits = int((left - 12) / room_for("x"))
        parts.append(text(0, y + 14, name if len(name) <= fits else name[: fits - 1] + "…", "strong"))
        assert row.plan is not None
        bubble = row.plan.cost.bubble_seconds
        for (kind, words), seconds in zip(
            PARTS, (row.step_seconds - row.exposed_seconds - bubble, row.exposed_seconds, bubble), strict=True
        ):
            if seconds > 1e-6 * row.step_seconds:
                parts.append(box(x, y, seconds * scale, BAR, f"k-{kind}", f"{name}, {words}: {seconds_text(seconds)}"))
                x += seconds * scale
    return picture(TOP + ROW * len(planned), *parts, label="Seconds of a step of each plan") + legend(
        (f"k-{kind}", words) for kind, words in PARTS
    )

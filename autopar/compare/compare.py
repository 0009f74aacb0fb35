"""Plan a step for several machines, by several methods, and put the plans into one order.

In:     a step, its arguments or their types; clusters, methods, prices.
Out:    `Comparison`: a row for each cluster and method, the quickest first; what cannot be planned says why.
Method: each is planned as it would be to run it; the figures are those of the plans (`Cost`). Prices and watts that are
        given here come before what clusters and devices state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from autopar.api import parallelize
from autopar.compare.page import comparison_html, comparison_text
from autopar.compare.prices import Price, read_prices
from autopar.compare.row import Row
from autopar.errors import AutoparError, ClusterError, check_choice
from autopar.mesh import Cluster
from autopar.report.html import whole_file
from autopar.report.show import write_page
from autopar.search.figures import sum_stated
from autopar.search.method_names import method_of
from autopar.search.methods import Method, method_text
from autopar.step import ParallelStep

SORTS = ("step", "rate", "price", "energy")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows, the best first; those without a plan are the last.

    Attributes:
        name: The step's.
        rows: One for each cluster and method.
        currency: Of the prices.
    """

    name: str
    rows: tuple[Row, ...]
    currency: str = ""

    def sorted_by(self, key: str) -> Comparison:
        """By `"step"` time, `"rate"`, `"price"` or `"energy"`; what has no such figure is behind."""
        check_choice("compare", "sort", key, SORTS)

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
        return comparison_text(self._title, self.rows, self.currency)

    def _repr_html_(self) -> str:
        return comparison_html(self._title, self.rows, self.currency)

    def save_html(self, path: str | PathLike) -> Path:
        """Write the page as a file that needs nothing else."""
        return write_page(Path(path), whole_file(self._title, self._repr_html_()))

    @property
    def _title(self) -> str:
        return f"{self.name}, one step"


def compare(
    step: ParallelStep | Callable[..., Any],
    args: Sequence[Any],
    clusters: Sequence[Cluster | str],
    methods: Sequence[Method | str] | None = None,
    *,
    prices: Mapping[str, Any] | str | PathLike | None = None,
    sort: str = "step",
) -> Comparison:
    """Plan a step for several clusters, by several methods; touches no device.

    Args:
        step: A step, made by `parallelize` or not.
        args: Its arguments, or their types (`jax.ShapeDtypeStruct`).
        clusters: Machines, as `Cluster` or as `Cluster.of` reads them.
        methods: As `parallelize` takes them; None: the step's own.
        prices: By name of a device `{"per_hour": ..., "watts": ...}`, of one device, and perhaps `"currency"`; or a TOML
            file with such tables. None: no column of prices and energy.
        sort: `"step"`, `"rate"`, `"price"` or `"energy"`.

    Raises:
        ClusterError: A cluster cannot be read.
        AutoparError: A method, a price or the order cannot be.
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

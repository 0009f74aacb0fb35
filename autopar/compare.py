"""`autopar.compare`: one step on several machines, by several methods, in one table.

In:     a step, its arguments or their types; clusters, which one need not own; methods; what a device costs, from the user.
Out:    `Comparison`: a row for each cluster and method, the quickest first; what cannot be planned says why.
Method: each is planned as it would be to run it. The share of the peak that is used (MFU) counts what the traced step
        multiplies, what it says itself to compute again included, at each dtype's peak; Chowdhery et al., "PaLM", 2022.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autopar._jax import JaxprEqn
from autopar.api import ParallelStep, parallelize
from autopar.errors import AutoparError, ClusterError
from autopar.fit.values import amount_of
from autopar.intra_op.costs import is_contraction
from autopar.ir.program import Program
from autopar.ir.region import bodies_of, is_region, trip_count
from autopar.ir.rules import rule_for
from autopar.mesh import Cluster
from autopar.mesh.catalog import find_device
from autopar.plan.words import bytes_text, seconds_text
from autopar.report.plan import Plan
from autopar.search.method_names import method_of
from autopar.search.methods import Method, method_text

SORTS = ("step", "rate", "price", "energy")


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster and method.

    Attributes:
        cluster: In words.
        method: In words.
        plan: None: there is none.
        problem: Why there is none, one line.
        mfu: Share of the devices' peak that is used, 0 to 1.
        amount: What one step learns from: so many of `unit`.
        unit: `"tokens"` or `"samples"`.
        price_per_hour: Of all devices; None: not stated.
        watts: Of all devices; None: not stated.
    """

    cluster: str
    method: str
    plan: Plan | None
    problem: str = ""
    mfu: float = 0.0
    amount: int = 0
    unit: str = "samples"
    price_per_hour: float | None = None
    watts: float | None = None

    @property
    def step_seconds(self) -> float:
        """Of one step; inf: there is no plan."""
        return math.inf if self.plan is None else self.plan.cost.step_seconds

    @property
    def rate(self) -> float:
        """Units per second."""
        return 0.0 if self.plan is None else self.amount / self.step_seconds

    @property
    def left_bytes(self) -> float:
        """Of the budget, on the fullest device."""
        return 0.0 if self.plan is None else self.plan.budget_bytes - max(self.plan.cost.peak_bytes)

    @property
    def price_per_million(self) -> float | None:
        """Of a million units."""
        return self._per_million(self.price_per_hour, 3600)

    @property
    def kwh_per_million(self) -> float | None:
        """Energy for a million units."""
        return self._per_million(self.watts, 3.6e6)

    def _per_million(self, per_hour: float | None, seconds: float) -> float | None:
        return None if per_hour is None or not self.rate else per_hour / seconds * 1e6 / self.rate


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
        if key not in SORTS:
            raise AutoparError(
                "there is no such order.",
                given=f"sort={key!r}",
                wrong=f"it is none of {', '.join(SORTS)}.",
                do="pass one of these.",
            )

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
        columns, rows = self._cells()
        table = Table(title=f"{self.name}, one step", title_justify="left", box=None, pad_edge=False)
        for k, column in enumerate(columns):
            table.add_column(column, justify="left" if k < 2 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console = Console(width=200, force_terminal=False, force_jupyter=False, highlight=False)
        with console.capture() as captured:
            console.print(table)
        problems = [f"{row.cluster}, {row.method}: {row.problem}" for row in self.rows if row.problem]
        return "\n".join([*(line.rstrip() for line in captured.get().rstrip().splitlines()), *problems])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        unit = next((row.unit for row in self.rows if row.plan is not None), "samples")
        columns = ["cluster", "method", "step", "MFU", f"{unit}/s", "peak", "left", "communication", "bubbles"]
        has_price = any(row.price_per_million is not None for row in self.rows)
        has_watts = any(row.watts is not None for row in self.rows)
        columns += [f"{self.currency or 'price'} per million"] if has_price else []
        columns += ["kWh per million"] if has_watts else []
        return columns, [_cells_of(row, has_price, has_watts) for row in self.rows]


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
    stated, currency = _prices(prices)
    rows = [
        _row(step.replan(cluster, method), tuple(args), name, cluster, method_text(method), stated)
        for name, cluster in machines
        for method in chosen
    ]
    return Comparison(step.__name__, tuple(rows), currency).sorted_by(sort)


def _row(
    step: ParallelStep, args: tuple[Any, ...], name: str, cluster: Cluster, method: str, stated: Mapping[str, _Price]
) -> Row:
    try:
        plan = step.plan(*args)
    except AutoparError as error:
        return Row(name, method, None, error.summary.rstrip(".") + (f": {error.wrong}" if error.wrong else ""))
    program, roles = plan.origin.program, plan.origin.roles
    amount, unit = amount_of([program.in_avals[k] for k in roles.batch])
    mfu = least_seconds(program, cluster) / plan.cost.step_seconds
    groups = cluster.groups or (cluster,)
    known = [(g.num_devices, stated.get(g.device.name, _Price())) for g in groups]
    per_hour = [None if price.per_hour is None else n * price.per_hour for n, price in known]
    watts = [None if price.watts is None else n * price.watts for n, price in known]
    return Row(name, method, plan, "", mfu, amount, unit, _sum(per_hour), _sum(watts))


def least_seconds(program: Program, cluster: Cluster) -> float:
    """A step's multiplications on all devices at once, each at the peak of its dtype, and nothing else."""
    groups = cluster.groups or (cluster,)

    def seconds(eqn: JaxprEqn) -> float:
        if is_region(eqn):
            return trip_count(eqn) * sum(seconds(inner) for body in bodies_of(eqn) for inner in body.eqns)
        rule = rule_for(eqn)
        if not is_contraction(rule):
            return 0.0
        dtype = eqn.outvars[0].aval.dtype
        return rule.flops / sum(g.num_devices * g.device.flops_per_second(dtype) for g in groups)

    return sum(seconds(eqn) for eqn in program.jaxpr.eqns)


@dataclass(frozen=True, slots=True)
class _Price:
    per_hour: float | None = None
    watts: float | None = None


def _prices(given: Mapping[str, Any] | str | PathLike | None) -> tuple[dict[str, _Price], str]:
    """By the catalog's name of a device, or the user's own."""
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
        try:
            key = find_device(name).device.name
        except ClusterError:
            key = name  # one that the user has described
        found[key] = _Price(figures.get("per_hour"), figures.get("watts"))
    return found, str(given.get("currency", ""))


def _no_prices(given: str, wrong: str) -> AutoparError:
    return AutoparError(
        "the prices cannot be read.",
        given=given,
        wrong=wrong,
        do='write one table for each device: currency = "EUR", then [h100] with per_hour = 2.5 and watts = 700, of one.',
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _cells_of(row: Row, has_price: bool, has_watts: bool) -> list[str]:
    more = [row.price_per_million] * has_price + [row.kwh_per_million] * has_watts
    if row.plan is None:
        return [row.cluster, row.method, "no plan", *[""] * (6 + len(more))]
    cost = row.plan.cost
    return [
        row.cluster,
        row.method,
        seconds_text(cost.step_seconds),
        f"{row.mfu:.0%}" if row.mfu >= 0.1 else f"{row.mfu:.1%}",
        f"{row.rate:,.0f}",
        bytes_text(max(cost.peak_bytes)),
        bytes_text(row.left_bytes),
        f"{cost.exposed_communication_seconds / cost.step_seconds:.0%}",
        f"{cost.bubble_seconds / cost.step_seconds:.0%}",
        *("?" if value is None else f"{value:.3g}" for value in more),
    ]

"""Plans a step for several machines, by several methods, and sorts the plans.

In:     a step, its arguments or their types; clusters, methods, prices.
Out:    `Comparison`: a row for each cluster and method, the fastest first; a row without a plan says why.
Method: each is planned as if it were to be run; the figures are those of the plans (`Cost`). Prices and watts that the user
        gives here override those that clusters and devices state; no price is built in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from autopar.api import parallelize
from autopar.compare.comparison import Comparison, Row, Sort
from autopar.errors import AutoparError, ClusterError
from autopar.mesh import Cluster
from autopar.mesh.find_device import known_device
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

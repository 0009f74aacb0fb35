"""Fits the parameters of the cost model to measurements.

In:     seconds of cases, starting values of the device and the link.
Out:    the `Device` and `Link` that fit best, and their prediction for each case.
Method: one kind of case after the other: launch and memory from passes, products by dtype, then convolutions, fused kernels,
        updates and whole layers, and links. Each parameter minimizes the mean relative error (medians are not smooth) of
        the formulas that plans are priced with, by a search on successively finer grids.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.calibrate.cases import Case
from autopar.cost import collective_seconds, kernel_seconds
from autopar.cost.kernels import Product
from autopar.mesh import Device, Link, LogicalMesh
from autopar.mesh.machine_profile import Measured

GRID, ROUNDS = 9, 5
"""Points per parameter on a grid, and number of grids."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A case, and the measured seconds of one turn."""

    case: Case
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """The fitted device, and the link between such devices."""

    device: Device
    link: Link | None

    def seconds(self, case: Case) -> float:
        """Predicted seconds of a turn."""
        return sum(kernel_seconds(kernel, self.device) for kernel in case.kernels) + self.sending_seconds(case)

    def sending_seconds(self, case: Case) -> float:
        """Predicted seconds of the collectives of a turn."""
        if not case.collectives or self.link is None:
            return 0.0
        mesh = LogicalMesh((case.group,), links=(self.link.within(case.group),))
        return sum(collective_seconds(kind, size, ("x",), mesh) for kind, size in case.collectives)


def fit(samples: Sequence[Sample], start: Device, link: Link) -> Fitted:
    """Fit all parameters that were measured; others keep their starting values.

    `start` and `link`: the catalog's, or guesses. Peak rates and the number of cores are kept if the catalog has them.
    """
    device, messages = start, [s for s in samples if s.case.collectives]
    for kinds, fitted in _FITS:
        own = [s for s in samples if s.case.kind in kinds and s.case.is_fitted]
        device = fitted(device, own) if own else device
    return Fitted(device, _fit_link(device, messages, link) if messages else None)


def as_measured(samples: Sequence[Sample], fitted: Fitted) -> tuple[Measured, ...]:
    """The measurements with fitted predictions."""
    return tuple(Measured(s.case.kind, s.case.text, s.seconds, fitted.seconds(s.case)) for s in samples)


def _fit_launch(device: Device, samples: Sequence[Sample]) -> Device:
    """Fit the launch time, by kernels that do next to nothing."""
    known = Fitted(_with(device, launch_seconds=0.0), None)
    each = [max(0.0, s.seconds - known.seconds(s.case)) / len(s.case.kernels) for s in samples]
    return _with(device, launch_seconds=min(each))


def _fit_passes(device: Device, samples: Sequence[Sample]) -> Device:
    """Fit the rate of memory."""

    def made(rate: float) -> Device:
        achieved = dataclasses.replace(device.achieved, memory=1.0)
        return dataclasses.replace(device, memory_bytes_per_second=rate, achieved=achieved)

    rates = [sum(kernel.num_bytes for kernel in s.case.kernels) / s.seconds for s in samples]
    found = made(*_closest(lambda rate: _error(made(rate), samples), [(min(rates) / 2, max(rates) * 2)]))
    return _as_share(device, found)


def _as_share(device: Device, found: Device) -> Device:
    """Express the memory's rate as a fraction of the datasheet's, if there is one that is not exceeded."""
    rate, stated = found.memory_bytes_per_second, device.memory_bytes_per_second
    if not rate < stated < math.inf:
        return found
    achieved = dataclasses.replace(found.achieved, memory=rate / stated)
    return dataclasses.replace(found, memory_bytes_per_second=stated, achieved=achieved)


def _fit_products(device: Device, samples: Sequence[Sample]) -> Device:
    """Fit rates of products (for the catalog's devices one fraction of all peaks, else by dtype), and tile parameters.

    Products that do next to nothing (`"launch"`) take a tile's time at least, which few large ones would leave open.
    """
    tiny, samples = ([s for s in samples if (s.case.kind == "launch") == is_tiny] for is_tiny in (True, False))
    if not samples:
        return device
    has_peak = isinstance(device.peak_flops, Mapping)
    main = samples[0].case.dtype
    own = samples if has_peak else [s for s in samples if s.case.dtype == main]
    longest_tile = min((s.seconds / len(_products(s.case)) for s in tiny), default=math.inf)

    def made(rate: float, tile_seconds: float, balance: float) -> Device:
        share, tile_seconds = min(1.0, rate) if has_peak else 1.0, min(tile_seconds, longest_tile)
        achieved = dataclasses.replace(device.achieved, product=share, tile_seconds=tile_seconds, balance=balance)
        peak = device.peak_flops if has_peak else {main: rate}
        return dataclasses.replace(device, peak_flops=peak, achieved=achieved)

    flops = [_flops(s.case) / s.seconds for s in own]
    spans = [(0.1, 1.0) if has_peak else (min(flops) / 2, max(flops) * 2)]
    start = device.achieved
    spans.append((max(start.tile_seconds, 1e-7) / 20, max(start.tile_seconds, 1e-7) * 20))
    spans.append((max(start.balance, 10.0) / 5, max(start.balance, 10.0) * 5))
    found = made(*_closest(lambda *at: _error(made(*at), own), spans))
    if has_peak:
        return found
    peak = dict(found.peak_flops) if isinstance(found.peak_flops, Mapping) else {}
    for dtype in dict.fromkeys(s.case.dtype for s in samples if s.case.dtype != main):
        others = [s for s in samples if s.case.dtype == dtype]
        flops = [_flops(s.case) / s.seconds for s in others]

        def error(rate: float, dtype: str = dtype, others: Sequence[Sample] = others) -> float:
            return _error(dataclasses.replace(found, peak_flops={dtype: rate}), others)

        peak[dtype] = _closest(error, [(min(flops) / 2, max(flops) * 4)])[0]
    return dataclasses.replace(found, peak_flops=peak)


def _fit_share(device: Device, samples: Sequence[Sample], name: str, least: float, most: float) -> Device:
    """Fit the field of `Achieved` that a kind of kernels depends on."""

    def made(share: float) -> Device:
        return _with(device, **{name: min(most, share)})

    return made(*_closest(lambda share: _error(made(share), samples), [(least, most)]))


def _with(device: Device, **achieved: Any) -> Device:
    return dataclasses.replace(device, achieved=dataclasses.replace(device.achieved, **achieved))


def _fit_link(device: Device, samples: Sequence[Sample], link: Link) -> Link:
    """Fit latency and rate of the link, to all collectives together."""

    def made(latency: float, rate: float) -> Link:
        return dataclasses.replace(link, latency_seconds=latency, bytes_per_second=rate)

    rates = [sum(size for _, size in s.case.collectives) / s.seconds for s in samples]
    least = min(s.seconds for s in samples)
    spans = [(least / 1000, least), (min(rates), max(rates) * 4)]
    known = {id(s): sum(kernel_seconds(kernel, device) for kernel in s.case.kernels) for s in samples}

    def error(latency: float, rate: float) -> float:
        fitted = Fitted(device, made(latency, rate))
        return _mean(_ratio(known[id(s)] + fitted.sending_seconds(s.case), s.seconds) for s in samples)

    return made(*_closest(error, spans))


def _flops(case: Case) -> float:
    return sum(k.work * k.count * k.rows * k.columns * k.depth for k in _products(case))


def _products(case: Case) -> list[Product]:
    return [kernel for kernel in case.kernels if isinstance(kernel, Product)]


def _error(device: Device, samples: Sequence[Sample]) -> float:
    fitted = Fitted(device, None)
    return _mean(_ratio(fitted.seconds(s.case), s.seconds) for s in samples)


def _ratio(one: float, other: float) -> float:
    """Distance of two times, |log ratio|: 0 if equal, the same for twice and for half."""
    return abs(math.log(one / other))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _closest(error: Callable[..., float], spans: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Minimize the error on logarithmic grids, each finer and around the best point of the one before."""
    logs = [(math.log(low), math.log(max(high, low * (1 + 1e-9)))) for low, high in spans]
    best: tuple[float, tuple[float, ...]] = (math.inf, ())
    for _ in range(ROUNDS):
        points: list[tuple[float, ...]] = [()]
        for low, high in logs:
            points = [(*p, low + (high - low) * k / (GRID - 1)) for p in points for k in range(GRID)]
        best = min(best, *((error(*map(math.exp, point)), point) for point in points))
        width = [(high - low) / (GRID - 1) * 1.5 for low, high in logs]
        logs = [(at - w, at + w) for at, w in zip(best[1], width, strict=True)]
    return tuple(map(math.exp, best[1]))


_FITS: tuple[tuple[tuple[str, ...], Callable[[Device, Sequence[Sample]], Device]], ...] = (
    (("launch",), _fit_launch),
    (("pass",), _fit_passes),
    (("product", "launch"), _fit_products),
    (("launch",), _fit_launch),  # again, now that the other time of these kernels is known
    (("product", "launch"), _fit_products),
    (("launch",), _fit_launch),
    (("turned",), functools.partial(_fit_share, name="turned", least=0.1, most=4.0)),
    (("transpose",), functools.partial(_fit_share, name="turning", least=1.0, most=100.0)),
    (("convolution",), functools.partial(_fit_share, name="convolution", least=0.01, most=4.0)),
    (("attention",), functools.partial(_fit_share, name="fused", least=0.01, most=1.0)),
    (("update",), functools.partial(_fit_share, name="update_passes", least=0.5, most=20.0)),
    (("layer",), functools.partial(_fit_share, name="passes", least=0.5, most=20.0)),
)
"""(kinds of cases, fit), in order."""

"""Chooses where stages and layers begin in a chain: with balanced work, and few bytes over the borders.

In:     a chain (`chain.py`).
Out:    the first segment of each stage (`balanced_borders`) or layer (`layer_borders`); `least_largest`, the work of the
        largest stage where none could be smaller.
Method: one dynamic program (`cheapest`) over the ends of runs of segments. What a run costs differs, and whether the sum
        counts or the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.grouping import grouped
from autopar.inter_op.chain import Chain
from autopar.tuning import TUNING


def balanced_borders(
    chain: Chain, num_stages: int, slack: float = 0.1, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """First segment of each stage: the fewest bytes between stages, with work balanced to within `slack`.

    Ties go to the same place of equal layers, since equal stages are planned once. If the user marked borders, stages
    begin only there; if more stages are wanted than that, at every mark and elsewhere.

    Args:
        num_stages: At most the number of segments.
        slack: Fraction by which a stage may exceed the least possible largest work, to send fewer bytes.
        shares: Relative speed of each stage, which divides its work; (): all equal.
    """
    speed = np.array(shares or [1.0] * num_stages)
    ends = (0, *chain.marks, chain.num_segments)
    if chain.marks and num_stages < len(ends):
        return _balance(chain, ends[:-1], chain.num_segments, speed, slack)
    counts = _stages_between(chain, ends, num_stages)
    borders: list[int] = []
    for first, end, count in zip(ends, ends[1:], counts, strict=False):
        borders += _balance(chain, range(first, end), end, speed[len(borders) : len(borders) + count], slack)
    return tuple(borders)


def _stages_between(chain: Chain, ends: Sequence[int], num_stages: int) -> list[int]:
    """Number of stages between each two marks: one each; further ones go where the work per stage is largest."""
    counts = [1] * (len(ends) - 1)
    for _ in range(num_stages - len(counts)):
        each = [
            float(chain.work[first:end].sum()) / count if count < end - first else -1.0
            for first, end, count in zip(ends, ends[1:], counts, strict=False)
        ]
        counts[each.index(max(each))] += 1
    return counts


def _balance(chain: Chain, places: Sequence[int], end: int, speed: np.ndarray, slack: float) -> tuple[int, ...]:
    """Choose the `places` at which stages begin, the first of them included."""
    total = np.concatenate([[0.0], np.cumsum(chain.work)])[[*places, end]]
    cap = least_largest(total, len(speed), speed) * (1 + slack)

    def cost(last: int) -> np.ndarray:
        work = (total[last] - total[:last]) / speed[:, None]
        return _uneven(work, cap, cap)

    found = cheapest(_begin(chain)[[*places]], cost, len(speed))[1]
    return tuple(places[k] for k in found)


def layer_borders(chain: Chain, num_layers: int, slack: float) -> tuple[int, ...]:
    """First segment of each layer, so that none has more than `1 + slack` times 1 / `num_layers` of the work.

    A segment larger than that is a layer by itself, with small neighbours at most. Of all such cuts, the one with the
    fewest bytes over its borders; layers begin at the user's marks, and ties go to the same place of equal layers.
    """
    total = np.concatenate([[0.0], np.cumsum(chain.work)])
    cap = float(total[-1]) / num_layers * (1 + slack)

    def cost(end: int) -> np.ndarray:
        largest = np.maximum.accumulate(chain.work[:end][::-1])[::-1]
        found = _uneven(total[end] - total[:end], cap, np.maximum(cap, TUNING.beside_layer * largest))
        found[: max((mark for mark in chain.marks if mark < end), default=0)] = np.inf  # no layer extends over a mark
        return found

    return tuple(cheapest(_begin(chain) + TUNING.odd_border, cost)[1])


def least_largest(total: np.ndarray, num_stages: int, speed: Sequence[float] | np.ndarray = ()) -> float:
    """The least possible work of the stage with the most work.

    `total`: cumulative work before each place where a stage may begin, from 0 to all of it.
    `speed`: of each stage, which divides its work; (): 1.
    """
    speeds = np.array(speed if len(speed) else [1.0] * num_stages)[:, None]
    begin = np.zeros(len(total) - 1)
    return float(cheapest(begin, lambda end: (total[end] - total[:end]) / speeds, num_stages, np.maximum)[0])


def cheapest(
    begin: np.ndarray, cost: Callable[[int], np.ndarray], num_runs: int | None = None, join: np.ufunc = np.add
) -> tuple[Any, list[int]]:
    """The least cost of dividing a row of places into runs, and the first place of each run.

    Ties go to runs that begin early. Costs may be complex: NumPy compares their real parts, then the imaginary ones.

    Args:
        begin: Cost of beginning a run at each place.
        cost: From the end of a run to its cost, `[number of the run, its first place]`; inf: not allowed.
        num_runs: Number of runs; None: any, and they cost the same whatever their number.
        join: From the costs of the runs before and of the last one to that of all.
    """
    best = np.full(((num_runs or 0) + 1, len(begin) + 1), np.inf, begin.dtype)
    best[0, 0] = 0.0
    before, after = (best, best) if num_runs is None else (best[:-1], best[1:])
    came = np.zeros(after.shape, int)
    for end in range(1, len(begin) + 1):
        total = join(before[:, :end] + begin[:end], cost(end))
        came[:, end], after[:, end] = total.argmin(axis=1), total.min(axis=1)
    firsts, run, end = list[int](), len(came) - 1, len(begin)
    while end > 0:
        end, run = int(came[run, end]), max(0, run - 1)
        firsts.append(end)
    return best[-1, -1], firsts[::-1]


def _uneven(work: np.ndarray, cap: float, most: float | np.ndarray) -> np.ndarray:
    """Costs of runs with so much work: of cuts with equal bytes, the more balanced is preferred, and none has more than
    `most`."""
    return np.where(work > most * (1 + 1e-9), np.inf, TUNING.uneven_work * (work / max(cap, 1e-30)) ** 2)


def _begin(chain: Chain) -> np.ndarray:
    """Cost of a border before each segment: its bytes, more where it is at another place of its layer than most."""
    sent = chain.cut_bytes[:-1] / max(float(chain.cut_bytes.max()), 1.0)
    return sent + TUNING.odd_border * ~np.isin(np.arange(chain.num_segments), _alike(chain))


def _alike(chain: Chain) -> list[int]:
    """Segments that begin at the same place of each layer in a row of equal layers."""
    rows = [at for at in grouped((kind, k) for k, kind in enumerate(chain.kinds)).values() if len(at) > 1]
    found: list[list[int]] = []
    for at in sorted(rows, key=lambda at: (float(np.mean(chain.cut_bytes[at])), -len(at), at[0])):
        if all(at[-1] < other[0] or other[-1] < at[0] for other in found):
            found.append(at)
    return sorted(segment for at in found for segment in at)

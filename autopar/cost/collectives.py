"""Seconds of collectives."""

from __future__ import annotations

import itertools
import math


def all_reduce_seconds(num_bytes, group_size, link):
    hops = 2 * (group_size - 1)
    return hops * (link.latency_seconds + num_bytes / group_size / link.bytes_per_second)


def all_gather_seconds(num_bytes, group_size, link):
    return (group_size - 1) * (link.latency_seconds + num_bytes / group_size / link.bytes_per_second)


reduce_scatter_seconds = all_gather_seconds
all_to_all_seconds = all_gather_seconds


def collective_seconds(kind, num_bytes, axes, mesh):
    axes = [a for a in axes if mesh.size_of(a) > 1]
    if not axes:
        return 0.0
    launch = max(mesh.link_of(a).latency_seconds for a in axes)
    best = math.inf
    for order in itertools.permutations(axes):
        size, total = num_bytes, 0.0
        for a in order:
            total += all_gather_seconds(size, mesh.size_of(a), mesh.link_of(a))
            if kind != "all-to-all":
                size = size / mesh.size_of(a)
        best = min(best, total * (2 if kind == "all-reduce" else 1))
    return launch + best

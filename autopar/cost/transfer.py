"""Seconds to bring a tensor from one mesh to another."""

from __future__ import annotations

from autopar.mesh import Link


def transfer_seconds(num_bytes: float, num_senders: int, num_receivers: int, link: Link) -> float:
    """Time of a transfer between two meshes in which every byte crosses once and both sides share the work.

    Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023, sec. 3.

    Args:
        num_bytes: Size of the whole tensor.
        num_senders: Devices that hold parts of it.
        num_receivers: Devices that want parts of it.
        link: Between a sender and a receiver.
    """
    lanes = min(num_senders, num_receivers)
    return link.latency_seconds + num_bytes / lanes / link.bytes_per_second if num_bytes else 0.0

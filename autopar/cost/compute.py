"""Roofline."""


def compute_seconds(flops, num_bytes, device, dtype):
    return max(flops / device.flops_per_second(dtype), num_bytes / device.memory_bytes_per_second)

"""Describes devices that XLA can compile for without their being present.

In:     a name in the catalog, numbers of hosts and devices.
Out:    JAX devices that one can compile for, but not run on.
Method: XLA takes a description of a GPU as text (its `GpuTargetConfigProto`), and for TPUs the name of their topology.
        The figures are those of the CUDA C++ Programming Guide (technical specifications per compute capability) and of
        the datasheets. The compilers come as wheels: for GPUs JAX's CUDA plugin, without NVIDIA's libraries, for TPUs
        libtpu, in the version that JAX asks for: what another one compiles cannot be printed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from autopar.errors import AutoparError, ClusterError
from autopar.mesh import Cluster
from autopar.mesh.find_device import compute_capability, find_device

GPU_OPTIONS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""Without a device to tune kernels on, XLA would split products differently, with other buffers, than what runs."""
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What XLA needs to know about a GPU.

    Attributes:
        name: Its name by the driver.
        cores: Number of streaming multiprocessors.
        units: float32 units per multiprocessor.
        shared_bytes: Shared memory per multiprocessor; a block can have 1 KiB less.
        cache_bytes: Size of the L2 cache.
        clock_ghz: Maximum clock rate.
        memory_bytes: Size of device memory.
        memory_bytes_per_second: Rate of device memory.
    """

    name: str
    cores: int
    units: int
    shared_bytes: int
    cache_bytes: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_second: float

    def text(self, capability: tuple[int, int]) -> str:
        """The description as XLA reads it."""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block_optin: {self.shared_bytes - 1024}
  core_count: {self.cores} fpus_per_core: {self.units} clock_rate_ghz: {self.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {self.memory_bytes_per_second:.0f} l2_cache_size: {self.cache_bytes}
  device_memory_size: {self.memory_bytes} device_address_bits: 64
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  driver_version: "12.8.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


_KIB, _MIB = 1 << 10, 1 << 20
GPUS: Mapping[str, Gpu] = {
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 108, 64, 164 * _KIB, 40 * _MIB, 1.41, 42_410_000_000, 1.555e12),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", 108, 64, 164 * _KIB, 40 * _MIB, 1.41, 85_100_000_000, 2.039e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 132, 128, 228 * _KIB, 50 * _MIB, 1.98, 84_940_000_000, 3.352e12),
    "h200": Gpu("NVIDIA H200", 132, 128, 228 * _KIB, 50 * _MIB, 1.98, 151_400_000_000, 4.8e12),
    "b200": Gpu("NVIDIA B200", 148, 128, 228 * _KIB, 126 * _MIB, 1.965, 191_500_000_000, 7.7e12),
}
_WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
"""Environment in which libtpu does not ask the host's metadata server about its TPUs; it compiles for other ones, too."""
TPUS: Mapping[str, str] = {"tpu-v4": "v4", "tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e"}


@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for.

    Attributes:
        name: Name of the device.
        devices: JAX devices.
        options: Options of XLA's compiler.
    """

    name: str
    devices: tuple[Any, ...]
    options: Mapping[str, Any]


def find_target(name: str | None, cluster: Cluster) -> Target:
    """The devices that a plan is compiled for.

    Args:
        name: A name in the catalog; None: the devices of this process, if the plan is for them, else its cluster's device.
        cluster: The plan's cluster, which gives the numbers of hosts and devices.

    Raises:
        ClusterError: XLA cannot compile for such a device without one.
        AutoparError: The compiler is not installed; says which wheel to install.
    """
    if name is None and cluster.devices is not None:
        devices = tuple(cluster.devices)
        is_gpu = devices[0].platform in ("gpu", "cuda")
        return Target(devices[0].device_kind, devices, GPU_OPTIONS if is_gpu else {})
    name = cluster.device.name if name is None else name
    device = find_device(name).device
    key = device.name.lower().replace(" ", "-").removesuffix("gb")
    if key in GPUS:
        _check_there(
            PLUGINS, device.name, "NVIDIA GPUs", "JAX's CUDA plugin", "GPU and no NVIDIA library", "'autopar[verify]'"
        )
        capability = compute_capability(device)
        assert capability is not None, "every GPU here is in the catalog"
        topology = f"1x{cluster.hosts}x{cluster.devices_per_host}"
        found = topologies.get_topology_desc(
            platform="cuda", target_config=GPUS[key].text(capability), topology=topology
        )
        return Target(device.name, tuple(found.devices), GPU_OPTIONS)
    if key in TPUS:
        _check_there(("libtpu",), device.name, "TPUs", "libtpu", "TPU", f"'jax[tpu]=={jax.__version__}'")
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
        found = topologies.get_topology_desc(_tpu_topology(TPUS[key], cluster.num_devices), "tpu")
        return Target(device.name, tuple(found.devices), {})
    raise ClusterError(
        "XLA cannot compile for this device without having it.",
        given=f"target={name!r}",
        wrong=f"there is no description of a {device.name} here.",
        do=f"name one of {', '.join((*GPUS, *TPUS))}, or run on such devices and leave the target out.",
    )


def _tpu_topology(generation: str, count: int) -> str:
    """The most even topology of so many chips: of two axes, for v4 and v5p of three."""
    num_axes = 3 if generation in ("v4", "v5p") else 2
    shape: list[int] = []
    for left in range(num_axes, 0, -1):
        side = max(d for d in range(1, count + 1) if count % d == 0 and d <= round(count ** (1 / left), 6))
        shape.append(side)
        count //= side
    return f"{generation}:{'x'.join(map(str, sorted(shape)))}"


def _check_there(modules: Sequence[str], device: str, kind: str, where: str, needless: str, wheel: str) -> None:
    if not any(map(_is_there, modules)):
        raise AutoparError(
            f"XLA's compiler for {kind} is not installed.",
            given=f"target {device}",
            wrong=f"it is in {where}, and this Python has none. No {needless} is needed.",
            do=f"pip install {wheel} (Linux).",
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False

"""The machine: devices, links, clusters, logical meshes, and shardings of tensors over them."""

from autopar.mesh.cluster import Cluster, more_devices_text
from autopar.mesh.device import Achieved, Device
from autopar.mesh.find_device import find_device
from autopar.mesh.link import Link
from autopar.mesh.logical_mesh import LogicalMesh, finer_meshes, linked_mesh, logical_mesh, logical_meshes
from autopar.mesh.machine_profile import MachineProfile
from autopar.mesh.sharding import ArrayType, Box, Sharding, boxes

__all__ = [
    "Achieved",
    "ArrayType",
    "Box",
    "Cluster",
    "Device",
    "Link",
    "LogicalMesh",
    "MachineProfile",
    "Sharding",
    "boxes",
    "find_device",
    "finer_meshes",
    "linked_mesh",
    "logical_mesh",
    "logical_meshes",
    "more_devices_text",
]

"""The machine: devices, links, clusters, logical meshes, and how a tensor lies on one."""

from autopar.mesh.cluster import Cluster
from autopar.mesh.device import Device
from autopar.mesh.link import Link
from autopar.mesh.logical_mesh import LogicalMesh, logical_meshes
from autopar.mesh.sharding import Sharding

__all__ = ["Cluster", "Device", "Link", "LogicalMesh", "Sharding", "logical_meshes"]
